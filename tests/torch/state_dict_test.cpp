// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/torch/state_dict.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "message_of.hpp"
#include "state_dict_net.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(torch_state_dict)

using namespace lockstep;
using namespace state_dicts;

namespace detail = lockstep::detail;  // LibTorch has one too

namespace {

bool contains(const std::string& text, const std::string& part) {
  BOOST_TEST(text.find(part) != std::string::npos, "'" << text << "' lacks '" << part << "'");
  return true;
}

struct Batch {
  at::Tensor inputs, labels;
};

/// The module as a model of a job; its values are those of `fill`.
struct Model : TorchModel<Model, Net> {
  Model() { fill(module()); }
  at::Tensor loss(const Batch& batch) {
    return at::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
  }
};

Batch batch_of(std::size_t rank) {
  const at::Tensor i = at::arange(4 * 3 * 5 * 5, at::kFloat) + static_cast<double>(rank);
  return {i.sin().view({4, 3, 5, 5}), at::arange(4)};
}

void require_no(const std::string& wrong) {
  if (!wrong.empty()) throw std::runtime_error("other values: " + wrong);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_module_comes_back_from_its_file_in_the_memory_that_it_has) {
  const TemporaryFolder folder;
  Odd saved;
  fill(saved);
  save_state_dict(saved, folder / "odd.safetensors");
  BOOST_TEST(folder.files().size() == 1u);  // no temporary is left

  Odd loaded;
  clear(loaded);
  std::vector<const void*> memory;
  for (const at::Tensor& tensor : loaded.parameters()) memory.push_back(tensor.data_ptr());
  const std::uint32_t version = loaded.scale._version();
  load_state_dict(loaded, folder / "odd.safetensors");
  BOOST_TEST(wrong_tensor(loaded) == "");
  BOOST_TEST(loaded.scale._version() > version);  // autograd sees that it was written
  BOOST_TEST(loaded.conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  std::size_t i = 0;
  for (const at::Tensor& tensor : loaded.parameters()) BOOST_TEST(tensor.data_ptr() == memory[i++]);

  const detail::SafetensorsFile file(folder / "odd.safetensors");
  BOOST_TEST((file.find("head.weight") != nullptr && file.find("embed.weight") != nullptr));
  BOOST_TEST(file.find("mask")->element->name == "BOOL");
  BOOST_TEST(file.find("norm.num_batches_tracked")->element->name == "I64");

  ::torch::nn::Sequential holder(::torch::nn::Linear(3, 2));
  save_state_dict(holder, folder / "holder.safetensors");
  clear(*holder);
  load_state_dict(holder, folder / "holder.safetensors");
  BOOST_TEST(holder->parameters()[0].abs().sum().item<float>() > 0);
}

BOOST_AUTO_TEST_CASE(names_and_shapes_that_do_not_fit_are_named_and_nothing_changes) {
  const TemporaryFolder folder;
  const std::string path = folder / "file.safetensors";
  Odd odd;
  fill(odd);
  save_state_dict(odd, path);
  Net net;
  clear(net);
  const std::string unexpected = message_of([&] { load_state_dict(net, path); });
  contains(unexpected,
           "load_state_dict: '" + path + "' does not fit the module: unexpected in the file: ");
  for (const char* name : {"small", "brain", "turned", "none", "bytes", "waves", "count"})
    contains(unexpected, name);
  contains(unexpected, "strict = false");
  BOOST_TEST(net.scale.item<float>() == 0);
  const LoadReport report = load_state_dict(net, path, /*strict=*/false);
  BOOST_TEST(report.unexpected.size() == 7u);
  BOOST_TEST(report.missing.empty());
  BOOST_TEST(wrong_tensor(net) == "");

  save_state_dict(net, path);
  contains(message_of([&] { load_state_dict(odd, path); }), "missing in the file: ");

  Net other;
  other.register_buffer("extra", at::zeros({2}));
  other.scale.set_data(at::zeros({2, 1}));
  const std::string all = message_of([&] { load_state_dict(other, path); });
  contains(all,
           "missing in the file: extra; other in the file: scale ([] in the file, [2, 1] in the "
           "module)");

  ::torch::nn::Module many;
  for (int i = 0; i != 19; ++i) many.register_buffer("b" + std::to_string(i), at::zeros({1}));
  contains(message_of([&] { load_state_dict(many, path); }), "b0, b1, b2, b3, ");
  contains(message_of([&] { load_state_dict(many, path); }), ", b14, b15 and 3 more");

  // A file that was damaged since is found out before anything is written.
  clear(net);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  contains(message_of([&] { load_state_dict(net, path); }),
           "the data of tensor 'mask' is not what was written");
  BOOST_TEST(net.scale.item<float>() == 0);
  contains(message_of([&] { load_state_dict(net, folder / "none"); }), "none");
}

BOOST_AUTO_TEST_CASE(numbers_of_another_type_are_converted_as_in_python) {
  const TemporaryFolder folder;
  Net net;
  fill(net);
  save_state_dict(net, folder / "f32");
  Net half;
  half.to(at::kBFloat16);
  load_state_dict(half, folder / "f32");
  BOOST_TEST(at::equal(half.embed->weight, net.embed->weight.to(at::kBFloat16)));
  BOOST_TEST(half.norm->num_batches_tracked.item<float>() == 24);  // it has that type too
  save_state_dict(half, folder / "bf16");
  Net again;
  load_state_dict(again, folder / "bf16");
  BOOST_TEST(at::equal(again.embed->weight, half.embed->weight.to(at::kFloat)));
}

BOOST_AUTO_TEST_CASE(one_of_several_names_is_enough_and_complex_numbers_do_not_become_real_ones) {
  const TemporaryFolder folder;
  ::torch::nn::Module saved;
  saved.register_buffer("second", at::full({2}, 3.f));
  save_state_dict(saved, folder / "one");
  ::torch::nn::Module tied;
  const at::Tensor tensor = tied.register_buffer("first", at::zeros({2}));
  tied.register_buffer("second", tensor);
  const LoadReport report = load_state_dict(tied, folder / "one");
  BOOST_TEST((report.missing.empty() && report.unexpected.empty()));
  BOOST_TEST(tensor.sum().item<float>() == 6);

  ::torch::nn::Module waves;
  waves.register_buffer("second", at::zeros({2}, at::kComplexFloat));
  load_state_dict(waves, folder / "one");
  BOOST_TEST(at::real(waves.buffers()[0]).sum().item<float>() == 6);
  save_state_dict(waves, folder / "waves");
  contains(message_of([&] { load_state_dict(saved, folder / "waves"); }),
           "second (C64 in the file, Float in the module)");
  waves.buffers()[0].set_data(at::zeros({2}, at::kComplexDouble));
  contains(message_of([&] { save_state_dict(waves, folder / "wide"); }),
           "second has elements of ComplexDouble, which safetensors files do not have");
}

BOOST_AUTO_TEST_CASE(python_loads_the_file_strictly_and_its_own_is_loaded_here) {
  if (peer().empty()) return;
  const TemporaryFolder folder;
  for (const std::string way : {"file", "model"}) {
    Odd odd;
    fill(odd);
    save_state_dict(odd, folder / "ours");
    BOOST_REQUIRE(
        ask_peer("odd " + folder / "ours" + " " + folder / "theirs" + " " + way, folder / "odd"));
    clear(odd);
    load_state_dict(odd, folder / "theirs");
    BOOST_TEST(wrong_tensor(odd, 2) == "");
  }
}

BOOST_AUTO_TEST_CASE(checkpoints_of_jobs_are_state_dicts_too_with_tied_names) {
  for (const std::size_t world : {1, 2, 4}) {
    const TemporaryFolder folder;
    const auto ends = ranks::run(ranks::As::processes, world, [&](auto& comm) {
      at::set_num_threads(1);
      DistributedDataParallel<Model, Optimizer<AdamW>> ddp(comm);
      ddp.optimizer().lr = 0;
      ddp.optimizer().weight_decay = 0;
      const auto set = [&](double factor) {
        const at::NoGradGuard quiet;
        const auto write = [&](const auto& tensors) {
          for (const auto& tensor : tensors) {
            const at::Tensor to = values(tensor.name, tensor.tensor);
            tensor.tensor.copy_(to.scalar_type() == at::kBool ? to : to * factor);
          }
        };
        comm.barrier();
        write(detail::module_parameters(ddp.model().module()));
        write(detail::module_buffers(ddp.model().module()));
        comm.barrier();
      };
      ddp.step(batch_of(comm.rank().value()));
      set(1);
      save(ddp, folder / "whole");
      save(ddp, folder / "parameters", {.parameters_only = true});
      set(3);
      load(ddp, folder / "whole");
      require_no(wrong_tensor(ddp.model().module()));
      set(3);
      load_parameters(ddp, folder / "parameters");
      require_no(wrong_tensor(ddp.model().module()));
      ddp.step(batch_of(comm.rank().value()));  // it is still the job's module
    });
    for (const std::string& end : ends) BOOST_TEST(end == "");
    const detail::CheckpointReader whole(folder / "whole");
    BOOST_TEST(whole.find("head.weight") != nullptr);
    BOOST_TEST(whole.find("lockstep/state/embed.weight/exp_avg") != nullptr);
    BOOST_TEST(whole.find("lockstep/state/head.weight/exp_avg") == nullptr);
    const detail::CheckpointReader parameters(folder / "parameters");
    for (const auto& tensor : parameters.tensors())
      BOOST_TEST(!tensor.name.starts_with("lockstep/"));
    Net net;  // without a job
    clear(net);
    load_state_dict(net, folder / "whole");
    BOOST_TEST(wrong_tensor(net) == "");

    if (peer().empty() || world == 4) continue;
    BOOST_REQUIRE(
        ask_peer("net " + folder / "whole" + " " + folder / "theirs1 checkpoint", folder / "a"));
    BOOST_REQUIRE(
        ask_peer("net " + folder / "parameters" + " " + folder / "theirs2 model", folder / "b"));
    const auto back = ranks::run(ranks::As::processes, world, [&](auto& comm) {
      at::set_num_threads(1);
      DistributedDataParallel<Model, Optimizer<AdamW>> ddp(comm);
      ddp.optimizer().lr = 0;
      for (const char* theirs : {"theirs1", "theirs2"}) {
        ddp.step(batch_of(comm.rank().value()));
        load_parameters(ddp, folder / theirs);
        require_no(wrong_tensor(ddp.model().module(), 2));
      }
    });
    for (const std::string& end : back) BOOST_TEST(end == "");
  }
}

BOOST_AUTO_TEST_SUITE_END()

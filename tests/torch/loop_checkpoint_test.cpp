// SPDX-License-Identifier: Apache-2.0
// Trainings whose loops are the program's own: saved, resumed on any number of ranks, and shared
// with Python.
#include "lockstep/torch_checkpoint.hpp"
#include "lockstep/torch_optim.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/data.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "message_of.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"
#include "torch/small_net.hpp"
#include "train/python.hpp"

BOOST_AUTO_TEST_SUITE(torch_loop_checkpoint)

namespace {

using namespace ranks;
using torch_net::all_say;
using torch_net::all_well;
namespace loops = lockstep::torch;
namespace optim = ::torch::optim;

/// A module with random numbers in its passes, and buffers.
struct Net : torch::nn::Module {
  torch::nn::Linear in = register_module("first", torch::nn::Linear(3, 6));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(6));
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(0.2));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(6, 1));
  at::Tensor forward(const at::Tensor& x) { return out(drop(at::tanh(norm(in(x))))); }
};

struct Waves : torch::data::datasets::Dataset<Waves> {
  at::Tensor at_ = at::arange(120, at::kFloat).view({40, 3}).sin();
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {at_[i], at_[i].sum(0, true)};
  }
  std::optional<std::size_t> size() const override { return 40; }
};

/// Everything that a program of its own has. `Made` makes an optimizer for parameters.
template <class Optimizer>
struct Training {
  template <class Made>
  Training(Shared& comm, const Made& made, std::size_t seed = 5)
      : net((torch::manual_seed(seed + comm.rank().value()), std::make_shared<Net>())),
        ddp(net, comm),
        optimizer(made(net->parameters(), ddp)),
        scheduler(optimizer, 3, 0.7),
        plateau(optimizer, optim::ReduceLROnPlateauScheduler::min, 0.9F, 1),
        sampler(40, comm),
        loader(torch::data::make_data_loader(Waves().map(torch::data::transforms::Stack<>()),
                                             sampler, 4)),
        checkpoint(ddp) {
    checkpoint.add("optimizer", optimizer).add("scheduler", scheduler).add("plateau", plateau);
    checkpoint.add("sampler", sampler).add("epoch", epoch).add("step", step).add("best", best);
    checkpoint.add("losses", losses).add("name", name).add("flag", flag);
  }

  /// Trains until `last` steps are done, and calls `after()` after each.
  void run(std::size_t last, const auto& after) {
    for (; step != last; ++epoch) {
      sampler.set_epoch(epoch);
      for (auto& batch : *loader) {
        const at::Tensor loss = at::mse_loss(ddp(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        scheduler.step();
        losses.push_back(loss.template item<double>());
        best = std::min(best, losses.back());
        plateau.step(static_cast<float>(step % 5));
        ++step;
        after();
        if (step == last) return;
      }
    }
  }
  void run(std::size_t last) {
    run(last, [] {});
  }

  std::shared_ptr<Net> net;
  loops::DistributedDataParallel<Net> ddp;
  Optimizer optimizer;
  optim::StepLR scheduler;
  optim::ReduceLROnPlateauScheduler plateau;
  loops::RankSampler<> sampler;
  decltype(torch::data::make_data_loader(Waves().map(torch::data::transforms::Stack<>()),
                                         std::declval<loops::RankSampler<>>(), 4)) loader;
  std::size_t epoch = 0;
  std::size_t step = 0;
  double best = std::numeric_limits<double>::infinity();
  std::vector<double> losses;
  std::string name = "waves";
  bool flag = true;
  loops::Checkpoint checkpoint;
};

void require_same_net(const torch::nn::Module& a, const torch::nn::Module& b,
                      const std::string& when) {
  const auto compare = [&](const auto& as, const auto& bs) {
    for (const auto& each : as)
      require(each.value().equal(bs[each.key()]), when + ": " + each.key() + " differs");
  };
  compare(a.named_parameters(), b.named_parameters());
  compare(a.named_buffers(), b.named_buffers());
}

/// A training that is saved after `k` of 23 steps and resumed is the one that was never disturbed.
template <class Optimizer>
void resume_as_undisturbed(const std::string& what, const auto& made,
                           const std::vector<std::size_t>& worlds = {2}) {
  for (const std::size_t world : worlds) {
    const TemporaryFolder folder;
    const std::string path = folder / "run.safetensors";
    for (const std::size_t k : {4u, 12u}) {
      all_well(world, [&](Shared& comm) {
        const std::string when = what + " after " + std::to_string(k) + " steps";
        Training<Optimizer> whole(comm, made);
        torch::manual_seed(70 + comm.rank().value());
        whole.run(23, [&] {
          // Half of the files are written in the background, while the training goes on.
          if (whole.step == k)
            k == 4 ? whole.checkpoint.save(path) : whole.checkpoint.async_save(path);
        });
        whole.checkpoint.finish();
        Training<Optimizer> resumed(comm, made, 99);
        torch::manual_seed(1);
        resumed.name = "";
        resumed.flag = false;
        require(resumed.checkpoint.resume(path), "no file");
        require(resumed.step == k && resumed.name == "waves" && resumed.flag, when + ": values");
        resumed.run(23);
        require_same_net(*whole.net, *resumed.net, when);
        require(whole.epoch == resumed.epoch, when + ": epochs");
        // Other ranks have got those of rank 0.
        if (comm.rank() != Rank{0}) return;
        require(whole.losses == resumed.losses && whole.best == resumed.best, when + ": losses");
      });
    }
  }
}

auto maker(auto options, auto type) {
  return [=](const std::vector<at::Tensor>& parameters, auto& ddp) {
    using Optimizer = typename decltype(type)::type;
    if constexpr (std::is_base_of_v<lockstep::detail::ShardedOptimizer, Optimizer>) {
      return Optimizer(parameters, ddp, options);
    } else {
      return Optimizer(parameters, options);
    }
  };
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_resumed_training_has_the_bits_of_an_undisturbed_one) {
  resume_as_undisturbed<optim::SGD>("SGD",
                                    maker(optim::SGDOptions(0.05).momentum(0.9).nesterov(true),
                                          std::type_identity<optim::SGD>{}));
  resume_as_undisturbed<optim::Adam>(
      "Adam", maker(optim::AdamOptions(0.01).amsgrad(true), std::type_identity<optim::Adam>{}));
  resume_as_undisturbed<optim::AdamW>(
      "AdamW", maker(optim::AdamWOptions(0.01), std::type_identity<optim::AdamW>{}), {1, 2, 4});
  resume_as_undisturbed<optim::RMSprop>(
      "RMSprop", maker(optim::RMSpropOptions(0.01).centered(true).momentum(0.5),
                       std::type_identity<optim::RMSprop>{}));
  resume_as_undisturbed<optim::Adagrad>(
      "Adagrad", maker(optim::AdagradOptions(0.05), std::type_identity<optim::Adagrad>{}));
}

BOOST_AUTO_TEST_CASE(states_that_are_divided_among_ranks_are_in_the_file_as_those_of_one) {
  using Sharded = loops::ZeroRedundancyOptimizer<optim::Adam>;
  const auto made = maker(optim::AdamOptions(0.01), std::type_identity<Sharded>{});
  resume_as_undisturbed<Sharded>("ZeroRedundancyOptimizer", made, {1, 2, 4});
}

BOOST_AUTO_TEST_CASE(a_training_goes_on_with_another_number_of_ranks) {
  const TemporaryFolder folder;
  const std::string path = folder / "run.safetensors";
  const auto made = maker(optim::AdamOptions(0.01), std::type_identity<optim::Adam>{});
  using Sharded = loops::ZeroRedundancyOptimizer<optim::Adam>;
  all_well(4, [&](Shared& comm) {
    Training<Sharded> four(comm, maker(optim::AdamOptions(0.01), std::type_identity<Sharded>{}));
    four.run(2);  // 2 of 3 batches of each rank: 32 of 40 samples
    four.checkpoint.save(path);
  });
  all_well(2, [&](Shared& comm) {
    Training<optim::Adam> two(comm, made, 99);
    const at::Tensor before = at::globalContext().defaultGenerator(at::kCPU).get_state();
    two.checkpoint.load(path);
    require(two.sampler.epoch() == lockstep::Epoch{0} && two.step == 2, "the position");
    require(!before.equal(at::globalContext().defaultGenerator(at::kCPU).get_state()),
            "the random numbers are not the saved ones");
    std::size_t left = 0;
    two.sampler.set_epoch(0);
    for (auto& batch : *two.loader) left += static_cast<std::size_t>(batch.data.size(0));
    require(left == 4, "the rest of the epoch has " + std::to_string(left) + " samples");
    require(two.optimizer.state().size() == 6, "states of the optimizer");
    two.run(9);
  });
  // One process without a wrapper, and a file that a job of lockstep's could have written.
  auto net = std::make_shared<Net>();
  loops::Checkpoint checkpoint(net);
  std::size_t step = 0;
  checkpoint.add("step", step);
  const lockstep::LoadReport report = checkpoint.load(path);
  BOOST_TEST(step == 2u);
  BOOST_TEST(report.missing.empty());
  lockstep::load_state_dict(*net, path);
}

BOOST_AUTO_TEST_CASE(a_file_that_does_not_fit_changes_nothing) {
  const TemporaryFolder folder;
  const std::string path = folder / "run.safetensors";
  const auto made = maker(optim::SGDOptions(0.05).momentum(0.9), std::type_identity<optim::SGD>{});
  const auto adam = maker(optim::AdamOptions(0.01), std::type_identity<optim::Adam>{});
  all_well(2, [&](Shared& comm) {
    Training<optim::SGD> saved(comm, made);
    saved.run(3);
    saved.checkpoint.save(path);
    Training<optim::Adam> other(comm, adam, 99);
    const at::Tensor weight = other.net->out->weight.detach().clone();
    const std::string words = message_of([&] { other.checkpoint.load(path); });
    require(words.find("'betas' of group 0") != std::string::npos, words);
    require(other.step == 0 && other.net->out->weight.equal(weight), "something has changed");

    std::size_t more = 7;
    saved.checkpoint.add("more", more);
    const std::string missing = message_of([&] { saved.checkpoint.load(path); });
    require(missing.find("has no 'more'") != std::string::npos, missing);
    const lockstep::LoadReport report = saved.checkpoint.load(path, /*strict=*/false);
    require(report.missing == std::vector<std::string>{"more"} && more == 7, "the report");

    std::string text;
    loops::Checkpoint form(saved.ddp);
    form.add("step", text);
    const std::string wrong = message_of([&] { form.load(path); });
    require(wrong.find("'step' is Int: 3, and not a text") != std::string::npos, wrong);
    const std::string twice = message_of([&] { form.add("step", text); });
    require(twice.find("'step' is empty, taken") != std::string::npos, twice);
    require(!form.resume(path + ".not"), "a file that is not there");
  });
}

BOOST_AUTO_TEST_CASE(parts_that_reject_their_states_come_before_the_module) {
  const TemporaryFolder folder;
  auto net = std::make_shared<Net>();
  loops::RankSampler<> sampler(40, lockstep::WorldSize{1}, lockstep::Rank{0});
  std::size_t seven = 7;
  loops::Checkpoint saved(net);
  saved.add("sampler", sampler).add("7", seven);
  saved.save(folder / "x");
  const at::Tensor weight = net->out->weight.detach().clone();
  auto other = std::make_shared<Net>();
  const at::Tensor before = other->out->weight.detach().clone();
  loops::RankSampler<> longer(41, lockstep::WorldSize{1}, lockstep::Rank{0});
  std::size_t number = 0;
  loops::Checkpoint loads(other);
  loads.add("7", number).add("sampler", longer);
  BOOST_CHECK_THROW(loads.load(folder / "x"), lockstep::Error);
  BOOST_TEST(other->out->weight.equal(before));
  BOOST_TEST(number == 0u);
  loops::Checkpoint fits(other);
  fits.add("7", number);
  fits.load(folder / "x");
  BOOST_TEST(other->out->weight.equal(weight));
  BOOST_TEST(number == 7u);

  std::uint64_t large = ~std::uint64_t{0};
  std::string bytes = "\xff";
  for (const bool is_text : {false, true}) {
    loops::Checkpoint wrong(net);
    is_text ? wrong.add("value", bytes) : wrong.add("value", large);
    const std::string words = message_of([&] { wrong.save(folder / "y"); });
    BOOST_TEST(words.find(is_text ? "not UTF-8" : "larger than integers") != std::string::npos,
               words);
  }
}

BOOST_AUTO_TEST_CASE(ranks_that_read_other_files_of_python_are_told) {
  const TemporaryFolder folder;
  all_say(ranks::run(As::processes, 2,
                     [&](Shared& comm) {
                       auto net = std::make_shared<Net>();
                       loops::DistributedDataParallel<Net> ddp(net, comm);
                       auto values = lockstep::detail::make_dict();
                       for (const auto& each : net->named_parameters())
                         values.insert(each.key(), each.value().detach() + comm.rank().value());
                       for (const auto& each : net->named_buffers())
                         values.insert(each.key(), each.value());
                       // As a host that has an older copy: each rank has a file of its own.
                       const std::string mine = folder / std::to_string(comm.rank().value());
                       std::filesystem::create_directory(mine);
                       std::filesystem::current_path(mine);
                       const std::vector<char> file = torch::jit::pickle_save(values);
                       std::ofstream("net.pt", std::ios::binary)
                           .write(file.data(), static_cast<std::streamsize>(file.size()));
                       loops::Checkpoint(ddp).load("net.pt");
                     }),
          "ranks have different files");
}

BOOST_AUTO_TEST_CASE(what_fails_on_one_rank_is_an_error_on_all) {
  const TemporaryFolder folder;
  const auto made = maker(optim::SGDOptions(0.05), std::type_identity<optim::SGD>{});
  const auto run = [&](const auto& f) {
    return ranks::run(As::processes, 2, [&](Shared& comm) {
      Training<optim::SGD> training(comm, made);
      training.run(2);
      f(training, comm.rank().value());
    });
  };
  all_say(run([&](auto& training, std::size_t) {
            training.checkpoint.save(folder / "no folder/x.safetensors");
          }),
          "no folder/x.safetensors");
  all_say(run([&](auto& training, std::size_t) {
            training.checkpoint.async_save(folder / "no folder/x.safetensors");
            training.run(4);  // goes on
            training.checkpoint.finish();
          }),
          "no folder/x.safetensors");
  all_say(run([&](auto& training, std::size_t rank) {
            training.checkpoint.save(folder / ("x" + std::to_string(rank)));
          }),
          "ranks have different paths");
  BOOST_TEST(folder.files().empty());
  all_say(run([&](auto& training, std::size_t rank) {
            const std::string path = folder / "x.safetensors";
            training.checkpoint.save(path);
            if (rank == 1) {
              std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
              file.seekp(-3, std::ios::end);
              file.put('x').put('y');
            }
            training.ddp.communicator().barrier();
            training.checkpoint.load(path);
          }),
          "x.safetensors");
}

namespace {

/// As loop_checkpoint_peer.py has it.
struct PlainNet : torch::nn::Module {
  torch::nn::Linear first =
      register_module("first", torch::nn::Linear(torch::nn::LinearOptions(3, 4).bias(false)));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(4, 1));
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(norm(first(x)))); }
};
struct Plain {
  std::shared_ptr<PlainNet> net = std::make_shared<PlainNet>();
  optim::AdamW optimizer{{optim::OptimizerParamGroup(net->first->parameters(),
                                                     std::make_unique<optim::AdamWOptions>(
                                                         optim::AdamWOptions(0.02).amsgrad(true))),
                          optim::OptimizerParamGroup({net->norm->weight, net->norm->bias,
                                                      net->out->weight, net->out->bias})},
                         optim::AdamWOptions(0.01).amsgrad(true)};
  optim::StepLR scheduler{optimizer, 3, 0.5};
  std::size_t epoch = 0;
  double best = std::numeric_limits<double>::infinity();
  std::string name = "waves";
  loops::Checkpoint checkpoint{net};
  Plain() {
    checkpoint.add("optimizer", optimizer).add("scheduler", scheduler);
    checkpoint.add("epoch", epoch).add("best", best);
  }
  void train(std::size_t last) {
    for (; epoch != last; ++epoch) {
      const at::Tensor x =
          at::arange(15, at::kFloat).view({5, 3}).add(static_cast<double>(epoch)).sin();
      optimizer.zero_grad();
      at::mse_loss(net->forward(x), x.sum(1, true)).backward();
      optimizer.step();
      scheduler.step();
    }
  }
};
void require_near(const torch::nn::Module& net, const std::string& path) {
  auto other = std::make_shared<PlainNet>();
  lockstep::load_state_dict(other, lockstep::load_pt(path));
  const auto compare = [&](const auto& as, const auto& bs) {
    for (const auto& each : as) {
      const at::Tensor apart = (each.value() - bs[each.key()]).abs().max();
      BOOST_TEST(apart.template item<double>() <= 2e-6, each.key() << " is " << apart << " off");
    }
  };
  compare(net.named_parameters(), other->named_parameters());
  compare(net.named_buffers(), other->named_buffers());
}

}  // namespace

BOOST_AUTO_TEST_CASE(files_of_pythons_torch_save_are_read) {
  const std::string python = train::python_with_torch();
  if (python.empty()) return say_skipped("no PyTorch to write files");
  const TemporaryFolder folder;
  if (!train::ask_torch(python, "../torch/loop_checkpoint_peer.py", "write " + folder.path,
                        folder / "peer"))
    return;
  for (const char* name : {"usual.pt", "protocol4.pt"}) {
    Plain training;
    training.checkpoint.load(folder / name);
    BOOST_TEST(training.epoch == 4u);
    BOOST_TEST(training.best == 0.25);
    training.train(7);
    require_near(*training.net, folder / "after.pt");
  }
  for (const char* name : {"plain.pt", "wrapped.pt"}) {
    auto net = std::make_shared<PlainNet>();
    lockstep::load_state_dict(*net, lockstep::load_pt(folder / name));
    auto again = std::make_shared<PlainNet>();
    loops::Checkpoint(again).load(folder / name);
    BOOST_TEST(net->norm->running_mean.equal(again->norm->running_mean));
    BOOST_TEST(net->out->weight.equal(again->out->weight));
  }
  torch::nn::Linear small(3, 4);
  const std::string strict =
      message_of([&] { lockstep::load_state_dict(small, lockstep::load_pt(folder / "plain.pt")); });
  BOOST_TEST(strict.find("missing in the file: ") != std::string::npos, strict);
  const lockstep::LoadReport report =
      lockstep::load_state_dict(small, lockstep::load_pt(folder / "plain.pt"), false);
  BOOST_TEST(report.missing.size() == 2u);
  BOOST_TEST(report.unexpected.size() == 8u);

  const auto tensors = lockstep::load_pt(folder / "tensors.pt").toGenericDict();
  const auto is = [&](const char* name, const at::Tensor& expected) {
    const at::Tensor read = tensors.at(name).toTensor();
    BOOST_TEST((read.scalar_type() == expected.scalar_type() && read.equal(expected)), name);
  };
  is("turned", at::arange(6).view({2, 3}).t());
  is("half", at::ones({2}, at::kHalf));
  is("brain", at::ones({2}, at::kBFloat16));
  is("none", at::zeros({0, 3}));
  is("flag", at::ones({}, at::kBool));
  BOOST_TEST(tensors.at("wide").toTensor().to(at::kLong).equal(at::arange(3)));
  BOOST_TEST(tensors.at("parameter").toTensor().numel() == 1);
  for (const char* name : {"old.pt", "no.pt"}) {
    const std::string words = message_of([&] { lockstep::load_pt(folder / name); });
    BOOST_TEST(words.find("torch.save has written since PyTorch 1.6") != std::string::npos, words);
  }
}

BOOST_AUTO_TEST_CASE(python_goes_on_from_a_checkpoint) {
  const std::string python = train::python_with_torch();
  if (python.empty()) return say_skipped("no PyTorch to read files");
  const TemporaryFolder folder;
  Plain training;
  training.checkpoint.add("name", training.name);
  training.train(4);
  training.checkpoint.save(folder / "here.safetensors");
  if (!train::ask_torch(python, "../torch/loop_checkpoint_peer.py", "read " + folder.path,
                        folder / "peer"))
    return;
  training.train(7);
  require_near(*training.net, folder / "after.pt");
}

BOOST_AUTO_TEST_CASE(damaged_pickles_are_errors) {
  auto value = lockstep::detail::make_dict();
  value.insert("a", at::arange(6, at::kFloat).view({2, 3}).t());
  value.insert("n", c10::ivalue::Tuple::create({1, 2.5, c10::IValue(), true, "text"}));
  value.insert(std::int64_t{70000}, lockstep::detail::make_list());
  const std::vector<char> file = torch::jit::pickle_save(value);
  std::istringstream stream(std::string(file.begin(), file.end()));
  caffe2::serialize::PyTorchStreamReader archive(&stream);
  const auto [record, bytes] = archive.getRecord("data.pkl");
  const std::string code(static_cast<const char*>(record.get()), bytes);
  const auto load = [&](std::string_view damaged) {
    const auto storage = [&](const std::string&) {
      auto [data, size] = archive.getRecord("data/0");
      return std::pair(std::move(data), size);
    };
    return lockstep::detail::Unpickler("x.pt", damaged, storage).run();
  };
  const auto read = load(code).toGenericDict();
  BOOST_TEST(read.at("a").toTensor().equal(at::arange(6, at::kFloat).view({2, 3}).t()));
  BOOST_TEST(read.at("n").toTupleRef().elements()[4].toStringRef() == "text");
  BOOST_TEST(read.at(std::int64_t{70000}).toListRef().empty());
  for (std::size_t size = 0; size != code.size(); ++size)
    BOOST_CHECK_THROW(load(std::string_view(code).substr(0, size)), lockstep::Error);
  std::mt19937 random(7);
  std::size_t errors = 0;
  for (int i = 0; i != 20000; ++i) {
    std::string damaged = code;
    for (std::size_t n = 1 + random() % 3; n != 0; --n)
      damaged[random() % damaged.size()] = static_cast<char>(random());
    try {
      load(damaged);
    } catch (const lockstep::Error&) {
      ++errors;
    }
  }
  BOOST_TEST(errors > 5000u);
}

BOOST_AUTO_TEST_CASE(pickles_of_endless_depth_are_errors) {
  const auto load = [](const std::string& code) {
    return lockstep::detail::Unpickler("x.pt", code, {}).run();
  };
  const auto times = [](std::size_t count, std::string_view code) {
    std::string all;
    for (std::size_t i = 0; i != count; ++i) all += code;
    return all;
  };
  const auto words = [&](const std::string& code) { return message_of([&] { load(code); }); };
  constexpr std::size_t endless = 300'000;  // for which no stack is large enough
  const std::string deep = "more than 256 deep";
  BOOST_TEST(words(")" + times(endless, "\x85") + ".").find(deep) != std::string::npos);
  BOOST_TEST(words(times(endless, "]") + times(endless - 1, "a") + ".").find(deep) !=
             std::string::npos);
  BOOST_TEST(words(times(endless, "}K\1") + "N" + times(endless, "s") + ".").find(deep) !=
             std::string::npos);
  // Containers that hold each other in turn, from outside to inside and in a circle.
  const std::string filled = "is filled after it was put into another";
  BOOST_TEST(words("]q\1" + times(endless, "]q\2ah\2q\1") + ".").find(filled) != std::string::npos);
  BOOST_TEST(words("]q\1h\1a.").find(filled) != std::string::npos);
  BOOST_TEST(words("}q\1K\1h\1s.").find(filled) != std::string::npos);
  BOOST_TEST(load(")" + times(255, "\x85") + ".").isTuple());
  BOOST_TEST(load("]]q\1ah\1a.").toListRef().size() == 2u);  // one list, twice
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// A LibTorch module as a model: its tensors, its modes, its memory, and what goes wrong with each.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/comm/objects.hpp"
#include "lockstep/data/in_memory_dataset.hpp"
#include "lockstep/launch/spawn.hpp"
#include "lockstep/torch/batch.hpp"
#include "lockstep/trainer/ddp.hpp"
#include "lockstep/trainer/dp.hpp"
#include "lockstep/trainer/trainer.hpp"
#include "temporary_folder.hpp"
#include "torch/cases.hpp"
#include "words_of.hpp"

BOOST_AUTO_TEST_SUITE(torch_model)

namespace {

using namespace torch_tests;
using ranks::Ends;
using ranks::require;
using ranks::Shared;
using Ddp = DistributedDataParallel<Model, Optimizer<SGDMomentum>>;

/// Runs `f(comm)` on real processes, which LibTorch needs even for one rank: a process that has
/// used it with threads cannot fork.
Ends run(std::size_t world, auto f) {
  return ranks::run_processes(world, std::chrono::seconds(20), [&](Shared& comm) {
    at::set_num_threads(1);
    f(comm);
  });
}
void all_well(std::size_t world, auto f) {
  const Ends ends = run(world, f);
  for (std::size_t rank = 0; rank != world; ++rank)
    BOOST_TEST(ends[rank] == "", "rank " << rank << " of " << world << ": " << ends[rank]);
}
void all_say(const Ends& ends, const std::string& words) {
  for (std::size_t rank = 0; rank != ends.size(); ++rank)
    BOOST_TEST(ends[rank].find(words) != std::string::npos,
               "rank " << rank << " does not say \"" << words << "\": " << ends[rank]);
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What was thrown on one rank by the second of two steps, between which `change(module)` is made.
std::string words_after(const std::string& name, const auto& change, std::size_t steps = 2) {
  const Ends ends = run(1, [&](Shared& comm) {
    const auto net = make_net(name);
    Ddp ddp(comm, Model(net));
    ddp.step(batch_of(name, 0, 0));
    change(*net);
    for (std::size_t s = 1; s <= steps; ++s) ddp.step(batch_of(name, s, 0));
    throw std::runtime_error("nothing was thrown");
  });
  return ends[0];
}

at::Tensor mask_of(const std::vector<std::int64_t>& set) {
  return at::tensor(set, at::kLong).to(at::kBool);
}

std::shared_ptr<Net> net_with_buffers(std::size_t rank) {
  const auto net = make_net("norm");
  net->register_buffer("mask", mask_of({1, rank == 0, 0, rank == 1}));
  net->register_buffer("count", at::full({2}, static_cast<std::int64_t>(7 + rank), at::kLong));
  return net;
}

}  // namespace

BOOST_AUTO_TEST_CASE(buffers_of_every_type_are_those_of_rank_0) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [](Shared& comm) {
      const auto net = net_with_buffers(comm.rank().value());
      Ddp ddp(comm, Model(net));
      for (std::size_t s = 0; s != 3; ++s) {
        ddp.step(batch_of("norm", s, comm.rank().value()));
        net->named_buffers()["count"] += 1;
      }
      ddp.synchronize_buffers();
      const auto buffers = net->named_buffers();
      require(buffers["mask"].equal(mask_of({1, 1, 0, 0})), "the mask");
      require(buffers["mask"].scalar_type() == at::kBool, "the mask's type");
      require(buffers["count"].equal(at::full({2}, 10, at::kLong)), "the count");
      require(buffers["norm.num_batches_tracked"].item<std::int64_t>() == 3, "tracked batches");
      const std::vector<float> values = values_of(*net);
      const auto all = all_gather_objects(
          comm, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
      for (const auto& each : all) require(each == all[0], "ranks have different values");
    });
  }
}

BOOST_AUTO_TEST_CASE(a_module_that_the_program_keeps_has_memory_of_its_own_after_the_job) {
  all_well(2, [](Shared& comm) {
    const auto net = make_net("norm");
    const std::vector<float> before = values_of(*net);
    std::vector<float> trained;
    {
      Ddp ddp(comm, Model(net));
      ddp.optimizer().lr = 0.1;
      for (std::size_t s = 0; s != 4; ++s) ddp.step(batch_of("norm", s, comm.rank().value()));
      trained = values_of(*net);
    }
    require(trained != before, "nothing was trained");
    require(values_of(*net) == trained, "values have gone with the job");
    ::torch::optim::SGD optimizer(net->parameters(), 0.1);
    cross_entropy(*net, batch_of("norm", 0, 0)).backward();  // gradients are LibTorch's again
    require(net->parameters()[0].grad().defined(), "there is no gradient");
    optimizer.step();
    require(values_of(*net) != trained, "LibTorch cannot train it");
    Ddp again(comm, Model(net));  // and neither is it lost for another job
    again.step(batch_of("norm", 0, comm.rank().value()));
  });
}

BOOST_AUTO_TEST_CASE(modes_of_all_parts_are_restored_after_an_evaluation_that_equals_a_plain_one) {
  all_well(2, [](Shared& comm) {
    const auto net = make_net("norm");
    net->train();
    net->children()[1]->eval();  // the norm stays as it is
    Ddp ddp(comm, Model(net));
    for (std::size_t s = 0; s != 3; ++s) ddp.step(batch_of("norm", s, comm.rank().value()));
    const Batch batch = batch_of("norm", 9, 0);
    const double loss = ddp.evaluate(batch);
    Tally tally;
    ddp.evaluate(batch, tally);
    require(net->is_training() && net->children()[0]->is_training(), "the module evaluates");
    require(!net->children()[1]->is_training(), "the norm trains");
    net->eval();
    const at::NoGradGuard quiet;
    require(loss == cross_entropy(*net, batch).item<double>(), "the loss is another one");
    const auto right = net->forward(batch.inputs).argmax(1).eq(batch.labels).sum().item<double>();
    const Scores scores = reduce(comm, tally);
    require(scores["accuracy"] == right / static_cast<double>(batch.size()), "the accuracy");
    require(std::abs(scores["loss"] - loss) < 1e-6, "the loss in the score");
  });
}

// ---- Holders, copies, replicas, trainers

namespace {

using Rows = LabelledBatch<float, std::int64_t>;

/// A holder as the module: tanh between two linear layers.
struct Stacked : TorchModel<Stacked, ::torch::nn::Sequential> {
  Stacked()
      : TorchModel(::torch::nn::Linear(12, 16), ::torch::nn::Tanh(), ::torch::nn::Linear(16, 5)) {}
  at::Tensor loss(const Batch& batch) {
    return at::cross_entropy_loss(module()->forward(batch.inputs), batch.labels);
  }
};

/// Another one, with dropout, whose losses are of lockstep's batches.
struct Dropping : TorchModel<Dropping, ::torch::nn::Sequential> {
  static constexpr bool draws = true;
  Dropping()
      : TorchModel(::torch::nn::Linear(12, 16), ::torch::nn::Tanh(), ::torch::nn::Dropout(0.25),
                   ::torch::nn::Linear(16, 5)) {}
  at::Tensor loss(const Rows& rows) {
    number = at::rand({1}).item<double>();
    const TensorBatch batch = as_tensors(rows);
    return at::cross_entropy_loss(module()->forward(batch.inputs), batch.labels);
  }
  double number = 0;  // drawn by the latest step
};

std::vector<float> stacked_values(const auto& model) {
  std::vector<float> values;
  for (const at::Tensor& tensor : model.module()->parameters()) {
    const at::Tensor row = tensor.detach().contiguous();
    values.insert(values.end(), row.const_data_ptr<float>(),
                  row.const_data_ptr<float>() + row.numel());
  }
  return values;
}

using Job = Trainer<Dropping, Optimizer<AdamW>>;

/// Runs `f(session)` on every rank.
void run_sessions(std::size_t world, const auto& f) {
  spawn(
      AsProcesses{}, world,
      [&](const Membership& member, Store&) {
        require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
        at::set_num_threads(1);
        Session session(member, Store(member.host, member.port, member.secret, member.timeout));
        f(session);
      },
      std::chrono::seconds(30));
}

auto rows(std::size_t count) {
  std::vector<float> inputs(count * 12);
  std::vector<std::int64_t> labels(count);
  for (std::size_t i = 0; i != inputs.size(); ++i)
    inputs[i] = std::sin(0.1f * static_cast<float>(i * i % 101));
  for (std::size_t i = 0; i != count; ++i) labels[i] = static_cast<std::int64_t>(i % 5);
  return InMemoryDataset<float, std::int64_t>(std::move(inputs), std::move(labels));
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_copy_of_a_model_has_a_module_of_its_own) {
  all_well(1, [](Shared&) {
    const Stacked one;
    Stacked other(one);
    require(stacked_values(one) == stacked_values(other), "the copy has other values");
    const at::NoGradGuard quiet;
    other.module()->parameters()[0].add_(1);
    require(stacked_values(one) != stacked_values(other), "the copy has no values of its own");
    const Model first(make_net("plain"));
    const std::string cannot = words_of([&] { Model copy(first); });
    require(contains(cannot, "cannot be copied") && contains(cannot, "torch::nn::Cloneable"),
            cannot);
  });
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_train_as_one_module_does) {
  all_well(1, [](Shared&) {
    ::torch::manual_seed(3);
    DataParallel<Stacked> dp({.replicas = 2});
    Stacked plain;
    {
      const at::NoGradGuard quiet;
      std::size_t number = 0;
      dp.for_each_parameter([&](auto, auto view) {
        at::Tensor to = plain.module()->parameters()[number++];
        to.copy_(at::from_blob(const_cast<float*>(view.data_handle()), to.sizes()));
      });
    }
    dp.optimizer().lr = 0.1;
    ::torch::optim::SGD optimizer(plain.module()->parameters(), 0.1);
    for (std::size_t s = 0; s != 5; ++s) {
      const Batch batch = batch_of("plain", s, 0);
      dp.step(batch);
      optimizer.zero_grad();
      plain.loss(batch).backward();
      optimizer.step();
    }
    std::size_t at = 0;
    const std::vector<float> want = stacked_values(plain);
    dp.for_each_parameter([&](auto name, auto view) {
      for (std::size_t i = 0; i != view.size(); ++i, ++at)
        require(std::abs(view.data_handle()[i] - want[at]) < 1e-6,
                std::string(name) + " is " + std::to_string(view.data_handle()[i]) + ", not " +
                    std::to_string(want[at]));
    });
  });
}

BOOST_AUTO_TEST_CASE(
    a_trainer_of_a_holder_with_dropout_resumes_to_the_same_bits_twice_in_one_process) {
  for (const std::size_t world : {1u, 2u}) {
    const TemporaryFolder folder;
    BOOST_CHECK_NO_THROW(run_sessions(world, [&](Session& session) {
      const auto data = rows(40);
      const auto train = [&](Job& job, const std::string& saved) {
        for (auto epoch : job.epochs(3)) {
          for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
          if (epoch.number() == 0 && !saved.empty()) job.save(saved);
        }
        return job.evaluate(data, 8)["loss"];
      };
      Job job(session);
      job.optimizer().lr = 0.01;
      const double begin = job.evaluate(data, 8)["loss"];
      const double end = train(job, folder / "first");
      require(end < begin, "nothing was learned");
      const double drawn = job.model().number;
      const auto ranks = static_cast<double>(world);
      require(world == 1 || job.all_reduce(drawn) != drawn * ranks, "all ranks draw the same");
      Job second(session);  // in the same process, from the first one's first epoch
      second.resume(folder / "first");
      require(train(second, "") == end, "the loss is another one after resuming");
      require(stacked_values(second.model()) == stacked_values(job.model()),
              "other bits after resuming");
      require(second.model().number == drawn, "other numbers are drawn after resuming");
    }));
  }
}

// ---- What goes wrong

BOOST_AUTO_TEST_CASE(memory_that_is_replaced_is_found_and_the_tensor_is_named) {
  const auto says = [](const std::string& words, const std::string& part) {
    BOOST_TEST(contains(words, part), words);
  };
  const std::string replaced = words_after("plain", [](Net& net) {
    at::Tensor weight = net.named_parameters()["last.weight"];
    weight.set_data(weight.detach().clone());
  });
  says(replaced, "the memory of last.weight was replaced after training had begun");
  says(replaced, "load_state_dict");
  says(words_after("plain",
                   [](Net& net) {  // as torch::load does
                     ::torch::serialize::OutputArchive saved;
                     net.save(saved);
                     std::stringstream file;
                     saved.save_to(file);
                     ::torch::serialize::InputArchive loaded;
                     loaded.load_from(file);
                     net.load(loaded);
                   }),
       "the memory of first.weight was replaced");
  says(words_after("plain", [](Net& net) { net.to(at::kDouble); }),
       "the memory of first.weight was replaced");
  says(words_after("norm",
                   [](Net& net) {
                     at::Tensor mean = net.named_buffers()["norm.running_mean"];
                     mean.set_data(at::zeros({16}));
                   }),
       "the memory of norm.running_mean was replaced");
  says(words_after("plain",
                   [](Net& net) {
                     const at::NoGradGuard quiet;  // values may be set, where they are
                     net.named_parameters()["last.weight"].fill_(0.5);
                   }),
       "nothing was thrown");
}

BOOST_AUTO_TEST_CASE(tensors_that_are_registered_later_are_found_and_named) {
  const std::string words =
      words_after("plain", [](Net& net) { net.register_parameter("scale", at::ones({3})); }, 4);
  BOOST_TEST(contains(words, "parameter scale was registered, replaced or removed"), words);
  const std::string buffer =
      words_after("plain", [](Net& net) { net.register_buffer("seen", at::ones({3})); }, 4);
  BOOST_TEST(contains(buffer, "buffer seen was registered, replaced or removed"), buffer);
}

BOOST_AUTO_TEST_CASE(ranks_with_different_modules_name_the_difference) {
  for (const std::size_t world : {2u, 4u}) {
    all_say(run(world,
                [](Shared& comm) {
                  Ddp ddp(comm, make_model(comm.rank() == Rank{1} ? "sparse" : "plain"));
                }),
            "rank 0 has \"parameter first.weight float 16 x 12\" and rank 1 has \"parameter "
            "table.weight float 30 x 12\"");
  }
}

BOOST_AUTO_TEST_CASE(an_exception_in_the_loss_ends_all_ranks_with_its_words) {
  const auto fails = [](Net& net, const Batch& batch) -> at::Tensor {
    if (batch.labels[0].item<std::int64_t>() == 3) throw std::runtime_error("label 3 is unknown");
    return cross_entropy(net, batch);
  };
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_say(run(world,
                [&](Shared& comm) {
                  Ddp ddp(comm, Model(make_net("plain"), fails));
                  for (std::size_t s = 0; s != 40; ++s)
                    ddp.step(batch_of("plain", s, comm.rank().value()));
                }),
            "label 3 is unknown");
  }
}

BOOST_AUTO_TEST_CASE(losses_and_types_that_make_no_sense_are_refused) {
  const auto several = [](Net& net, const Batch& batch) { return net.forward(batch.inputs); };
  all_say(run(1,
              [&](Shared& comm) {
                Ddp ddp(comm, Model(make_net("plain"), several));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "the model's loss has 20 elements");
  all_say(run(1,
              [](Shared& comm) {
                const auto net = make_net("plain");
                net->to(at::kDouble);
                Ddp ddp(comm, Model(net));
              }),
          "first.weight has elements of Double, which the model does not list");
  const auto detached = [](Net& net, const Batch& batch) {
    return cross_entropy(net, batch).detach();
  };
  all_say(run(1,
              [&](Shared& comm) {
                Ddp ddp(comm, Model(make_net("plain"), detached));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "requires no gradient");
}

// ---- Policies

BOOST_AUTO_TEST_CASE(unused_parameters_accumulation_and_clipping_are_as_in_one_process) {
  using Busy = DistributedDataParallel<Model, Optimizer<SGDMomentum>, UnusedParameters<Zero>,
                                       Accumulate<2>, Clip<0.05>>;
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [](Shared& comm) {
      const auto make = [] {
        const auto net = make_net("plain");
        net->register_parameter("spare", at::full({7}, 0.5));
        return net;
      };
      const auto net = make();
      Busy ddp(comm, Model(net));
      ddp.optimizer().lr = 0.5;
      const auto plain = make();
      ::torch::optim::SGD optimizer(plain->parameters(),
                                    ::torch::optim::SGDOptions(0.5).momentum(0.9));
      for (std::size_t s = 0; s != 8; ++s) {
        ddp.step(batch_of("plain", s, comm.rank().value()));
        for (std::size_t rank = 0; rank != comm.world_size().value(); ++rank)
          (cross_entropy(*plain, batch_of("plain", s, rank)) /
           static_cast<double>(2 * comm.world_size().value()))
              .backward();
        if (s % 2 == 0) continue;
        ::torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05);
        optimizer.step();
        optimizer.zero_grad();
      }
      const std::vector<float> have = values_of(*net);
      const std::vector<float> want = values_of(*plain);
      for (std::size_t i = 0; i != want.size(); ++i)
        require(std::abs(have[i] - want[i]) < 1e-6, "value " + std::to_string(i) + " is " +
                                                        std::to_string(have[i]) + ", not " +
                                                        std::to_string(want[i]));
    });
  }
  all_say(run(1,
              [](Shared& comm) {
                const auto net = make_net("plain");
                net->register_parameter("spare", at::ones({7}));
                Ddp ddp(comm, Model(net));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "spare");
}

BOOST_AUTO_TEST_SUITE_END()

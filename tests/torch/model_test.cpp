// SPDX-License-Identifier: Apache-2.0
// A LibTorch module as a model: its tensors, its modes and its memory.
#include "lockstep/detail/torch/model.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_model)

namespace {

using namespace torch_tests;

at::Tensor mask_of(const std::vector<std::int64_t>& set) {
  return at::tensor(set, at::kLong).to(at::kBool);
}

std::shared_ptr<Net> net_with_buffers(std::size_t rank) {
  const auto net = make_net("norm");
  net->register_buffer("mask", mask_of({1, rank == 0, 0, rank == 1}));
  net->register_buffer("count", at::full({2}, static_cast<std::int64_t>(7 + rank), at::kLong));
  net->register_buffer("none", at::zeros({0, 3}));
  return net;
}

std::vector<const void*> memory_of(const ::torch::nn::Module& net) {
  std::vector<const void*> memory;
  for (const at::Tensor& tensor : net.parameters()) memory.push_back(tensor.const_data_ptr());
  for (const at::Tensor& tensor : net.buffers()) memory.push_back(tensor.const_data_ptr());
  return memory;
}
void require_no_overlap(const std::vector<const void*>& a, const std::vector<const void*>& b) {
  for (std::size_t i = 0; i != a.size(); ++i) require(a[i] != b[i], "memory is the job's");
}

/// A layer in a holder.
struct Layer : TorchModel<Layer, ::torch::nn::Linear> {
  using TorchModel::TorchModel;
  at::Tensor loss(const Batch& batch) {
    return at::cross_entropy_loss(module()->forward(batch.inputs), batch.labels);
  }
};

/// Notes whether graphs are built.
struct Watched : TorchModel<Watched, Net> {
  using TorchModel::TorchModel;
  at::Tensor loss(const Batch& batch) {
    builds_graphs = at::GradMode::is_enabled();
    return cross_entropy(module(), batch);
  }
  void score(const Batch&, auto& tally) {
    builds_graphs = at::GradMode::is_enabled();
    tally.add("ones", 1, 1);
  }
  bool builds_graphs = false;
};

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
    std::vector<const void*> memory;
    {
      Ddp ddp(comm, Model(net));
      ddp.optimizer().lr = 0.1;
      for (std::size_t s = 0; s != 4; ++s) ddp.step(batch_of("norm", s, comm.rank().value()));
      trained = values_of(*net);
      memory = memory_of(*net);
    }
    require(trained != before, "nothing was trained");
    require_no_overlap(memory, memory_of(*net));
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

BOOST_AUTO_TEST_CASE(a_holder_that_the_program_keeps_has_memory_of_its_own_after_the_job) {
  all_well(1, [](Shared& comm) {
    ::torch::nn::Linear layer(12, 5);
    std::vector<const void*> memory;
    {
      DistributedDataParallel<Layer> ddp(comm, Layer(layer.ptr()));
      ddp.step(batch_of("plain", 0, 0));
      memory = memory_of(*layer);
    }
    require_no_overlap(memory, memory_of(*layer));
  });
}

BOOST_AUTO_TEST_CASE(gradients_are_the_jobs_in_its_steps_and_libtorchs_between_them) {
  all_well(1, [](Shared& comm) {
    const auto net = make_net("plain");
    DistributedDataParallel<Model, Frozen<"last.*">> ddp(comm, Model(net));
    const at::Tensor first = net->named_parameters()["first.weight"];
    const at::Tensor last = net->named_parameters()["last.weight"];
    ddp.step(batch_of("plain", 0, 0));
    require(!first.grad().defined(), "a step has left a gradient");
    require(!last.requires_grad(), "a frozen parameter's gradient is computed");
    cross_entropy(*net, batch_of("plain", 1, 0)).backward();
    require(first.grad().defined() && !last.grad().defined(), "the program's own gradients");
    ddp.step(batch_of("plain", 2, 0));
  });
}

BOOST_AUTO_TEST_CASE(evaluations_build_no_graphs_and_leave_a_module_in_evaluation_there) {
  all_well(1, [](Shared& comm) {
    const auto net = make_net("plain");
    DistributedDataParallel<Watched> ddp(comm, Watched(net));
    ddp.step(batch_of("plain", 0, 0));
    require(ddp.model().builds_graphs, "a step builds no graph");
    ddp.evaluate(batch_of("plain", 0, 0));
    require(!ddp.model().builds_graphs, "an evaluation builds a graph");
    ddp.model().builds_graphs = true;
    net->eval();
    Tally tally;
    ddp.evaluate(batch_of("plain", 0, 0), tally);
    require(!ddp.model().builds_graphs, "a score builds a graph");
    require(!net->is_training(), "the module trains");
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

BOOST_AUTO_TEST_SUITE_END()

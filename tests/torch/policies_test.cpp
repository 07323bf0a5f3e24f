// SPDX-License-Identifier: Apache-2.0
// A TorchModel under a job's policies trains like LibTorch in one process.
#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/torch/adopted_tensors.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "temporary_folder.hpp"
#include "torch/small_net.hpp"

BOOST_AUTO_TEST_SUITE(torch_policies)

namespace {

using namespace lockstep;
using namespace torch_net;
using ranks::Shared;

struct Rows {
  at::Tensor inputs;
  bool with_extra = true;
  std::size_t size() const { return static_cast<std::size_t>(inputs.size(0)); }
};
struct Model : TorchModel<Model, Net> {
  using TorchModel::TorchModel;
  at::Tensor loss(const Rows& rows) {
    return torch_net::loss_of(module().forward(rows.inputs, rows.with_extra));
  }
};

/// What a comparison does besides plain steps.
struct Course {
  std::size_t micro = 1;
  double clip = 0;
  double lr = 0.1;
  double tolerance = 1e-6;
  bool (*uses_extra)(std::size_t rank, std::size_t step) = [](std::size_t, std::size_t) {
    return true;
  };
};

/// Trains five steps on ranks with the policies, and the same in one process with LibTorch's SGD.
/// `begin(ddp, alone, plain)` sets numbers of both.
template <class... Ps>
void compare_from(const std::string& what, const Course& course, const auto& begin) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto alone = make_net();
      torch::optim::SGD plain(alone->parameters(), course.lr);
      DistributedDataParallel<Model, Ps...> ddp(comm, Model(make_net(3 + rank)));
      ddp.optimizer().lr = course.lr;
      begin(ddp, *alone, plain);
      for (std::size_t s = 0; s != 5; ++s) {
        const auto rows = [&](std::size_t m, std::size_t r) {
          return Rows{inputs_of(20 * m + s, r), course.uses_extra(r, s)};
        };
        step_alone(*alone, plain, world, course.clip, [&](Net& net, std::size_t r) {
          for (std::size_t m = 0; m != course.micro; ++m) {
            const Rows mine = rows(m, r);
            (loss_of(net.forward(mine.inputs, mine.with_extra)) / static_cast<double>(course.micro))
                .backward();
          }
        });
        for (std::size_t m = 0; m != course.micro; ++m) ddp.step(rows(m, rank));
        ddp.for_each_parameter([](auto&&...) {});  // they have arrived
        require_close(ddp.model().module(), *alone, what + ", step " + std::to_string(s),
                      course.tolerance);
      }
    });
  }
}

template <class... Ps>
void compare(const std::string& what, const Course& course = {}) {
  compare_from<Ps...>(what, course, [](auto&, Net&, torch::optim::SGD&) {});
}

using Pieces = Buckets<BucketLimits{100, 200}>;

}  // namespace

BOOST_AUTO_TEST_CASE(accumulated_and_clipped_steps_of_shared_parameters) {
  compare<Accumulate<2>, Clip<0.05>>("shared", {.micro = 2, .clip = 0.05});
}

BOOST_AUTO_TEST_CASE(unused_parameters_of_replicated_ones) {
  const auto uses = [](std::size_t r, std::size_t s) { return s == 1 || (s == 3 && r == 0); };
  // With momentum, a parameter that counts as used by mistake would move.
  compare_from<Sharding<Replicated>, UnusedParameters<Zero>, Pieces, Optimizer<SGDMomentum>>(
      "unused", {.uses_extra = uses}, [](auto& ddp, Net&, torch::optim::SGD& plain) {
        ddp.optimizer().momentum = 0.9;
        static_cast<torch::optim::SGDOptions&>(plain.param_groups()[0].options()).momentum(0.9);
      });
}

BOOST_AUTO_TEST_CASE(a_walk_through_the_graph_finds_parameters_that_a_loss_does_not_reach) {
  auto net = make_net();
  const std::vector<at::Tensor> parameters{net->in->weight, net->extra->weight, net->extra->bias};
  std::vector<lockstep::detail::GradientNode> nodes;
  for (std::size_t i = 0; i != parameters.size(); ++i) {
    nodes.push_back(lockstep::detail::hook_gradient(
        parameters[i], i, std::make_shared<lockstep::detail::GradientReceiver>()));
  }
  const auto unreached = [&](const at::Tensor& loss) {
    std::vector<std::size_t> found;
    lockstep::detail::for_each_unreached(loss, nodes, [&](std::size_t i) { found.push_back(i); });
    return found;
  };
  const at::Tensor x = inputs_of(0, 0);
  BOOST_TEST((unreached(loss_of(net->forward(x, true))).empty()));
  BOOST_TEST((unreached(loss_of(net->forward(x, false))) == std::vector<std::size_t>{1, 2}));
  BOOST_TEST((unreached(net->extra->bias) == std::vector<std::size_t>{0, 1}));
  BOOST_TEST((unreached(at::zeros({})) == std::vector<std::size_t>{0, 1, 2}));
}

namespace {

struct BlindModel : TorchModel<BlindModel, Net> {
  using TorchModel::TorchModel;
  at::Tensor loss(const Rows& rows) {
    const at::Tensor y = module().forward(rows.inputs, rows.with_extra);
    return torch_net::loss_of(rows.with_extra ? y : blind_to_extra(module(), y));
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(gradients_that_autograd_leaves_undefined_are_zero) {
  all_well(2, [](Shared& comm) {
    DistributedDataParallel<BlindModel> ddp(comm, BlindModel(make_net()));
    ddp.optimizer().lr = 0.1;
    const at::Tensor& weight = ddp.model().module().extra->weight;
    const std::size_t rank = comm.rank().value();
    const at::Tensor before = weight.detach().clone();
    ddp.step(Rows{inputs_of(0, rank)});
    const at::Tensor after = weight.detach().clone();
    require(!at::equal(before, after), "nothing was trained");
    ddp.step(Rows{inputs_of(1, rank), false});
    ddp.for_each_parameter([](auto&&...) {});  // they have arrived
    require(at::equal(after, weight), "an undefined gradient counts");
  });
}

BOOST_AUTO_TEST_CASE(unused_parameters_are_named_without_the_policy) {
  all_say(ranks::run(ranks::As::processes, 2,
                     [](Shared& comm) {
                       DistributedDataParallel<Model, Accumulate<2>, Clip<0.05>> ddp(
                           comm, Model(make_net()));
                       ddp.step(Rows{inputs_of(0, 0), comm.rank() == Rank{0}});
                       ddp.step(Rows{inputs_of(0, 0), true});
                     }),
          "no gradient came for extra.weight, extra.bias");
}

BOOST_AUTO_TEST_CASE(a_graph_that_is_kept_over_a_step_is_rejected) {
  all_say(ranks::run(ranks::As::processes, 1,
                     [](Shared& comm) {
                       DistributedDataParallel<Model> ddp(comm, Model(make_net()));
                       ddp.step(Rows{inputs_of(0, 0)});
                       const at::Tensor kept =
                           loss_of(ddp.model().module().forward(inputs_of(1, 0)));
                       ddp.step(Rows{inputs_of(1, 0)});
                       kept.backward();
                     }),
          "has been modified by an inplace operation");
}

BOOST_AUTO_TEST_CASE(sharded_optimizers_and_gradients) {
  compare<Sharding<ZeroRedundancy>, Pieces>("sharded");
  compare<Sharding<ZeroRedundancy, Gradients>, Pieces, Accumulate<2>>("freed", {.micro = 2});
}

BOOST_AUTO_TEST_CASE(frozen_parameters_and_groups_with_hooks) {
  using Biases = Named<"*.bias">;
  compare_from<Frozen<"out.*">, ParameterGroups<Biases>, Hooks<CompressTo<BFloat16>>>(
      "groups", {.tolerance = 4e-3}, [](auto& ddp, Net& alone, torch::optim::SGD& plain) {
        ddp.optimizer(Biases{}).lr = 0.02;
        alone.out->weight.requires_grad_(false);
        alone.out->bias.requires_grad_(false);
        std::vector<at::Tensor> weights, biases;
        for (const auto& each : alone.named_parameters())
          (each.key().ends_with(".bias") ? biases : weights).push_back(each.value());
        plain.param_groups().clear();
        plain.add_param_group(torch::optim::OptimizerParamGroup(weights));
        plain.add_param_group(torch::optim::OptimizerParamGroup(
            biases, std::make_unique<torch::optim::SGDOptions>(0.02)));
      });
}

BOOST_AUTO_TEST_CASE(ranks_with_fewer_batches_and_steps_that_are_skipped) {
  all_well(3, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    auto alone = make_net();
    torch::optim::SGD plain(alone->parameters(), 0.1);
    DistributedDataParallel<Model, UnevenInputs<Join>, Anomaly<Skip>> ddp(comm, Model(make_net()));
    ddp.optimizer().lr = 0.1;
    const auto rows = [](std::size_t s, std::size_t r) {
      at::Tensor x = inputs_of(s, r);
      if (s == 1 && r == 2) x[0][0] = std::numeric_limits<float>::quiet_NaN();
      return Rows{x};
    };
    for (std::size_t s = 0; s != 4; ++s) {
      if (s == 1) continue;  // not finite
      step_alone(*alone, plain, 3, 0, [&](Net& net, std::size_t r) {
        if (s < 2 + r) loss_of(net.forward(rows(s, r).inputs)).backward();
      });
    }
    auto joined = ddp.join();
    for (std::size_t s = 0; s != 2 + rank; ++s) ddp.step(rows(s, rank));
    joined.finish();
    require(ddp.skipped_steps() == 1, "no step was skipped");
    require_close(ddp.model().module(), *alone, "joined");
  });
}

BOOST_AUTO_TEST_CASE(a_job_that_is_saved_and_resumed_has_the_bits_of_one_that_was_not) {
  const TemporaryFolder folder;
  const std::string path = folder / "job.safetensors";
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [&](Shared& comm) {
      using Job = DistributedDataParallel<Model, Optimizer<AdamW>>;
      const auto step = [&](Job& job, std::size_t s) {
        job.step(Rows{inputs_of(s, comm.rank().value())});
      };
      Job job(comm, Model(make_net()));
      for (std::size_t s = 0; s != 6; ++s) {
        step(job, s);
        if (s == 2) save(job, path);
      }
      Job other(comm, Model(make_net(17)));
      step(other, 9);
      resume(other, path);
      for (std::size_t s = 3; s != 6; ++s) step(other, s);
      require_close(other.model().module(), job.model().module(), "resumed", 0);
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()

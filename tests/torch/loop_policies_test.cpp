// SPDX-License-Identifier: Apache-2.0
// Policies that act on gradients and buffers in a program's own loop.
#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "torch/small_net.hpp"

BOOST_AUTO_TEST_SUITE(torch_loop_policies)

namespace {

using namespace ranks;
using namespace torch_net;
namespace loops = lockstep::torch;

/// An optimizer that moves parameters and states without a gradient, where it gets a zero one.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(Net& net, bool adamw) {
  if (adamw)
    return std::make_unique<torch::optim::AdamW>(
        net.parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  return std::make_unique<torch::optim::SGD>(
      net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
}
constexpr double tolerance_of(bool adamw) { return adamw ? 1e-4 : 1e-6; }

/// Zero gradients for the extra part, unless it is used.
at::Tensor loss_with(Net& net, const at::Tensor& y, bool uses_extra) {
  return loss_of(uses_extra ? y : blind_to_extra(net, y));
}

bool has_extra(const Net& net) {
  const bool weight = net.extra->weight.grad().defined();
  require(weight == net.extra->bias.grad().defined(), "weight and bias are not treated alike");
  return weight;
}

void require_equal_on_all_ranks(Shared& comm, const at::Tensor& values, const std::string& what) {
  at::Tensor first = values.detach().to(at::kDouble).clone();
  comm.broadcast(std::span(first.data_ptr<double>(), static_cast<std::size_t>(first.numel())),
                 Rank{0});
  require(at::equal(first, values.detach().to(at::kDouble)), what + " differs between ranks");
}

/// Does any rank use the extra part in a step?
bool uses(std::size_t rank, std::size_t step) { return step == 1 || (step == 3 && rank == 0); }
bool any_uses(std::size_t step) { return step == 1 || step == 3; }

}  // namespace

// ---- Hooks<SkipZeroGradients>

BOOST_AUTO_TEST_CASE(gradients_that_are_zero_on_all_ranks_are_undefined) {
  using Skipping = loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      for (const bool adamw : {false, true}) {
        auto alone = make_net(), net = make_net(3 + rank);
        const auto plain = make_optimizer(*alone, adamw);
        Skipping ddp(net, comm);
        const auto optimizer = make_optimizer(*net, adamw);
        for (std::size_t s = 0; s != 6; ++s) {
          step_alone(*alone, *plain, world, 0, [&](Net& each, std::size_t r) {
            const bool with = uses(r, s);
            loss_of(each.forward(inputs_of(s, r), with)).backward();
          });
          const at::Tensor x = inputs_of(s, rank);
          loss_with(*net, ddp(x, uses(rank, s)), uses(rank, s)).backward();
          require(has_extra(*net) == any_uses(s), "another gradient in step " + std::to_string(s));
          require(net->out->weight.grad().defined(), "a gradient that is not zero is left out");
          optimizer->step();
          optimizer->zero_grad(s % 2 == 0);  // zeros that stay are zero gradients too
          require_close(*net, *alone, "step " + std::to_string(s), tolerance_of(adamw));
        }
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(what_was_left_out_is_zero_for_later_passes) {
  using Skipping = loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto alone = make_net(), net = make_net();
      torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      Skipping ddp(net, comm);
      const auto pass = [&](std::size_t s, bool with) {
        loss_with(*net, ddp(inputs_of(s, rank), with), with).backward();
      };
      const auto compare = [&](std::size_t first, bool with_first, bool with_second) {
        step_alone(*alone, plain, world, 0, [&](Net& each, std::size_t r) {
          loss_of(each.forward(inputs_of(first, r), with_first)).backward();
          loss_of(each.forward(inputs_of(first + 1, r), with_second)).backward();
        });
        optimizer.step();
        optimizer.zero_grad();
        require_close(*net, *alone, "passes from " + std::to_string(first));
      };
      pass(0, false);
      require(!has_extra(*net), "a zero gradient is there");
      pass(1, true);
      require(has_extra(*net), "the sum of a zero gradient and another is left out");
      compare(0, false, true);
      pass(2, true);
      pass(3, false);
      require(has_extra(*net), "a sum is left out because its second part is zero");
      compare(2, true, false);
      {
        const auto local = ddp.no_sync();
        pass(4, true);
      }
      pass(5, false);
      require(has_extra(*net), "a gradient of no_sync is left out");
      compare(4, true, false);
      {
        const auto local = ddp.no_sync();
        pass(6, false);
      }
      pass(7, false);
      require(!has_extra(*net), "two zero gradients are there");
      compare(6, false, false);
    });
  }
}

BOOST_AUTO_TEST_CASE(an_exhausted_rank_leaves_the_same_gradients_out) {
  using Skipping =
      loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients>, UnevenInputs<Join>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      const auto batches = [](std::size_t r) { return 1 + 2 * r; };
      for (const bool adamw : {false, true}) {
        auto alone = make_net(), net = make_net();
        const auto plain = make_optimizer(*alone, adamw), optimizer = make_optimizer(*net, adamw);
        const auto with = [](std::size_t s) { return s % 3 == 1; };
        for (std::size_t s = 0; s != batches(world - 1); ++s) {
          step_alone(*alone, *plain, world, 0, [&](Net& each, std::size_t r) {
            if (s < batches(r)) loss_of(each.forward(inputs_of(s, r), with(s))).backward();
          });
        }
        Skipping ddp(net, comm);
        std::size_t updates = 0;
        const auto update = [&] {
          require(has_extra(*net) == with(updates), "another gradient in an update");
          ++updates;
          optimizer->step();
          optimizer->zero_grad();
        };
        auto joined = ddp.join(update);
        for (std::size_t s = 0; s != batches(rank); ++s) {
          loss_with(*net, ddp(inputs_of(s, rank), with(s)), with(s)).backward();
          update();
        }
        joined.finish();
        require(updates == batches(world - 1), "another number of updates");
        require_close(*net, *alone, "joined", tolerance_of(adamw));
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(zero_gradients_are_left_out_beside_other_policies) {
  all_well(2, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    const auto check = [&](auto& ddp, const std::string& what) {
      loss_with(*ddp.operator->(), ddp(inputs_of(0, rank), false), false).backward();
      require(!has_extra(ddp.module()), what + ": a zero gradient is there");
      require(ddp->out->weight.grad().defined(), what + ": all gradients are left out");
      loss_of(ddp(inputs_of(1, rank), rank == 0)).backward();
    };
    {
      loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients, CompressTo<BFloat16>>,
                                     UnusedParameters<Zero>>
          ddp(make_net(), comm);
      check(ddp, "compressed");
      require(has_extra(ddp.module()), "rank 0's gradient is left out");
    }
    loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients>, UnusedParameters<Zero>,
                                   Anomaly<Ignore>>
        ddp(make_net(), comm);
    check(ddp, "unused");
    require(has_extra(ddp.module()), "rank 0's gradient is left out");
    ddp->zero_grad();
    // A NaN is not zero.
    at::Tensor x = inputs_of(2, rank);
    if (rank == 1) x[0][0] = std::numeric_limits<float>::quiet_NaN();
    loss_of(ddp(x)).backward();
    require(has_extra(ddp.module()), "a NaN is taken for zero");
  });
}

// ---- Anomaly<Skip>

namespace {

at::Tensor spoiled_inputs(std::size_t step, std::size_t rank, bool is_bad) {
  at::Tensor x = inputs_of(step, rank);
  if (is_bad)
    x[1][2] = step % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                            : std::numeric_limits<float>::infinity();
  return x;
}

void require_no_gradient(const torch::nn::Module& net, const std::string& when) {
  for (const auto& each : net.named_parameters())
    require(!each.value().grad().defined(), when + ": " + each.key() + " has a gradient");
}

}  // namespace

BOOST_AUTO_TEST_CASE(passes_that_are_not_finite_change_nothing_and_are_counted) {
  using Skipping = loops::DistributedDataParallel<Net, Anomaly<Skip>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      const auto is_bad = [](std::size_t s) { return s == 1 || s == 2 || s == 6; };
      for (const bool adamw : {false, true}) {
        auto alone = make_net(), net = make_net(3 + rank);
        const auto plain = make_optimizer(*alone, adamw);
        Skipping ddp(net, comm);
        const auto optimizer = make_optimizer(*net, adamw);
        std::uint64_t skipped = 0;
        for (std::size_t s = 0; s != 8; ++s) {
          const bool bad = is_bad(s);
          if (!bad) {
            step_alone(*alone, *plain, world, 0, [&](Net& each, std::size_t r) {
              loss_of(each.forward(inputs_of(s, r))).backward();
            });
          }
          const at::Tensor loss = loss_of(ddp(spoiled_inputs(s, rank, bad && rank + 1 == world)));
          if (s == 2) {
            ddp.backward(loss);
          } else {
            loss.backward();
          }
          if (bad) require_no_gradient(*net, "step " + std::to_string(s));
          require(ddp.skipped_steps() == (skipped += bad ? 1 : 0), "another count");
          torch::nn::utils::clip_grad_norm_(net->parameters(), 1e9);
          optimizer->step();
          optimizer->zero_grad(s % 2 == 0);
          require_close(*net, *alone, "step " + std::to_string(s), tolerance_of(adamw));
        }
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(what_was_accumulated_before_a_pass_that_is_not_finite_is_dropped) {
  using Skipping = loops::DistributedDataParallel<Net, Anomaly<Skip>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto alone = make_net(), net = make_net();
      torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      Skipping ddp(net, comm);
      const auto pass = [&](std::size_t s, bool bad = false) {
        loss_of(ddp(spoiled_inputs(s, rank, bad && rank == 0))).backward();
      };
      {
        const auto local = ddp.no_sync();
        pass(0);
      }
      pass(1, true);
      require_no_gradient(*net, "after no_sync");
      {
        const auto local = ddp.no_sync();
        pass(0, true);
      }
      pass(1);
      require_no_gradient(*net, "after a bad pass in no_sync");
      pass(0);
      pass(1, true);
      require_no_gradient(*net, "after two passes");
      require(ddp.skipped_steps() == 3, "another count");
      // A pass after it is the first of another sum.
      pass(2);
      step_alone(*alone, plain, world, 0, [&](Net& each, std::size_t r) {
        loss_of(each.forward(inputs_of(2, r))).backward();
      });
      optimizer.step();
      require_close(*net, *alone, "a later pass");
    });
  }
}

BOOST_AUTO_TEST_CASE(an_exhausted_rank_leaves_the_same_passes_out) {
  using Skipping = loops::DistributedDataParallel<Net, Anomaly<Skip>, UnevenInputs<Join>>;
  for (const std::size_t world : {2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      const auto batches = [](std::size_t r) { return 1 + 2 * r; };
      const std::size_t bad = batches(world - 1) - 2;  // when most ranks have no more batches
      auto alone = make_net(), net = make_net();
      const auto plain = make_optimizer(*alone, true), optimizer = make_optimizer(*net, true);
      for (std::size_t s = 0; s != batches(world - 1); ++s) {
        if (s == bad) continue;
        step_alone(*alone, *plain, world, 0, [&](Net& each, std::size_t r) {
          if (s < batches(r)) loss_of(each.forward(inputs_of(s, r))).backward();
        });
      }
      Skipping ddp(net, comm);
      const auto update = [&] {
        optimizer->step();
        optimizer->zero_grad();
      };
      auto joined = ddp.join(update);
      for (std::size_t s = 0; s != batches(rank); ++s) {
        loss_of(ddp(spoiled_inputs(s, rank, s == bad))).backward();
        update();
      }
      joined.finish();
      require(ddp.skipped_steps() == 1, "another count");
      require_close(*net, *alone, "joined", 1e-4);
      for (const at::Tensor& parameter : net->parameters())
        require_equal_on_all_ranks(comm, parameter, "a parameter");
    });
  }
}

BOOST_AUTO_TEST_CASE(hooks_with_residuals_train_on_after_a_pass_that_was_left_out) {
  for (const std::size_t world : {2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto net = make_net();
      loops::DistributedDataParallel<Net, Hooks<SkipZeroGradients, PowerSGD<>>, Anomaly<Skip>> ddp(
          net, comm);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      double first = 0, last = 0;
      for (std::size_t s = 0; s != 40; ++s) {
        at::Tensor x = inputs_of(0, rank);
        if (s == 7 && rank == 1) x[0][0] = std::numeric_limits<float>::infinity();
        const at::Tensor loss = loss_of(ddp(x));
        if (s != 7) last = loss.item<double>();
        if (s == 0) first = last;
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      require(ddp.skipped_steps() == 1, "another count");
      require(last < 0.3 * first, "it does not train");
      for (const at::Tensor& parameter : net->parameters())
        require_equal_on_all_ranks(comm, parameter, "a parameter");
    });
  }
}

// ---- Buffers

namespace {

/// A norm, and buffers of other types.
struct Counting : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(5, 4));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
  at::Tensor sum = register_buffer("sum", at::zeros({2}, at::kDouble));
  at::Tensor seen = register_buffer("seen", at::zeros({3}, at::kBool));
  at::Tensor forward(const at::Tensor& x) { return norm->forward(layer->forward(x)); }
};

template <class... Policies>
using CountingDdp =
    loops::DistributedDataParallel<Counting, ParameterTypes<float, double>, Policies...>;

/// Two steps with other batches on each rank, of which rank r makes r more passes on its own.
void train_apart(auto& ddp, std::size_t rank) {
  for (std::size_t s = 0; s != 2; ++s) {
    {
      const auto local = ddp.no_sync();
      for (std::size_t pass = 0; pass != rank; ++pass) ddp(inputs_of(10 + s + pass, rank));
    }
    loss_of(ddp(inputs_of(s, rank))).backward();
    ddp->zero_grad();
  }
  ddp->sum.fill_(static_cast<double>(rank));
  if (rank < 3) ddp->seen[static_cast<std::int64_t>(rank)] = true;
}

}  // namespace

BOOST_AUTO_TEST_CASE(synced_buffers_stay_local_until_they_are_averaged) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto net = make_net<Counting>(), alone = make_net<Counting>();
      CountingDdp<Buffers<Synced>> ddp(net, comm);
      for (std::size_t s = 0; s != 2; ++s) {
        for (std::size_t pass = 0; pass != rank; ++pass)
          alone->forward(inputs_of(10 + s + pass, rank));
        alone->forward(inputs_of(s, rank));
      }
      train_apart(ddp, rank);
      require(at::allclose(net->norm->running_mean, alone->norm->running_mean, 1e-5, 1e-6),
              "a running mean is not the rank's own");
      const auto count = [&] { return net->norm->num_batches_tracked.item<std::int64_t>(); };
      require(count() == static_cast<std::int64_t>(2 + 2 * rank), "another count");
      at::Tensor mean = net->norm->running_mean.clone(), var = net->norm->running_var.clone();
      comm.all_reduce(std::span(mean.data_ptr<float>(), 4), Average{});
      comm.all_reduce(std::span(var.data_ptr<float>(), 4), Average{});
      ddp.synchronize_buffers();
      require(at::allclose(net->norm->running_mean, mean, 1e-6, 1e-7), "another mean");
      require(at::allclose(net->norm->running_var, var, 1e-6, 1e-7), "another variance");
      require(count() == static_cast<std::int64_t>(2 * world), "not the largest count");
      const double average = (static_cast<double>(world) - 1) / 2;
      require(net->sum[1].item<double>() == average, "another average of doubles");
      for (std::size_t i = 0; i != 3; ++i) {
        require(net->seen[static_cast<std::int64_t>(i)].item<bool>() == (i < world),
                "another union of booleans");
      }
      require_equal_on_all_ranks(comm, net->norm->running_mean, "a mean");
      // Training goes on from there, and buffers are local again.
      loss_of(ddp(inputs_of(5, rank))).backward();
      require(count() == static_cast<std::int64_t>(2 * world) + 1, "another count afterwards");
    });
  }
}

BOOST_AUTO_TEST_CASE(synchronize_buffers_gives_all_ranks_those_of_rank_0) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const auto check = [&](auto& ddp) {
        train_apart(ddp, comm.rank().value());
        at::Tensor mean = ddp->norm->running_mean.clone();
        comm.broadcast(std::span(mean.data_ptr<float>(), 4), Rank{0});
        ddp.synchronize_buffers();
        require(at::equal(ddp->norm->running_mean, mean), "another mean than rank 0's");
        require(ddp->norm->num_batches_tracked.template item<std::int64_t>() == 2, "another count");
        require(ddp->sum[0].template item<double>() == 0, "another sum");
        require(!ddp->seen[1].template item<bool>(), "other booleans");
      };
      {
        CountingDdp<> ddp(make_net<Counting>(), comm);
        check(ddp);
      }
      CountingDdp<Buffers<Local>> ddp(make_net<Counting>(), comm);
      check(ddp);
    });
  }
}

BOOST_AUTO_TEST_CASE(buffers_are_not_synchronized_where_a_rank_may_be_exhausted) {
  all_say(ranks::run(As::processes, 2,
                     [](Shared& comm) {
                       CountingDdp<UnevenInputs<Join>, Buffers<Synced>> ddp(make_net<Counting>(),
                                                                            comm);
                       auto joined = ddp.join([] {});
                       loss_of(ddp(inputs_of(0, comm.rank().value()))).backward();
                       ddp.synchronize_buffers();
                     }),
          "call it after joined.finish()");
  all_well(2, [](Shared& comm) {
    auto net = make_net<Counting>();
    CountingDdp<UnevenInputs<Join>, Buffers<Synced>> ddp(net, comm);
    auto joined = ddp.join([] {});
    for (std::size_t s = 0; s != 1 + comm.rank().value(); ++s)
      loss_of(ddp(inputs_of(s, comm.rank().value()))).backward();
    joined.finish();
    ddp.synchronize_buffers();
    require(net->norm->num_batches_tracked.item<std::int64_t>() == 2, "another count");
  });
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// A module in the program's own loop, with LibTorch's optimizers: ranks train like one process.
#include "lockstep/detail/torch/distributed_data_parallel.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "torch/small_net.hpp"

#if LOCKSTEP_HAS_GLOO
#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#endif

BOOST_AUTO_TEST_SUITE(torch_distributed_data_parallel)

namespace {

using namespace ranks;
using namespace torch_net;
namespace loops = lockstep::torch;

/// A `no_sync` scope, where there is a wrapper.
template <class Ddp>
auto held(Ddp* ddp) {
  using Scope = decltype(ddp->no_sync());
  struct Local {
    explicit Local(Ddp& ddp) : scope(ddp.no_sync()) {}
    Scope scope;
  };
  return ddp != nullptr ? std::make_unique<Local>(*ddp) : nullptr;
}

at::Tensor comm_average(Shared& comm, const at::Tensor& of) {
  at::Tensor all = of.clone();
  comm.all_reduce(std::span(all.data_ptr<float>(), static_cast<std::size_t>(all.numel())),
                  Average{});
  return all;
}

/// Trains both for a few steps. `backward(net, forward, r, s, ddp)` runs what a rank does before an
/// update, where `forward` is the wrapper's, or the module's and there is no wrapper.
template <class Ddp>
void train_both(auto& comm, const std::string& what, const auto& backward, bool clips = false,
                double tolerance = 1e-6) {
  const std::size_t rank = comm.rank().value(), world = comm.world_size().value();
  const torch::optim::SGDOptions options = torch::optim::SGDOptions(0.1).momentum(0.9);
  auto alone = make_net();
  torch::optim::SGD plain(alone->parameters(), options);
  auto net = make_net(3 + rank);
  Ddp ddp(net, comm);
  torch::optim::SGD optimizer(net->parameters(), options);
  for (std::size_t s = 0; s != 5; ++s) {
    const std::string when = what + ", step " + std::to_string(s);
    // Gradients may be zeroed in place, or dropped.
    const bool to_none = s % 2 == 0;
    const auto backward_alone = [&](Net& each, std::size_t r) {
      const auto forward = [&](auto&&... x) { return each.forward(x...); };
      backward(each, forward, r, s, static_cast<Ddp*>(nullptr));
    };
    step_alone(*alone, plain, world, clips ? 0.1 : 0, backward_alone, to_none);
    backward(*net, [&](auto&&... x) { return ddp(x...); }, rank, s, &ddp);
    if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
    optimizer.step();
    optimizer.zero_grad(to_none);
    require_close(*net, *alone, when, tolerance);
  }
}
template <class Ddp = loops::DistributedDataParallel<Net>>
void compare(const std::string& what, const auto& backward, bool clips = false,
             double tolerance = 1e-6) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) { train_both<Ddp>(comm, what, backward, clips, tolerance); });
  }
}

/// Trains, and returns how ranks ended.
template <class Ddp = loops::DistributedDataParallel<Net>>
Ends train(std::size_t world, const auto& in_step, std::chrono::milliseconds timeout = 20s) {
  return ranks::run(
      As::processes, world,
      [&](Shared& comm) {
        auto net = make_net();
        Ddp ddp(net, comm);
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        for (std::size_t s = 0; s != 4; ++s) {
          in_step(*net, ddp, comm.rank().value(), s);
          optimizer.step();
          optimizer.zero_grad();
        }
      },
      timeout);
}
void train_one_step(auto& ddp, std::size_t rank, std::size_t s) {
  loss_of(ddp(inputs_of(s, rank))).backward();
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_train_like_one_process) {
  compare("plain", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    loss_of(forward(inputs_of(s, r))).backward();
  });
}

BOOST_AUTO_TEST_CASE(gradients_can_be_clipped) {
  compare(
      "clipped",
      [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
        loss_of(forward(inputs_of(s, r))).backward();
      },
      true);
}

BOOST_AUTO_TEST_CASE(gradients_of_no_sync_are_averaged_with_the_next_pass) {
  compare("no_sync", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto* ddp) {
    {
      auto local = held(ddp);
      loss_of(forward(inputs_of(s, r))).backward();
      loss_of(forward(inputs_of(s + 20, r))).backward();
    }
    loss_of(forward(inputs_of(s + 40, r))).backward();
  });
}

BOOST_AUTO_TEST_CASE(passes_in_no_sync_are_a_ranks_own) {
  all_well(3, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    auto alone = make_net(), net = make_net();
    loops::DistributedDataParallel ddp(net, comm);
    for (std::size_t s = 0; s != 3; ++s) {
      // Rank 0 has none at all.
      for (std::size_t pass = 0; pass != rank; ++pass) {
        const auto local = ddp.no_sync();
        loss_of(ddp(inputs_of(s + 10 * pass, rank))).backward();
        loss_of(alone->forward(inputs_of(s + 10 * pass, rank))).backward();
        const at::Tensor apart = net->out->weight.grad() - alone->out->weight.grad();
        require(apart.abs().max().item<float>() < 1e-6F, "it is not the rank's own gradient");
      }
      train_one_step(ddp, rank, s);
      ddp->zero_grad();
      alone->zero_grad();
    }
  });
}

BOOST_AUTO_TEST_CASE(forward_and_backward_passes_come_in_any_number) {
  compare("two forwards", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    const at::Tensor first = forward(inputs_of(s, r)), second = forward(inputs_of(s + 20, r));
    (loss_of(first) + 0.5 * loss_of(second)).backward();
  });
  compare("two backwards", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    const at::Tensor y = forward(inputs_of(s, r));
    loss_of(y).backward({}, true);
    y.pow(2).mean().backward();
  });
  using Zeroing = loops::DistributedDataParallel<Net, UnusedParameters<Zero>>;
  compare<Zeroing>("three backwards, not all of everything",
                   [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
                     const at::Tensor y = forward(inputs_of(s, r)),
                                      z = forward(inputs_of(s, r), false);
                     loss_of(y).backward({}, true);
                     loss_of(z).backward();
                     y.pow(2).mean().backward();
                   });
  compare("no backward", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    static_cast<void>(forward(inputs_of(s + 20, r)));
    loss_of(forward(inputs_of(s, r))).backward();
  });
  compare("by the wrapper", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto* ddp) {
    const at::Tensor loss = loss_of(forward(inputs_of(s, r)));
    if (ddp != nullptr) {
      ddp->backward(loss);
    } else {
      loss.backward();
    }
  });
}

#if LOCKSTEP_HAS_GLOO
BOOST_AUTO_TEST_CASE(ranks_that_meet_through_gloo_train_like_one_process) {
  using Ddp = loops::DistributedDataParallel<Net, Backend<Gloo>>;
  using Zeroing = loops::DistributedDataParallel<Net, Backend<Gloo>, UnusedParameters<Zero>>;
  for (const std::size_t world : {1u, 2u, 4u}) {
    const Ends ends = ranks::run_processes<ranks::Sockets>(world, 30s, [](auto& comm) {
      at::set_num_threads(1);
      const auto plain = [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
        loss_of(forward(inputs_of(s, r))).backward();
      };
      train_both<Ddp>(comm, "plain", plain);
      const auto sum = [](Net&, const auto& forward, std::size_t r, std::size_t s, auto* ddp) {
        {
          auto local = held(ddp);
          loss_of(forward(inputs_of(s, r))).backward();
        }
        loss_of(forward(inputs_of(s + 40, r))).backward();
      };
      train_both<Ddp>(comm, "no_sync", sum, true);
      const auto parts = [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
        loss_of(forward(inputs_of(s, r), s == 1 || (s == 3 && r == 0))).backward();
      };
      train_both<Zeroing>(comm, "unused", parts);
    });
    for (std::size_t r = 0; r < world; ++r)
      BOOST_TEST(ends[r] == "", "rank " << r << " of " << world << ": " << ends[r]);
  }
}
#endif

BOOST_AUTO_TEST_CASE(gradients_of_gradients_are_averaged) {
  using torch::autograd::grad;
  compare("penalty", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    const at::Tensor x = inputs_of(s, r).requires_grad_();
    const at::Tensor y = forward(x);
    const at::Tensor slope = grad({y.sum()}, {x}, {}, true, true)[0];
    (loss_of(y) + slope.pow(2).mean()).backward();
  });
  compare("double backward",
          [](Net& net, const auto& forward, std::size_t r, std::size_t s, auto*) {
            const at::Tensor loss = loss_of(forward(inputs_of(s, r)));
            const auto slopes = grad({loss}, {net.in->weight, net.out->weight}, {}, true, true);
            (loss + slopes[0].pow(2).sum() + slopes[1].pow(2).sum()).backward();
          });
  compare("create_graph", [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    struct Quiet : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    loss_of(forward(inputs_of(s, r))).backward({}, true, true);
  });
}

BOOST_AUTO_TEST_CASE(unused_parameters_count_as_zero_and_stay_if_no_rank_uses_them) {
  using Zeroing = loops::DistributedDataParallel<Net, UnusedParameters<Zero>>;
  const auto uses = [](std::size_t r, std::size_t s) { return s == 1 || (s == 3 && r == 0); };
  compare<Zeroing>("unused", [&](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
    loss_of(forward(inputs_of(s, r), uses(r, s))).backward();
  });
  compare<Zeroing>("early",
                   [&](Net& net, const auto& forward, std::size_t r, std::size_t s, auto* ddp) {
                     const at::Tensor loss = loss_of(forward(inputs_of(s, r), uses(r, s)));
                     if (ddp != nullptr) {
                       ddp->backward(loss);
                       const bool used = net.extra->weight.grad().defined();
                       require(s != 0 || !used, "a gradient that no rank has");
                     } else {
                       loss.backward();
                     }
                   });
  compare<Zeroing>("in no_sync only",
                   [&](Net&, const auto& forward, std::size_t r, std::size_t s, auto* ddp) {
                     {
                       auto local = held(ddp);
                       loss_of(forward(inputs_of(s + 20, r), r == 0)).backward();
                     }
                     loss_of(forward(inputs_of(s, r), false)).backward();
                   });
}

BOOST_AUTO_TEST_CASE(gradients_that_autograd_leaves_undefined_are_zero) {
  all_well(2, [](Shared& comm) {
    auto net = make_net();
    loops::DistributedDataParallel ddp(net, comm);
    const std::size_t rank = comm.rank().value();
    train_one_step(ddp, rank, 0);
    require(net->extra->weight.grad().abs().max().item<float>() > 0, "there was no gradient");
    ddp->zero_grad();
    // One rank has a gradient, the other one has none.
    const at::Tensor y = ddp(inputs_of(1, rank), rank == 0);
    loss_of(rank == 0 ? y : blind_to_extra(*net, y)).backward();
    const at::Tensor average = net->extra->weight.grad().clone();
    ddp->zero_grad();
    {
      const auto local = ddp.no_sync();
      loss_of(ddp(inputs_of(1, 0))).backward();
    }
    const at::Tensor apart = net->extra->weight.grad() - 2 * average;
    require(apart.abs().max().item<float>() < 1e-6F, "it is not half of rank 0's");
  });
}

BOOST_AUTO_TEST_CASE(unused_parameters_are_named) {
  for (const std::size_t world : {1u, 3u}) {
    all_say(train(world,
                  [&](Net&, auto& ddp, std::size_t r, std::size_t s) {
                    loss_of(ddp(inputs_of(s, r), r + 1 != world || s == 0)).backward();
                  }),
            "no gradient came for extra.weight, extra.bias");
  }
}

BOOST_AUTO_TEST_CASE(optimizers_are_made_before_or_after_and_keep_their_states) {
  all_well(2, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    auto before = make_net(), after = make_net();
    torch::optim::AdamW first(before->parameters(), 0.01);
    loops::DistributedDataParallel ddp_before(before, comm), ddp_after(after, comm);
    torch::optim::AdamW second(after->parameters(), 0.01);
    const at::Tensor start = before->in->weight.detach().clone();
    for (std::size_t s = 0; s != 4; ++s) {
      train_one_step(ddp_before, rank, s);
      train_one_step(ddp_after, rank, s);
      first.step();
      second.step();
      first.zero_grad();
      second.zero_grad();
    }
    require(first.state().size() == 6 && second.state().size() == 6, "states are missing");
    require(!at::equal(start, before->in->weight), "nothing was trained");
    require_close(*before, *after, "optimizers", 0);
    require(torch::nn::utils::parameters_to_vector(after->parameters()).numel() ==
                5 * 7 + 7 + 7 * 7 + 7 + 2 * (7 * 3 + 3),
            "parameters_to_vector");
  });
}

BOOST_AUTO_TEST_CASE(an_evaluation_and_the_time_after_the_wrapper_are_a_ranks_own) {
  all_well(3, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    auto net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const void* place = nullptr;
    {
      loops::DistributedDataParallel ddp(net, comm);
      train_one_step(ddp, rank, 0);
      optimizer.step();
      if (rank == 1) {
        const at::NoGradGuard quiet;
        ddp->eval();
        for (std::size_t s = 0; s != 5; ++s) ddp(inputs_of(s, rank));
        ddp->train();
      }
      train_one_step(ddp, rank, 1);
      place = net->in->weight.grad().const_data_ptr();
    }
    require(net->in->weight.grad().const_data_ptr() != place,
            "the memory of the job is still used");
    const at::Tensor average = net->in->weight.grad().clone();
    optimizer.step();
    loss_of(net->forward(inputs_of(2, rank))).backward();
    const at::Tensor own = net->in->weight.grad() - average;
    const at::Tensor apart = own - comm_average(comm, own);
    require(apart.abs().max().item<float>() > 1e-6F, "gradients are averaged still");
  });
}

BOOST_AUTO_TEST_CASE(buffers_are_rank_0s_before_a_forward_pass_in_training) {
  all_well(3, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    torch::nn::Sequential net(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4));
    loops::DistributedDataParallel ddp(net, comm);
    const auto buffer = [&](const char* name) { return ddp->named_buffers()[name]; };
    for (std::size_t s = 0; s != 3; ++s) {
      at::Tensor before = buffer("1.running_mean").clone();
      comm.broadcast(std::span(before.data_ptr<float>(), 4), Rank{0});
      const at::Tensor x = inputs_of(s, rank);
      loss_of(ddp(x)).backward();
      const at::Tensor batch = ddp->at<torch::nn::LinearImpl>(0).forward(x).mean(0);
      require(at::allclose(buffer("1.running_mean"), 0.9 * before + 0.1 * batch, 1e-4, 1e-5),
              "other running means");
      require(
          buffer("1.num_batches_tracked").item<std::int64_t>() == static_cast<std::int64_t>(s) + 1,
          "another count");
      ddp->zero_grad();
    }
  });
}

namespace {

torch::nn::Sequential norm_net() {
  torch::manual_seed(5);
  return torch::nn::Sequential(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(4),
                               torch::nn::Linear(4, 2));
}

/// Steps of a wrapper around `net`, compared with one process that has the samples of all ranks.
void train_norms(auto& ddp, torch::nn::Sequential& net, Shared& comm, std::int64_t rows) {
  torch::nn::Sequential alone = norm_net();
  torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
  for (std::size_t s = 0; s != 4; ++s) {
    std::vector<at::Tensor> all;
    for (std::size_t r = 0; r != comm.world_size().value(); ++r)
      all.push_back(inputs_of(s, r, rows));
    loss_of(alone->forward(at::cat(all))).backward();
    loss_of(ddp(all[comm.rank().value()])).backward();
    plain.step();
    optimizer.step();
    plain.zero_grad();
    optimizer.zero_grad();
    require_close(*net, *alone, "synced norms, step " + std::to_string(s), 4e-6);
    for (const auto& item : alone->named_buffers())
      require(at::allclose(net->named_buffers()[item.key()], item.value(), 1e-4, 1e-5),
              "another " + item.key());
    for (const auto& inner : net->modules())
      require(inner->is_training(), "a module has another mode after the pass");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(synchronised_norms_train_like_one_process) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      // With one row, LibTorch's own norm rejects a rank's batch.
      for (const std::int64_t rows : {3, 1}) {
        if (world * static_cast<std::size_t>(rows) == 1) continue;
        {
          torch::nn::Sequential net = norm_net();
          loops::DistributedDataParallel<torch::nn::Sequential, Norms<Synced>> ddp(net, comm);
          train_norms(ddp, net, comm, rows);
        }
        {
          auto net = convert_sync_batchnorm(norm_net());
          loops::DistributedDataParallel ddp(net, comm);
          train_norms(ddp, net, comm, rows);
        }
        torch::nn::Sequential net = norm_net();
        loops::DistributedDataParallel<torch::nn::Sequential, Buffers<Local>> ddp(net, comm);
        convert_sync_batchnorm(net);
        train_norms(ddp, net, comm, rows);
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(only_norms_that_were_converted_are_synchronised) {
  all_well(2, [](Shared& comm) {
    torch::nn::BatchNorm1d own(5), shared(5);
    torch::nn::Sequential net(own, shared, torch::nn::Linear(5, 2));
    convert_sync_batchnorm(shared);
    for (int job = 0; job != 2; ++job) {  // a norm stays converted
      for (torch::nn::BatchNorm1d norm : {own, shared}) norm->reset_running_stats();
      loops::DistributedDataParallel<torch::nn::Sequential, Buffers<Local>> ddp(net, comm);
      loss_of(ddp(inputs_of(0, comm.rank().value()))).backward();
      require(at::allclose(own->running_mean, 0.1 * inputs_of(0, comm.rank().value()).mean(0)),
              "a norm that was not converted shares its statistics");
      const at::Tensor means = comm_average(comm, shared->running_var);
      require(at::allclose(means, shared->running_var, 1e-6, 1e-7),
              "a converted norm has statistics of its own");
      std::string words;
      try {
        net->forward(inputs_of(0, 0));
      } catch (const Error& error) {
        words = error.what();
      }
      require(words.find("trains outside of a step of its job") != std::string::npos, words);
    }
    net->forward(inputs_of(0, 0));
    require(at::equal(shared->running_mean, net->named_buffers()["1.running_mean"]),
            "the norm's tensor is not the module's after the job");
  });
}

BOOST_AUTO_TEST_CASE(converted_norms_of_a_job_that_may_not_share_are_rejected) {
  const auto ends = ranks::run(As::processes, 2, [](Shared& comm) {
    auto net = convert_sync_batchnorm(norm_net());
    loops::DistributedDataParallel<torch::nn::Sequential, UnevenInputs<Join>> ddp(net, comm);
    loss_of(ddp(inputs_of(0, 0))).backward();
  });
  all_say(ends, "convert_sync_batchnorm has met the batch norm \"1\"");
}

BOOST_AUTO_TEST_CASE(norms_that_train_past_the_wrapper_are_rejected_in_the_first_pass_too) {
  const auto past_a_policy = ranks::run(As::processes, 2, [](Shared& comm) {
    torch::nn::Sequential net = norm_net();
    loops::DistributedDataParallel<torch::nn::Sequential, Norms<Synced>> ddp(net, comm);
    loss_of(net->forward(inputs_of(0, comm.rank().value()))).backward();
  });
  const auto past_a_conversion = ranks::run(As::processes, 2, [](Shared& comm) {
    torch::nn::Sequential net = norm_net();
    loops::DistributedDataParallel ddp(net, comm);
    convert_sync_batchnorm(net);
    loss_of(net->forward(inputs_of(0, comm.rank().value()))).backward();
  });
  for (const auto& ends : {past_a_policy, past_a_conversion})
    all_say(ends, "trains outside of a step of its job");
}

namespace {

struct Part : torch::nn::Module {
  explicit Part(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  at::Tensor weight;
};
/// Two parts share a weight, one parameter is a double, and one gets sparse gradients.
struct Mixed : torch::nn::Module {
  std::shared_ptr<Part> first, second;
  at::Tensor scale;
  torch::nn::Embedding table{nullptr};

  Mixed() {
    const at::Tensor shared = at::randn({5, 5});
    first = register_module("first", std::make_shared<Part>(shared));
    second = register_module("second", std::make_shared<Part>(shared));
    second->weight = first->weight;
    scale = register_parameter("scale", at::full({5}, 1.5, at::kDouble));
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 5).sparse(true)));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rows) {
    const at::Tensor hidden = at::tanh(at::tanh(at::mm(x, first->weight)).mm(second->weight));
    return (hidden + table(rows)).to(at::kDouble) * scale;
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(tied_double_and_sparse_parameters_train_like_one_process) {
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [&](Shared& comm) {
      auto alone = make_net<Mixed>(), net = make_net<Mixed>();
      loops::DistributedDataParallel<Mixed, ParameterTypes<float, double>> ddp(net, comm);
      const auto rows = [](std::size_t s, std::size_t r) {
        return (at::arange(4) + static_cast<std::int64_t>(s + 2 * r)) % 6;
      };
      for (std::size_t s = 0; s != 4; ++s) {
        for (std::size_t r = 0; r != world; ++r)
          (loss_of(alone->forward(inputs_of(s, r), rows(s, r))) / static_cast<double>(world))
              .backward();
        const std::size_t rank = comm.rank().value();
        loss_of(ddp(inputs_of(s, rank), rows(s, rank))).backward();
        const at::NoGradGuard quiet;
        for (Mixed* each : {alone.get(), net.get()}) {
          for (at::Tensor p : {each->first->weight, each->scale, each->table->weight}) {
            const at::Tensor g = p.grad().is_sparse() ? p.grad().to_dense() : p.grad();
            p.sub_(0.1 * g);
            p.mutable_grad().reset();
          }
        }
        require_close(*net, *alone, "mixed");
      }
    });
  }
  all_say(ranks::run(As::processes, 2,
                     [](Shared& comm) {
                       auto net = make_net();
                       net->to(at::kDouble);
                       loops::DistributedDataParallel ddp(net, comm);
                     }),
          "first.weight has elements of Double, which the model does not list");
}

namespace {

/// A hook of a user's own: each rank bounds the elements of its gradients.
template <int Thousandths>
struct BoundedTo {
  static constexpr std::string_view name = "Bounded";
  static constexpr bool changes_only_type =
      true;  // it passes on every element, so it may be joined
  static constexpr float bound = 0.001F * Thousandths;
  template <class T>
  struct Bucket {
    void begin(std::span<T> values, auto& next) {
      for (T& each : values) each = std::clamp(each, -bound, bound);
      next.begin(values);
    }
    void finish(std::span<T> values, auto& next) { next.finish(values); }
  };
};
using Bounded = BoundedTo<20>;
using WideBounds = BoundedTo<1000000>;

void require_equal_on_ranks(Shared& comm, const at::Tensor& values, const std::string& what) {
  at::Tensor first = values.detach().clone();
  comm.broadcast(std::span(first.data_ptr<float>(), static_cast<std::size_t>(first.numel())),
                 Rank{0});
  require(at::equal(first, values), what + " differs between ranks");
}

}  // namespace

BOOST_AUTO_TEST_CASE(gradients_travel_through_hooks) {
  using Half = loops::DistributedDataParallel<Net, Hooks<CompressTo<BFloat16>>>;
  compare<Half>(
      "compressed",
      [](Net&, const auto& forward, std::size_t r, std::size_t s, auto*) {
        loss_of(forward(inputs_of(s, r))).backward();
      },
      false, 4e-3);
  using Clipped = loops::DistributedDataParallel<Net, Hooks<Bounded>>;
  compare<Clipped>("a hook of one's own", [](Net& net, const auto& forward, std::size_t r,
                                             std::size_t s, auto* ddp) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& each : net.parameters())
      before.push_back(each.grad().defined() ? each.grad().clone() : at::zeros_like(each));
    loss_of(forward(inputs_of(s, r))).backward();
    if (ddp != nullptr) return;
    // The same by hand, of the part that this rank's pass has added.
    const auto parameters = net.parameters();
    for (std::size_t i = 0; i != parameters.size(); ++i) {
      if (!parameters[i].grad().defined()) continue;
      at::Tensor& all = parameters[i].mutable_grad();
      all.copy_(before[i] + (all - before[i]).clamp(-Bounded::bound, Bounded::bound));
    }
  });
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [](Shared& comm) {
      auto net = make_net();
      loops::DistributedDataParallel<Net, Hooks<PowerSGD<>>> ddp(net, comm);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      double first = 0, last = 0;
      for (std::size_t s = 0; s != 40; ++s) {
        const at::Tensor loss = loss_of(ddp(inputs_of(0, comm.rank().value())));
        last = loss.item<double>();
        if (s == 0) first = last;
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      require(last < 0.3 * first, "PowerSGD does not train");
      require_equal_on_ranks(comm, net->in->weight, "a parameter");
    });
  }
}

BOOST_AUTO_TEST_CASE(ranks_with_fewer_batches_make_the_updates_of_the_others) {
  // Two epochs: an optimizer whose states had fallen behind in the first one would show it in the
  // second.
  using Ddp = loops::DistributedDataParallel<Net, UnevenInputs<Join>>;
  const auto trains = [](Shared& comm, const auto& make_optimizer, bool finishes,
                         double tolerance) {
    const std::size_t rank = comm.rank().value(), world = comm.world_size().value();
    const auto batches = [&](std::size_t r) { return 5 + 2 * r; };
    auto alone = make_net(), net = make_net();
    auto plain = make_optimizer(*alone), optimizer = make_optimizer(*net);
    Ddp ddp(net, comm);
    const auto update = [&] {
      optimizer.step();
      optimizer.zero_grad();
    };
    for (std::size_t epoch = 0; epoch != 2; ++epoch) {
      for (std::size_t s = 0; s != batches(world - 1); ++s) {
        step_alone(*alone, plain, world, 0, [&](Net& each, std::size_t r) {
          if (s < batches(r)) loss_of(each.forward(inputs_of(20 * epoch + s, r))).backward();
        });
      }
      {
        auto joined = ddp.join(update);
        for (std::size_t s = 0; s != batches(rank); ++s) {
          train_one_step(ddp, rank, 20 * epoch + s);
          update();
        }
        if (finishes) joined.finish();
      }
      require_close(*net, *alone, "joined, epoch " + std::to_string(epoch), tolerance);
      for (const at::Tensor& parameter : net->parameters()) {
        require_equal_on_ranks(comm, parameter, "a parameter");
        if (!parameter.requires_grad()) continue;
        // An optimizer's states are those of one that has made all updates.
        const auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
        if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
          require_equal_on_ranks(comm, sgd->momentum_buffer(), "a momentum");
        } else {
          const auto& adam = dynamic_cast<const torch::optim::AdamWParamState&>(state);
          require(adam.step() == static_cast<std::int64_t>((epoch + 1) * batches(world - 1)),
                  "an optimizer has made " + std::to_string(adam.step()) + " steps");
          require_equal_on_ranks(comm, adam.exp_avg(), "a first moment");
          require_equal_on_ranks(comm, adam.exp_avg_sq(), "a second moment");
        }
      }
    }
  };
  for (const std::size_t world : {1u, 2u, 4u}) {
    for (const bool finishes : {true, false}) {
      all_well(world, [&](Shared& comm) {
        trains(
            comm,
            [](Net& net) {
              return torch::optim::SGD(net.parameters(),
                                       torch::optim::SGDOptions(0.1).momentum(0.9));
            },
            finishes, 1e-6);
        trains(
            comm, [](Net& net) { return torch::optim::AdamW(net.parameters(), 0.01); }, finishes,
            1e-4);
      });
    }
  }
}

BOOST_AUTO_TEST_CASE(exhausted_ranks_take_part_in_hooks) {
  const auto trains = []<class Hook>(Shared& comm, std::type_identity<Hook>, double tolerance) {
    const std::size_t rank = comm.rank().value(), world = comm.world_size().value();
    auto alone = make_net(), net = make_net();
    torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    loops::DistributedDataParallel<Net, Hooks<Hook>, UnevenInputs<Join>> ddp(net, comm);
    for (std::size_t s = 0; s != 2 + world; ++s) {
      step_alone(*alone, plain, world, 0, [&](Net& each, std::size_t r) {
        if (s < 3 + r) loss_of(each.forward(inputs_of(s, r))).backward();
      });
    }
    const auto update = [&] {
      optimizer.step();
      optimizer.zero_grad();
    };
    auto joined = ddp.join(update);
    for (std::size_t s = 0; s != 3 + rank; ++s) {
      train_one_step(ddp, rank, s);
      update();
    }
    joined.finish();
    require_close(*net, *alone, "joined", tolerance);
    for (const at::Tensor& parameter : net->parameters())
      require_equal_on_ranks(comm, parameter, "a parameter");
  };
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      trains(comm, std::type_identity<CompressTo<BFloat16>>{}, 4e-3);
      trains(comm, std::type_identity<WideBounds>{}, 1e-6);
    });
  }
}

BOOST_AUTO_TEST_CASE(gradients_are_divided_by_the_ranks_that_have_batches_where_that_is_asked_for) {
  all_well(2, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    auto alone = make_net(), net = make_net();
    torch::optim::SGD plain(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    loops::DistributedDataParallel<Net, UnevenInputs<Join, DivideByLive>> ddp(net, comm);
    step_alone(*alone, plain, 2, 0, [&](Net& each, std::size_t r) {
      loss_of(each.forward(inputs_of(0, r))).backward();
    });
    step_alone(*alone, plain, 1, 0,
               [&](Net& each, std::size_t) { loss_of(each.forward(inputs_of(1, 1))).backward(); });
    const auto update = [&] {
      optimizer.step();
      optimizer.zero_grad();
    };
    auto joined = ddp.join(update);
    for (std::size_t s = 0; s != 1 + rank; ++s) {  // rank 1 has two batches
      train_one_step(ddp, rank, s);
      update();
    }
    joined.finish();
    require_close(*net, *alone, "divided by live ranks");
  });
}

BOOST_AUTO_TEST_CASE(frozen_parameters_keep_their_values) {
  using Freezing = loops::DistributedDataParallel<Net, Frozen<"out.*">>;
  all_well(2, [](Shared& comm) {
    auto net = make_net();
    torch::optim::AdamW optimizer(net->parameters(), 0.1);
    Freezing ddp(net, comm);
    const at::Tensor frozen = net->out->weight.detach().clone();
    const at::Tensor trained = net->extra->weight.detach().clone();
    for (std::size_t s = 0; s != 3; ++s) {
      train_one_step(ddp, comm.rank().value(), s);
      optimizer.step();
      optimizer.zero_grad();
    }
    require(at::equal(frozen, net->out->weight), "a frozen parameter was trained");
    require(!at::equal(trained, net->extra->weight), "nothing was trained");
    require(at::equal(comm_average(comm, net->extra->weight.detach()), net->extra->weight),
            "ranks have different parameters");
  });
}

BOOST_AUTO_TEST_CASE(norms_take_their_statistics_in_groups) {
  all_well(4, [](Shared& comm) {
    const std::size_t rank = comm.rank().value();
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::BatchNorm1d(5), torch::nn::Linear(5, 2));
    loops::DistributedDataParallel<torch::nn::Sequential, Norms<Synced, WithinGroup>,
                                   Groups<Grid<4, 2>>, Buffers<Local>>
        ddp(net, comm);
    loss_of(ddp(inputs_of(0, rank))).backward();
    const std::size_t first = rank / 2 * 2;
    const at::Tensor mean = at::cat({inputs_of(0, first), inputs_of(0, first + 1)}).mean(0);
    require(at::allclose(net->named_buffers()["0.running_mean"], 0.1 * mean, 1e-4, 1e-5),
            "other statistics than those of the group");
  });
}

BOOST_AUTO_TEST_CASE(one_rank_joins_by_a_session_or_a_process_group) {
  Session session = lockstep::detail::join_alone();
  const auto train_with = [](auto& ddp) {
    loss_of(ddp(inputs_of(0, 0))).backward();
    BOOST_TEST(ddp->in->weight.grad().defined());
  };
  loops::DistributedDataParallel<Net> ddp(make_net(), session);
  train_with(ddp);
  ProcessGroup group(session);
  loops::DistributedDataParallel<Net> grouped(make_net(), group);
  train_with(grouped);
}

// ---- What can go wrong

BOOST_AUTO_TEST_CASE(a_rank_that_throws_ends_the_others) {
  const auto thrown = [](std::size_t r, std::size_t s) {
    if (r == 1 && s == 2) throw std::runtime_error("no luck today");
  };
  all_say(train(3,
                [&](Net&, auto& ddp, std::size_t r, std::size_t s) {
                  const at::Tensor x = inputs_of(s, r);
                  loss_of(ddp(r == 1 && s == 2 ? x.t() : x)).backward();
                }),
          "shapes cannot be multiplied (5x4 and 5x7)");
  // In the middle of backward: with its words by the wrapper's own backward.
  const auto failing = [&](bool by_wrapper) {
    return train(3, [&](Net& net, auto& ddp, std::size_t r, std::size_t s) {
      const at::Tensor loss = loss_of(ddp(inputs_of(s, r)));
      net.in->weight.register_hook([=](const at::Tensor& g) {
        thrown(r, s);
        return g;
      });
      if (by_wrapper) {
        ddp.backward(loss);
      } else {
        loss.backward();
      }
    });
  };
  all_say(failing(true), "no luck today");
  const Ends ends = failing(false);
  BOOST_TEST(ends[1] == "no luck today");
  BOOST_TEST(
      ends[0].find("rank 1 failed: its backward pass ended with an exception") != std::string::npos,
      ends[0]);
}

BOOST_AUTO_TEST_CASE(a_gradient_that_is_not_finite_stops_all_ranks_and_is_named) {
  const auto spoiled = [](Net& net, auto& ddp, std::size_t r, std::size_t s, std::size_t who,
                          bool by_wrapper) {
    const at::Tensor loss = loss_of(ddp(inputs_of(s, r)));
    if (r == who && s == 2) {
      net.out->bias.register_hook([](const at::Tensor& gradient) {
        at::Tensor bad = gradient.clone();
        bad[1] = std::numeric_limits<float>::quiet_NaN();
        return bad;
      });
    }
    if (by_wrapper) {
      ddp.backward(loss);
    } else {
      loss.backward();
    }
  };
  for (const std::size_t world : {1u, 2u, 4u}) {
    for (const bool by_wrapper : {false, true}) {
      const Ends ends = train(world, [&](Net& net, auto& ddp, std::size_t r, std::size_t s) {
        spoiled(net, ddp, r, s, world - 1, by_wrapper);
      });
      all_say(ends,
              "backward: the gradient of out.bias is nan at element 1, as the average over ranks, "
              "in backward pass 3");
      all_say(ends, "Anomaly<Ignore>");
      for (std::size_t r = 0; r != world; ++r)
        BOOST_TEST(ends[r].find("lockstep: rank ") != std::string::npos, ends[r]);
    }
  }
  // A rank that has no more batches stops, too.
  using Joining = loops::DistributedDataParallel<Net, UnevenInputs<Join>>;
  all_say(ranks::run(As::processes, 2,
                     [&](Shared& comm) {
                       auto net = make_net();
                       Joining ddp(net, comm);
                       auto joined = ddp.join([&] { net->zero_grad(); });
                       for (std::size_t s = 0; s != (comm.rank() == Rank{0} ? 1 : 4); ++s) {
                         spoiled(*net, ddp, comm.rank().value(), s, 1, false);
                         net->zero_grad();
                       }
                       joined.finish();
                     }),
          "backward: the gradient of out.bias is nan at element 1");
  using Ignoring = loops::DistributedDataParallel<Net, Anomaly<Ignore>>;
  const Ends ends = train<Ignoring>(2, [&](Net& net, auto& ddp, std::size_t r, std::size_t s) {
    spoiled(net, ddp, r, s, 1, false);
    if (s == 2) require(net.out->bias.grad()[1].isnan().template item<bool>(), "it is finite");
  });
  for (const std::string& end : ends) BOOST_TEST(end == "");
}

BOOST_AUTO_TEST_CASE(a_rank_that_never_calls_backward_is_named) {
  const Ends ends = train(
      2,
      [](Net&, auto& ddp, std::size_t r, std::size_t s) {
        const at::Tensor loss = loss_of(ddp(inputs_of(s, r)));
        if (r == 1 && s == 1) std::this_thread::sleep_for(4s);
        if (r == 0 || s == 0) loss.backward();
      },
      1s);
  BOOST_TEST(ends[0].find("rank 1") != std::string::npos, ends[0]);
  BOOST_TEST(ends[0].find("rank 0, backward") != std::string::npos, ends[0]);
}

BOOST_AUTO_TEST_CASE(another_ranks_other_module_is_found) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    torch::nn::Sequential net(torch::nn::Linear(5, comm.rank() == Rank{0} ? 7 : 8));
    loops::DistributedDataParallel ddp(net, comm);
  });
  all_say(ends,
          "rank 0 has \"parameter 0.weight float 7 x 5\" and rank 1 has \"parameter 0.weight "
          "float 8 x 5\"");
}

BOOST_AUTO_TEST_CASE(tensors_that_are_replaced_after_wrapping_are_named) {
  const auto replaced_by = [](const auto& replace) {
    return train(2, [&](Net& net, auto& ddp, std::size_t r, std::size_t s) {
      if (s == 1 && r == 0) replace(net);
      train_one_step(ddp, r, s);
    });
  };
  all_say(replaced_by([](Net& net) { net.to(at::kDouble); }),
          "the memory of first.weight was replaced");
  all_say(replaced_by([](Net& net) {
            auto other = make_net(9);
            std::stringstream file;
            torch::save(other, file);
            torch::serialize::InputArchive archive;
            archive.load_from(file);
            net.load(archive);
          }),
          "the memory of first.weight was replaced");
  all_say(replaced_by([](Net& net) {
            torch::nn::utils::vector_to_parameters(
                torch::nn::utils::parameters_to_vector(net.out->parameters()),
                net.out->parameters());
          }),
          "the memory of out.weight was replaced");
  all_say(replaced_by([](Net& net) { net.register_parameter("late", at::zeros(2)); }),
          "the module's parameter late was registered, replaced or removed");
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module in a program's own loop on GPUs, and replicas of one in one process: they train
/// like a plain LibTorch program.

#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/tanh.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/torch_models.hpp"
#include "lockstep/torch.cuh"
#include "lockstep/torch_optim.hpp"

namespace torch_gpu {

using Numbers = std::vector<float>;

/// How a program's own loop is written.
struct Loop {
  std::size_t local_passes = 0;  ///< in no_sync, before the one that averages
  bool own_stream = false;       ///< not LibTorch's default one
  bool by_wrapper = false;       ///< ddp.backward(loss), not loss.backward()
  bool is_divided = false;       ///< by a ZeroRedundancyOptimizer
  bool is_resumed = false;       ///< in the middle, by another optimizer, from a state_dict
};

inline constexpr Loop divided{.is_divided = true};
inline constexpr Loop divided_on_own_stream{.own_stream = true, .is_divided = true};
inline constexpr Loop resumed{.is_resumed = true};
inline constexpr Loop divided_and_resumed{.is_divided = true, .is_resumed = true};

inline ::torch::optim::AdamWOptions loop_options() { return ::torch::optim::AdamWOptions(0.01); }

/// The program runs on a stream of its own for a while, where it wants to.
struct ProgramStream {
  explicit ProgramStream(bool own) {
    if (own) on.reset_stream(c10::cuda::getStreamFromPool());
  }
  c10::cuda::OptionalCUDAStreamGuard on;
};

/// AdamW, or the same with its states divided among the ranks.
template <class Ddp>
std::unique_ptr<::torch::optim::Optimizer> make_optimizer(Ddp& ddp, bool is_divided) {
  using ::torch::optim::AdamW;
  using Divided = lockstep::torch::ZeroRedundancyOptimizer<AdamW>;
  if (is_divided) return std::make_unique<Divided>(ddp.module().parameters(), ddp, loop_options());
  return std::make_unique<AdamW>(ddp.module().parameters(), loop_options());
}
/// The whole state_dict on every rank, from host memory, as from a file.
template <class Ddp>
c10::IValue shared_state_dict(Ddp& ddp, ::torch::optim::Optimizer& optimizer) {
  if (auto* const sharded = dynamic_cast<lockstep::detail::ShardedOptimizer*>(&optimizer))
    sharded->consolidate_state_dict(Rank{0});
  std::string bytes;
  if (ddp.communicator().rank() == Rank{0}) {
    const std::vector<char> saved = ::torch::jit::pickle_save(optimizer_state_dict(optimizer));
    bytes.assign(saved.begin(), saved.end());
  }
  broadcast_object(ddp.communicator(), bytes, Rank{0});
  return ::torch::jit::pickle_load({bytes.begin(), bytes.end()});
}

/// The losses of all steps, then all tensors of the module.
template <class Ddp>
Numbers own_loop(Session& session, const Wishes& wishes, std::size_t steps, const Loop& how = {}) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  const ProgramStream stream(how.own_stream);
  const auto net = std::make_shared<Net>(wishes);
  Numbers seen;
  {
    Ddp ddp(net, session);
    auto optimizer = make_optimizer(ddp, how.is_divided);
    const at::Device device = net->parameters()[0].device();
    const std::size_t parts = how.local_passes + 1;
    for (std::size_t s = 0; s != steps; ++s) {
      const TensorBatch share =
          share_of(batch_of(s), session.rank().value(), session.world().value());
      const auto pass = [&](std::size_t part) {
        const TensorBatch rows = share_of(share, part, parts);
        const at::Tensor loss =
            at::cross_entropy_loss(ddp(rows.inputs.to(device)), rows.labels.to(device));
        const at::Tensor mean = loss / static_cast<double>(parts);
        if (how.by_wrapper) {
          ddp.backward(mean);
        } else {
          mean.backward();
        }
        return loss;
      };
      if (how.local_passes != 0) {
        const auto local = ddp.no_sync();
        for (std::size_t part = 0; part != how.local_passes; ++part) pass(part);
      }
      const at::Tensor loss = pass(how.local_passes);
      optimizer->step();
      optimizer->zero_grad(s % 2 == 0);
      if (how.is_resumed && s == steps / 2) {
        const c10::IValue saved = shared_state_dict(ddp, *optimizer);
        optimizer = make_optimizer(ddp, how.is_divided);
        load_optimizer_state_dict(*optimizer, saved);
      }
      seen.push_back(loss.item<float>());
    }
  }
  // The wrapper has ended, and the module has memory of its own.
  const Numbers end = numbers_of(*net);
  seen.insert(seen.end(), end.begin(), end.end());
  return seen;
}

/// A part of it runs only when it is asked for.
struct Branches : ::torch::nn::Cloneable<Branches> {
  ::torch::nn::Linear first{nullptr}, extra{nullptr}, last{nullptr};

  Branches() { reset(); }
  void reset() override {
    first = register_module("first", ::torch::nn::Linear(columns, hidden));
    extra = register_module("extra", ::torch::nn::Linear(hidden, hidden));
    last = register_module("last", ::torch::nn::Linear(hidden, classes));
    set_values(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool with_extra = true) {
    const at::Tensor inner = at::tanh(first->forward(x));
    return last->forward(with_extra ? inner + at::tanh(extra->forward(inner)) : inner);
  }
};

/// Which rank uses the extra part in a step.
inline bool uses_extra(std::size_t rank, std::size_t step) {
  return step % 3 == 1 || (step % 3 == 2 && rank == 0);
}

template <class Ddp>
Numbers loop_with_branches(Session& session, std::size_t steps, bool by_wrapper) {
  const auto net = std::make_shared<Branches>();
  Ddp ddp(net, session);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  const std::size_t rank = session.rank().value();
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch share = share_of(batch_of(s), rank, session.world().value());
    const at::Tensor loss = at::cross_entropy_loss(
        ddp(share.inputs.to(at::kCUDA), uses_extra(rank, s)), share.labels.to(at::kCUDA));
    if (by_wrapper) {
      ddp.backward(loss);
    } else {
      loss.backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return numbers_of(*net);
}
/// The same by LibTorch alone.
inline Numbers plain_loop_with_branches(std::size_t ranks, std::size_t steps) {
  Branches net;
  net.to(at::kCUDA);
  ::torch::optim::AdamW optimizer(net.parameters(), loop_options());
  for (std::size_t s = 0; s != steps; ++s) {
    for (std::size_t r = 0; r != ranks; ++r) {
      const TensorBatch share = share_of(batch_of(s), r, ranks);
      const at::Tensor loss = at::cross_entropy_loss(
          net.forward(share.inputs.to(at::kCUDA), uses_extra(r, s)), share.labels.to(at::kCUDA));
      (loss / static_cast<double>(ranks)).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return numbers_of(net);
}

/// Rank r has 4 + r batches, and answers the others when it is exhausted.
template <class Ddp>
Numbers loop_with_join(Session& session) {
  const auto net = std::make_shared<Net>();
  Ddp ddp(net, session);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  const auto update = [&] {
    optimizer.step();
    optimizer.zero_grad();
  };
  const std::size_t rank = session.rank().value();
  auto joined = ddp.join(update);
  for (std::size_t s = 0; s != 4 + rank; ++s) {
    const TensorBatch share = share_of(batch_of(s), rank, session.world().value());
    at::cross_entropy_loss(ddp(share.inputs.to(at::kCUDA)), share.labels.to(at::kCUDA)).backward();
    update();
  }
  joined.finish();
  return numbers_of(*net);
}
/// The same by LibTorch alone.
inline Numbers plain_loop_with_join(std::size_t ranks) {
  Net net;
  net.to(at::kCUDA);
  ::torch::optim::AdamW optimizer(net.parameters(), loop_options());
  for (std::size_t s = 0; s != 3 + ranks; ++s) {
    for (std::size_t r = 0; r != ranks; ++r) {
      if (s >= 4 + r) continue;
      const TensorBatch share = share_of(batch_of(s), r, ranks);
      const at::Tensor loss = at::cross_entropy_loss(net.forward(share.inputs.to(at::kCUDA)),
                                                     share.labels.to(at::kCUDA));
      (loss / static_cast<double>(ranks)).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return numbers_of(net);
}

/// What a rank says when a hook of its own throws in the middle of a pass.
template <class Ddp>
std::string words_of_failure(Session& session) {
  const auto net = std::make_shared<Net>();
  Ddp ddp(net, session);
  try {
    for (std::size_t s = 0; s != 3; ++s) {
      const TensorBatch share =
          share_of(batch_of(s), session.rank().value(), session.world().value());
      const at::Tensor loss =
          at::cross_entropy_loss(ddp(share.inputs.to(at::kCUDA)), share.labels.to(at::kCUDA));
      const bool fails = s == 1 && session.rank().value() + 1 == session.world().value();
      if (fails) {
        net->first->bias.register_hook([](const at::Tensor& gradient) -> at::Tensor {
          throw std::runtime_error("no luck today");
          return gradient;
        });
      }
      ddp.backward(loss);
      net->zero_grad();
    }
    ddp.communicator().barrier();  // on a GPU the host may be far ahead
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// What a rank says when the last rank's gradient of last.bias is NaN in pass 3: a later pass finds
/// it, and nobody waits for that.
template <class Ddp>
std::string words_of_anomaly(Session& session) {
  const auto net = std::make_shared<Net>();
  Ddp ddp(net, session);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  try {
    for (std::size_t s = 0; s != 10; ++s) {
      const TensorBatch share =
          share_of(batch_of(s), session.rank().value(), session.world().value());
      const at::Tensor loss =
          at::cross_entropy_loss(ddp(share.inputs.to(at::kCUDA)), share.labels.to(at::kCUDA));
      if (s == 2 && session.rank().value() + 1 == session.world().value()) {
        net->last->bias.register_hook([](const at::Tensor& gradient) {
          at::Tensor bad = gradient.clone();
          bad[1] = std::numeric_limits<float>::quiet_NaN();
          return bad;
        });
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      static_cast<void>(loss.item<float>());  // the host knows of this pass from here on
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// How a rank ends that asks before each update whether the averages are finite, when a batch of
/// the last rank has a NaN in pass 3.
struct AnomalyEnd {
  std::string words;
  std::size_t updates = 0;
  Numbers numbers;  // of the module
};
template <class Ddp>
AnomalyEnd end_before_update(Session& session) {
  const auto net = std::make_shared<Net>();
  AnomalyEnd end;
  {
    Ddp ddp(net, session);
    ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
    try {
      for (; end.updates != 10; ++end.updates) {
        TensorBatch share =
            share_of(batch_of(end.updates), session.rank().value(), session.world().value());
        if (end.updates == 2 && session.rank().value() + 1 == session.world().value())
          share.inputs[0][0] = std::numeric_limits<float>::quiet_NaN();
        at::cross_entropy_loss(ddp(share.inputs.to(at::kCUDA)), share.labels.to(at::kCUDA))
            .backward();
        ddp.require_finite();
        optimizer.step();
        optimizer.zero_grad();
      }
    } catch (const std::exception& error) {
      end.words = error.what();
    }
  }
  end.numbers = numbers_of(*net);
  return end;
}

/// Zero gradients for the extra part where no rank uses it: `Hooks<SkipZeroGradients>` leaves it
/// out of the update, as LibTorch alone does in `plain_loop_with_branches`.
template <class Ddp>
Numbers loop_with_zero_gradients(Session& session, std::size_t steps) {
  const auto net = std::make_shared<Branches>();
  Ddp ddp(net, session);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  const std::size_t rank = session.rank().value();
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch share = share_of(batch_of(s), rank, session.world().value());
    const at::Tensor outputs = ddp(share.inputs.to(at::kCUDA), uses_extra(rank, s));
    at::Tensor loss = at::cross_entropy_loss(outputs, share.labels.to(at::kCUDA));
    if (!uses_extra(rank, s)) loss = loss + 0 * (net->extra->weight.sum() + net->extra->bias.sum());
    loss.backward();
    const bool is_used = s % 3 != 0;
    if (net->extra->weight.grad().defined() != is_used || !net->first->weight.grad().defined())
      throw std::runtime_error("other gradients are left out in step " + std::to_string(s));
    optimizer.step();
    optimizer.zero_grad(s % 2 == 0);
  }
  return numbers_of(*net);
}

/// The last rank's batch has a NaN in steps 2 and 5. `make_step(ddp, optimizer)(loss)` runs a
/// backward pass and an update, which `Anomaly<Skip>` or a `GradScaler` leaves out.
template <class Ddp>
Numbers loop_with_anomalies(Session& session, std::size_t steps, const auto& make_step) {
  const auto net = std::make_shared<Net>();
  Ddp ddp(net, session);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  auto step = make_step(ddp, optimizer);
  for (std::size_t s = 0; s != steps; ++s) {
    TensorBatch share = share_of(batch_of(s), session.rank().value(), session.world().value());
    if ((s == 2 || s == 5) && session.rank().value() + 1 == session.world().value())
      share.inputs[0][0] = std::numeric_limits<float>::quiet_NaN();
    step(at::cross_entropy_loss(ddp(share.inputs.to(at::kCUDA)), share.labels.to(at::kCUDA)));
    optimizer.zero_grad(s % 2 == 0);
  }
  return numbers_of(*net);
}
/// The same by LibTorch alone, without these steps.
inline Numbers plain_loop_with_anomalies(std::size_t steps) {
  Net net;
  net.to(at::kCUDA);
  ::torch::optim::AdamW optimizer(net.parameters(), loop_options());
  for (std::size_t s = 0; s != steps; ++s) {
    if (s == 2 || s == 5) continue;
    const TensorBatch batch = batch_of(s);
    at::cross_entropy_loss(net.forward(batch.inputs.to(at::kCUDA)), batch.labels.to(at::kCUDA))
        .backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return numbers_of(net);
}

inline std::shared_ptr<Net> norm_net() {
  Wishes wishes;
  wishes.norm = true;
  return std::make_shared<Net>(wishes);
}
/// Rank r makes 3 + r passes of its own.
inline void pass_alone(std::size_t rank, std::size_t ranks, const auto& forward) {
  const at::NoGradGuard quiet;
  for (std::size_t s = 0; s != 3 + rank; ++s)
    forward(share_of(batch_of(s), rank, ranks).inputs.to(at::kCUDA));
}
/// The buffers that a rank has after its passes and `synchronize_buffers()`.
template <class Ddp>
Numbers synchronized_buffers(Session& session) {
  const auto net = norm_net();
  Ddp ddp(net, session);
  pass_alone(session.rank().value(), session.world().value(), [&](const at::Tensor& x) { ddp(x); });
  ddp.synchronize_buffers();
  return numbers_of(*net);
}
/// The same by LibTorch alone: averages over ranks, and of counts the largest, or rank 0's.
inline Numbers plain_buffers(std::size_t ranks, bool averages) {
  const auto first = norm_net();
  first->to(at::kCUDA);
  pass_alone(0, ranks, [&](const at::Tensor& x) { first->forward(x); });
  for (std::size_t r = 1; averages && r != ranks; ++r) {
    const auto net = norm_net();
    net->to(at::kCUDA);
    pass_alone(r, ranks, [&](const at::Tensor& x) { net->forward(x); });
    const auto part = static_cast<double>(r);
    for (const auto& each : net->named_buffers()) {
      at::Tensor all = first->named_buffers()[each.key()];
      if (each.value().is_floating_point()) {
        all.copy_((all * part + each.value()) / (part + 1));
      } else {
        all.copy_(each.value());  // the last rank's is the largest
      }
    }
  }
  return numbers_of(*first);
}

/// A module under `DataParallel` with so many replicas, in a program's own loop.
inline Numbers data_parallel_loop(std::size_t replicas, std::size_t steps, bool on_own_stream) {
  const ProgramStream stream(on_own_stream);
  const auto net = std::make_shared<Branches>();
  net->to(at::kCUDA);
  lockstep::torch::DataParallel<Branches> dp(net, replicas);
  ::torch::optim::AdamW optimizer(net->parameters(), loop_options());
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch batch = batch_of(s);
    at::cross_entropy_loss(dp(batch.inputs.to(at::kCUDA)), batch.labels.to(at::kCUDA)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return numbers_of(*net);
}

struct BranchModel : TorchModel<BranchModel, Branches> {
  at::Tensor loss(const TensorBatch& batch) {
    return at::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
  }
};

/// The same as a job of `ParallelStrategy<DP>`.
template <class Job>
Numbers data_parallel_job(std::size_t replicas, std::size_t steps) {
  Session session = lockstep::detail::join_alone();
  TrainerOptions options;
  options.replicas = replicas;
  Job job(session, {}, options);
  job.optimizer().lr = 0.01;
  for (std::size_t s = 0; s != steps; ++s) job.step(batch_of(s));
  job.barrier();
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return numbers_of(job.model().module());
}

}  // namespace torch_gpu

// SPDX-License-Identifier: Apache-2.0
// LibTorch modules on GPUs: torch_gpu --ranks N nccl|shm [CHECK]. What ranks make of a module is
// compared with a plain LibTorch program on the GPU, and captured steps with steps call by call.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/optim/adamw.h>

#include "lockstep/torch.cuh"
#include "require.hpp"
#if LOCKSTEP_HAS_NCCL
#include "lockstep/nccl.cuh"
#endif
#include "gpu/check_names.hpp"
#include "gpu/torch_cross_entropy.cuh"
#include "gpu/torch_loops.cuh"
#include "gpu/torch_models.hpp"

namespace {

using namespace torch_gpu;
using Rows = LabelledBatch<float, std::int32_t>;

constexpr double rate = 0.01;

bool ranks_are_threads = false;

/// Threads draw from one generator, in an order that nobody sets, and are not captured then.
bool share_generator(const Session& session) {
  return ranks_are_threads && session.world() != WorldSize{1};
}

/// The losses of all steps, then all tensors of the module.
template <class Job>
Numbers train(Session& session, const Wishes& wishes, std::size_t steps, bool rows = false) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  ::torch::manual_seed(5);
  Job job(session, [&](Session&) { return typename Job::model_type(wishes); });
  job.optimizer().lr = rate;
  Numbers seen;
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch share =
        share_of(batch_of(s), session.rank().value(), session.world().value());
    if (rows) {
      const auto* x = share.inputs.contiguous().const_data_ptr<float>();
      const at::Tensor y = share.labels.to(at::kInt).contiguous();
      Rows batch;
      batch.width = columns;
      batch.inputs.assign(x, x + share.inputs.numel());
      batch.labels.assign(y.const_data_ptr<int>(), y.const_data_ptr<int>() + y.numel());
      batch.weights.assign(batch.labels.size(), 1.f);
      seen.push_back(static_cast<float>(static_cast<double>(job.step(batch))));
    } else {
      seen.push_back(static_cast<float>(static_cast<double>(job.step(share))));
    }
  }
  if constexpr (requires { job.template captured_graphs<TensorBatch>(); }) {
    const std::size_t graphs =
        rows ? job.template captured_graphs<Rows>() : job.template captured_graphs<TensorBatch>();
    require(graphs != 0 || (wishes.dropout != 0 && share_generator(session)),
            "nothing was captured");
  }
  job.barrier();
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const Numbers end = numbers_of(job.model().module());
  seen.insert(seen.end(), end.begin(), end.end());
  return seen;
}

/// The same by LibTorch alone, with the batches of all ranks.
Numbers train_plainly(const Wishes& wishes, std::size_t steps) {
  Net net(wishes);
  net.to(at::kCUDA);
  ::torch::optim::AdamW optimizer(net.parameters(), ::torch::optim::AdamWOptions(rate));
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch batch = batch_of(s);
    optimizer.zero_grad();
    loss_of(net, batch.inputs.to(at::kCUDA), batch.labels.to(at::kCUDA)).backward();
    optimizer.step();
  }
  return numbers_of(net);
}

/// The losses of a rank's rows in the same training, whose norms see the rows of all ranks.
Numbers plain_losses(const Wishes& wishes, std::size_t steps, std::size_t rank, std::size_t ranks) {
  Net net(wishes);
  net.to(at::kCUDA);
  ::torch::optim::AdamW optimizer(net.parameters(), ::torch::optim::AdamWOptions(rate));
  Numbers losses;
  for (std::size_t s = 0; s != steps; ++s) {
    const TensorBatch batch = batch_of(s);
    optimizer.zero_grad();
    const at::Tensor outputs = net.forward(batch.inputs.to(at::kCUDA));
    const TensorBatch share = share_of({outputs, batch.labels.to(at::kCUDA)}, rank, ranks);
    losses.push_back(at::cross_entropy_loss(share.inputs, share.labels).item<float>());
    at::cross_entropy_loss(outputs, batch.labels.to(at::kCUDA)).backward();
    optimizer.step();
  }
  return losses;
}

void require_bits(const Numbers& got, const Numbers& want) {
  require(got.size() == want.size() && !want.empty(), "other sizes");
  for (std::size_t i = 0; i != want.size(); ++i) {
    require(std::memcmp(&got[i], &want[i], sizeof(float)) == 0,
            "number " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
                std::to_string(want[i]));
  }
}
/// The module's numbers, which are the last of `got`.
void require_near(const Numbers& got, const Numbers& want, double tolerance) {
  require(got.size() >= want.size() && !want.empty(), "other sizes");
  double worst = 0;
  for (std::size_t i = 0; i != want.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(got[got.size() - want.size() + i]) -
                                     static_cast<double>(want[i])));
  require(worst <= tolerance, "differs by " + std::to_string(worst));
}

template <class Backend>
struct Checks {
  template <class Model, class... Policies>
  using JobOf = Trainer<Model, Device<Cuda>, Optimizer<AdamW>, Backend, Policies...>;
  template <class... Policies>
  using Job = JobOf<Model, Policies...>;
  using Eager = Job<>;
  using Captured = Job<CapturedStep>;
  using Drawn = JobOf<DrawingModel>;
  using DrawnCaptured = JobOf<DrawingModel, CapturedStep>;
  using Synchronised = Job<Norms<Synced>>;
  using SynchronisedCaptured = Job<Norms<Synced>, CapturedStep>;
  using Scaled = Job<Precision<ScaledLoss>>;
  template <class Module, class... Policies>
  using Wrapped =
      lockstep::torch::DistributedDataParallel<Module, Device<Cuda>, Backend, Policies...>;
  template <class... Policies>
  using Replicas =
      Trainer<BranchModel, ParallelStrategy<DP>, Device<Cuda>, Optimizer<AdamW>, Policies...>;
  using ScaledCaptured = Job<Precision<ScaledLoss>, CapturedStep>;

  Session& session;
  gpu_test::CheckNames names;
  int failed = 0;

  template <class F>
  void run(const char* check, const F& f) {
    if (!names.wants(check)) return;
    std::string end = "ok";
    try {
      f();
    } catch (const std::exception& error) {
      end = std::string("FAILED: ") + error.what();
      ++failed;
      if (!names.has_all()) throw std::runtime_error(std::string(check) + ": " + end);
    }
    if (session.rank() == Rank{0} || end != "ok") {
      std::printf("%s %s, rank %zu of %zu\n", end.c_str(), check, session.rank().value(),
                  session.world().value());
      std::fflush(stdout);
    }
  }

  void all() {
    run("parity",
        [&] { require_near(train<Eager>(session, {}, 10), train_plainly({}, 10), 1e-4); });
    run("made_on_gpu", [&] {
      require_bits(train<Eager>(session, {.made_on_gpu = true}, 6), train<Eager>(session, {}, 6));
    });
    run("captured",
        [&] { require_bits(train<Captured>(session, {}, 20), train<Eager>(session, {}, 20)); });
    run("rows", [&] {
      require_bits(train<Captured>(session, {}, 20, true), train<Eager>(session, {}, 20));
    });
    run("norm", [&] {
      require_bits(train<Captured>(session, {.norm = true}, 20),
                   train<Eager>(session, {.norm = true}, 20));
    });
    // A bias before a norm has no gradient but rounding, of which AdamW makes steps: losses do not
    // see it.
    run("synced_norm", [&] {
      const std::size_t steps = 12;
      const Numbers eager = train<Synchronised>(session, {.norm = true}, steps);
      Numbers losses = eager;
      losses.resize(steps);
      require_near(
          losses,
          plain_losses({.norm = true}, steps, session.rank().value(), session.world().value()),
          1e-3);
      require_bits(train<SynchronisedCaptured>(session, {.norm = true}, steps), eager);
    });
    run("autocast", [&] {
      Wishes wishes;
      wishes.cast = at::kBFloat16;
      const Numbers captured = train<Captured>(session, wishes, 20);
      require_bits(captured, train<Eager>(session, wishes, 20));
      require_near(captured, train_plainly(wishes, 20), 0.1);
    });
    run("dropout", [&] {
      Wishes wishes;
      wishes.dropout = 0.5;
      const Numbers captured = train<Captured>(session, wishes, 20);
      if (!share_generator(session)) require_bits(captured, train<Eager>(session, wishes, 20));
      require(captured[4] != captured[16], "a replay drew the same numbers");
    });
    run("draws", [&] {
      Wishes wishes;
      wishes.dropout = 0.5;
      const Numbers captured = train<DrawnCaptured>(session, wishes, 20);
      require(captured[4] != captured[16], "a replay drew the same numbers");
      if (share_generator(session)) return;
      require_bits(captured, train<Drawn>(session, wishes, 20));
      resume<DrawnCaptured>(wishes);
    });
    run("scaled", [&] {
      Wishes wishes;
      wishes.cast = at::kHalf;
      const Numbers captured = train<ScaledCaptured>(session, wishes, 20);
      require_bits(captured, train<Scaled>(session, wishes, 20));
      // A scale that was too large costs steps at first.
      require_near(captured, train_plainly({}, 20), 0.2);
      require(captured[18] < captured[0], "the loss does not fall");
    });
    run("cross_entropy", [&] {
      require_same_cross_entropy();
      const Wishes wishes{.fused_loss = true};
      const Numbers captured = train<Captured>(session, wishes, 20);
      require_bits(captured, train<Eager>(session, wishes, 20));
      require_near(captured, train_plainly({}, 20), 1e-4);
    });
    run("resume", [&] { resume<Captured>({}); });
    own_loops();
    replicas();
    run("replaced", [&] {
      Captured job(session);
      const TensorBatch share =
          share_of(batch_of(0), session.rank().value(), session.world().value());
      for (int i = 0; i != 4; ++i) static_cast<void>(static_cast<double>(job.step(share)));
      job.barrier();
      job.model().module().last->weight.set_data(
          job.model().module().last->weight.detach().clone());
      std::string words;
      try {
        job.step(share);
      } catch (const std::exception& error) {
        words = error.what();
      }
      require(words.find("last.weight") != std::string::npos, "it said: " + words);
    });
    names.require_known();
    if (failed != 0) throw std::runtime_error(std::to_string(failed) + " checks failed");
  }

  /// `DistributedDataParallel` in a program's own loop.
  void own_loops() {
    using Plain = Wrapped<Net>;
    run("own_loop", [&] {
      const Numbers plain = train_plainly({}, 10);
      require_near(own_loop<Plain>(session, {}, 10), plain, 1e-4);
      require_near(own_loop<Plain>(session, {.made_on_gpu = true}, 10, {.by_wrapper = true}), plain,
                   1e-4);
    });
    run("own_loop_stream", [&] {
      require_near(own_loop<Plain>(session, {}, 10, {.own_stream = true}), train_plainly({}, 10),
                   1e-4);
    });
    run("own_loop_zero", [&] {
      const Numbers plain = own_loop<Plain>(session, {}, 10);
      require_bits(own_loop<Plain>(session, {}, 10, divided), plain);
      require_bits(own_loop<Plain>(session, {}, 10, divided_on_own_stream), plain);
    });
    run("own_loop_state_dict", [&] {
      const Numbers plain = own_loop<Plain>(session, {}, 10);
      require_bits(own_loop<Plain>(session, {}, 10, resumed), plain);
      require_bits(own_loop<Plain>(session, {}, 10, divided_and_resumed), plain);
    });
    run("own_loop_no_sync", [&] {
      require_near(own_loop<Plain>(session, {}, 10, {.local_passes = 1}), train_plainly({}, 10),
                   1e-4);
    });
    run("own_loop_norm", [&] {
      const std::size_t steps = 12;
      Numbers losses = own_loop<Wrapped<Net, Norms<Synced>>>(session, {.norm = true}, steps);
      losses.resize(steps);
      require_near(
          losses,
          plain_losses({.norm = true}, steps, session.rank().value(), session.world().value()),
          1e-3);
    });
    run("own_loop_unused", [&] {
      using Zeroing = Wrapped<Branches, UnusedParameters<Zero>>;
      const Numbers plain = plain_loop_with_branches(session.world().value(), 9);
      require_near(loop_with_branches<Zeroing>(session, 9, false), plain, 1e-4);
      require_near(loop_with_branches<Zeroing>(session, 9, true), plain, 1e-4);
    });
    run("own_loop_join", [&] {
      require_near(loop_with_join<Wrapped<Net, UnevenInputs<Join>>>(session),
                   plain_loop_with_join(session.world().value()), 1e-4);
    });
    run("own_loop_zero_gradients", [&] {
      using Skipping = Wrapped<Branches, Hooks<SkipZeroGradients>>;
      require_near(loop_with_zero_gradients<Skipping>(session, 9),
                   plain_loop_with_branches(session.world().value(), 9), 1e-4);
    });
    run("own_loop_skip", [&] {
      const auto make_step = [&](auto& ddp, auto& optimizer) {
        return [&, passes = std::uint64_t{0}](const at::Tensor& loss) mutable {
          loss.backward();
          ++passes;
          require(ddp.skipped_steps() == (passes > 5   ? 2u
                                          : passes > 2 ? 1u
                                                       : 0u),
                  "another number of passes is left out");
          optimizer.step();
        };
      };
      require_near(loop_with_anomalies<Wrapped<Net, Anomaly<Skip>>>(session, 10, make_step),
                   plain_loop_with_anomalies(10), 1e-4);
    });
    run("own_loop_scaler", [&] {
      const auto make_step = [&](auto& ddp, auto& optimizer) {
        using Scaler = decltype(lockstep::torch::GradScaler(ddp));
        return [&, scaler = std::make_shared<Scaler>(ddp),
                passes = std::size_t{0}](const at::Tensor& loss) mutable {
          scaler->scale(loss).backward();
          if (passes % 2 == 0) scaler->unscale_(optimizer);
          const bool is_bad = passes == 2 || passes == 5;
          require(scaler->step(optimizer) == !is_bad, "another decision");
          scaler->update();
          ++passes;
          require(scaler->get_scale() == (passes > 5   ? 16384
                                          : passes > 2 ? 32768
                                                       : 65536),
                  "another scale");
        };
      };
      require_near(loop_with_anomalies<Wrapped<Net, Anomaly<Ignore>>>(session, 10, make_step),
                   plain_loop_with_anomalies(10), 1e-4);
    });
    run("own_loop_buffers", [&] {
      const std::size_t world = session.world().value();
      require_near(synchronized_buffers<Wrapped<Net, Buffers<Synced>>>(session),
                   plain_buffers(world, true), 1e-5);
      require_near(synchronized_buffers<Wrapped<Net, Buffers<Local>>>(session),
                   plain_buffers(world, false), 1e-5);
    });
    if (names.names("own_loop_failure")) {  // the job is over then
      run("own_loop_failure", [&] {
        const std::string words = words_of_failure<Plain>(session);
        require(words.find("no luck today") != std::string::npos, "it said: " + words);
      });
    }
    if (names.names("own_loop_anomaly")) {
      run("own_loop_anomaly", [&] {
        const std::string words = words_of_anomaly<Plain>(session);
        require(words.find("the gradient of last.bias is not finite") != std::string::npos,
                "it said: " + words);
      });
    }
    if (names.names("own_loop_require_finite")) {
      run("own_loop_require_finite", [&] {
        const AnomalyEnd end = end_before_update<Plain>(session);
        require(end.words.find("the gradient of first.weight is not finite") != std::string::npos,
                "it said: " + end.words);
        require(end.updates == 2, "it ended after " + std::to_string(end.updates) + " updates");
        for (const float number : end.numbers)
          require(std::isfinite(number), "a parameter is not finite");
      });
    }
  }

  /// Replicas in one process, each rank for itself.
  void replicas() {
    run("data_parallel", [&] {
      const Numbers alone = data_parallel_loop(1, 10, false);
      require_near(data_parallel_loop(2, 10, false), alone, 1e-4);
      require_near(data_parallel_loop(3, 10, true), alone, 1e-4);
    });
    run("data_parallel_job", [&] {
      if (session.world() != WorldSize{1}) return;
      const Numbers alone = data_parallel_loop(1, 10, false);
      require_near(data_parallel_job<Replicas<>>(2, 10), alone, 1e-4);
      require_near(data_parallel_job<Replicas<CapturedStep>>(2, 10), alone, 1e-4);
    });
  }

  /// Saved in the middle and gone on from in another job, it ends with the same bits.
  template <class Job>
  void resume(const Wishes& wishes) {
    const auto make = [&](Session&) { return typename Job::model_type(wishes); };
    const auto step = [&](Job& job, std::size_t s) {
      job.step(share_of(batch_of(s), session.rank().value(), session.world().value()));
    };
    Job whole(session, make);
    whole.optimizer().lr = rate;
    const std::string path =
        "/tmp/lockstep-torch-" + std::to_string(whole.broadcast(::getpid())) + ".safetensors";
    for (std::size_t s = 0; s != 6; ++s) step(whole, s);
    whole.save(path);
    for (std::size_t s = 6; s != 14; ++s) step(whole, s);
    whole.barrier();
    Job again(session, make);
    again.resume(path);
    again.optimizer().lr = rate;
    for (std::size_t s = 6; s != 14; ++s) step(again, s);
    again.barrier();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    require_bits(numbers_of(again.model().module()), numbers_of(whole.model().module()));
    again.barrier();
    if (session.rank() == Rank{0}) std::filesystem::remove(path);
  }
};

template <class Backend>
void run_checks(Session& session) {
  const auto& arguments = session.arguments();
  Checks<Backend>{session, gpu_test::CheckNames(arguments.size() > 2 ? arguments[2] : "all")}.all();
}

}  // namespace

int main(int argc, char** argv) {
  if (lockstep::detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  for (int i = 1; i < argc; ++i) {
#if LOCKSTEP_HAS_NCCL
    if (argv[i] == std::string("nccl")) return launch(argc, argv, run_checks<Backend<Nccl>>);
#endif
    if (argv[i] != std::string("shm")) continue;
    ranks_are_threads = true;
    return launch_threads(argc, argv, run_checks<Backend<Shm>>);
  }
  std::puts("usage: torch_gpu --ranks N nccl|shm [CHECK], of what it was built with");
  return 2;
}

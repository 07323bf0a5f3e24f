// SPDX-License-Identifier: Apache-2.0
// Norms on GPUs that the host plays: their kernels against plain loops, and jobs whose ranks share
// statistics against one process on the CPU that has all samples.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/norm_checks.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/norm/batch_norm.hpp"
#include "lockstep/detail/norm/layer_norm.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#if __has_include(<nccl.h>)
#include "gpu/emulated/nccl_ranks.hpp"
#endif

BOOST_AUTO_TEST_SUITE(gpu_played_norm)

namespace {

using namespace lockstep;
using namespace norm_checks;
using Batch = LabelledBatch<double, std::int32_t>;

constexpr std::size_t channels = 5, positions = 3, width = channels * positions;

// The parts of a network beside its norms, as one thread of a kernel, or the host, runs them.

struct MultiplyByGain {
  const double* x;
  const double* gain;
  double* y;
  std::size_t rows;
  void operator()() const {
    for (std::size_t i = 0; i != rows * width; ++i) y[i] = x[i] * gain[i % width];
  }
};
struct WeighSquares {
  const double* y;
  double* dy;
  std::size_t rows;
  double factor;
  double* loss;
  void operator()() const {
    *loss = 0;
    for (std::size_t i = 0; i != rows * width; ++i) {
      const double share = factor * static_cast<double>(1 + i % width % 4);
      *loss += share * y[i] * y[i] / 2;
      dy[i] = share * y[i];
    }
  }
};
struct GradientOfGain {
  const double* x;
  const double* dy;
  double* gradient;
  std::size_t rows;
  void operator()() const {
    for (std::size_t i = 0; i != width; ++i) gradient[i] = 0;
    for (std::size_t i = 0; i != rows * width; ++i) gradient[i % width] += dy[i] * x[i];
  }
};
template <class F>
LOCKSTEP_KERNEL call_once(F f) {
  f();
}

/// A gain for each input, batch norm with ReLU, layer norm, and weighted squares as the loss,
/// which is a sum over samples times `factor`.
struct Net {
  using Norm1 = BatchNorm<"bn1", dynamic, double>;
  using Norm2 = LayerNorm<"ln2", positions, double>;
  using Parameters = ParameterList<Parameter<"gain", double, width>, Norm1, Norm2>;
  using Buffers = BufferList<Norm1>;

  double factor = 0.05;
  Norm1 norm1;
  Norm2 norm2;
  std::unique_ptr<DeviceArena> on_device;
  std::vector<double> on_host;
  double host_loss = 0;

  Net() = default;
  Net(const Net& other) : factor(other.factor) {}

  void shapes(auto& shape) const { Norm1::shapes(shape, channels); }
  void initialize(auto& initial) {
    for (std::size_t i = 0; i != width; ++i)
      initial.param("gain"_p)(i) = 1 + 0.1 * static_cast<double>(i);
    for (std::size_t c = 0; c != channels; ++c)
      initial.param("bn1.bias"_p)(c) = 0.1 * static_cast<double>(c) - 0.1;
  }

  auto forward(auto& step, const auto& batch) {
    reserve(step, batch.size());
    const std::size_t rows = batch.size();
    run(step,
        MultiplyByGain{inputs(batch), step.param("gain"_p).data_handle(), array(step, 0), rows});
    norm1.forward_relu(step, view(step, 0), view(step, 1));
    norm2.forward(step, view(step, 1), view(step, 2));
    double* loss = &host_loss;
    if constexpr (requires { step.loss(); }) loss = step.loss();
    run(step, WeighSquares{array(step, 2), array(step, 3), rows, factor, loss});
    if constexpr (!requires { step.loss(); }) return host_loss;
  }
  void backward(auto& step, const auto& batch) {
    norm2.backward(step, view(step, 1), view(step, 3), view(step, 3));
    norm1.backward_relu(step, view(step, 0), view(step, 3), view(step, 4));
    run(step, GradientOfGain{inputs(batch), array(step, 4), step.grad("gain"_p).data_handle(),
                             batch.size()});
    step.ready("gain"_p);
  }

 private:
  static const double* inputs(const Batch& batch) { return batch.inputs.data(); }
  static const double* inputs(const auto& batch) { return batch.inputs; }

  std::size_t rows_ = 0;
  std::size_t room_ = 0;
  void reserve(auto& step, std::size_t rows) {
    rows_ = rows;
    if (rows <= room_) return;
    room_ = rows;
    if constexpr (requires { step.stream(); }) {
      on_device = std::make_unique<DeviceArena>(5 * room_ * width * sizeof(double));
    } else {
      on_host.resize(5 * room_ * width);
    }
  }
  double* array(auto& step, std::size_t which) {
    if constexpr (requires { step.stream(); }) {
      return on_device ? reinterpret_cast<double*>(on_device->data()) + which * room_ * width
                       : nullptr;
    } else {
      return on_host.data() + which * room_ * width;
    }
  }
  auto view(auto& step, std::size_t which) {
    using Memory = std::conditional_t<requires { step.stream(); }, DeviceMemory, HostMemory>;
    return detail::View<Memory, double, dynamic, channels, positions>(array(step, which), rows_);
  }
  template <class F>
  void run(auto& step, const F& f) {
    if constexpr (requires { step.stream(); }) {
      detail::launch_kernel<call_once<F>>("a part of the network", step.stream(), 1, 1, f);
    } else {
      f();
    }
  }
};

/// Ranks have different numbers of samples, and every second time one has none.
bool even = false;
std::size_t rows_of(std::size_t step, std::size_t rank) {
  return even ? 2 + step % 2 : (2 * (step % 2) + 3 * rank) % 4;
}

/// The samples of ranks [first, last) in a step.
Batch samples(std::size_t step, std::size_t first, std::size_t last) {
  Batch batch;
  std::vector<double> inputs;
  for (std::size_t rank = first; rank != last; ++rank) {
    for (std::size_t i = 0; i != rows_of(step, rank) * width; ++i)
      inputs.push_back(3 + std::sin(0.37 * static_cast<double>(i * (step + 1)) +
                                    static_cast<double>(rank + 10 * step)));
  }
  batch.resize(inputs.size() / width, width);
  batch.inputs = inputs;
  return batch;
}

constexpr std::size_t steps = 8;

/// All parameters and buffers of a job.
Doubles values_of(auto& job) {
  Doubles all;
  const auto add = [&](const auto& view) {
    using T = typename std::remove_cvref_t<decltype(view)>::value_type;
    std::vector<T> some(view.size());
    check_cuda(
        cudaMemcpy(some.data(), view.data_handle(), some.size() * sizeof(T), cudaMemcpyDefault),
        "cudaMemcpy");
    for (const T value : some) all.push_back(static_cast<double>(value));
  };
  add(job.param("gain"_p));
  add(job.param("bn1.weight"_p));
  add(job.param("bn1.bias"_p));
  add(job.param("ln2.weight"_p));
  add(job.param("ln2.bias"_p));
  add(job.buffer("bn1.running_mean"_p));
  add(job.buffer("bn1.running_var"_p));
  add(job.buffer("bn1.num_batches_tracked"_p));
  return all;
}

/// What one process makes of all samples.
Doubles on_cpu(std::size_t world) {
  LoopbackCommunicator alone;
  Net net;
  net.factor /= static_cast<double>(world);  // gradients of ranks are averaged
  detail::BasicDdp<Net, CanonicalPolicies<World<1>, Optimizer<SGD>>, LoopbackCommunicator> cpu(
      alone, net);
  cpu.optimizer().lr = 0.1;
  for (std::size_t s = 0; s != steps; ++s) cpu.step(samples(s, 0, world));
  return values_of(cpu);
}

/// The first batch of a shape runs call by call, the second is captured, others are replayed.
template <class Comm>
void train(Comm& comm, const Doubles& want) {
  using Job = detail::BasicDdp<
      Net, CanonicalPolicies<Device<Cuda>, Norms<Synced>, Optimizer<SGD>, CapturedStep>, Comm>;
  Job ddp(comm, Net{});
  ddp.optimizer().lr = 0.1;
  const std::size_t rank = comm.rank().value();
  for (std::size_t s = 0; s != steps; ++s) ddp.step(samples(s, rank, rank + 1));
  comm.synchronize();
  const std::string wrong = difference(values_of(ddp), want, 1e-9);
  thread_ranks::require(wrong.empty(), wrong);
  thread_ranks::require(ddp.template captured_graphs<Batch>() != 0, "nothing was captured");
}

}  // namespace

BOOST_AUTO_TEST_CASE(batch_norms_are_what_plain_loops_find) {
  const emulated::Machine machine(1);
  check_batch_norms<float>(3000, 1);
  check_batch_norms<BFloat16, float, Fusion::relu>(2000, 3);
}

BOOST_AUTO_TEST_CASE(large_means_lose_nothing) {
  const emulated::Machine machine(1);
  check_large_means();
}

BOOST_AUTO_TEST_CASE(evaluation_takes_the_running_statistics) {
  const emulated::Machine machine(1);
  check_running();
}

BOOST_AUTO_TEST_CASE(layer_norms_are_what_plain_loops_find) {
  const emulated::Machine machine(1);
  check_layer_norms<float>(1);
  check_sums_of_many_rows();
}

BOOST_AUTO_TEST_CASE(ranks_that_share_statistics_train_like_one_process) {
  for (const std::size_t world : {1, 2, 3}) {
    const Doubles want = on_cpu(world);
    const emulated::Machine machine(world);
    thread_ranks::expect_all_fine(thread_ranks::run(world, [&](auto& comm) { train(comm, want); }));
  }
}

#if __has_include(<nccl.h>)
BOOST_AUTO_TEST_CASE(ranks_share_statistics_through_nccl) {
  constexpr std::size_t world = 3;
  even = true;  // as captured steps must be
  const Doubles want = on_cpu(world);
  nccl_ranks::Job job(world);
  nccl_ranks::run_nccl(job, [&](auto& comm) { train(comm, want); });
}
#endif

BOOST_AUTO_TEST_SUITE_END()

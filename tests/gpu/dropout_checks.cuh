// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Dropout and random numbers of steps on GPUs, real or emulated, against the host's bits.

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/norm/dropout.cuh"
#include "lockstep/detail/strategy/features.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

namespace dropout_checks {

using namespace lockstep;
using thread_ranks::require;

// The kernels alone.

/// A step of the host, and one of a GPU, with a key of their own.
struct HostStep {
  static constexpr bool draws = true;
  static constexpr bool is_training() { return true; }
  std::uint64_t key = 0;
  LayerRandom random(std::uint64_t layer) const { return detail::layer_random(key, layer); }
};
struct GpuStep {
  static constexpr bool draws = true;
  static constexpr bool is_training() { return true; }
  const std::uint64_t* key;
  cudaStream_t queue;
  cudaStream_t stream() const { return queue; }
  DeviceLayerRandom random(std::uint64_t layer) const { return {key, layer}; }
};
struct GpuEvaluation : GpuStep {
  static constexpr bool is_training() { return false; }
};

/// From and to any element of an array, so that packets of 16 bytes fit or do not; what lies around
/// the result stays as it was.
template <class T>
void compare_with_host(cudaStream_t stream, std::uint64_t* key, std::size_t count,
                       std::size_t offset, double p) {
  constexpr std::size_t around = 16;
  const Dropout<"drop1"> drop(p);
  std::vector<T> x(count + 2 * around);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<T>(static_cast<detail::Accumulator<T>>(0.3 * static_cast<double>(i % 97)));
  std::vector<T> want = x;
  HostStep host{count * 31 + offset};
  drop.forward(host, HostView<T, dynamic>(x.data() + around + offset, count),
               HostView<T, dynamic>(want.data() + around + offset, count));

  detail::launch_store(stream, key, host.key);
  DeviceArena from(x.size() * sizeof(T));
  DeviceArena to(x.size() * sizeof(T));
  detail::copy_now(from.data(), x.data(), from.bytes());
  detail::copy_now(to.data(), x.data(), to.bytes());
  const auto at = [&](const DeviceArena& arena) {
    return DeviceView<T, dynamic>(reinterpret_cast<T*>(arena.data()) + around + offset, count);
  };
  GpuStep step{key, stream};
  drop.forward(step, at(from), at(to));
  drop.backward(step, at(from), at(from));  // in place
  for (const DeviceArena* arena : {&from, &to}) {
    std::vector<T> got(x.size());
    check_cuda(
        cudaMemcpyAsync(got.data(), arena->data(), arena->bytes(), cudaMemcpyDefault, stream),
        "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    BOOST_TEST(std::memcmp(got.data(), want.data(), arena->bytes()) == 0,
               detail::element_name(element_kind<T>())
                   << ": " << count << " elements, offset " << offset << ", p = " << p);
  }
  GpuEvaluation evaluation{{key, stream}};
  drop.forward(evaluation, at(from), at(to));
  std::vector<T> got(x.size());
  check_cuda(cudaMemcpyAsync(got.data(), to.data(), to.bytes(), cudaMemcpyDefault, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  BOOST_TEST(std::memcmp(got.data(), want.data(), to.bytes()) == 0, "an evaluation does not copy");
}

inline void compare_all_with_host(const std::vector<std::size_t>& counts) {
  CudaStream stream;
  DeviceArena key(sizeof(std::uint64_t));
  auto* const place = reinterpret_cast<std::uint64_t*>(key.data());
  for (const std::size_t count : counts) {
    for (const std::size_t offset : {0u, 1u}) {
      for (const double p : {0.0, 0.3, 1.0}) {
        compare_with_host<float>(stream, place, count, offset, p);
        compare_with_host<double>(stream, place, count, offset, p);
        compare_with_host<Half>(stream, place, count, offset, p);
        compare_with_host<BFloat16>(stream, place, count, offset, p);
      }
    }
  }
}

// Jobs.

constexpr std::size_t width = 1030;

/// Samples at a place of the whole batch, of a micro-batch. Its gradient tells place and
/// micro-batch, so that a sum shows which of them dropped an element.
struct Points {
  std::size_t place = 0;
  std::size_t samples = 1;
  std::size_t micro_batch = 0;
  std::size_t size() const { return samples; }
  Points slice(std::size_t first, std::size_t count) const { return {first, count, micro_batch}; }
  float value() const { return static_cast<float>(1u << (2 * place + micro_batch)); }
  friend bool operator==(const Points&, const Points&) = default;
};

LOCKSTEP_KERNEL fill(float* to, std::size_t count, float value) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = value;
}
/// A layer of a program's own.
LOCKSTEP_KERNEL draw(DeviceLayerRandom random, float* to, std::size_t count) {
  const LayerRandom numbers = random.numbers();
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = numbers.uniform(i);
}

/// The gradient is what dropout leaves of the batch's value.
struct Dropped {
  static constexpr bool draws = true;
  using Parameters = ParameterList<Parameter<"w", float, width>>;

  Dropout<"drop1"> drop{0.5};
  DeviceArena values{width * sizeof(float)};
  DeviceArena left{width * sizeof(float)};   // by forward
  DeviceArena noise{width * sizeof(float)};  // of the latest pass

  static constexpr unsigned blocks = (width + 255) / 256;
  static float* numbers(const DeviceArena& arena) { return reinterpret_cast<float*>(arena.data()); }
  static DeviceView<float, width> view(const DeviceArena& arena) {
    return DeviceView<float, width>(numbers(arena));
  }

  void initialize(auto& initial) {
    for (std::size_t i = 0; i < width; ++i) initial.param("w"_p)(i) = 0;
  }
  void forward(auto& step, const Points& points) {
    detail::launch_kernel<fill>("fill", step.stream(), blocks, 256, numbers(values), width,
                                points.value());
    detail::launch_kernel<draw>("draw", step.stream(), blocks, 256, step.random("noise"_p),
                                numbers(noise), width);
    drop.forward(step, view(values), view(left));
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
  void backward(auto& step, const Points&) {
    drop.backward(step, view(values), step.grad("w"_p));
    step.ready("w"_p);
  }
  Dropped replicate() const { return {}; }
};

/// In the order of a stream.
inline std::vector<float> download(cudaStream_t stream, const float* from) {
  std::vector<float> numbers(width);
  check_cuda(
      cudaMemcpyAsync(numbers.data(), from, width * sizeof(float), cudaMemcpyDefault, stream),
      "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return numbers;
}

/// A rank's micro-batch on the host.
inline HostStep host_step(std::uint64_t seed, std::size_t rank, std::size_t updates,
                          std::size_t micro_batch) {
  struct OnHost {
    using device = Cpu;
    LoopbackCommunicator nobody;
    LoopbackCommunicator& comm() { return nobody; }
  } host;
  detail::RandomNumbers<OnHost, LoopbackCommunicator> numbers(host);
  numbers.start(Seed{seed}, Rank{rank});
  numbers.prepare(updates, micro_batch);
  return HostStep{numbers.keys().micro_batch};
}

/// What dropout leaves there.
inline std::vector<float> left_by_host(std::uint64_t seed, std::size_t rank, std::size_t updates,
                                       std::size_t micro_batch) {
  HostStep step = host_step(seed, rank, updates, micro_batch);
  std::vector<float> x(width, Points{rank, 1, micro_batch}.value());
  const HostView<float, width> view(x.data());
  Dropout<"drop1">(0.5).forward(step, view, view);
  return x;
}

/// The numbers of the layer "noise" there.
inline std::vector<float> noise_by_host(std::uint64_t seed, std::size_t rank, std::size_t updates,
                                        std::size_t micro_batch) {
  const LayerRandom random =
      host_step(seed, rank, updates, micro_batch).random(detail::layer_hash("noise"));
  std::vector<float> numbers(width);
  for (std::size_t i = 0; i < width; ++i) numbers[i] = random.uniform(i);
  return numbers;
}

/// The parameters that updates [first, last) of `ranks` ranks make of zeros. All numbers are exact.
inline std::vector<float> parameters_by_host(std::uint64_t seed, std::size_t ranks,
                                             std::size_t first, std::size_t last) {
  std::vector<float> w(width);
  for (std::size_t u = first; u < last; ++u) {
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t m = 0; m < 2; ++m) {
        const std::vector<float> left = left_by_host(seed, r, u, m);
        for (std::size_t i = 0; i < width; ++i) w[i] -= left[i] / static_cast<float>(2 * ranks);
      }
    }
  }
  return w;
}

inline void require_same(const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& what) {
  for (std::size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i]) {
      require(false, what + ": number " + std::to_string(i) + " is " + std::to_string(got[i]) +
                         ", the host has " + std::to_string(want[i]));
    }
}

/// Ranks that are threads. The first update runs call by call, the second is captured, later ones
/// are replayed; evaluations in between change nothing. Another job, with another seed, goes on.
inline void ranks_draw_the_hosts_numbers(std::size_t ranks) {
  thread_ranks::expect_all_fine(thread_ranks::run(ranks, [&](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job =
        detail::BasicDdp<Dropped, CanonicalPolicies<Device<Cuda>, Accumulate<2>, CapturedStep>,
                         Comm>;
    const std::size_t me = comm.rank().value();
    const cudaStream_t stream = comm.gpu().stream();
    std::vector<float> evaluated;
    const auto train = [&](Job& job, std::size_t first, std::size_t last) {
      for (std::size_t u = first; u < last; ++u) {
        for (std::size_t m = 0; m < 2; ++m) {
          job.step(Points{me, 1, m});
          const std::string when =
              "update " + std::to_string(u) + ", micro-batch " + std::to_string(m);
          require_same(download(stream, Dropped::numbers(job.model().left)),
                       left_by_host(5, me, u, m), when);
          require_same(download(stream, Dropped::numbers(job.model().noise)),
                       noise_by_host(5, me, u, m), when + ", a layer of the program's own");
          job.evaluate(Points{me, 1, 0});
          const std::vector<float> noise = download(stream, Dropped::numbers(job.model().noise));
          if (evaluated.empty()) evaluated = noise;
          require_same(noise, evaluated, when + ", an evaluation");
          require(noise != noise_by_host(5, me, u, m), when + ": an evaluation draws its numbers");
        }
        require_same(download(stream, job.param("w"_p).data_handle()),
                     parameters_by_host(5, ranks, first, u + 1),
                     "the parameters after update " + std::to_string(u));
      }
      require(job.template captured_graphs<Points>() == 2, "not all was captured");
    };
    Job job(comm, {}, Seed{5});
    job.optimizer().lr = 1;
    train(job, 0, 4);
    Job resumed(comm, {}, Seed{77});
    resumed.set_progress(job.progress());
    train(resumed, 4, 7);
  }));
}

/// Replicas of DP, whose steps are one graph of all.
inline void replicas_draw_the_hosts_numbers(std::size_t replicas) {
  DataParallel<Dropped, Device<Cuda>, Accumulate<2>, CapturedStep> dp(
      {.replicas = replicas, .seed = Seed{5}});
  dp.optimizer().lr = 1;
  for (std::size_t u = 0; u < 4; ++u) {
    for (std::size_t m = 0; m < 2; ++m) {
      dp.step(Points{0, replicas, m});
      dp.synchronize();
      std::size_t replica = 0;
      dp.for_each_model([&](const Dropped& model) {
        require_same(download(nullptr, Dropped::numbers(model.left)),
                     left_by_host(5, replica, u, m), "replica " + std::to_string(replica));
        ++replica;
      });
    }
    require_same(download(nullptr, dp.param("w"_p).data_handle()),
                 parameters_by_host(5, replicas, 0, u + 1), "the replicas' parameters");
  }
  require(dp.template captured_graphs<Points>() == 2, "not all was captured");
}

}  // namespace dropout_checks

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Tensors and random numbers between a step and a module on the host.

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Device.h>

#include <cstring>
#include <mutex>

#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/torch/adopted_tensors.hpp"

namespace lockstep::detail {

/// Seeds a device's default generator. On a CPU this writes 2.5 KB.
inline void seed_generator(std::uint64_t seed, at::Device device = at::kCPU) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

/// Held while a module is made: all CPU threads share LibTorch's generator.
inline std::mutex module_making;

/// Calls `make`, whose layers draw from LibTorch's generators as after `torch::manual_seed(seed)`;
/// later draws differ between ranks. Ranks that are threads make their modules one by one.
auto make_seeded_module(Seed seed, Rank rank, bool on_gpu, const auto& make) {
  const std::lock_guard<std::mutex> lock(module_making);
  const auto begin_from = [&](Seed with) {
    seed_generator(with.value());
    if (on_gpu) seed_generator(with.value(), at::kCUDA);  // the current GPU's
  };
  begin_from(seed);
  auto made = make();
  begin_from(rank_seed(seed, rank));
  return made;
}

/// Seeds a generator with the step's key (job seed, rank, update, micro-batch).
template <class Step>
void seed_torch(const Step& step, at::Device device = at::kCPU) {
  constexpr const char* layer = "torch";
  if constexpr (Step::is_training()) {
    seed_generator(step.random_seed(layer), device);
  } else {
    seed_generator(step.random_seed_in_evaluation(layer), device);
  }
}

/// What backward starts from: `one`, which is made in a job's first step (a captured one comes
/// later), or ones like a loss of another type or shape.
inline at::Tensor ones_for(const at::Tensor& loss, at::Tensor& one) {
  if (loss.scalar_type() != at::kFloat || loss.dim() != 0) return at::ones_like(loss);
  if (!one.defined()) [[unlikely]]
    one = at::ones_like(loss);
  return one;
}

/// The device of a step: here the host, where calls are synchronous.
template <class Step>
struct TorchDevice {
  /// RAII state around a module's passes: nothing on the host.
  struct Scope {
    explicit Scope(const Step&) {}
  };
  static at::Device device(const Step&) { return at::kCPU; }

  /// Seeds LibTorch's generator with this step's key.
  static void seed(const Step& step) { seed_torch(step); }

  /// The value of the loss, which the step returns.
  static double publish(const Step&, const at::Tensor& loss) { return loss.item<double>(); }
  /// What backward starts from.
  static at::Tensor gradient(const Step&, const at::Tensor& loss, at::Tensor& one) {
    return ones_for(loss, one);
  }

  /// Copies small gradients of the same type by memcpy, in a fraction of the time of `copy_`.
  static void write(const Step&, void* to, at::ScalarType type, const at::Tensor& gradient) {
    const std::size_t bytes = gradient.nbytes();
    if (gradient.scalar_type() == type && bytes <= most_copied && gradient.is_contiguous()) {
      std::memcpy(to, gradient.const_data_ptr(), bytes);
    } else {
      tensor_at(to, gradient.sizes(), type, at::kCPU).copy_(gradient);
    }
  }
  static void zero(const Step&, void* to, std::size_t bytes) { std::memset(to, 0, bytes); }

  /// The gradients of one backward pass, each ready as soon as it is written.
  class Gradients {
   public:
    explicit Gradients(Step& step) : step_(step) {}
    void write(std::size_t parameter, void* to, at::ScalarType type, const at::Tensor& gradient) {
      TorchDevice::write(step_, to, type, gradient);
      step_.ready(parameter);
    }
    void finish() {}

   private:
    Step& step_;
  };

 private:
  /// Larger ones are copied by LibTorch's threads.
  static constexpr std::size_t most_copied = std::size_t{1} << 20;
};

}  // namespace lockstep::detail

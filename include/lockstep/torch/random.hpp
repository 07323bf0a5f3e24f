// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch's random numbers in a job: initial values that follow from its seed, and dropout
/// that differs between ranks and goes on after a restart.

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// LibTorch's generator of a device begins anew from a seed. On a CPU this writes 2.5 KB.
inline void seed_generator(std::uint64_t seed, at::Device device = at::kCPU) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

/// Held while a module is made: LibTorch has one generator for all CPU threads.
inline std::mutex& module_making() {
  static std::mutex mutex;
  return mutex;
}

/// Calls a function that makes a module, whose layers draw their initial values from LibTorch's
/// generators: from `seed`, the same on all ranks and as after `torch::manual_seed(seed)`. What is
/// drawn later differs between ranks. Ranks that are threads of a process make their modules one
/// after the other, so `make` must not wait for another rank.
template <class F>
auto make_seeded_module(Seed seed, Rank rank, bool on_gpu, const F& make) {
  const std::lock_guard<std::mutex> lock(module_making());
  const auto begin_from = [&](Seed with) {
    seed_generator(with.value());
    if (on_gpu) seed_generator(with.value(), at::kCUDA);  // of the current GPU
  };
  begin_from(seed);
  auto made = make();
  begin_from(rank_seed(seed, rank));
  return made;
}

/// The generator of a device draws from the step's key: from the job's seed, the rank, the update
/// and the micro-batch, whatever else has drawn before. A model that says `static constexpr bool
/// draws = true;` has steps with such a key.
template <class Step>
void seed_torch(const Step& step, at::Device device = at::kCPU) {
  constexpr const char* layer = "torch";
  if constexpr (Step::is_training()) {
    seed_generator(step.random_seed(layer), device);
  } else {
    seed_generator(step.random_seed_in_evaluation(layer), device);
  }
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch's random numbers in the steps of a job: dropout that differs between ranks and
/// goes on after a restart.

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

namespace lockstep::detail {

/// LibTorch's generator of a device begins anew from a seed. On a CPU this writes 2.5 KB.
inline void seed_generator(std::uint64_t seed, at::Device device = at::kCPU) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
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

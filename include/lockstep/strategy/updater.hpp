// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What an updater is, and what it may ask of a step's gradients.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::detail {

/// The gradients of a step on one rank. An updater takes what it needs: whole averages need not
/// exist, and never do where every rank reduces the slice alone that it updates.
/// - `own<T>(offset, bytes)`: this rank's gradients in a piece of the arena, summed over
///   micro-batches. Where buckets are reduced early they are on their way and not to be touched.
/// - `wait(bucket)`: averages a bucket over ranks, or waits for its reduction that is under way.
///   **Ranks** all, in the order of buckets. `reduce()` does it for all buckets.
/// - `averages<T>(offset, bytes)`: a piece whose buckets are averaged, in the type of its
/// reduction.
/// - `agree_on_usage()`: which parameters any rank has used since the last update. **Ranks** all.
template <class G>
concept GradientSource = requires(G& gradients, std::size_t n) {
  { gradients.template own<float>(n, n) } -> std::same_as<std::span<float>>;
  gradients.wait(n);
  gradients.reduce();
  { gradients.template averages<float>(n, n).size() } -> std::same_as<std::size_t>;
  { gradients.agree_on_usage() } -> std::same_as<const typename G::Usage&>;
};

/// A replica's optimizer: it keeps the states of what this rank updates, all parameters or a slice
/// of them, and its numbers (`options`, `schedule`). An update is `begin()`, which settles the
/// learning rate, and one of the two below, which leave new parameters on all ranks. **Ranks** all.
/// - `reduce_and_update(gradients)` from gradients that are each rank's own.
/// - `update_averaged(gradients)` after `gradients.reduce()`.
template <class U, class Gradients>
concept Updater = GradientSource<Gradients> && requires(U& updater, Gradients& gradients) {
  updater.options().lr;
  updater.schedule();
  { updater.learning_rate() } -> std::same_as<double>;
  { updater.steps() } -> std::same_as<std::uint64_t>;
  updater.set_epoch(std::uint64_t{1});
  updater.begin();
  updater.reduce_and_update(gradients);
  updater.update_averaged(gradients);
};

/// The updater of a device under a job's policies, as `type`. It is made from the communicator, the
/// execution, the layout of the parameters and the arena in which they lie. Specialised for every
/// device: `Cpu` in host_updater.hpp, `Cuda` in gpu_updater.cuh.
template <class Device, class Traits, class Comm>
struct UpdaterOn;

}  // namespace lockstep::detail

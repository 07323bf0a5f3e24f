// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `job.fit(train, {.epochs = 5, .batch_size = 64})`: the usual loop in one call.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lockstep/core/reduce_op.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/observe/epoch_summary.hpp"

namespace lockstep {

/// How `job.fit` trains.
struct FitOptions {
  std::uint64_t epochs = 1;
  std::size_t batch_size = 1;       ///< of one rank, as in `epoch.batches`
  std::size_t test_batch_size = 0;  ///< of the evaluation; 0: as `batch_size`
};

namespace detail {

struct NoCallback {
  constexpr void operator()(const auto&...) const {}
};
struct NoData {};

/// Calls `f(epoch, scores)` or `f(epoch)`, whichever it takes. A function that returns false on any
/// rank ends the training on all of them, so that ranks cannot part. **Ranks** all.
template <class Comm, class F, class Epoch>
bool goes_on_after(Comm& comm, F& f, Epoch& epoch, const Scores& scores) {
  constexpr bool takes_scores = std::invocable<F&, Epoch&, const Scores&>;
  constexpr bool is_callback = takes_scores || std::invocable<F&, Epoch&>;
  static_assert(is_callback,
                "lockstep: fit calls its function after every epoch, as on_epoch(epoch) or "
                "on_epoch(epoch, scores)");
  if constexpr (is_callback) {
    const auto call = [&]() -> decltype(auto) {
      if constexpr (takes_scores) {
        return f(epoch, scores);
      } else {
        return f(epoch);
      }
    };
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
    } else {
      std::uint8_t stops[] = {static_cast<bool>(call()) ? std::uint8_t{0} : std::uint8_t{1}};
      comm.all_reduce(stops, Max{});
      return stops[0] == 0;
    }
  }
  return true;
}

/// The loop of `fit`. `NoData` is evaluated on nothing.
template <class Job, class Comm, Dataset Train, class Test, class OnEpoch, class OnStep>
EpochSummary fit(Job& job, Comm& comm, const Train& train, const Test& test,
                 const FitOptions& options, OnEpoch& on_epoch, OnStep& on_step) {
  for (auto epoch : job.epochs(options.epochs)) {
    for (const auto& batch : epoch.batches(train, options.batch_size)) {
      const auto loss = job.step(batch);
      if constexpr (!std::same_as<OnStep, NoCallback>) on_step(batch, loss);
    }
    Scores scores;
    if constexpr (!std::same_as<Test, NoData>) {
      scores = job.evaluate(
          test, options.test_batch_size == 0 ? options.batch_size : options.test_batch_size);
    }
    if constexpr (!std::same_as<OnEpoch, NoCallback>) {
      if (!goes_on_after(comm, on_epoch, epoch, scores)) break;
    }
  }
  return job.summary();
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Loads a batch, in its pass, so that whatever fails names its samples.

#include <cstddef>
#include <span>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/dataset.hpp"

namespace lockstep::detail {

/// What reading or changing one sample threw, with its number. The first exception is nested in it.
class SampleError : public Error {
 public:
  [[gnu::cold]] SampleError(std::size_t sample, std::size_t draw, const Error& error);
  SampleError(const SampleError& other);
  ~SampleError() override;

  std::size_t sample() const { return sample_; }
  /// Its place in the batch, from 0.
  std::size_t draw() const { return draw_; }

 private:
  std::size_t sample_;
  std::size_t draw_;
};

/// For handlers: throws what is being handled as the failure of a sample, the `draw`-th of its
/// batch. A job's end, `Stopped`, is thrown as it is.
[[noreturn, gnu::cold]] void rethrow_of_sample(std::size_t sample, std::size_t draw);

/// Where a batch stands in an epoch: its pass, and its number on this rank, from 0.
struct BatchPlace {
  Pass pass{};
  std::size_t number = 0;
};

/// For handlers: throws what is being handled as the failure of a batch. It names the sample that
/// failed, where that is known, or else all samples of the batch.
[[noreturn, gnu::cold]] void rethrow_of_batch(std::span<const std::size_t> indices,
                                              BatchPlace place);

/// Loads the samples of `indices` by the data set's own `load`.
template <Dataset Source, class Batch>
void load_batch(const Source& dataset, std::span<const std::size_t> indices, BatchPlace place,
                Batch& out) {
  try {
    if constexpr (PassLoading<Source, Batch>) {
      dataset.load(indices, place.pass, out);
    } else {
      dataset.load(indices, out);
    }
  } catch (...) {
    rethrow_of_batch(indices, place);
  }
}

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/load_batch.ipp"
#endif

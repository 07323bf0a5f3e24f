// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a batch of DP is shared out among replicas, and how many samples each of them has.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/strategy/shares.hpp"

namespace lockstep::detail {

/// The shares of so many replicas.
class DpShares {
 public:
  /// `needs_all`: no replica may be without samples. PyTorch's chunks leave the last replicas
  /// without where others have two, so shares are equal then.
  DpShares(std::size_t replicas, bool needs_all);

  /// In proportion to these numbers, one for each replica; none makes shares equal again.
  void set(std::vector<double> weights);

  /// Cuts a batch, and counts the samples of every replica: `samples_of(cut, replica)`. A batch
  /// without any is an error.
  template <class SamplesOf>
  BatchCut count(const SamplesOf& samples_of) {
    const BatchCut cut{parts_.size(), weights_};
    std::size_t all = 0;
    std::size_t largest = 0;
    for (std::size_t i = 0; i != parts_.size(); ++i) {
      const std::size_t samples = samples_of(cut, i);
      parts_[i].samples = {all, samples};
      all += samples;
      largest = std::max(largest, samples);
    }
    if (all == 0) refuse_empty();
    for (BatchPart& part : parts_) {
      part.all = all;
      part.largest = largest;
    }
    return cut;
  }

  /// Throws if a replica has no sample of the batch that was counted: it does not run its model,
  /// and the norms of the others would wait for its statistics.
  void require_samples() const;

  /// The samples of the batch that was counted: a replica's, and those of all.
  const BatchPart& operator[](std::size_t replica) const { return parts_[replica]; }
  std::size_t samples() const { return parts_[0].all; }

 private:
  [[noreturn]] static void refuse_empty();

  bool needs_all_;
  std::vector<BatchPart> parts_;
  std::vector<double> weights_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/strategy/dp_shares.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of gradients that tells ranks who still has batches, behind the first bucket.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/riders.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/riders.hpp"

namespace lockstep::detail {

/// A base of `Self`, the gradients. With `UnevenInputs<Even>` there is nothing to tell.
template <class Self, class Traits, class Comm>
class JoiningGradients {
 public:
  /// The ranks that had batches in the round under way, or in the last one. **Host** blocks until
  /// the first bucket has landed.
  LiveRanks live()
    requires(Traits::joins)
  {
    self().wait(0);
    return riders_.live();
  }
  /// The rank that has the newest buffers: it was among the last that had a batch.
  Rank newest() const
    requires(Traits::joins)
  {
    return Rank{riders_.live().lowest};
  }
  /// All ranks are through, or begin; `newest` has the newest buffers.
  void forget_live(Rank newest = Rank{0})
    requires(Traits::joins)
  {
    riders_.begin_anew(newest.value());
  }
  /// By how much the sum over ranks is divided, as a part of all ranks: by the live ones, unless
  /// `average` has done that. **Host** blocks.
  double live_share()
    requires(Traits::divides_by_live)
  {
    if (is_averaged_) return 1;
    return static_cast<double>(live().count) /
           static_cast<double>(self().comm_.world_size().value());
  }
  bool is_averaged() const { return is_averaged_; }
  auto& riders()
    requires(Traits::joins)
  {
    return riders_;
  }

 protected:
  explicit JoiningGradients(Comm& comm) : riders_(comm) {}

  /// Where the riders lie behind the first bucket, in bytes from the arena's start.
  std::size_t riders_at() const {
    const Bucket& bucket = self().layout_.plan().bucket_table[0];
    return bucket.offset + bucket.bytes;
  }
  /// Writes the riders of a round that begins.
  void board(bool is_live) {
    is_boarded_ = true;
    is_averaged_ = false;
    Traits::with_element(
        self().layout_.plan().bucket_table[0].element, [&]<class T>(std::type_identity<T>) {
          riders_.board(
              self().template own<T>(
                  riders_at(), riders_behind<Traits>(0, self().comm_.world_size()) * sizeof(T)),
              is_live);
        });
  }
  /// Reads them when they have come, once.
  void settle() {
    is_boarded_ = false;
    const auto ranks = static_cast<double>(self().comm_.world_size().value());
    Traits::with_element(
        self().layout_.plan().bucket_table[0].element, [&]<class T>(std::type_identity<T>) {
          riders_.settle(
              self().template averages<T>(
                  riders_at(), riders_behind<Traits>(0, self().comm_.world_size()) * sizeof(T)),
              self().factor() * ranks);
        });
  }
  /// The first bucket has landed.
  void settle_if_boarded() {
    if (is_boarded_) settle();
  }
  void mark_as_averaged() { is_averaged_ = true; }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  [[no_unique_address]] RidersOf<Traits, Comm> riders_;
  bool is_boarded_ = false;   // riders are under way
  bool is_averaged_ = false;  // gradients were made averages, and wait for their update
};

}  // namespace lockstep::detail

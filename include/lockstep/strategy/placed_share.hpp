// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica's share of a batch, where its model can read it.

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/core/utility.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/strategy/shares.hpp"

namespace lockstep::detail {

/// Keeps the latest share of every type of batch. With `HasWhole` the replica that takes the loss
/// (`is_root`) keeps whole batches too.
template <class Execution, bool HasWhole>
class PlacedShare {
 public:
  PlacedShare(Execution& execution, std::size_t replica, bool is_root)
      : execution_(execution), replica_(replica), is_root_(is_root) {}

  /// The batch must outlive its share, which may be a view of it.
  template <class Batch>
  void take(const Batch& batch, const BatchCut& cut, const BatchPart& part) {
    if constexpr (HasWhole) {
      if (is_root_) storage_.get<PlacedWhole<Batch>>().at = &place_whole(batch);
    }
    if (part.samples.count != 0)
      storage_.get<PlacedPart<Batch>>().at = &place(batch, cut, part.largest);
  }

  template <class Batch>
  const auto& share() {
    return *storage_.get<PlacedPart<Batch>>().at;
  }
  /// The whole batch, on the replica that takes the loss.
  template <class Batch>
  const auto& whole() {
    return *storage_.get<PlacedWhole<Batch>>().at;
  }

  /// The type that the model gets for a whole `Batch`.
  template <class Batch>
  using Whole =
      std::remove_cvref_t<decltype(std::declval<Execution&>().place(std::declval<const Batch&>()))>;

 private:
  /// Is a batch handed on as it is, and may lie on another device than the one that reads it?
  template <class Batch>
  static constexpr bool may_be_far =
      std::is_same_v<Whole<Batch>, Batch> && BringingNear<Execution, Batch>;

  template <class Batch>
  const auto& place_whole(const Batch& batch) {
    if constexpr (may_be_far<Batch>) {
      return execution_.bring_near(batch, storage_.get<NearWhole<Batch>>().kept);
    } else {
      return execution_.place(batch);
    }
  }

  /// Places a share. Where the whole batch is on this replica's device, it is a part of that.
  template <class Batch>
  const auto& place(const Batch& batch, const BatchCut& cut, std::size_t largest) {
    if constexpr (HasWhole && (!std::is_same_v<Whole<Batch>, Batch> || may_be_far<Batch>)) {
      static_assert(std::is_same_v<ShareOf<Whole<Batch>>, Placed<Batch>>,
                    "lockstep: LossOnOutput needs the whole batch and a share of it on one device; "
                    "give what the batch becomes there slice(first, count), or use LossOnReplica");
      if (is_root_) return cut_out(whole<Batch>(), cut);
    }
    return place_share(batch, cut, largest);
  }

  template <class Batch>
  const auto& place_share(const Batch& batch, const BatchCut& cut, std::size_t largest) {
    if constexpr (may_be_far<ShareOf<Batch>>) {
      return execution_.bring_near(cut_out(batch, cut),
                                   storage_.get<NearPart<ShareOf<Batch>>>().kept);
    } else if constexpr (RowPlacing<Execution, Batch>) {
      const RowRange rows = cut.rows(batch.size(), replica_);
      return execution_.place(batch, rows.first, rows.count, largest);
    } else if constexpr (std::is_same_v<ShareOf<Batch>, Batch>) {
      return execution_.place(cut.replicas == 1 ? batch : cut_out(batch, cut));
    } else {
      return execution_.place(cut_out(batch, cut));
    }
  }

  /// Cuts out a share, into memory that is kept.
  template <class Cuttable>
  const ShareOf<Cuttable>& cut_out(const Cuttable& from, const BatchCut& cut) {
    auto& share = storage_.get<std::optional<ShareOf<Cuttable>>>();
    take_share(from, cut, replica_, share);
    return share.value();
  }

  /// This class, as a type that waits for a `Batch`: clang looks into any other at once, where the
  /// class is not complete yet.
  template <class Batch>
  using Complete = std::conditional_t<std::is_void_v<Batch>, Batch, PlacedShare>;

  template <class Batch>
  using Placed = std::remove_cvref_t<decltype(std::declval<Complete<Batch>&>().place_share(
      std::declval<const Batch&>(), BatchCut{}, 0))>;

 public:
  /// The type that the model gets for its share of a `Batch`.
  template <class Batch>
  using Share = std::remove_cvref_t<decltype(std::declval<Complete<Batch>&>().place(
      std::declval<const Batch&>(), BatchCut{}, 0))>;

 private:
  /// Shares and whole batches can be of one type: each has a pointer of its own.
  template <class Batch>
  struct PlacedWhole {
    const Whole<Batch>* at = nullptr;
  };
  template <class Batch>
  struct PlacedPart {
    const Share<Batch>* at = nullptr;
  };

  /// Copies of either from another device.
  template <class Batch>
  struct NearWhole {
    typename Execution::template Near<Batch> kept;
  };
  template <class Batch>
  struct NearPart {
    typename Execution::template Near<Batch> kept;
  };

  Execution& execution_;
  std::size_t replica_;
  bool is_root_;
  TypedStorage storage_;
};

}  // namespace lockstep::detail

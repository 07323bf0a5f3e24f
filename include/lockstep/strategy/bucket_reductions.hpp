// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions of buckets that are under way, each with its own type of handle.

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// One slot per bucket for the handle of its reduction. Handles stay where they are made, and their
/// type depends on the bucket's elements: there is a row of slots for each element type.
template <class Traits, class Comm>
class BucketReductions {
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  template <class T>
  using Handle = decltype(std::declval<Comm&>().all_reduce_async(std::declval<std::span<T>>(),
                                                                 reduction_of_gradients<how>(1)));

 public:
  BucketReductions(const Comm&, const auto& /*execution*/, const auto& layout)
      : buckets_(layout.plan().bucket_count) {
    forget();
  }

  /// Drops every handle: the reductions were part of a capture that failed and never happened.
  void forget() {
    std::apply([&](auto&... row) { (row.reset(buckets_), ...); }, rows_);
  }

  template <class T>
  void start(Comm& comm, std::size_t bucket, std::span<T> gradients) {
    std::get<Row<T>>(rows_).slots[bucket].emplace(Start<T>{comm, gradients});
  }

  /// Waits for a bucket's reduction, if one is under way.
  template <class T>
  void wait(std::size_t bucket) {
    auto& slot = std::get<Row<T>>(rows_).slots[bucket];
    if (!slot) return;
    slot->wait();
    slot.reset();
  }

 private:
  /// Converts to the handle itself, so that the handle is made in its slot.
  template <class T>
  struct Start {
    Comm& comm;
    std::span<T> gradients;
    operator Handle<T>() const {
      return comm.all_reduce_async(
          gradients, reduction_of_gradients<how>(comm.world_size().value()), step_call<Traits>());
    }
  };

  template <class T>
  struct Row {
    std::unique_ptr<std::optional<Handle<T>>[]> slots;

    void reset(std::size_t buckets) {
      for (std::size_t b = 0; slots != nullptr && b != buckets; ++b)
        if (slots[b]) slots[b]->forget();
      slots = std::make_unique<std::optional<Handle<T>>[]>(buckets);
    }
  };

  template <std::size_t... K>
  static auto make_rows(std::index_sequence<K...>) -> std::tuple<
      Row<typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>>...>;

  std::size_t buckets_;
  decltype(make_rows(std::make_index_sequence<Traits::kinds().size>{})) rows_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handles of asynchronous calls on buckets, each of its own type.

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "lockstep/bucket/elements.hpp"

namespace lockstep::detail {

/// One slot per bucket for the handle of a call on its elements. `Start` begins such a call:
/// `Start::on(space, std::span<T>)` returns its handle. Handles stay where they are made, and their
/// type depends on the bucket's elements: there is a row of slots for each of `Ts`.
template <class Start, class Space, class... Ts>
class BucketHandles {
 public:
  explicit BucketHandles(std::size_t buckets) : buckets_(buckets) { forget(); }

  /// Drops every handle: the calls were part of a capture that failed and never happened.
  void forget() {
    std::apply([&](auto&... row) { (row.reset(buckets_), ...); }, rows_);
  }

  template <class T>
  void start(Space& space, std::size_t bucket, std::span<T> elements) {
    std::get<Row<T>>(rows_).slots[bucket].emplace(Begin<T>{space, elements});
  }

  template <class T>
  bool is_under_way(std::size_t bucket) const {
    return std::get<Row<T>>(rows_).slots[bucket].has_value();
  }

  /// Waits for a bucket's call, if one is under way.
  template <class T>
  void wait(std::size_t bucket) {
    auto& slot = std::get<Row<T>>(rows_).slots[bucket];
    if (!slot) return;
    slot->wait();
    slot.reset();
  }

 private:
  template <class T>
  using Handle = decltype(Start::on(std::declval<Space&>(), std::declval<std::span<T>>()));

  /// Converts to the handle itself, so that the handle is made in its slot.
  template <class T>
  struct Begin {
    Space& space;
    std::span<T> elements;
    operator Handle<T>() const { return Start::on(space, elements); }
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

  std::size_t buckets_;
  std::tuple<Row<Ts>...> rows_;
};

template <class Start, class Space, class Traits, std::size_t... K>
auto travelling_handles(std::index_sequence<K...>)
    -> BucketHandles<Start, Space,
                     typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>...>;

/// The handles of calls on a job's gradients, in the types in which these travel.
template <class Start, class Space, class Traits>
using TravellingHandles = decltype(travelling_handles<Start, Space, Traits>(
    std::make_index_sequence<Traits::kinds().size>{}));

}  // namespace lockstep::detail

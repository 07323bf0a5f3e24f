// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions that are under way, each with its own type of handle.

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep {

/// How gradients become one: as a value, because nvcc writes a type the way it was reached, which
/// would be through a job's policies.
template <bool Sums>
constexpr auto reduction_of_gradients() {
  if constexpr (Sums) {
    return Sum{};
  } else {
    return Average{};
  }
}

/// The handle of an all-reduce of gradients of T.
template <class Comm, class T, bool Sums>
using ReductionWork = decltype(std::declval<Comm&>().all_reduce_async(
    std::declval<std::span<T>>(), reduction_of_gradients<Sums>()));

/// One place per bucket for the handle of its reduction. Handles stay where they are made, and
/// their type depends on the bucket's elements: there is a row of places for each element type.
template <class Traits, class Comm>
class InFlight {
  static constexpr bool sums = Traits::sums_gradients;

 public:
  explicit InFlight(std::size_t buckets) : buckets_(buckets) { forget(); }

  /// Nothing is under way.
  void forget() {
    std::apply([&](auto&... row) { (row.reset(buckets_), ...); }, rows_);
  }

  template <class T>
  void start(Comm& comm, std::size_t bucket, std::span<T> gradients) {
    std::get<Row<T>>(rows_).places[bucket].emplace(Start<T>{comm, gradients});
  }

  template <class T>
  void wait(std::size_t bucket) {
    auto& place = std::get<Row<T>>(rows_).places[bucket];
    if (!place) return;
    place->wait();
    place.reset();
  }

 private:
  /// Converts to the handle itself, so that it is made in its place.
  template <class T>
  struct Start {
    Comm& comm;
    std::span<T> gradients;
    operator ReductionWork<Comm, T, sums>() const {
      return comm.all_reduce_async(gradients, reduction_of_gradients<sums>());
    }
  };

  template <class T>
  struct Row {
    std::unique_ptr<std::optional<ReductionWork<Comm, T, sums>>[]> places;

    void reset(std::size_t buckets) {
      places = std::make_unique<std::optional<ReductionWork<Comm, T, sums>>[]>(buckets);
    }
  };

  template <std::size_t... K>
  static auto make_rows(std::index_sequence<K...>) -> std::tuple<
      Row<typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>>...>;

  std::size_t buckets_;
  decltype(make_rows(std::make_index_sequence<Traits::kinds().size>{})) rows_;
};

}  // namespace lockstep

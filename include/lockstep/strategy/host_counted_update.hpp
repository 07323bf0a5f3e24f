// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of the host's updater that updates parameters one by one, and leaves some out.

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/strategy/counted_updates.hpp"

namespace lockstep::detail {

/// A base of `Self`, the updater. Where updates leave no parameter out there is nothing in it.
template <class Self, class Traits, class Comm>
class HostCountedUpdate {
 protected:
  HostCountedUpdate(Comm& comm, const typename Traits::layout& where) : counted_(comm, where) {}

  /// Updates parameters each with its own count of updates, as PyTorch does. Parameters that are
  /// not used are left out. Where gradients of zero are skipped, the elements of one wait until an
  /// average comes that is not zero.
  template <class T, class Pass>
  bool update_used(const Run& run, const auto& slice, const Pass& pass, std::size_t at,
                   std::span<const T> averages) const {
    bool finite = true;
    counted_.template for_each_part<T>(
        run, at, averages.size(), [&](std::size_t p, std::size_t begin, std::size_t end) {
          const auto part = averages.subspan(begin - at, end - begin);
          const auto constants = constants_of_parameter<T>(p);
          if constexpr (Traits::skips_zero_gradients) {
            if (counted_.is_undecided(p)) {
              if (note_part(run, slice, p, end, part)) return;
              const std::size_t first = counted_.template elements_of<T>(run, p).first;
              update_with_zeros<T>(pass, constants, std::max(slice.begin, first), begin);
            }
          }
          finite &= pass.with(constants, begin, part);
        });
    return finite;
  }

  /// Takes note of averages from element `at` of a run on: which parameters have some that are not
  /// zero.
  template <class T>
  void note_zeros(const Run& run, const auto& slice, std::size_t at,
                  std::span<const T> averages) const {
    counted_.template for_each_part<T>(
        run, at, averages.size(), [&](std::size_t p, std::size_t begin, std::size_t end) {
          if (counted_.is_undecided(p))
            note_part(run, slice, p, end, averages.subspan(begin - at, end - begin));
        });
  }

  /// Decides which gradients are zero, and updates this rank's parts that are zero where the rest
  /// of the parameter is not. Returns whether there may be some.
  bool update_zeros() {
    if (!counted_.decide()) return false;
    self().for_each_run([&]<class T>(const auto& run, const auto& slice, std::type_identity<T>) {
      const auto pass = self().template update_pass<T>(run, slice, 0);
      counted_.template for_each_part<T>(
          run, slice.begin, slice.count(), [&](std::size_t p, std::size_t begin, std::size_t end) {
            if (counted_.has_zeros(p))
              update_with_zeros<T>(pass, constants_of_parameter<T>(p), begin, end);
          });
    });
    return true;
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  template <class T>
  auto constants_of_parameter(std::size_t p) const {
    return self().template constants_of<Accumulator<T>>(self().group_of(p), counted_.number(p));
  }

  /// Takes note of averages that end at element `end`. Returns whether they are all zero.
  template <class T>
  bool note_part(const Run& run, const auto& slice, std::size_t p, std::size_t end,
                 std::span<const T> averages) const {
    const auto [first, last] = counted_.template elements_of<T>(run, p);
    return counted_.note(p, averages, end == std::min(slice.end, last),
                         first < slice.begin || last > slice.end);
  }

  template <class T, class Pass>
  static void update_with_zeros(const Pass& pass, const auto& constants, std::size_t begin,
                                std::size_t end) {
    static constexpr std::array<T, 256> zeros{};
    for (std::size_t at = begin; at < end; at += zeros.size())
      pass.with(constants, at, std::span(zeros).first(std::min(zeros.size(), end - at)));
  }

 protected:
  [[no_unique_address]] mutable CountedUpdatesOf<Traits, Comm> counted_;
};

}  // namespace lockstep::detail

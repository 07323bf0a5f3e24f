// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `LocalSGD<Every>`: ranks update alone and average their parameters periodically.

#include "lockstep/detail/hook/hook.hpp"

namespace lockstep {

/// Ranks update with their own gradients, and average parameters (not optimizer states) every
/// `Every` updates: PyTorch's `post_localSGD_hook`. The first `Start` steps average gradients.
template <std::size_t Every, std::uint64_t Start = 0>
struct LocalSGD {
  static constexpr std::string_view name = "LocalSGD";
  static constexpr bool well_formed = Every > 0;
  static constexpr bool is_alone_of_its_kind = true;
  /// 0: before the start; 1: a local step; 2: a local step that ends with an average.
  static constexpr std::uint64_t phase(std::uint64_t step) {
    if (!detail::has_begun<Start>(step)) return 0;
    return averages_parameters(step + 1) ? 2 : 1;
  }
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Every).number(Start); }

  /// `update` counts from 1.
  static constexpr bool averages_parameters(std::uint64_t update) {
    return update > Start && (update - Start) % Every == 0;
  }

  template <class T>
  class Bucket {
   public:
    explicit Bucket(auto& bucket) : step_(bucket.step()) {}

    void begin(std::span<T> values, auto& next) {
      in_flight_ = !detail::has_begun<Start>(step_);
      if (in_flight_) next.begin(values);
    }
    void finish(std::span<T> values, auto& next) {
      if (in_flight_) next.finish(values);
    }

   private:
    const std::uint64_t& step_;
    bool in_flight_ = false;
  };
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The first gradient of an update on the host that is not finite.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/core/element.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/strategy/anomaly_error.hpp"

namespace lockstep::detail {

/// It is noted in a pass, which another thread may be running, and thrown after it.
class NotedAnomaly {
 public:
  bool is_there() const { return found_.has_value(); }

  /// Notes the first of these averages that is not finite, which begin with element `at` of a run
  /// at `offset` of the arena. `sources` are all ranks' gradients, where they are at hand.
  template <class T, class... Sources>
  [[gnu::cold, gnu::noinline]] void note(std::size_t offset, std::size_t at,
                                         std::span<const T> averages, Sources... sources) {
    using A = Accumulator<T>;
    if (found_) return;
    std::size_t i = 0;
    while (i + 1 < averages.size() && is_finite(static_cast<A>(averages[i]))) ++i;
    Found found{offset + (at + i) * sizeof(T), static_cast<double>(static_cast<A>(averages[i]))};
    [[maybe_unused]] const auto look = [&](std::span<T* const> all) {
      for (std::size_t w = all.size(); w-- != 0;) {
        if (is_finite(static_cast<A>(all[w][at + i]))) continue;
        ++found.ranks;
        found.first_rank = w;
      }
    };
    (look(sources), ...);
    found_ = found;
  }

  /// Throws it and forgets it. `average` says what the gradient is, where no rank is known that
  /// gave it.
  template <class Layout>
  [[noreturn, gnu::cold, gnu::noinline]] void report(const Layout& layout, const char* average,
                                                     std::uint64_t step) {
    const Found found = found_.value_or(Found{});
    found_.reset();
    std::string whose = average;
    if (found.ranks != 0) whose = "of rank " + std::to_string(found.first_rank);
    if (found.ranks > 1) whose += " and " + std::to_string(found.ranks - 1) + " more";
    throw anomaly_error(layout, found.offset, std::to_string(found.value), whose, step);
  }

 private:
  /// A gradient that is not finite, and the ranks that gave it.
  struct Found {
    std::size_t offset = 0;  // bytes
    double value = 0;
    std::size_t ranks = 0;
    std::size_t first_rank = 0;
  };
  std::optional<Found> found_;
};

}  // namespace lockstep::detail

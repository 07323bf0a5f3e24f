// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The options of a job as named numbers that can be saved and restored exactly.

#include <variant>

#include "lockstep/detail/optim/constants.hpp"
#include "lockstep/detail/optim/optimizer.hpp"

namespace lockstep::detail {

/// A named number. 64-bit integers are not stored as double, which has only 53 bits of precision.
struct NamedNumber {
  using Value = std::variant<double, std::int64_t, std::uint64_t>;
  std::string name;
  Value value;
  friend bool operator==(const NamedNumber&, const NamedNumber&) = default;
};

template <class T>
NamedNumber::Value exact_number(const T& number) {
  static_assert(std::is_arithmetic_v<T>, "lockstep: options are numbers");
  if constexpr (std::floating_point<T>) return static_cast<double>(number);
  if constexpr (std::signed_integral<T>) return static_cast<std::int64_t>(number);
  if constexpr (std::unsigned_integral<T>) return static_cast<std::uint64_t>(number);
}

[[noreturn]] inline void reject_number(std::string_view name, const char* what) {
  throw Error("load", "the number " + std::string(name) + " " + what,
              "load it into a job with the same optimizer and schedule");
}

/// The number in the type of its option. Throws if it does not fit.
template <class T>
T number_as(const NamedNumber& kept) {
  return std::visit(
      [&]<class V>(V value) -> T {
        if constexpr (std::floating_point<T>) {
          return static_cast<T>(value);
        } else if constexpr (std::same_as<T, bool>) {
          return value != 0;
        } else if constexpr (std::integral<V>) {
          if (!std::in_range<T>(value)) reject_number(kept.name, "is too large for its option");
          return static_cast<T>(value);
        } else {
          // Every integer below 2^63 that a double can represent survives both casts.
          if (std::trunc(value) != value || std::abs(value) > 9.2e18 ||
              !std::in_range<T>(static_cast<std::int64_t>(value)))
            reject_number(kept.name, "is no integer, as its option is");
          return static_cast<T>(value);
        }
      },
      kept.value);
}

template <NumberOptions Options>
void list_numbers(const std::string& prefix, const Options& options, std::vector<NamedNumber>& to) {
  options.for_each([&](std::string_view name, const auto& number) {
    to.push_back({prefix + std::string(name), exact_number(number)});
  });
}

/// Sets the options that are in the list, through the const references that `for_each` passes. An
/// option that `for_each` computes cannot be set: throws if it differs.
template <NumberOptions Options>
void set_numbers(const std::string& prefix, Options& options, std::span<const NamedNumber> from) {
  std::as_const(options).for_each([&]<class T>(std::string_view name, const T& number) {
    for (const NamedNumber& kept : from) {
      if (kept.name.size() != prefix.size() + name.size() || !kept.name.starts_with(prefix) ||
          !kept.name.ends_with(name))
        continue;
      const T value = number_as<T>(kept);
      const std::less<const void*> before;
      if (!before(&number, &options) && before(&number, &options + 1)) {
        const_cast<T&>(number) = value;
      } else if (number != value) {
        reject_number(kept.name, "is computed, and comes out as another one here");
      }
    }
  });
}

/// A job's progress, equal on all ranks.
struct ReplicaProgress {
  std::uint64_t updates = 0;      ///< begun, skipped ones included
  std::uint64_t counted = 0;      ///< by the optimizer's rule, without skipped ones
  std::uint64_t skipped = 0;      ///< because gradients were not finite
  std::uint64_t epoch = 0;        ///< of the schedule
  bool knows_epoch = false;       ///< was an epoch set?
  std::uint64_t curve_ahead = 0;  ///< the schedule's step less `updates`, modulo 2^64
  std::optional<LossScale> loss_scale;
  /// The seed of the model's random numbers, if it draws any.
  std::optional<std::uint64_t> random_seed;
  /// The rank whose buffers are broadcast next, if not rank 0.
  std::optional<std::uint64_t> newest_buffers;
  /// The options of the optimizer ("optimizer/lr"; of a group with its own options
  /// "optimizer/1/lr") and of the schedule ("schedule/warmup").
  std::vector<NamedNumber> numbers;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The optimizer's pass on the host, and the anomaly axis, for NaN and infinite gradients.

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Anomaly : WithName<"Anomaly"> {};
}  // namespace axes

/// A loss or gradient that is not finite ends the job with an error that names rank, step and
/// parameter. The update pass detects it: some parameters may be affected; on a GPU a later call
/// throws. With loss scaling, steps that overflow are skipped until the scale is too small.
struct Stop : Choice<axes::Anomaly>, WithName<"Stop"> {};

/// A step whose gradients have no finite norm, taken before every update, is skipped and counted.
struct Skip : Choice<axes::Anomaly>, WithName<"Skip"> {};

/// Nothing is checked.
struct Ignore : Choice<axes::Anomaly>, WithName<"Ignore"> {};

/// The policy for a loss or gradient that is NaN or infinite: `Anomaly<Skip>`.
template <class How>
struct Anomaly : detail::ChoicePolicy<axes::Anomaly, How> {};

namespace detail {

/// Zero for finite numbers only; combined with `|`, the bits of `value - value` vectorise well.
template <std::floating_point A>
LOCKSTEP_HOST_DEVICE constexpr auto non_finite(A value) {
  using Bits = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
  // Under -ffast-math the compiler folds the difference to zero: test the exponent instead.
  constexpr Bits exponent = __builtin_bit_cast(Bits, static_cast<A>(__builtin_huge_val()));
  return static_cast<Bits>((__builtin_bit_cast(Bits, value) & exponent) == exponent);
#else
  return __builtin_bit_cast(Bits, value - value);
#endif
}
LOCKSTEP_HOST_DEVICE constexpr bool is_finite(double value) { return non_finite(value) == 0; }

struct AnomalyRecord {
  static constexpr unsigned long long nowhere = ~0ULL;

  std::uint64_t step = 0;                 // the first bad step, from 1; 0: none
  unsigned long long gradient = nowhere;  // the lowest byte offset of a gradient that is not finite
  bool loss = false;
  bool scale = false;  // the loss scale is too small
};

/// Where kernels look for anomalies and report them, part of a step's constants.
struct AnomalyWatch {
  AnomalyRecord* record = nullptr;
  std::uint32_t* seen = nullptr;  // in host memory, which the host reads without waiting
  const double* loss = nullptr;
};

inline Error anomaly_error(const std::string& what, std::uint64_t step) {
  return {"step " + std::to_string(step), what,
          "lower the learning rate, clip gradients (Clip<1.0>) or look at the batch; "
          "Anomaly<Skip> leaves such steps out, Anomaly<Ignore> goes on"};
}

Error anomaly_error(const auto& layout, std::size_t offset, const std::string& value,
                    const std::string& whose, std::uint64_t step) {
  const auto& placements = layout.plan().placements;
  std::size_t p = 0;
  while (p + 1 < placements.size() &&
         !(offset >= placements[p].offset && offset - placements[p].offset < placements[p].bytes))
    ++p;
  const std::size_t size = placements[p].bytes / layout.infos()[p].count();
  return anomaly_error("the gradient of " + std::string(layout.name(p)) + " is " + value +
                           " at element " + std::to_string((offset - placements[p].offset) / size) +
                           (whose.empty() ? "" : ", " + whose),
                       step);
}

/// The first gradient of a host update that is not finite: recorded in a pass, thrown afterwards.
class NotedAnomaly {
 public:
  bool is_there() const { return is_there_; }

  /// Records the first of these averages that is not finite: elements from `at` on of those at byte
  /// `offset` of the arena. `sources` are all ranks' gradients, if this rank can read them.
  template <class T, class... Sources>
  [[gnu::cold, gnu::noinline]] void note(std::size_t offset, std::size_t at,
                                         std::span<const T> averages, Sources... sources) {
    using A = Accumulator<T>;
    if (is_there_) return;
    std::size_t i = 0;
    while (i + 1 < averages.size() && is_finite(static_cast<A>(averages[i]))) ++i;
    is_there_ = true;
    offset_ = offset + (at + i) * sizeof(T);
    value_ = static_cast<double>(static_cast<A>(averages[i]));
    ranks_ = 0;
    [[maybe_unused]] const auto look = [&](std::span<T* const> all) {
      for (std::size_t w = all.size(); w-- != 0;) {
        if (is_finite(static_cast<A>(all[w][at + i]))) continue;
        ++ranks_;
        first_rank_ = w;
      }
    };
    (look(sources), ...);
  }

  /// Throws the anomaly and clears it. `average` describes the gradient if no rank is known.
  [[noreturn, gnu::cold, gnu::noinline]] void report(const auto& layout, const char* average,
                                                     std::uint64_t step) {
    is_there_ = false;
    std::string whose = average;
    if (ranks_ != 0) whose = "of rank " + std::to_string(first_rank_);
    if (ranks_ > 1) whose += " and " + std::to_string(ranks_ - 1) + " more";
    throw anomaly_error(layout, offset_, std::to_string(value_), whose, step);
  }

 private:
  bool is_there_ = false;
  std::size_t offset_ = 0;  // bytes
  double value_ = 0;
  std::size_t ranks_ = 0;
  std::size_t first_rank_ = 0;
};

template <class Rule, class T>
using StatesOf = std::array<Accumulator<T>*, Rule::states>;

/// Updates `count` elements in one pass; `scale(g)` clips or averages before the rule. Returns
/// whether all gradients were finite; always true without `Watches`.
template <class Rule, bool Watches, class T, class Update, class Scale>
bool update_elements(Update update, T* __restrict parameters, const T* __restrict gradients,
                     const StatesOf<Rule, T>& states, std::size_t count, Scale scale) {
  using A = Accumulator<T>;
  // Captures are by value: the compiler would reload captured references after every store.
  const auto pass = [update, scale, parameters, gradients, count](auto* __restrict... state) {
    auto non_finites = non_finite(A{0});
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      A parameter = static_cast<A>(parameters[i]);
      const A gradient = static_cast<A>(gradients[i]);
      if constexpr (Watches) non_finites |= non_finite(gradient);
      A values[] = {state[i]..., A{}};  // one more, so that the array is never empty
      update(parameter, scale(gradient), values);
      parameters[i] = static_cast<T>(parameter);
      std::size_t k = 0;
      ((state[i] = values[k++]), ...);
    }
    return non_finites;
  };
  return std::apply(pass, states) == 0;
}

template <class A>
struct Scaled {
  A factor;
  constexpr A operator()(A gradient) const { return factor * gradient; }
};

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reduce operations of collectives, and those of gradients.

#include <bit>

#include "lockstep/detail/core/element.hpp"

namespace lockstep {

/// An operation has three steps, which each backend can fuse with its loads and stores: `prepare`
/// widens one rank's value, `combine` joins two prepared values in rank order, and `finish` narrows
/// the result for a world of `ranks`. One of them exists only for the supported element types.
template <class Op, class T>
concept ReduceOp = Element<T> && requires(const Op op, T value, std::size_t ranks) {
  { Op::name } -> std::convertible_to<std::string_view>;
  {
    op.template finish<T>(op.combine(op.prepare(value), op.prepare(value)), ranks)
  } -> std::same_as<T>;
};

namespace detail {

/// The type in which Op combines values of T.
template <class T, class Op>
using Prepared = decltype(std::declval<const Op&>().prepare(T{}));

template <Element T>
LOCKSTEP_HOST_DEVICE constexpr Accumulator<T> widen(T value) {
  return static_cast<Accumulator<T>>(value);
}

/// The base of operations that do not depend on the world size. Some widen in their own `prepare`.
struct Narrowing {
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T prepare(T value) const {
    return value;
  }
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T finish(auto accumulated, std::size_t) const {
    return static_cast<T>(accumulated);
  }
};

/// Are combined values results already? `finish` is that of `Narrowing`, and no type is narrowed.
template <class Op, class T>
concept FinishedAsCombined = std::same_as<T, Prepared<T, Op>> && requires {
  requires std::same_as<decltype(&Op::template finish<T, T>),
                        decltype(&Narrowing::template finish<T, T>)>;
};

/// Half and BFloat16 compare as float.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr bool less(T a, T b) {
  if constexpr (std::integral<T> || std::floating_point<T>) {
    return a < b;
  } else {
    return static_cast<float>(a) < static_cast<float>(b);
  }
}

template <class T>
LOCKSTEP_HOST_DEVICE constexpr bool is_nan(T a) {
  if constexpr (std::integral<T>) {
    return false;
  } else {
    const auto wide = widen(a);
    return wide != wide;
  }
}

}  // namespace detail

/// The sum over ranks; integers wrap around.
struct Sum : detail::Narrowing {
  static constexpr std::string_view name = "sum";
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr auto prepare(T value) const {
    return detail::widen(value);
  }
  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr A combine(A a, A b) const {
    return static_cast<A>(a + b);
  }
};

/// The mean over ranks, of floating elements: an integer mean would silently lose its remainder.
struct Average {
  static constexpr std::string_view name = "average";
  template <FloatingElement T>
  LOCKSTEP_HOST_DEVICE constexpr auto prepare(T value) const {
    return detail::widen(value);
  }
  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr A combine(A a, A b) const {
    return a + b;
  }
  template <FloatingElement T>
  LOCKSTEP_HOST_DEVICE constexpr T finish(detail::Accumulator<T> sum, std::size_t ranks) const {
    return static_cast<T>(sum / static_cast<detail::Accumulator<T>>(ranks));
  }
};

/// The sum over ranks of `factor` times each value, in one pass.
template <std::floating_point Factor = float>
struct PreMultipliedSum : Sum {
  static constexpr std::string_view name = "pre-multiplied sum";
  Factor factor = 1;

  constexpr explicit PreMultipliedSum(Factor f) : factor(f) {}

  template <FloatingElement T>
  LOCKSTEP_HOST_DEVICE constexpr detail::Accumulator<T> prepare(T value) const {
    return detail::widen(value) * static_cast<detail::Accumulator<T>>(factor);
  }
};

/// The product over ranks; integers wrap around.
struct Product : detail::Narrowing {
  static constexpr std::string_view name = "product";
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr auto prepare(T value) const {
    return detail::widen(value);
  }
  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr A combine(A a, A b) const {
    if constexpr (std::integral<A>) {  // 16-bit operands promote to int and could overflow there
      return static_cast<A>(static_cast<std::uint64_t>(a) * b);
    } else {
      return a * b;
    }
  }
};

/// The minimum over ranks. A NaN on any rank is the result, so that a broken gradient shows.
struct Min : detail::Narrowing {
  static constexpr std::string_view name = "min";
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return detail::is_nan(a) || detail::less(a, b) ? a : b;
  }
};

/// The maximum over ranks; NaN as in `Min`.
struct Max : detail::Narrowing {
  static constexpr std::string_view name = "max";
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return detail::is_nan(a) || detail::less(b, a) ? a : b;
  }
};

/// Bits that are set on all ranks.
struct BitAnd : detail::Narrowing {
  static constexpr std::string_view name = "bitwise and";
  template <IntegerElement T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return static_cast<T>(a & b);
  }
};

/// Bits that are set on any rank.
struct BitOr : detail::Narrowing {
  static constexpr std::string_view name = "bitwise or";
  template <IntegerElement T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return static_cast<T>(a | b);
  }
};

/// Bits that are set on an odd number of ranks.
struct BitXor : detail::Narrowing {
  static constexpr std::string_view name = "bitwise xor";
  template <IntegerElement T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

static_assert(ReduceOp<Sum, Half> && ReduceOp<Sum, std::int32_t> &&
              ReduceOp<Product, std::uint16_t>);
static_assert(ReduceOp<Average, float> && !ReduceOp<Average, std::int32_t>);
static_assert(ReduceOp<PreMultipliedSum<>, BFloat16> && !ReduceOp<PreMultipliedSum<>, std::int8_t>);
static_assert(ReduceOp<Min, double> && ReduceOp<Max, std::uint8_t>);
static_assert(ReduceOp<BitAnd, std::int64_t> && !ReduceOp<BitOr, float> && !ReduceOp<BitXor, Half>);

namespace detail {

/// How gradients are reduced. A folded sum leaves the division to the norm and the update's factor.
enum class GradientReduction : std::uint8_t {
  sum,
  average,
  folded_sum,
  /// `Half` could overflow: it is first divided, exactly, by a power of two not below the ranks.
  folded_sum_of_halves,
};

/// A communicator that averages with a sum and one more pass over memory: `averages_by_sums`.
template <class Comm>
concept AveragingBySums = requires { requires Comm::averages_by_sums; };

/// By value, because nvcc spells a type by the path to it: kernels' names cannot contain policies.
template <GradientReduction How>
constexpr auto reduction_of_gradients(std::size_t ranks) {
  if constexpr (How == GradientReduction::average) {
    return Average{};
  } else if constexpr (How == GradientReduction::folded_sum_of_halves) {
    return PreMultipliedSum<float>(1 / static_cast<float>(std::bit_ceil(ranks)));
  } else {
    return Sum{};
  }
}

/// The factor that turns the results into averages.
constexpr double folded_factor(GradientReduction how, std::size_t ranks) {
  const auto number = static_cast<double>(ranks);
  if (how == GradientReduction::folded_sum) return 1 / number;
  if (how == GradientReduction::folded_sum_of_halves)
    return static_cast<double>(std::bit_ceil(ranks)) / number;
  return 1;
}

}  // namespace detail

}  // namespace lockstep

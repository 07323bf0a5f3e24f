// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements and reduce operations as NCCL names them, where it has them.

#include <nccl.h>

#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/comm/combine.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail::nccl {

/// NCCL's name for T; `ncclNumTypes` for 16-bit integers, which it does not have.
template <Element T>
constexpr ncclDataType_t data_type() {
  switch (element_kind<T>()) {
    case ElementKind::f64:
      return ncclFloat64;
    case ElementKind::f32:
      return ncclFloat32;
    case ElementKind::f16:
      return ncclFloat16;
    case ElementKind::bf16:
      return ncclBfloat16;
    case ElementKind::i8:
      return ncclInt8;
    case ElementKind::i32:
      return ncclInt32;
    case ElementKind::i64:
      return ncclInt64;
    case ElementKind::u8:
      return ncclUint8;
    case ElementKind::u32:
      return ncclUint32;
    case ElementKind::u64:
      return ncclUint64;
    default:
      return ncclNumTypes;
  }
}

template <class Op>
inline constexpr bool is_pre_multiplied = false;
template <class Factor>
inline constexpr bool is_pre_multiplied<PreMultipliedSum<Factor>> = true;

/// The operation that NCCL has to perform where the first and last step are made elsewhere.
template <class Op>
struct Middle {
  using type = Op;
};
template <class Op>
struct Middle<Combining<Op>> {
  using type = std::conditional_t<std::same_as<Op, Average> || is_pre_multiplied<Op>, Sum, Op>;
};

/// NCCL's name for the operation on T, `ncclNumOps` where it has none that does the same. Its
/// minimum and maximum of floats lose a NaN, which lockstep's must not. Its average multiplies by
/// 1/N in T, so that an average of bfloat16 over 3 ranks is 0.2% too large, and never uses the
/// network's own sums: averages are sums, and a pass of lockstep's (`Factors`).
template <class Whole, Element T>
constexpr ncclRedOp_t reduce_operation() {
  using Op = typename Middle<Whole>::type;
  if constexpr (data_type<T>() == ncclNumTypes) return ncclNumOps;
  if constexpr (std::same_as<Op, Sum>) return ncclSum;
  if constexpr (std::same_as<Op, Product>) return ncclProd;
  if constexpr (std::same_as<Op, Average>) return ncclSum;
  if constexpr (std::same_as<Op, Min> && std::integral<T>) return ncclMin;
  if constexpr (std::same_as<Op, Max> && std::integral<T>) return ncclMax;
  return ncclNumOps;
}

/// Does NCCL reduce T by Op itself?
template <class Op, class T>
inline constexpr bool reduces = reduce_operation<Op, T>() != ncclNumOps ||
                                (is_pre_multiplied<Op> && data_type<T>() != ncclNumTypes);

static_assert(reduces<Sum, float> && reduces<Average, BFloat16> && reduces<Min, std::int8_t>);
static_assert(reduce_operation<Average, float>() == ncclSum);
static_assert(reduces<PreMultipliedSum<>, Half> && !reduces<Sum, std::int16_t>);
static_assert(!reduces<Min, float> && !reduces<BitXor, std::uint32_t>);
static_assert(reduce_operation<Combining<Average>, float>() == ncclSum &&
              reduce_operation<Combining<PreMultipliedSum<>>, float>() == ncclSum &&
              reduce_operation<Combining<Product>, double>() == ncclProd &&
              !reduces<Combining<Max>, float>);

/// The factors of a reduction. NCCL multiplies every element by `before`, which must be exact in T;
/// a pass of lockstep's multiplies the result by `after` and divides it by `divisor`, in the
/// arithmetic of sums, and rounds once.
struct Factors {
  double before = 1;
  double after = 1;
  double divisor = 1;

  constexpr bool needs_pass() const { return after != 1 || divisor != 1; }
  friend constexpr bool operator==(const Factors&, const Factors&) = default;
};

/// The largest power of two that is not larger than `factor`, and is a normal number of T.
template <class T>
constexpr double power_of_two_below(double factor) {
  const double least = std::same_as<T, Half> ? 0x1p-14 : 0x1p-126;
  double power = 1;
  while (power > factor && power > least) power /= 2;
  while (power * 2 <= factor && power < 0x1p15) power *= 2;
  return power;
}

/// Sums of `Half` could leave its range where the result does not: what is more than the factor's
/// power of two is multiplied afterwards, so that no sum is larger than with the whole factor.
template <class T, class Op>
constexpr Factors factors_of(const Op& op, std::size_t ranks) {
  if constexpr (std::same_as<Op, Average>) {
    const auto number = static_cast<double>(ranks);
    if constexpr (!std::same_as<T, Half>) return {1, 1, number};
    const double power = power_of_two_below<T>(1 / number);
    return {power, 1, number * power};
  } else if constexpr (is_pre_multiplied<Op>) {
    using A = Accumulator<T>;
    const A factor = static_cast<A>(op.factor);
    if (static_cast<A>(static_cast<T>(factor)) == factor) return {static_cast<double>(factor)};
    const double whole = static_cast<double>(factor);
    const double power = power_of_two_below<T>(whole < 0 ? -whole : whole);
    return {power, whole / power};
  } else {
    return {};
  }
}

static_assert(factors_of<BFloat16>(Average{}, 3) == Factors{1, 1, 3});
static_assert(factors_of<Half>(Average{}, 3) == Factors{0.25, 1, 0.75});
static_assert(factors_of<Half>(Average{}, 8) == Factors{0.125, 1, 1});

/// The last step of such a reduction, as an operation of one rank.
struct Rescaled {
  static constexpr std::string_view name = "rescaled";
  Factors factors;

  template <FloatingElement T>
  LOCKSTEP_HOST_DEVICE constexpr auto prepare(T value) const {
    return widen(value);
  }
  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr A combine(A a, A) const {
    return a;
  }
  template <FloatingElement T>
  LOCKSTEP_HOST_DEVICE constexpr T finish(Accumulator<T> value, std::size_t) const {
    using A = Accumulator<T>;
    return static_cast<T>(value * static_cast<A>(factors.after) / static_cast<A>(factors.divisor));
  }
};

/// Calls `call(operation)` with NCCL's operation, made for the call where NCCL has to multiply. It
/// keeps a copy of what it needs: the operation ends with the call.
template <class Op, class T, class F>
ncclResult_t with_operation(double before, ncclComm_t comm, const F& call) {
  if constexpr (std::same_as<Op, Average> || is_pre_multiplied<Op>) {
    if (before != 1) {
      T factor = static_cast<T>(static_cast<Accumulator<T>>(before));
      ncclRedOp_t operation = ncclNumOps;
      const ncclResult_t made = ncclRedOpCreatePreMulSum(&operation, &factor, data_type<T>(),
                                                         ncclScalarHostImmediate, comm);
      if (made != ncclSuccess) return made;
      const ncclResult_t called = call(operation);
      const ncclResult_t ended = ncclRedOpDestroy(operation, comm);
      return ended == ncclSuccess ? called : ended;
    }
    return call(ncclSum);
  } else {
    return call(reduce_operation<Op, T>());
  }
}

}  // namespace lockstep::detail::nccl

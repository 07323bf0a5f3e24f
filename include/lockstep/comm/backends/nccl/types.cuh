// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements and reduce operations as NCCL names them, where it has them.

#include <nccl.h>

#include <concepts>
#include <type_traits>

#include "lockstep/comm/combining.hpp"
#include "lockstep/core/element.hpp"
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
/// minimum and maximum of floats lose a NaN, which lockstep's must not.
template <class Whole, Element T>
constexpr ncclRedOp_t reduce_operation() {
  using Op = typename Middle<Whole>::type;
  if constexpr (data_type<T>() == ncclNumTypes) return ncclNumOps;
  if constexpr (std::same_as<Op, Sum>) return ncclSum;
  if constexpr (std::same_as<Op, Product>) return ncclProd;
  if constexpr (std::same_as<Op, Average>) return ncclAvg;
  if constexpr (std::same_as<Op, Min> && std::integral<T>) return ncclMin;
  if constexpr (std::same_as<Op, Max> && std::integral<T>) return ncclMax;
  return ncclNumOps;
}

/// Does NCCL reduce T by Op itself?
template <class Op, class T>
inline constexpr bool reduces = reduce_operation<Op, T>() != ncclNumOps ||
                                (is_pre_multiplied<Op> && data_type<T>() != ncclNumTypes);

static_assert(reduces<Sum, float> && reduces<Average, BFloat16> && reduces<Min, std::int8_t>);
static_assert(reduces<PreMultipliedSum<>, Half> && !reduces<Sum, std::int16_t>);
static_assert(!reduces<Min, float> && !reduces<BitXor, std::uint32_t>);
static_assert(reduce_operation<Combining<Average>, float>() == ncclSum &&
              reduce_operation<Combining<PreMultipliedSum<>>, float>() == ncclSum &&
              reduce_operation<Combining<Product>, double>() == ncclProd &&
              !reduces<Combining<Max>, float>);

/// Calls `call(operation)` with NCCL's operation, made for the call where it holds a factor. NCCL
/// keeps a copy of what it needs: the operation ends with the call. The factor is rounded to T.
template <class T, class Op, class F>
ncclResult_t with_operation(const Op& op, ncclComm_t comm, const F& call) {
  if constexpr (is_pre_multiplied<Op>) {
    T factor = static_cast<T>(static_cast<Accumulator<T>>(op.factor));
    ncclRedOp_t operation = ncclNumOps;
    const ncclResult_t made = ncclRedOpCreatePreMulSum(&operation, &factor, data_type<T>(),
                                                       ncclScalarHostImmediate, comm);
    if (made != ncclSuccess) return made;
    const ncclResult_t called = call(operation);
    const ncclResult_t ended = ncclRedOpDestroy(operation, comm);
    return ended == ncclSuccess ? called : ended;
  } else {
    return call(reduce_operation<Op, T>());
  }
}

}  // namespace lockstep::detail::nccl

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a rank's arguments say of a call, and whose memory they are: the host's or a GPU's.
/// Those that cannot be right fail before it is made.

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call_arguments.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep {

/// Of this rank in its world.
struct GpuArguments : CallArguments {
  /// A call as the others will compare it. Arguments that cannot be right fail here and now.
  template <class T>
  Call describe(CollectiveKind kind, std::size_t count, Rank root = Rank{0}) const {
    check<T>(kind, root);
    return make_call<T>(kind, count, false, root.value());
  }
  template <class T, class Op>
  Call describe(CollectiveKind kind, std::size_t count, Rank root = Rank{0}) const {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    return describe<T>(kind, count, root).with(Op::name);
  }

  /// Of nothing, the host takes care.
  template <class T>
  static bool is_host(std::span<T> data) {
    return data.empty() || is_host_memory(data.data());
  }
  template <class In, class T>
  bool is_host(const Call& call, std::span<In> in, std::span<T> out) const {
    static_assert(std::same_as<std::remove_const_t<In>, T>,
                  "lockstep: a collective's arguments have one element type");
    const bool host = is_host(in);
    if (host == is_host(out)) return host;
    throw Error(call.text(),
                host ? "in is host memory and out is device memory"
                     : "in is device memory and out is host memory",
                "give both arguments in the same memory", rank);
  }
};

}  // namespace lockstep

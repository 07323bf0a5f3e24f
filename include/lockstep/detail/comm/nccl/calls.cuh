// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file NCCL's element types and reduce operations, and its collectives on device memory.

#include "lockstep/detail/comm/combine.cuh"
#include "lockstep/detail/comm/generic.hpp"
#include "lockstep/detail/comm/nccl/engine.cuh"

namespace lockstep::detail::nccl {

/// NCCL's type for T; `ncclNumTypes` for 16-bit integers, which NCCL lacks.
template <Element T>
constexpr ncclDataType_t data_type() {
  constexpr ncclDataType_t none = ncclNumTypes;
  constexpr ncclDataType_t names[] = {// in the order of `ElementKind`
                                      none,     ncclFloat64, ncclFloat32, ncclFloat16, ncclBfloat16,
                                      ncclInt8, none,        ncclInt32,   ncclInt64,   ncclUint8,
                                      none,     ncclUint32,  ncclUint64};
  static_assert(std::size(names) == element_kinds);
  return names[static_cast<std::size_t>(element_kind<T>())];
}

template <class Op>
inline constexpr bool is_pre_multiplied = false;
template <class Factor>
inline constexpr bool is_pre_multiplied<PreMultipliedSum<Factor>> = true;

/// The operation that NCCL performs: averages and pre-multiplied sums become sums (see `Factors`).
template <class Op>
std::conditional_t<std::same_as<Op, Average> || is_pre_multiplied<Op>, Sum, Op> middle_of(
    const Op&);
template <class Op>
decltype(middle_of(std::declval<Op>())) middle_of(const Combining<Op>&);

/// NCCL's operation for Op on T, else `ncclNumOps`. NCCL's min and max of floats lose NaN. Its
/// average multiplies by 1/N in T: for bfloat16 over 3 ranks, the result is 0.2% too large.
template <class Whole, Element T>
constexpr ncclRedOp_t reduce_operation() {
  using Op = decltype(middle_of(std::declval<Whole>()));
  if constexpr (data_type<T>() == ncclNumTypes) return ncclNumOps;
  if constexpr (std::same_as<Op, Sum>) return ncclSum;
  if constexpr (std::same_as<Op, Product>) return ncclProd;
  if constexpr (std::same_as<Op, Min> && std::integral<T>) return ncclMin;
  if constexpr (std::same_as<Op, Max> && std::integral<T>) return ncclMax;
  return ncclNumOps;
}

template <class Op, class T>
inline constexpr bool reduces = reduce_operation<Op, T>() != ncclNumOps;

/// NCCL multiplies every element by `before`, exact in T; a pass of lockstep computes sum * `after`
/// / `divisor` in the accumulator type and rounds once. This is its reduce operation, of one rank.
struct Factors {
  static constexpr std::string_view name = "rescaled";
  double before = 1;
  double after = 1;
  double divisor = 1;

  constexpr bool needs_pass() const { return after != 1 || divisor != 1; }
  friend constexpr bool operator==(const Factors&, const Factors&) = default;

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
    return static_cast<T>(value * static_cast<A>(after) / static_cast<A>(divisor));
  }
};

/// The largest power of two up to `factor` that is a normal number of T.
template <class T>
constexpr double power_of_two_below(double factor) {
  const double least = std::same_as<T, Half> ? 0x1p-14 : 0x1p-126;
  double power = 1;
  while (power > factor && power > least) power /= 2;
  while (power * 2 <= factor && power < 0x1p15) power *= 2;
  return power;
}

/// Sums of `Half` may overflow: elements are first multiplied by a power of two up to the factor.
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

/// Calls `call(operation)`; an operation that multiplies is made for it and destroyed at once.
template <class Op, class T, class F>
ncclResult_t with_operation(double before, ncclComm_t comm, const F& call) {
  if (before == 1) return call(reduce_operation<Op, T>());
  T factor = static_cast<T>(static_cast<Accumulator<T>>(before));
  ncclRedOp_t operation = ncclNumOps;
  const ncclResult_t made =
      ncclRedOpCreatePreMulSum(&operation, &factor, data_type<T>(), ncclScalarHostImmediate, comm);
  if (made != ncclSuccess) return made;
  const ncclResult_t called = call(operation);
  const ncclResult_t ended = ncclRedOpDestroy(operation, comm);
  return ended == ncclSuccess ? called : ended;
}

/// NCCL's own collectives where it has the operation, else the generic form. Data moves as bytes.
class Transport {
 public:
  explicit Transport(Engine& engine) : engine_(engine) {}

  Rank rank() const { return engine_.rank(); }
  WorldSize world_size() const { return WorldSize{engine_.world()}; }

  /// In a world of one, NCCL 2.28 skips the last elements of some pre-multiplied sums.
  template <class C>
    requires reduces<typename C::operation, typename C::element>
  void execute(const C& call) {
    using T = typename C::element;
    using Op = typename C::operation;
    if (engine_.world() == 1) return execute_generically(*this, call);
    const Factors factors = factors_of<T>(call.op, engine_.world());
    constexpr const char* name = C::kind == CollectiveKind::all_reduce ? "ncclAllReduce"
                                 : C::kind == CollectiveKind::reduce   ? "ncclReduce"
                                                                       : "ncclReduceScatter";
    make(name, [&](ncclComm_t comm) {
      return with_operation<Op, T>(factors.before, comm, [&](ncclRedOp_t operation) {
        const T* const in = call.in.data();
        T* const out = call.out.data();
        if constexpr (C::kind == CollectiveKind::all_reduce) {
          return ncclAllReduce(in, out, call.count, data_type<T>(), operation, comm, stream());
        } else if constexpr (C::kind == CollectiveKind::reduce) {
          return ncclReduce(in, out, call.count, data_type<T>(), operation, peer(call.root), comm,
                            stream());
        } else {
          return ncclReduceScatter(in, out, call.count, data_type<T>(), operation, comm, stream());
        }
      });
    });
    if constexpr (FloatingElement<T>) {
      const bool takes = C::kind != CollectiveKind::reduce || rank() == call.root;
      if (factors.needs_pass() && takes)
        passes().combine(std::span<const T>(call.out), call.out, factors);
    }
  }

  template <class C>
    requires(C::is_message || C::kind == CollectiveKind::broadcast ||
             C::kind == CollectiveKind::all_gather)
  void execute(const C& call) {
    constexpr ncclDataType_t byte = ncclUint8;
    constexpr const char* name = C::kind == CollectiveKind::broadcast    ? "ncclBroadcast"
                                 : C::kind == CollectiveKind::all_gather ? "ncclAllGather"
                                 : C::kind == CollectiveKind::send       ? "ncclSend"
                                                                         : "ncclRecv";
    make(name, [&](ncclComm_t comm) {
      const std::size_t bytes = call.count * sizeof(typename C::element);
      if constexpr (C::kind == CollectiveKind::broadcast) {
        auto* const data = call.data().data();
        return ncclBroadcast(data, data, bytes, byte, peer(call.root), comm, stream());
      } else if constexpr (C::kind == CollectiveKind::all_gather) {
        return ncclAllGather(call.in.data(), call.out.data(), bytes, byte, comm, stream());
      } else if constexpr (C::kind == CollectiveKind::send) {
        return ncclSend(call.in.data(), bytes, byte, peer(call.root), comm, stream());
      } else {
        return ncclRecv(call.out.data(), bytes, byte, peer(call.root), comm, stream());
      }
    });
  }

  /// The messages of `f()` form one NCCL group.
  template <class F>
  void grouped(const F& f) {
    engine_.nccl("ncclGroupEnd", [&](ncclComm_t comm) {
      const ncclResult_t started = ncclGroupStart();
      if (started != ncclSuccess) return started;
      group_ = comm;
      group_result_ = ncclSuccess;
      try {
        f();
      } catch (...) {
        group_ = nullptr;
        static_cast<void>(ncclGroupEnd());
        throw;
      }
      group_ = nullptr;
      const ncclResult_t ended = ncclGroupEnd();
      return group_result_ == ncclSuccess ? ended : group_result_;
    });
  }

  template <class T>
  std::span<T> scratch(const T*, std::size_t wanted, std::size_t) const {
    return {reinterpret_cast<T*>(engine_.scratch()),
            std::min(wanted, Engine::scratch_bytes / sizeof(T))};
  }
  StreamPasses passes() const { return StreamPasses(stream()); }

 private:
  static int peer(Rank rank) { return static_cast<int>(rank.value()); }
  cudaStream_t stream() const { return engine_.stream(); }

  template <class F>
  void make(const char* name, const F& call) {
    if (group_ == nullptr) {
      engine_.nccl(name, call);
    } else if (const ncclResult_t result = call(group_); !is_made(result)) {
      group_result_ = result;
    }
  }

  Engine& engine_;
  ncclComm_t group_ = nullptr;  // null outside of a group
  ncclResult_t group_result_ = ncclSuccess;
};

}  // namespace lockstep::detail::nccl

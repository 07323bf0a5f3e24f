// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives executed by Gloo's algorithms, inside a call that all ranks have agreed on.

#include "lockstep/detail/comm/combine.hpp"
#include "lockstep/detail/comm/gloo/connections.hpp"

namespace lockstep::detail::over_gloo {

/// Do partial results fit the type? Sums of 16-bit floats do not: a ring would round every step.
template <class T, class Op>
inline constexpr bool travels_in_place = sizeof(Prepared<T, Op>) == sizeof(T);

/// All-reduce, broadcast, all-gather, all-to-all and messages; others have their generic form.
class Transport {
 public:
  /// Gloo matches messages by `tag`, the collective's number, or by `slot`, the purpose.
  Transport(const std::shared_ptr<Connections>& connections, std::uint64_t tag,
            OwnSlot slot = OwnSlot::piece)
      : connections_(connections),
        tag_(static_cast<std::uint32_t>(tag)),
        slot_(static_cast<std::uint64_t>(slot)) {}

  Rank rank() const { return Rank{static_cast<std::size_t>(connections_->rank)}; }
  WorldSize world_size() const { return WorldSize{world()}; }

  /// Uses Gloo's ring, or bcube for few bytes, if partial results fit the type; else slices.
  template <class T, class Op>
  void execute(const calls::AllReduce<T, Op>& call) const {
    if (call.count == 0) return;
    if constexpr (travels_in_place<T, Op>) {
      const std::span<const T> values(call.out);
      if constexpr (requires { call.op.factor; }) HostPasses::prepare(values, call.out, call.op);
      ::gloo::AllreduceOptions options(connections_);
      options.setOutput(call.out.data(), call.count);
      options.setReduceFunction(combiner<T>(call.op));
      options.setAlgorithm(call.out.size_bytes() <= few_bytes
                               ? ::gloo::AllreduceOptions::Algorithm::BCUBE
                               : ::gloo::AllreduceOptions::Algorithm::RING);
      options.setTag(tag_);
      ::gloo::allreduce(options);
      // Elements were not widened, so narrowing is no step here.
      if constexpr (!std::derived_from<Op, Narrowing>)
        HostPasses::finish(values, call.out, call.op, world());
    } else {
      all_reduce_slices(call);
    }
  }

  template <class T>
  void execute(const calls::Broadcast<T>& call) const {
    if (call.count == 0) return;
    ::gloo::BroadcastOptions options(connections_);
    options.setOutput(call.data().data(), call.count);
    options.setRoot(static_cast<int>(call.root.value()));
    options.setTag(tag_);
    ::gloo::broadcast(options);
  }

  template <class C>
    requires(C::kind == CollectiveKind::all_gather || C::kind == CollectiveKind::all_to_all)
  void execute(const C& call) const {
    constexpr bool gathers = C::kind == CollectiveKind::all_gather;
    if (call.count == 0) return;
    std::conditional_t<gathers, ::gloo::AllgatherOptions, ::gloo::AlltoallOptions> options(
        connections_);
    // Without an input, Gloo gathers in place.
    if (!gathers || call.in.data() != call.out.data() + rank().value() * call.count)
      options.setInput(unguarded(call.in), call.in.size());
    options.setOutput(call.out.data(), call.out.size());
    options.setTag(tag_);
    if constexpr (gathers) {
      ::gloo::allgather(options);
    } else {
      ::gloo::alltoall(options);
    }
  }

  template <class C>
    requires C::is_message
  void execute(const C& message) const {
    if (message.count == 0) return;
    constexpr bool sends = C::kind == CollectiveKind::send;
    const int peer = static_cast<int>(message.root.value());
    const auto buffer =
        connections_->createUnboundBuffer(sends ? unguarded(message.in) : message.out.data(),
                                          message.count * sizeof(typename C::element));
    if constexpr (sends) {
      buffer->send(peer, slot_);
      buffer->waitSend();
    } else {
      buffer->recv(peer, slot_);
      buffer->waitRecv();
    }
  }

 private:
  /// Up to this many bytes, fewer messages matter more than shorter ones.
  static constexpr std::size_t few_bytes = 16 << 10;

  std::size_t world() const { return static_cast<std::size_t>(connections_->size); }

  /// Gloo takes non-const pointers even to memory that it only reads.
  template <class T>
  static T* unguarded(std::span<const T> values) {
    return const_cast<T*>(values.data());
  }

  template <class T, class Op>
  static auto combiner(const Op& op) {
    return [op](void* out, const void* left, const void* right, std::size_t count) {
      using Value = Prepared<T, Op>;
      auto* const result = static_cast<Value*>(out);
      const auto* const a = static_cast<const Value*>(left);
      const auto* const b = static_cast<const Value*>(right);
      for (std::size_t i = 0; i < count; ++i) result[i] = op.combine(a[i], b[i]);
    };
  }

  /// Each rank combines one slice, rounding once, between an all-to-all and an all-gather.
  template <class T, class Op>
  void all_reduce_slices(const calls::AllReduce<T, Op>& call) const {
    std::vector<std::int64_t> counts(world());
    for (std::size_t w = 0; w < world(); ++w)
      counts[w] =
          static_cast<std::int64_t>(call.count * (w + 1) / world() - call.count * w / world());
    const std::int64_t own = counts[rank().value()];
    std::vector<T> slice(static_cast<std::size_t>(own));
    std::vector<T> parts(slice.size() * world());
    ::gloo::AlltoallvOptions deal(connections_);
    deal.setInput(unguarded(call.in), counts);
    deal.setOutput(parts.data(), std::vector<std::int64_t>(world(), own));
    deal.setTag(tag_);
    ::gloo::alltoallv(deal);
    HostPasses::combine(std::span<const T>(parts), std::span<T>(slice), call.op);
    ::gloo::AllgathervOptions collect(connections_);
    collect.setInput(slice.data(), slice.size());
    collect.setOutput(call.out.data(), std::vector<std::size_t>(counts.begin(), counts.end()));
    collect.setTag(tag_);
    ::gloo::allgatherv(collect);
  }

  const std::shared_ptr<Connections>& connections_;
  std::uint32_t tag_;
  std::uint64_t slot_;
};

}  // namespace lockstep::detail::over_gloo

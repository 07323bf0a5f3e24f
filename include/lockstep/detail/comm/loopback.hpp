// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicator of a world of one: copies what must be copied, else compiles to nothing.

#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep {

namespace detail {
/// Performs a call in a world of one: a copy at most, times the factor of a pre-multiplied sum.
template <class Passes, class C>
constexpr void perform_alone(const Passes& passes, const C& call) {
  using T = typename C::element;
  if constexpr (requires { call.op.factor; }) {
    passes.combine(std::span<const T>(call.in), call.out, call.op);
  } else if constexpr (!C::is_in_place && C::kind != CollectiveKind::barrier) {
    passes.copy(call.in, call.out);
  }
}

class AloneInWorld {
 public:
  static constexpr std::size_t most_in_flight = static_cast<std::size_t>(-1);

  static constexpr Rank rank() { return Rank{0}; }
  static constexpr WorldSize world_size() { return WorldSize{1}; }
  /// No call waits for another rank: the limit is only stored.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  static constexpr void abort(std::string_view) {}
  static constexpr void agree(const Call&) {}

 private:
  std::chrono::milliseconds timeout_{default_timeout};
};
}  // namespace detail

/// **Host** every collective returns at once. **Stream** none: host memory only.
class LoopbackCommunicator : public Collectives<LoopbackCommunicator>,
                             public detail::AloneInWorld,
                             public detail::HostAllocating {
 public:
  LoopbackCommunicator() = default;  // or it would be an aggregate
  using AloneInWorld::agree;

  // Called by `Collectives`.

  template <class C>
  static void perform(const C& call) {
    detail::perform_alone(detail::HostPasses{}, call);
  }

  /// A group of a world of one is a world of one.
  template <std::size_t GroupRanks>
  static std::optional<LoopbackCommunicator> split(const detail::GroupPosition& position) {
    return position.is_member() ? std::optional<LoopbackCommunicator>(std::in_place) : std::nullopt;
  }
};

}  // namespace lockstep

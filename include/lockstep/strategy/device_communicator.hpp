// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What strategies ask of communicators on GPUs, beyond what every communicator offers.

#include <concepts>
#include <string>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// Its work is enqueued: `synchronize` blocks the host until this rank's stream is empty, and
/// throws what has gone wrong on it.
template <class C>
concept StreamCommunicator = Communicator<C> && requires(C& comm) { comm.synchronize(); };

/// `order_streams` makes every rank's stream wait for what all streams hold at the call. **Ranks**
/// all.
template <class C>
concept StreamOrdering = StreamCommunicator<C> && requires(C& comm) { comm.order_streams(); };

/// `capture(f)` runs `f` without running what it enqueues, and gives that as a graph, or as none
/// and the reason why; it does not throw. `replay` enqueues a graph. **Ranks** all, the same of
/// both.
template <class C>
concept CapturingCommunicator = StreamCommunicator<C> && requires(C& comm, void (*f)()) {
  { static_cast<bool>(comm.capture(f)) } -> std::same_as<bool>;
  { comm.capture(f).reason() } -> std::convertible_to<std::string>;
  comm.replay(comm.capture(f));
};

/// A graph is that of all ranks together: none may capture or replay unless all do.
template <class C>
concept JointlyCapturing = CapturingCommunicator<C> && C::captures_jointly;

}  // namespace lockstep::detail

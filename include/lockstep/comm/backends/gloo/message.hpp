// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Messages from one rank to another. What is coming is said first, so that the receiver can
/// compare.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/backends/gloo/connections.hpp"
#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::over_gloo {

/// **Host** blocks until the other rank has received it.
inline void send(Engine& engine, const Call& call, std::span<const std::byte> bytes, Rank to) {
  engine.message(call, to, [&] {
    const int peer = static_cast<int>(to.value());
    Call said = call;
    const auto head = engine.connections()->createUnboundBuffer(&said, sizeof said);
    const auto body = engine.connections()->createUnboundBuffer(
        const_cast<std::byte*>(bytes.data()), bytes.size());
    head->send(peer, static_cast<std::uint64_t>(OwnSlot::message_head));
    if (!bytes.empty()) body->send(peer, static_cast<std::uint64_t>(OwnSlot::message));
    head->waitSend();
    if (!bytes.empty()) body->waitSend();
  });
}

inline void receive(Engine& engine, const Call& call, std::span<std::byte> bytes, Rank from) {
  engine.message(call, from, [&] {
    const int peer = static_cast<int>(from.value());
    Call said;
    const auto head = engine.connections()->createUnboundBuffer(&said, sizeof said);
    head->recv(peer, static_cast<std::uint64_t>(OwnSlot::message_head));
    head->waitRecv();
    if (!(said == call)) {
      throw Error(call.text(), "rank " + std::to_string(from.value()) + " sends " + said.text(),
                  "send and receive the same type and count, in the same order", engine.rank());
    }
    if (bytes.empty()) return;
    const auto body = engine.connections()->createUnboundBuffer(bytes.data(), bytes.size());
    body->recv(peer, static_cast<std::uint64_t>(OwnSlot::message));
    body->waitRecv();
  });
}

}  // namespace lockstep::over_gloo

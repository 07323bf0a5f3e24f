// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Messages from one rank to another, through the sender's outbox.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "lockstep/comm/backends/shm/control.hpp"
#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

/// A rank has one outbox, which holds one piece at a time: messages leave in the order of sending,
/// and a piece must be received before the next is written.
inline void send(Engine& engine, const Call& call, std::span<const std::byte> bytes, Rank to) {
  Outbox& outbox = engine.own().outbox;
  std::size_t done = 0;
  do {
    const std::uint64_t sent = outbox.sent.value.load(std::memory_order_relaxed);
    engine.wait(to.value(), outbox.received, sent, call);
    const std::size_t n = std::min(outbox.data.size(), bytes.size() - done);
    outbox.address.store((sent + 1) << 16 | to.value(), std::memory_order_relaxed);
    outbox.call = call;
    outbox.bytes = n;
    if (n != 0) std::memcpy(outbox.data.data(), bytes.data() + done, n);
    done += n;
    publish(outbox.sent, sent + 1);
  } while (done < bytes.size());
}

inline void receive(Engine& engine, const Call& call, std::span<std::byte> bytes, Rank from) {
  Outbox& outbox = engine.block(from.value()).outbox;
  for (std::size_t done = 0;;) {
    const std::uint64_t piece = outbox.received.value.load(std::memory_order_acquire) + 1;
    engine.wait(from.value(), outbox.sent, piece, call);
    const std::uint64_t address = outbox.address.load(std::memory_order_acquire);
    if (address >> 16 != piece) continue;  // its receiver has taken it meanwhile
    if ((address & 0xffff) != engine.rank().value()) {
      engine.wait(from.value(), outbox.received, piece, call);
      continue;
    }
    if (!outbox.call.carries_the_same_as(call))
      engine.fail(messages_differ(call, from, outbox.call.text(), engine.rank()));
    if (outbox.bytes != 0) std::memcpy(bytes.data() + done, outbox.data.data(), outbox.bytes);
    done += outbox.bytes;
    publish(outbox.received, piece);
    if (done >= bytes.size()) return;
  }
}

}  // namespace lockstep::detail::shm

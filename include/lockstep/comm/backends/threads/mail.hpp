// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Messages from one rank of a process to another: the receiver takes them from where they
/// lie.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/participant.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/sentences.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::threads {

/// One box for every pair of ranks. A box holds one message: the sender waits until it was taken.
class Mailboxes {
 public:
  explicit Mailboxes(WorldSize world)
      : world_(world.value()), boxes_(world.value() * world.value()) {}

  /// Offers a message and waits until the receiver has taken it. Returns the receiver's event.
  void* send(Participant& rank, const Call& call, const Offer& offer, Rank to) {
    Box& box = this->box(rank.rank(), to);
    const std::uint64_t message = box.sent.value.load(std::memory_order_relaxed) + 1;
    box.call = call;
    box.offer = offer;
    publish(box.sent, message);
    rank.await(box.taken, message, call, [&](std::size_t w) { return Rank{w} == to; });
    return box.offer.event;
  }

  /// Waits for a message and copies it with `take(offer)`, which returns an event for the sender.
  template <class Take>
  void receive(Participant& rank, const Call& call, bool on_host, Rank from, const Take& take) {
    Box& box = this->box(from, rank.rank());
    const std::uint64_t message = box.taken.value.load(std::memory_order_relaxed) + 1;
    const auto is_sender = [&](std::size_t w) { return Rank{w} == from; };
    rank.await(box.sent, message, call, is_sender);
    rank.work_on(call, is_sender, [&] {
      check(rank, box, call, on_host, from);
      box.offer.event = take(box.offer);
    });
    publish(box.taken, message);
  }

  /// Forgets all messages. No rank may send or receive meanwhile.
  void restore() {
    for (Box& box : boxes_) box.sent.value = box.taken.value = 0;
  }

 private:
  struct Box {
    Counter sent{};
    Counter taken{};
    Call call;
    Offer offer;
  };

  Box& box(Rank from, Rank to) { return boxes_[from.value() * world_ + to.value()]; }

  static void check(const Participant& rank, const Box& box, const Call& call, bool on_host,
                    Rank from) {
    const bool same = box.call.carries_the_same_as(call);
    if (same && box.offer.on_host == on_host) return;
    const char* const where = on_host ? " in device memory" : " in host memory";
    throw messages_differ(call, from, box.call.text() + (same ? where : ""), rank.rank());
  }

  std::size_t world_;
  std::vector<Box> boxes_;
};

}  // namespace lockstep::detail::threads

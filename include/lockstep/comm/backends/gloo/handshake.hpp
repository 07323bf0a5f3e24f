// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Before every collective, each rank tells all others which call it makes.
///
/// Gloo does not notice when ranks make different calls: it adds up what does not belong together,
/// or writes past the end of a buffer. Comparing logs afterwards would find that out too late. A
/// greeting is one small message to each rank. Its receive was posted in advance, so it costs one
/// network latency. A rank that has all greetings knows that all ranks have come: greetings are the
/// barrier too.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "lockstep/comm/backends/gloo/connections.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::over_gloo {

struct Greeting {
  enum class State : std::uint64_t { calls, leaves, gave_up };

  std::uint64_t number = 0;  // of the call, from 1
  State state = State::calls;
  Call call;
  std::uint64_t end = 0;  // the number again: the greeting is here as a whole
};

class RollCall {
 public:
  explicit RollCall(Connections& connections)
      : connections_(connections),
        own_(static_cast<std::size_t>(connections.rank)),
        heard_(static_cast<std::size_t>(connections.size)),
        incoming_(connections.createUnboundBuffer(heard_.data(), heard_.size() * sizeof(Greeting))),
        outgoing_(connections.createUnboundBuffer(&said_, sizeof said_)),
        farewell_(connections.createUnboundBuffer(&last_said_, sizeof last_said_)) {
    const BrokenPipesBlocked blocked;
    // A rank may have ended since all were connected. The first call finds that out as every later
    // call does, and names the rank.
    for_peers([&](int peer) { static_cast<void>(throws([&] { listen_to(peer); })); });
  }

  /// Every rank's greeting, by rank. **Ranks** all. **Host** blocks until all have come.
  std::vector<Greeting> exchange(const Call& call) {
    const std::uint64_t number = next_.load(std::memory_order_relaxed);
    said_ = heard_[own_] = Greeting{number, Greeting::State::calls, call, number};
    for_peers([&](int peer) { outgoing_->send(peer, slot, 0, sizeof said_); });
    for_peers([&](int) { incoming_->waitRecv(); });
    for_peers([&](int) { outgoing_->waitSend(); });
    std::vector<Greeting> all = heard_;
    next_.store(number + 1, std::memory_order_relaxed);
    for_peers([&](int peer) { listen_to(peer); });
    return all;
  }

  /// The number of the current or next call.
  std::uint64_t number() const { return next_.load(std::memory_order_relaxed); }

  /// Says that this rank makes no further call, and waits for the others to say something. Returns
  /// the ranks that did not. **Ranks** this one, outside of `exchange`.
  std::vector<Rank> say_farewell(Greeting::State state, std::chrono::milliseconds limit) {
    const BrokenPipesBlocked blocked;
    last_said_ = Greeting{number(), state, Call{}, number()};
    for_peers([&](int peer) {
      // This throws if the other rank has ended before.
      static_cast<void>(throws([&] { farewell_->send(peer, slot, 0, sizeof last_said_); }));
    });
    const Deadline deadline = Deadline::after(limit);
    while (!silent().empty() && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return silent();
  }

  /// The ranks whose greeting for the current or next call has not come.
  std::vector<Rank> silent() const {
    std::vector<Rank> ranks;
    for (std::size_t w = 0; w < heard_.size(); ++w)
      if (w != own_ && !is_here(w)) ranks.emplace_back(w);
    return ranks;
  }

  /// Has this rank said that it makes no further call?
  bool has_left(std::size_t peer) const {
    return peer != own_ && is_here(peer) && heard_[peer].state == Greeting::State::leaves;
  }

 private:
  static constexpr auto slot = static_cast<std::uint64_t>(OwnSlot::greeting);

  /// Gloo's thread writes greetings whenever they come, their end last. What is read of one after
  /// its end has been seen must not be read before.
  bool is_here(std::size_t peer) const {
    auto& end = const_cast<std::uint64_t&>(heard_[peer].end);  // for atomic_ref, which only reads
    return std::atomic_ref(end).load(std::memory_order_acquire) == number();
  }

  /// Asks for the next greeting of a rank. Throws if that rank has ended.
  void listen_to(int peer) {
    incoming_->recv(peer, slot, static_cast<std::size_t>(peer) * sizeof(Greeting),
                    sizeof(Greeting));
  }

  template <class F>
  void for_peers(const F& f) const {
    for (int i = 1; i < connections_.size; ++i) f((connections_.rank + i) % connections_.size);
  }

  Connections& connections_;
  std::size_t own_;
  std::atomic<std::uint64_t> next_ = 1;
  std::vector<Greeting> heard_;
  Greeting said_;
  Greeting last_said_;
  // Declared after the memory that Gloo's thread writes, so that these end first.
  std::unique_ptr<::gloo::transport::UnboundBuffer> incoming_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> outgoing_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> farewell_;
};

}  // namespace lockstep::detail::over_gloo

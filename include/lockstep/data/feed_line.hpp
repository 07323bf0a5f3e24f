// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The connection through which the ranks of a job feed each other, beside the one on which
/// they compute.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/feed_route.hpp"

namespace lockstep::detail {

struct NoDevice {
  struct Selected {
    constexpr Selected() {}
  };
  constexpr Selected operator()() const { return {}; }
};

/// A communicator of its own and this rank's part. The rank's thread asks for rounds of batches;
/// feeding threads make them, one after the other. All ranks ask for the same rounds in the same
/// order, so that every message meets its partner, also where an evaluation comes between two
/// steps.
///
/// `select()` makes the rank's GPU current while its result lives.
template <Communicator Comm, class Select = NoDevice>
class FeedLine {
 public:
  FeedLine(Comm comm, FeedRoute route, Select select = {})
      : comm_(std::forward<Comm>(comm)), route_(std::move(route)), select_(select) {}
  FeedLine(const FeedLine&) = delete;
  FeedLine& operator=(const FeedLine&) = delete;

  Rank rank() const { return comm_.rank(); }
  const FeedRoute& route() const { return route_; }
  bool reads() const { return route_.reads(rank()); }

  // For the rank's own thread.

  /// Asks for a round. Returns its number.
  std::uint64_t ask() { return asked_++; }

  /// Has everything been made that was asked for, within the limit?
  bool is_idle_within(std::chrono::milliseconds limit) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (made_.load() != asked_) {
      if (std::chrono::steady_clock::now() > end) return false;
      sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  /// Gives up, also where the feeding thread is in a call: that call and those of the other ranks
  /// fail with this reason.
  void abandon(std::string_view reason) { comm_.abandon(reason); }

  // For feeding threads.

  /// Begins a round when those before it are over. It is over when the result ends, however it has
  /// ended. **Host** blocks until it is its turn.
  [[nodiscard]] auto begin(std::uint64_t number) {
    for (std::uint64_t made = made_.load(); made != number; made = made_.load()) made_.wait(made);
    struct Round {
      explicit Round(FeedLine& line) : line(line), on(line.select_()) {}
      Round(const Round&) = delete;
      Round& operator=(const Round&) = delete;
      ~Round() {
        line.made_.fetch_add(1);
        line.made_.notify_all();
      }
      FeedLine& line;
      decltype(std::declval<const Select&>()()) on;
    };
    return Round(*this);
  }

  /// A message: its sizes, then its bytes. **Ranks** this one and `to`. **Host** blocks.
  void send(std::span<const std::uint64_t> sizes, std::span<const std::uint8_t> bytes, Rank to) {
    comm_.send(sizes, to);
    if (!bytes.empty()) comm_.send(bytes, to);
  }
  /// `room(sizes)` gives the memory for the bytes.
  template <class Room>
  void receive(std::span<std::uint64_t> sizes, const Room& room) {
    comm_.receive(sizes, route_.from);
    if (const std::span<std::uint8_t> bytes = room(sizes); !bytes.empty())
      comm_.receive(bytes, route_.from);
  }

 private:
  Comm comm_;
  FeedRoute route_;
  [[no_unique_address]] Select select_;
  std::uint64_t asked_ = 0;              ///< rounds that loops have asked for
  std::atomic<std::uint64_t> made_ = 0;  ///< of those, how many are over
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The state that the ranks of one process share: their calls, memory and presence.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/fault/first_fault.hpp"
#include "lockstep/comm/waiting/counter.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::threads {

/// How many calls may be under way at once.
inline constexpr std::size_t ring = 32;

/// The memory that a rank brings to a call: pointers, because ranks are threads of one process.
struct Offer {
  const void* in = nullptr;
  void* out = nullptr;
  void* event = nullptr;  // the point in the rank's stream after which its memory may be used
  bool on_host = false;   // its memory is the host's
};

/// The state that all ranks share. Every rank announces its calls in the same order; the last to
/// announce one does its work, for all ranks. A call costs one wait; an asynchronous one costs none
/// until its result is needed.
///
/// Used through `Participant`, one for each rank.
class Meeting {
 public:
  explicit Meeting(WorldSize world) : ranks_(world.value()) {
    for (Slot& slot : slots_) {
      slot.calls.resize(world.value());
      slot.offers.resize(world.value());
    }
  }

  std::size_t world() const { return ranks_.size(); }

  /// Forgets all calls and all faults. No rank may be in a call meanwhile.
  void restore() {
    for (RankState& rank : ranks_) {
      rank.announced = 0;
      rank.fault.forget();
      rank.has_words = false;
      rank.words.clear();
    }
    for (Slot& slot : slots_) slot.arrived = 0;
    done_.value = 0;
    disagrees_ = false;
  }

 private:
  friend class Participant;

  /// The state that one rank publishes.
  struct alignas(line_pair) RankState {
    std::atomic<std::uint64_t> announced{0};
    std::atomic<bool> has_joined{false};
    std::atomic<bool> has_left{false};
    FirstFault fault;                    // its own or another rank's; it makes no more calls
    std::atomic<bool> has_words{false};  // this rank's words explain the fault
    std::string words;
  };

  /// A call under way.
  struct alignas(line_pair) Slot {
    std::atomic<std::size_t> arrived{0};
    std::vector<Call> calls;
    std::vector<Offer> offers;
  };

  std::vector<RankState> ranks_;
  std::array<Slot, ring> slots_;
  Counter done_{};  // calls whose work was done
  /// Held by the rank that works for all, and by a rank that gives up. After that no rank uses the
  /// memory of the rank that gave up.
  std::mutex working_;
  std::atomic<bool> disagrees_{false};
  std::optional<Error> disagreement_;
};

}  // namespace lockstep::detail::threads

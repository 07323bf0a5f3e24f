// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The flight recorder: the last calls of every communicator, to be read after a fault.

#include <atomic>
#include <cstring>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep::detail {

/// A rank of a communicator, whose name is the same on all of its ranks.
struct GroupMember {
  std::string group;
  Rank rank;
  WorldSize world;
  Rank job_rank;  // its number in the job
};

GroupMember group_member(const Membership& member, const std::string& group);

/// A call as the recorder has it. Times are ticks, 0 for what has not happened.
struct CallRecord {
  std::uint64_t number = 0;    // among all calls of this rank of the communicator, from 1
  std::uint64_t sequence = 0;  // among its collectives, or among its messages, from 1
  Call call{};
  std::uint64_t scheduled = 0;  // the rank has made the call
  std::uint64_t started = 0;    // all ranks are in it, where that is known
  std::uint64_t completed = 0;

  bool is_message() const {
    return call.kind == CollectiveKind::send || call.kind == CollectiveKind::receive;
  }
};

/// The last calls of a rank of a communicator, always on. Calls are recorded by one thread at a
/// time; any thread may read meanwhile, and misses only what is overwritten as it reads.
class FlightRecorder {
 public:
  static constexpr std::size_t kept = 2048;

  FlightRecorder(std::string_view backend, GroupMember member);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  const GroupMember& member() const { return member_; }
  std::string_view backend() const { return backend_; }

  /// This rank makes a call. Returns the record's number.
  std::uint64_t schedule(const Call& call) {
    const bool is_message =
        call.kind == CollectiveKind::send || call.kind == CollectiveKind::receive;
    const std::uint64_t sequence = ++(is_message ? messages_ : collectives_);
    const std::uint64_t number = calls() + 1;
    Entry& entry = entries_[(number - 1) % kept];
    std::array<std::uint64_t, call_words> words;
    std::memcpy(words.data(), &call, sizeof call);
    entry.number.store(0, std::memory_order_relaxed);  // a reader that sees new words sees this too
    for (std::size_t i = 0; i != call_words; ++i)
      entry.call[i].store(words[i], std::memory_order_release);
    entry.sequence.store(sequence, std::memory_order_release);
    entry.scheduled.store(ticks_now(), std::memory_order_release);
    entry.started.store(0, std::memory_order_release);
    entry.completed.store(0, std::memory_order_release);
    entry.number.store(number, std::memory_order_release);
    calls_.store(number, std::memory_order_release);
    return number;
  }
  /// All ranks are in the call.
  void start(std::uint64_t number) { note(number, &Entry::started); }
  void complete(std::uint64_t number) { note(number, &Entry::completed); }

  /// The number of calls so far.
  std::uint64_t calls() const { return calls_.load(std::memory_order_acquire); }
  /// The kept calls with numbers above `after`, in their order.
  std::vector<CallRecord> records(std::uint64_t after = 0) const;

 private:
  static constexpr std::size_t call_words = sizeof(Call) / sizeof(std::uint64_t);
  static_assert(sizeof(Call) % sizeof(std::uint64_t) == 0);
  static_assert(std::is_trivially_copyable_v<Call>);

  struct Entry {
    std::atomic<std::uint64_t> number{0};
    std::array<std::atomic<std::uint64_t>, call_words> call{};
    std::atomic<std::uint64_t> sequence{0};
    std::atomic<std::uint64_t> scheduled{0};
    std::atomic<std::uint64_t> started{0};
    std::atomic<std::uint64_t> completed{0};
  };

  void note(std::uint64_t number, std::atomic<std::uint64_t> Entry::* time) {
    Entry& entry = entries_[(number - 1) % kept];
    if (entry.number.load(std::memory_order_relaxed) == number)
      (entry.*time).store(ticks_now(), std::memory_order_relaxed);
  }

  std::string backend_;
  GroupMember member_;
  std::unique_ptr<Entry[]> entries_ = std::make_unique<Entry[]>(kept);
  std::atomic<std::uint64_t> calls_{0};
  std::uint64_t collectives_ = 0;
  std::uint64_t messages_ = 0;
};

/// The recorders of a rank of the job that are alive, oldest first.
void for_each_recorder(Rank job_rank, const std::function<void(const FlightRecorder&)>& f);

/// A rank's records, as PyTorch's flight recorder has them, as JSON.
std::string flight_record(Rank job_rank);

/// After a fault of a rank: writes its records, if LOCKSTEP_FLIGHT_RECORDER names a folder. Only
/// says on stderr that it cannot, because the fault is what counts.
[[gnu::cold]] void dump_after_fault(Rank job_rank) noexcept;

}  // namespace lockstep::detail

namespace lockstep {

/// Writes a rank's last collectives, with their states and times, to `folder/rank_N.json`, for
/// `lockstep-trace flight` and PyTorch's `fr_trace`. **Ranks** this one.
void dump_flight_recorder(const std::string& folder, Rank rank);

}  // namespace lockstep

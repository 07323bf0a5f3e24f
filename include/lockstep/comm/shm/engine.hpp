// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The meeting point of a shared-memory communicator: posting calls, waiting for the others,
/// noticing who is missing or disagrees.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/shm/control.hpp"
#include "lockstep/comm/shm/region.hpp"
#include "lockstep/comm/shm/wait.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::shm {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// A call that this rank has posted and whose work it has yet to do. Work is done in the order of
/// posting, so that one counter tells all.
struct Pending {
  std::uint64_t ticket = 0;
  void (*finish)(Pending&) = nullptr;  // waits for all ranks, then works
};

/// One rank's end of the shared control blocks. Used by one thread at a time.
class Engine {
 public:
  /// Makes the memory for a world. One rank does this and tells the others the address.
  static MemoryFile make_file(WorldSize world) {
    MemoryFile file = MemoryFile::create();
    file.reserve(align_up(world.value() * sizeof(RankBlock), page));
    return file;
  }
  static std::string address(const MemoryFile& file) {
    return std::to_string(::getpid()) + " " + std::to_string(file.descriptor());
  }
  static MemoryFile open(const std::string& address) {
    const std::size_t space = address.find(' ');
    return MemoryFile::open_of(std::stoi(address.substr(0, space)),
                               std::stoi(address.substr(space + 1)));
  }

  Engine(Rank rank, WorldSize world, MemoryFile file, Milliseconds timeout)
      : rank_(rank.value()),
        world_(world.value()),
        timeout_(timeout),
        patience_(Patience::for_ranks(world_)),
        file_(std::move(file)),
        blocks_(file_, 0, world_ * sizeof(RankBlock)),
        file_bytes_(align_up(world_ * sizeof(RankBlock), page)) {
    file_.lock_byte(rank);
    own().process.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_release);
  }

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Tells the others that this rank is gone, and whether an exception drove it out.
  ~Engine() {
    if (!broken_ && std::uncaught_exceptions() > exceptions_) say("it ended with an exception");
    own().left.store(1, std::memory_order_release);
  }

  std::size_t rank() const { return rank_; }
  std::size_t world() const { return world_; }
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  RankBlock& block(std::size_t rank) const {
    return reinterpret_cast<RankBlock*>(blocks_.data())[rank];
  }
  RankBlock& own() const { return block(rank_); }
  Slot& slot(std::size_t rank, std::uint64_t ticket) const {
    return block(rank).slots[ticket % ring];
  }

  // Arenas

  /// Makes `bytes` of memory for every rank, visible to all. Ranks: all, with the same size.
  std::byte* allocate(std::size_t bytes) {
    const std::size_t stride = align_up(std::max<std::size_t>(bytes, 1), page);
    const std::size_t offset = file_bytes_;
    arenas_.push_back({map_more(bytes, world_ * stride), offset, stride});
    return arenas_.back().mapping.data() + rank_ * stride;
  }

  /// Makes `bytes` of memory that all ranks have in common. Ranks: all, with the same size.
  std::byte* allocate_shared(std::size_t bytes) {
    common_.push_back(map_more(bytes, align_up(std::max<std::size_t>(bytes, 1), page)));
    return common_.back().data();
  }

  /// Where in the file this rank's memory lies; nothing if it is not in one of its arenas.
  std::optional<std::uint64_t> locate(const void* data, std::size_t bytes) const {
    for (const Arena& arena : arenas_) {
      const std::byte* const begin = arena.mapping.data() + rank_ * arena.stride;
      const auto* const first = static_cast<const std::byte*>(data);
      if (first >= begin && first + bytes <= begin + arena.stride) {
        return arena.offset + static_cast<std::uint64_t>(first - arena.mapping.data());
      }
    }
    return std::nullopt;
  }

  /// The same memory, seen from here.
  std::byte* at(std::uint64_t offset) const {
    for (const Arena& arena : arenas_) {
      if (offset - arena.offset < arena.mapping.bytes())
        return arena.mapping.data() + (offset - arena.offset);
    }
    return nullptr;
  }

  // Calls

  /// Announces a call; its data must be ready. `fill` writes into the slot before the others see
  /// it.
  template <class Fill>
  std::uint64_t post(const Call& call, std::uint64_t offset, const Fill& fill) {
    if (broken_)
      throw Error(call.text(), "this communicator failed before", "start the job again", me());
    const std::uint64_t ticket = posted_++;
    if (ticket >= ring) {  // the slot's last call must be over on all ranks, this one first
      finish_pending(ticket - ring + 1);
      for_others([&](std::size_t w) { wait(w, block(w).finished, ticket - ring + 1, call); });
    }
    Slot& slot = this->slot(rank_, ticket);
    slot.call = call;
    slot.offset = offset;
    fill(slot);
    publish(own().arrived, ticket + 1);
    return ticket;
  }
  std::uint64_t post(const Call& call, std::uint64_t offset) {
    return post(call, offset, [](Slot&) {});
  }

  bool all_arrived(std::uint64_t ticket) const {
    return all_of([&](std::size_t w) { return reached(block(w).arrived, ticket + 1); });
  }
  bool all_finished(std::uint64_t ticket) const {
    return all_of([&](std::size_t w) { return reached(block(w).finished, ticket + 1); });
  }

  /// Waits until every rank has posted the call, and compares. Nobody has written anything yet.
  void wait_arrived(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).arrived, ticket + 1, slot(rank_, ticket).call); });
    verify(ticket);
  }
  void wait_finished(std::uint64_t ticket) {
    for_others(
        [&](std::size_t w) { wait(w, block(w).finished, ticket + 1, slot(rank_, ticket).call); });
  }

  bool all_agree(std::uint64_t ticket) const {
    const Call& mine = slot(rank_, ticket).call;
    return all_of([&](std::size_t w) { return slot(w, ticket).call == mine; });
  }

  /// Compares this rank's call with all others'.
  void verify(std::uint64_t ticket) {
    if (!all_agree(ticket)) [[unlikely]] {
      // All ranks name the same pair: rank 0 and the first that differs from it.
      const Call& first = slot(0, ticket).call;
      std::size_t other = 1;
      while (slot(other, ticket).call == first) ++other;
      fail(Error("call " + std::to_string(ticket),
                 "ranks disagree: rank 0 called " + first.text() + " and rank " +
                     std::to_string(other) + " called " + slot(other, ticket).call.text(),
                 "let every rank make the same calls in the same order", me()));
    }
  }

  /// Says that this rank has done its work on the call's memory.
  void finish(std::uint64_t ticket) {
    worked_ = ticket + 1;
    publish(own().finished, worked_);
  }

  // Order: the calls from `worked_` up to `posted_` are under way here.

  void add(Pending& pending) { pending_[pending.ticket % ring] = &pending; }
  bool is_next(std::uint64_t ticket) const { return worked_ == ticket; }
  Pending& next() const { return *pending_[worked_ % ring]; }

  /// Does the work of everything posted before `ticket`.
  void finish_pending(std::uint64_t ticket) {
    while (worked_ < std::min(ticket, posted_)) finish_next();
  }

  /// The library's one call through a pointer: for whoever cannot know the type of the next call,
  /// because calls are waited for out of order or by a helper. Whoever waits in order never comes
  /// here.
  [[gnu::noinline]] void finish_next() { next().finish(next()); }

  /// Does the next pending work if all ranks have posted it and agree. Never waits, never throws.
  bool work_if_ready() {
    if (broken_ || worked_ == posted_ || !all_arrived(worked_) || !all_agree(worked_)) return false;
    finish_next();
    return true;
  }

  /// Whoever uses the engine holds this, where a helper does so too.
  std::mutex& turns() { return turns_; }

  // Faults

  /// Waits for a counter of rank w, looking after all ranks and the time when it takes long.
  void wait(std::size_t w, Counter& counter, std::uint64_t value, const Call& call) {
    if (reached(counter, value)) [[likely]]
      return;
    const Clock::time_point begin = Clock::now();
    wait_for(counter, value, patience_, [&] { look(w, call, begin); });
  }

  [[noreturn]] void fail(const Error& error) {
    abandon(error.text());
    throw error;
  }

  /// Gives up. The others learn why from their next call, or the one that they are in.
  void abandon(std::string_view reason) {
    if (!broken_) say(reason);
    broken_ = true;
  }
  bool is_abandoned() const { return broken_; }

  Rank me() const { return Rank{rank_}; }

 private:
  struct Arena {
    Mapping mapping;
    std::size_t offset;
    std::size_t stride;
  };

  static constexpr std::size_t page = 64_KiB;  // the largest page size of the kernels at hand

  /// Adds `length` bytes to the file, because all ranks ask for `bytes` each, and maps them.
  Mapping map_more(std::size_t bytes, std::size_t length) {
    if (rank_ == 0) guard([&] { file_.reserve(file_bytes_ + length); });
    const std::uint64_t ticket =
        post(make_call<std::uint8_t>(CollectiveKind::allocate, bytes, false), 0);
    finish_pending(ticket);
    wait_arrived(ticket);
    Mapping mapping = guard([&] { return Mapping(file_, file_bytes_, length); });
    file_bytes_ += length;
    finish(ticket);
    return mapping;
  }

  template <class F>
  auto guard(const F& f) -> decltype(f()) {
    try {
      return f();
    } catch (const Error& error) {
      fail(error.on(me()));
    }
  }

  template <class F>
  bool all_of(const F& holds) const {
    for (std::size_t w = 0; w < world_; ++w) {
      if (w != rank_ && !holds(w)) return false;
    }
    return true;
  }
  template <class F>
  void for_others(const F& f) const {
    for (std::size_t i = 1; i < world_; ++i) f((rank_ + i) % world_);
  }

  void say(std::string_view words) {
    auto& text = own().last_words;
    const std::size_t n = std::min(words.size(), text.size() - 1);
    std::memcpy(text.data(), words.data(), n);
    text[n] = '\0';
    own().failed.store(1, std::memory_order_release);
  }

  /// Is this rank's process gone? Threads of this process end with it.
  bool is_dead(std::size_t w) const {
    const std::uint32_t process = block(w).process.load(std::memory_order_acquire);
    return process != 0 && process != static_cast<std::uint32_t>(::getpid()) &&
           !file_.is_locked(Rank{w});
  }

  /// Throws if a rank can be waited for no longer. `behind` is the one that is waited for.
  void look(std::size_t behind, const Call& call, Clock::time_point begin) {
    const auto words = [&](std::size_t w) {
      return block(w).failed.load(std::memory_order_acquire) != 0
                 ? std::string(block(w).last_words.data())
                 : std::string();
    };
    // First whoever is gone, then whoever gave up because of that: everybody names the same
    // culprit.
    for_others([&](std::size_t w) {
      if (block(w).left.load(std::memory_order_acquire) != 0 || !is_dead(w)) return;
      fail(Error(call.text(),
                 "rank " + std::to_string(w) + "'s process ended" +
                     (words(w).empty() ? "" : ": " + words(w)),
                 "look for the reason in its output", me())
               .as_consequence());
    });
    for_others([&](std::size_t w) {
      if (!words(w).empty()) {
        fail(Error(call.text(), "rank " + std::to_string(w) + " failed: " + words(w),
                   "look at that rank first", me())
                 .as_consequence());
      }
    });
    if (block(behind).left.load(std::memory_order_acquire) != 0) {
      fail(Error(call.text(),
                 "rank " + std::to_string(behind) + " closed its communicator without this call",
                 "let every rank make the same calls", me()));
    }
    if (Clock::now() - begin < timeout_) return;
    fail(Error(call.text(),
               "waited " + std::to_string(timeout_.count()) + " ms for " + missing(behind),
               "see whether it hangs, or raise the time limit", me()));
  }

  /// Every rank that has made fewer calls than this one; else the one that is waited for.
  std::string missing(std::size_t behind) const {
    std::string names;
    for (std::size_t w = 0; w < world_; ++w) {
      const std::uint64_t made = block(w).arrived.value.load(std::memory_order_acquire);
      if (made >= posted_) continue;
      const bool joined = block(w).process.load(std::memory_order_acquire) != 0;
      names +=
          (names.empty() ? "rank " : ", rank ") + std::to_string(w) +
          (joined ? " (made " + std::to_string(made) + " of " + std::to_string(posted_) + " calls)"
                  : " (never joined)");
    }
    return names.empty() ? "rank " + std::to_string(behind) : names;
  }

  std::size_t rank_;
  std::size_t world_;
  Milliseconds timeout_;
  Patience patience_;
  MemoryFile file_;
  Mapping blocks_;
  std::size_t file_bytes_;
  std::deque<Arena> arenas_;
  std::deque<Mapping> common_;
  std::uint64_t posted_ = 0;
  std::uint64_t worked_ = 0;
  std::array<Pending*, ring> pending_{};
  std::mutex turns_;
  bool broken_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::shm

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `engine.hpp`.

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/comm/fault/sentences.hpp"

namespace lockstep::detail::shm {

LOCKSTEP_INLINE MemoryFile Engine::make_file(WorldSize world) {
  MemoryFile file = MemoryFile::create();
  file.reserve(align_up(world.value() * sizeof(RankBlock), page));
  return file;
}

LOCKSTEP_INLINE std::string Engine::address(const MemoryFile& file) {
  return text({::getpid(), " ", file.descriptor()});
}

LOCKSTEP_INLINE MemoryFile Engine::open(const std::string& address) {
  char* end = nullptr;
  const auto process = static_cast<int>(std::strtol(address.c_str(), &end, 10));
  return MemoryFile::open_of(process, static_cast<int>(std::strtol(end, nullptr, 10)));
}

LOCKSTEP_INLINE Engine::Engine(Rank rank, WorldSize world, MemoryFile file, Milliseconds timeout)
    : rank_(rank.value()),
      world_(world.value()),
      timeout_(timeout),
      budget_(SpinBudget::for_ranks(world_)),
      file_(std::move(file)),
      blocks_(file_, 0, world_ * sizeof(RankBlock)),
      file_bytes_(align_up(world_ * sizeof(RankBlock), page)),
      arenas_(rank_) {
  file_.lock_byte(rank);
  own().process.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_release);
}

LOCKSTEP_INLINE Engine::~Engine() {
  if (scope_.is_failure()) abandon(ended_by_exception);
  own().left.store(1, std::memory_order_release);
}

LOCKSTEP_INLINE std::byte* Engine::allocate(std::size_t bytes) {
  const std::size_t offset = file_bytes_;
  const std::size_t stride = Arenas::stride(bytes);
  return arenas_.add(map_more(bytes, world_ * stride), offset, stride);
}

LOCKSTEP_INLINE std::byte* Engine::allocate_shared(std::size_t bytes) {
  return arenas_.add_common(map_more(bytes, Arenas::stride(bytes)));
}

LOCKSTEP_INLINE Mapping Engine::map_more(std::size_t bytes, std::size_t length) {
  try {
    if (rank_ == 0) file_.reserve(file_bytes_ + length);
  } catch (const Error& error) {
    fail(error.on(rank()));
  }
  Call call;
  call.kind = CollectiveKind::allocate;
  call.element = ElementKind::u8;
  call.count = bytes;
  const std::uint64_t ticket = post(call, 0, [](Slot&) {});
  finish_pending(ticket);
  wait_arrived(ticket);
  try {
    Mapping mapping(file_, file_bytes_, length);
    file_bytes_ += length;
    finish(ticket);
    return mapping;
  } catch (const Error& error) {
    fail(error.on(rank()));
  }
}

LOCKSTEP_INLINE void Engine::fail(const Error& error) {
  give_up(error, error.text());
  throw error;
}

LOCKSTEP_INLINE void Engine::fail_disagreement(std::uint64_t ticket) {
  const auto call_of = [&](std::size_t w) -> const Call& { return slot(w, ticket).call; };
  if (const auto error = find_disagreement(ticket, world_, call_of, rank())) fail(*error);
  std::terminate();  // it is called only where calls differ
}

LOCKSTEP_INLINE void Engine::abandon(std::string_view reason) {
  give_up(gave_up("shared memory", reason, rank()), reason);
}

LOCKSTEP_INLINE void Engine::give_up(const Error& error, std::string_view words) {
  if (!fault_.note(error)) return;
  auto& last = own().last_words;
  const std::size_t n = std::min(words.size(), last.size() - 1);
  std::memcpy(last.data(), words.data(), n);
  last[n] = '\0';
  own().failed.store(1, std::memory_order_release);
}

LOCKSTEP_INLINE bool Engine::has_died(std::size_t w) const {
  const std::uint32_t process = block(w).process.load(std::memory_order_acquire);
  return !has_left(w) && process != 0 && process != static_cast<std::uint32_t>(::getpid()) &&
         !file_.is_locked(Rank{w});
}

LOCKSTEP_INLINE std::string Engine::words(std::size_t w) const {
  if (block(w).failed.load(std::memory_order_acquire) == 0) return "";
  return block(w).last_words.data();
}

LOCKSTEP_INLINE void Engine::look(std::size_t behind, const Call& call,
                                  std::chrono::steady_clock::time_point begin) {
  fault_.raise();  // another thread of this rank may have given up
  const auto is_behind = [&](std::size_t w) { return w == behind; };
  if (const auto fault = find_fault(*this, call, is_behind)) fail(*fault);
  if (std::chrono::steady_clock::now() - begin < timeout_) return;
  // Every rank that has made fewer calls is missing; if there is none, the one that is waited for.
  const bool all_have_come = all_others([&](std::size_t w) { return calls_made(w) >= posted_; });
  fail(find_missing(*this, call, timeout_, [&](std::size_t w) {
    return all_have_come ? is_behind(w) : calls_made(w) < posted_;
  }));
}

}  // namespace lockstep::detail::shm

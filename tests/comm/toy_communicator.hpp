// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The smallest backend there can be: threads, a mutex, and messages between them. It shows
/// what a backend must have; the front makes all collectives of it.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/comm/groups.hpp"

namespace ranks {

/// What the ranks share: a box of messages for every pair of them, and the first fault.
struct ToyWorld {
  explicit ToyWorld(std::size_t ranks) : size(ranks), boxes(ranks * ranks) {}

  std::size_t size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<std::vector<std::byte>>> boxes;  // from * size + to
  std::optional<std::size_t> failed;                      // the first rank that gave up
  std::string words;                                      // why
};

class ToyCommunicator : public lockstep::Collectives<ToyCommunicator>,
                        public lockstep::detail::HostAllocating {
 public:
  static constexpr std::size_t most_in_flight = 1;

  ToyCommunicator(std::shared_ptr<ToyWorld> world, lockstep::Rank rank,
                  std::chrono::milliseconds timeout)
      : world_(std::move(world)), rank_(rank), timeout_(timeout) {
    barrier();
  }

  lockstep::Rank rank() const { return rank_; }
  lockstep::WorldSize world_size() const { return lockstep::WorldSize{world_->size}; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  void abort(std::string_view reason) {
    const std::lock_guard lock(world_->mutex);
    if (!world_->failed) {
      world_->failed = rank_.value();
      world_->words = reason;
    }
    world_->changed.notify_all();
  }

  template <class T>
  void execute(const lockstep::detail::calls::Send<T>& message) {
    const auto bytes = std::as_bytes(message.in);
    const std::lock_guard lock(world_->mutex);
    box(rank_, message.root).emplace_back(bytes.begin(), bytes.end());
    world_->changed.notify_all();
  }

  template <class T>
  void execute(const lockstep::detail::calls::Receive<T>& message) {
    std::unique_lock lock(world_->mutex);
    auto& box = this->box(message.root, rank_);
    const bool in_time =
        world_->changed.wait_for(lock, timeout_, [&] { return !box.empty() || world_->failed; });
    const std::string call = message.call().text();
    if (!in_time)
      throw lockstep::detail::time_is_over(call, timeout_,
                                           lockstep::detail::text({"rank ", message.root}), rank_);
    if (box.empty())
      throw lockstep::detail::rank_failed(call, lockstep::Rank{*world_->failed}, world_->words,
                                          rank_);
    if (!box.front().empty())
      std::memcpy(message.out.data(), box.front().data(), box.front().size());
    box.pop_front();
  }

 private:
  std::deque<std::vector<std::byte>>& box(lockstep::Rank from, lockstep::Rank to) {
    return world_->boxes[from.value() * world_->size + to.value()];
  }

  std::shared_ptr<ToyWorld> world_;
  lockstep::Rank rank_;
  std::chrono::milliseconds timeout_;
};

static_assert(lockstep::ArenaAllocating<ToyCommunicator> &&
              lockstep::AsyncReducing<ToyCommunicator> && lockstep::Splitting<ToyCommunicator>);

/// How toy ranks exchange: they are threads.
struct ToyRendezvous {
  explicit ToyRendezvous(std::size_t world) : world(std::make_shared<ToyWorld>(world)) {}
  void begin() {}
  ToyCommunicator join(lockstep::Rank rank, lockstep::WorldSize,
                       std::chrono::milliseconds timeout) const {
    return ToyCommunicator(world, rank, timeout);
  }
  std::shared_ptr<ToyWorld> world;
};

}  // namespace ranks

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job keeps, copied out of it and into another one, for tests.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/optim/progress.hpp"

namespace train {

using namespace lockstep;

inline std::size_t bytes_of(std::span<const lockstep::detail::StateEntry> pieces) {
  std::size_t bytes = 0;
  for (const lockstep::detail::StateEntry& piece : pieces) bytes += piece.file_bytes();
  return bytes;
}

/// Copies of pieces, one behind the other.
inline std::vector<lockstep::detail::StateCopy> copies_to(
    std::byte* memory, std::span<const lockstep::detail::StateEntry> pieces) {
  std::vector<lockstep::detail::StateCopy> copies;
  for (const lockstep::detail::StateEntry& piece : pieces) {
    copies.push_back({memory, piece});
    memory += piece.file_bytes();
  }
  return copies;
}

/// Progress in words, in which every bit counts.
inline std::string text_of(const lockstep::detail::ReplicaProgress& progress) {
  std::string text;
  for (const std::uint64_t number :
       {progress.updates, progress.counted, progress.skipped, progress.epoch,
        std::uint64_t{progress.knows_epoch}, progress.curve_ahead})
    text += std::to_string(number) + " ";
  if (progress.loss_scale)
    text += "scale " + std::to_string(progress.loss_scale->scale) + " after " +
            std::to_string(progress.loss_scale->good_steps) + " ";
  for (const lockstep::detail::NamedNumber& number : progress.numbers) {
    text += number.name + " ";
    std::visit([&](auto value) { text += std::to_string(std::bit_cast<std::uint64_t>(value)); },
               number.value);
    text += " ";
  }
  return text;
}

/// All that a rank keeps: what it would save if it were alone.
class OwnCopy {
 public:
  /// Copies what `job` has now. On a GPU the host does not wait.
  explicit OwnCopy(auto& job) {
    job.list_state(lockstep::detail::StateUse::loading, pieces_);
    auto memory = std::make_shared<decltype(job.make_state_memory(0))>(
        job.make_state_memory(bytes_of(pieces_)));
    copies_ = copies_to(memory->data(), pieces_);
    memory_ = memory;
    job.copy_out(copies_);
    progress_ = job.progress();
  }
  /// Waits as the thread does that writes a file.
  void await(auto& job) {
    std::string failure;
    std::thread([&] {
      try {
        job.await_copies();
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }).join();
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  /// Makes another job go on from there.
  void load(auto& job) const {
    job.set_progress(progress_);
    std::vector<lockstep::detail::StateEntry> entries;
    job.list_state(lockstep::detail::StateUse::loading, entries);
    for (const lockstep::detail::StateEntry& entry : entries) {
      for (const lockstep::detail::StateCopy& copy : copies_)
        if (is_same(copy.piece, entry)) job.copy_in(entry, copy.to);
    }
  }

  /// Empty, or what differs.
  std::string difference(const OwnCopy& other) const {
    if (text_of(progress_) != text_of(other.progress_))
      return text_of(progress_) + " and " + text_of(other.progress_);
    if (copies_.size() != other.copies_.size()) return "how many pieces";
    for (std::size_t i = 0; i != copies_.size(); ++i) {
      const lockstep::detail::StateEntry& piece = copies_[i].piece;
      if (!is_same(piece, other.copies_[i].piece)) return "other pieces";
      if (std::memcmp(copies_[i].to, other.copies_[i].to, piece.file_bytes()) != 0)
        return "other bits in " + std::string(piece.name) + " " + std::string(piece.state) +
               " of role " + std::to_string(static_cast<int>(piece.role));
    }
    return {};
  }

  const lockstep::detail::ReplicaProgress& progress() const { return progress_; }

 private:
  static bool is_same(const lockstep::detail::StateEntry& a,
                      const lockstep::detail::StateEntry& b) {
    return a.role == b.role && a.name == b.name && a.state == b.state && a.rank == b.rank &&
           a.first == b.first && a.count == b.count;
  }

  lockstep::detail::ReplicaProgress progress_;
  std::vector<lockstep::detail::StateEntry> pieces_;
  std::vector<lockstep::detail::StateCopy> copies_;
  std::shared_ptr<void> memory_;
};

/// Empty, or what is wrong: a job that goes on from another one's copy, taken after `before`
/// micro-batches while that one goes on, ends as it does. `make()` makes a job, `step(job, s)`
/// trains micro-batch s. Jobs are compared by all that they keep.
std::string go_on(const auto& make, const auto& step, std::size_t before, std::size_t after) {
  auto first = make();
  for (std::size_t s = 0; s < before; ++s) step(*first, s);
  OwnCopy copy(*first);
  for (std::size_t s = before; s < before + after; ++s) step(*first, s);  // they wait for the copy
  copy.await(*first);
  auto second = make();
  for (std::size_t s = 0; s < before % 5; ++s) step(*second, s + 1);
  second->optimizer().lr = 0.5;
  copy.load(*second);
  for (std::size_t s = before; s < before + after; ++s) step(*second, s);
  OwnCopy one(*first);
  OwnCopy other(*second);
  one.await(*first);
  other.await(*second);
  if (copy.difference(one).empty()) return "nothing was trained";
  return one.difference(other);
}

}  // namespace train

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `joint_work.hpp`.

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/trainer/joint_work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void append_sized(std::string& out, std::string_view piece) {
  const std::uint64_t size = piece.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof size).append(piece);
}

LOCKSTEP_INLINE std::string_view take_sized(std::string_view& rest) {
  std::uint64_t size = 0;
  std::memcpy(&size, rest.data(), sizeof size);
  const std::string_view piece = rest.substr(sizeof size, size);
  rest.remove_prefix(sizeof size + size);
  return piece;
}

LOCKSTEP_INLINE std::string packed_error(std::string_view operation, std::string_view problem,
                                         std::string_view advice) {
  std::string packed = "!";
  for (const std::string_view piece : {operation, problem, advice}) append_sized(packed, piece);
  return packed;
}

/// What a rank tells the others of its work: `.` and its result, or `!` and its error.
LOCKSTEP_INLINE std::string outcome_of(std::string_view operation,
                                       FunctionRef<std::string()> work) {
  try {
    std::string mine(1, '.');
    return mine.append(work());
  } catch (const Error& error) {
    return packed_error(error.operation(), error.problem(), error.advice());
  } catch (const std::exception& error) {
    return packed_error(operation, error.what(), "see to that, and call it again");
  }
}

/// The results of all ranks, or the first rank's error.
LOCKSTEP_INLINE std::vector<std::string> results_of(std::vector<std::string> all) {
  for (std::size_t rank = 0; rank != all.size(); ++rank) {
    if (all[rank].front() != '!') continue;
    std::string_view rest = std::string_view(all[rank]).substr(1);
    const std::string_view whose = take_sized(rest);
    const std::string_view problem = take_sized(rest);
    throw Error(whose, problem, take_sized(rest), Rank{rank});
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

LOCKSTEP_INLINE std::vector<std::string> work_together(const JointRanks& ranks,
                                                       std::string_view operation,
                                                       FunctionRef<std::string()> work) {
  return results_of(ranks.gather(outcome_of(operation, work)));
}

/// Rounds in which ranks tell each other whether they still work: `~`, or the outcome. A rank sends
/// one in every round until the outcomes of all are there, or one of them is that its storage is
/// dead: that ends with `!` too, and is told while the rank still waits for it.
class StorageRounds {
 public:
  StorageRounds(const JointRanks& ranks, std::string_view operation,
                const StoragePatience& patience)
      : ranks_(ranks), operation_(operation), patience_(patience), next_words_(patience.words) {
    try {
      thread_ = Thread(
          ThreadName{"lockstep alive", "the thread that says that this rank waits for storage"},
          [this] { run(); }, [this](std::exception_ptr thrown) { failure_ = std::move(thrown); });
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // Without a thread the rounds begin when the work is done: the others wait as long as a call
      // may take.
    }
  }
  StorageRounds(const StorageRounds&) = delete;
  StorageRounds& operator=(const StorageRounds&) = delete;

  /// The outcomes of all ranks; this one's is `mine`.
  std::vector<std::string> end(std::string mine) {
    {
      const std::lock_guard lock(mutex_);
      mine_ = std::move(mine);
      changed_.notify_all();
    }
    if (!thread_.is_running()) {
      run();
    } else {
      thread_.join();
    }
    if (failure_) std::rethrow_exception(failure_);
    return std::move(all_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr char working = '~';

  void run() {
    for (bool is_dead = false; !is_dead;) {
      all_ = ranks_.gather(next());
      bool works = false;
      for (const std::string& told : all_) {
        works = works || told.front() == working;
        is_dead = is_dead || (told.front() == '!' && told.ends_with(dead));
      }
      if (!works) break;
    }
    // The others have been told, which will end this process while it still waits: what it has been
    // writing must not stay.
    if (is_given_up_) remove_temporary_files();
  }

  /// What this rank says in the next round.
  std::string next() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience_.heartbeat, [&] { return mine_.has_value(); });
    if (mine_) return *mine_;
    const Clock::time_point now = Clock::now();
    if (const std::uint64_t count = storage_progress().load(); count != progress_) {
      progress_ = count;
      progressed_ = now;
    }
    const auto seconds = [&](Clock::time_point since) {
      return std::chrono::duration_cast<std::chrono::seconds>(now - since).count();
    };
    if (now - progressed_ >= patience_.longest) {
      is_given_up_ = true;
      return packed_error(
          operation_, text({"its storage has made no progress for ", seconds(progressed_), " s"}),
          dead);
    }
    if (now - begun_ >= next_words_) {
      next_words_ *= 2;
      std::fputs(
          text({"lockstep: rank ", ranks_.rank, ", ", operation_, ": waiting for storage for ",
                seconds(begun_), " s; the other ranks wait too\n"})
              .c_str(),
          stderr);
    }
    return {working};
  }

  static constexpr std::string_view dead = "see whether the disk or its server still answers";

  const JointRanks& ranks_;
  std::string_view operation_;
  const StoragePatience& patience_;
  std::chrono::milliseconds next_words_;
  Clock::time_point begun_ = Clock::now();
  Clock::time_point progressed_ = begun_;
  std::uint64_t progress_ = storage_progress().load();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> mine_;
  bool is_given_up_ = false;  // of the thread's
  std::vector<std::string> all_;
  std::exception_ptr failure_;
  Thread thread_;  // declared last: it uses the members above
};

LOCKSTEP_INLINE std::vector<std::string> store_together(const JointRanks& ranks,
                                                        std::string_view operation,
                                                        FunctionRef<std::string()> work,
                                                        const StoragePatience& patience) {
  if (ranks.world == 1) return work_together(ranks, operation, work);
  StorageRounds rounds(ranks, operation, patience);
  return results_of(rounds.end(outcome_of(operation, work)));
}

LOCKSTEP_INLINE void require_same_path(const JointRanks& ranks, std::string_view operation,
                                       const std::vector<std::string>& paths) {
  for (std::size_t rank = 1; rank < paths.size(); ++rank) {
    if (paths[rank] == paths[0]) continue;
    fail(operation,
         {"ranks were given different paths: rank 0 has '", paths[0], "' and rank ", rank, " has '",
          paths[rank], "'"},
         "give all ranks the same path", ranks.rank);
  }
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job as saving and loading see it, without its type, and work of which all ranks learn
/// how it ended: what goes wrong on one rank is the same error on all.

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/state.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/optim/progress.hpp"

namespace lockstep::detail {

/// The ranks of a job, without the type of their communicator.
struct JointRanks {
  Rank rank;
  std::size_t world = 1;
  /// Every rank's text, by rank. Any thread may call it, one at a time. **Ranks** all. **Host**
  /// blocks.
  FunctionRef<std::vector<std::string>(std::string)> gather;
};

/// What every rank's `work()` returned, by rank. Where it throws on any rank, all ranks throw the
/// first such rank's error, with its number; no rank is told to end, so that the program may go
/// on. `work` must not communicate. **Ranks** all. **Host** blocks.
std::vector<std::string> work_together(const JointRanks& ranks, std::string_view operation,
                                       FunctionRef<std::string()> work);

/// How long ranks wait for each other's storage.
struct StoragePatience {
  /// How often a rank that works says that it is alive: below every sensible limit of calls.
  std::chrono::milliseconds heartbeat{200};
  /// After how long it says on stderr that its storage is slow; then after twice as long, and so
  /// on.
  std::chrono::milliseconds words = std::chrono::seconds(10);
  /// After how long without any progress its storage is taken for dead.
  std::chrono::milliseconds longest = std::chrono::minutes(30);
};

/// The same for work that waits for storage, which may take longer than a call between ranks may:
/// until all are done, a thread of every rank tells the others now and then that it is alive. So a
/// slow disk is no failure, and a process that ends or hangs is found as in every other call. A
/// rank that has read and written nothing for `patience.longest` is an error on all ranks.
///
/// `work` runs on the calling thread. **Ranks** all. **Host** blocks.
std::vector<std::string> store_together(const JointRanks& ranks, std::string_view operation,
                                        FunctionRef<std::string()> work,
                                        const StoragePatience& patience = {});

/// Throws on all ranks unless they were given the same path; `paths` are those of all ranks.
void require_same_path(const JointRanks& ranks, std::string_view operation,
                       const std::vector<std::string>& paths);

/// Appends a text with its length, and takes it off again.
void append_sized(std::string& out, std::string_view piece);
std::string_view take_sized(std::string_view& rest);

/// Memory into which a device copies best.
struct SnapshotMemory {
  std::shared_ptr<void> owner;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// What saving and loading ask of a wrapper: of no type, so that they are compiled once, for all.
/// None but `synchronize_buffers` communicates.
struct JobCalls {
  void (*list_state)(void* wrapper, StateUse use, std::vector<StateEntry>& to);
  ReplicaProgress (*progress)(void* wrapper);
  void (*set_progress)(void* wrapper, const ReplicaProgress& to);
  void (*synchronize_buffers)(void* wrapper);  ///< where one set of them is that of all ranks
  SnapshotMemory (*make_memory)(void* wrapper, std::size_t bytes);
  void (*copy_out)(void* wrapper, std::span<const StateCopy> copies);
  void (*copy_in)(void* wrapper, const StateEntry& entry, const std::byte* from);
  /// Waits for the latest copies, on any thread, while the wrapper lives.
  void (*await_copies)(void* wrapper);
  /// Ends all other ranks with these words.
  void (*abandon)(void* wrapper, const char* words);
};

/// This rank's part of a job.
class StatefulJob {
 public:
  JointRanks ranks;
  JobShape shape;
  const JobCalls& calls;
  void* wrapper;
  /// While the job's memory is read and written, another thread tells the other ranks that this one
  /// is alive. Both use the communicator, one at a time.
  std::mutex& turns;
  bool is_one_process = false;       ///< are all replicas of this process?
  std::size_t micro_batches = 0;     ///< that are added up, and not yet used
  std::uint64_t updates = 0;         ///< of the optimizer
  std::vector<NameAlias> aliases{};  ///< of parameters and buffers

  std::vector<StateEntry> entries(StateUse use) const {
    const std::lock_guard turn(turns);
    std::vector<StateEntry> all;
    calls.list_state(wrapper, use, all);
    return all;
  }
  ReplicaProgress progress() const {
    const std::lock_guard turn(turns);
    return calls.progress(wrapper);
  }
  void set_progress(const ReplicaProgress& to) const {
    const std::lock_guard turn(turns);
    calls.set_progress(wrapper, to);
  }
  void copy_out(std::span<const StateCopy> copies) const {
    const std::lock_guard turn(turns);
    calls.copy_out(wrapper, copies);
  }
  void copy_in(const StateEntry& entry, const std::byte* from) const {
    const std::lock_guard turn(turns);
    calls.copy_in(wrapper, entry, from);
  }
  void synchronize_buffers() const { calls.synchronize_buffers(wrapper); }
  SnapshotMemory make_memory(std::size_t bytes) const { return calls.make_memory(wrapper, bytes); }
  void await_copies() const { calls.await_copies(wrapper); }
};

/// The calls of a wrapper.
template <class Wrapper>
inline constexpr JobCalls job_calls = {
    [](void* w, StateUse use, std::vector<StateEntry>& to) {
      static_cast<Wrapper*>(w)->list_state(use, to);
    },
    [](void* w) { return static_cast<Wrapper*>(w)->progress(); },
    [](void* w, const ReplicaProgress& to) { static_cast<Wrapper*>(w)->set_progress(to); },
    [](void* w) {
      if constexpr (Wrapper::traits::unites_buffers)
        static_cast<Wrapper*>(w)->synchronize_buffers();
    },
    [](void* w, std::size_t bytes) {
      using Memory = decltype(static_cast<Wrapper*>(w)->make_kept_memory(bytes));
      const auto memory =
          std::make_shared<Memory>(static_cast<Wrapper*>(w)->make_kept_memory(bytes));
      return SnapshotMemory{memory, memory->data(), bytes};
    },
    [](void* w, std::span<const StateCopy> copies) { static_cast<Wrapper*>(w)->copy_out(copies); },
    [](void* w, const StateEntry& entry, const std::byte* from) {
      static_cast<Wrapper*>(w)->copy_in(entry, from);
    },
    [](void* w) { static_cast<Wrapper*>(w)->await_copies(); },
    []([[maybe_unused]] void* w, [[maybe_unused]] const char* words) {
      if constexpr (!Wrapper::is_one_process)
        static_cast<Wrapper*>(w)->communicator().abandon(words);
    },
};

/// How many processes make a call together, and which this is.
template <class Wrapper>
std::size_t process_count(Wrapper& wrapped) {
  if constexpr (Wrapper::is_one_process) {
    return 1;
  } else {
    return wrapped.communicator().world_size().value();
  }
}
template <class Wrapper>
Rank process_rank(Wrapper& wrapped) {
  if constexpr (Wrapper::is_one_process) {
    return Rank{0};
  } else {
    return wrapped.communicator().rank();
  }
}

/// Every rank's text, by rank, as a part of the program's call `call`. **Ranks** all. **Host**
/// blocks.
template <class Wrapper>
struct GatherTexts {
  std::vector<std::string> operator()(std::string text) const {
    if constexpr (Wrapper::is_one_process || Wrapper::traits::alone) {
      return {std::move(text)};
    } else {
      [[maybe_unused]] const auto on = wrapped.on_device();
      const InJobCall in(call);
      const std::lock_guard turn(turns);
      return all_gather_objects(wrapped.communicator(), std::move(text));
    }
  }
  Wrapper& wrapped;
  JobCall call;
  std::mutex& turns;
};

/// Calls `f(job)` as a part of the program's call `call`. **Ranks** all.
template <class Wrapper>
void with_job(Wrapper& wrapped, JobCall call, FunctionRef<void(const StatefulJob&)> f) {
  if constexpr (!Wrapper::is_one_process) wrapped.require_joined("checkpoints");
  [[maybe_unused]] const auto on = wrapped.on_device();
  const InJobCall in(call);
  std::mutex turns;
  const GatherTexts<Wrapper> gather{wrapped, call, turns};
  StatefulJob job{{process_rank(wrapped), process_count(wrapped), gather},
                  wrapped.job_shape(),
                  job_calls<Wrapper>,
                  &wrapped,
                  turns,
                  Wrapper::is_one_process,
                  wrapped.micro_batches(),
                  wrapped.updates()};
  if constexpr (TensorListing<typename Wrapper::traits::model>)
    job.aliases = listed_aliases(wrapped.model());
  f(job);
}

}  // namespace lockstep::detail

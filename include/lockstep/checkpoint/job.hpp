// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job as saving and loading see it, without its type, and work of which all ranks learn
/// how it ended: what goes wrong on one rank is the same error on all.

#include <mutex>

#include "lockstep/checkpoint/state.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/groups.hpp"
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

/// This rank's part of a job: what saving and loading ask of a wrapper, without its type, so that
/// they are compiled once, for all. Of the functions none but `synchronize_buffers` communicates.
class StatefulJob {
 public:
  JointRanks ranks;
  JobShape shape{};
  bool is_one_process = false;       ///< are all replicas of this process?
  std::size_t micro_batches = 0;     ///< that are added up, and not yet used
  std::uint64_t updates = 0;         ///< of the optimizer
  std::vector<NameAlias> aliases{};  ///< of parameters and buffers

  explicit StatefulJob(const JointRanks& of) : ranks(of) {}
  StatefulJob(const StatefulJob&) = delete;
  StatefulJob& operator=(const StatefulJob&) = delete;

  virtual std::vector<StateEntry> entries(StateUse use) const = 0;
  virtual ReplicaProgress progress() const = 0;
  virtual void set_progress(const ReplicaProgress& to) const = 0;
  virtual void synchronize_buffers() const = 0;  ///< where one set of them is that of all ranks
  /// Memory into which the device copies best.
  virtual std::shared_ptr<std::byte> make_memory(std::size_t bytes) const = 0;
  virtual void copy_out(std::span<const StateCopy> copies) const = 0;
  virtual void copy_in(const StateEntry& entry, const std::byte* from) const = 0;
  /// A function that waits for the latest copies, on any thread, while the wrapper lives.
  virtual std::function<void()> copies_waiter() const = 0;
  void await_copies() const { copies_waiter()(); }
  /// Ends all other ranks with these words.
  virtual void abandon(const char* words) const = 0;

 protected:
  ~StatefulJob() = default;
};

/// A wrapper's part of a job, within the program's call `call`.
///
/// While the job's memory is read and written, another thread tells the other ranks that this one
/// is alive. Both use the communicator, one at a time.
template <class Wrapper>
class WrappedJob final : public StatefulJob {
 public:
  WrappedJob(Wrapper& wrapped, JobCall call)
      : StatefulJob({Rank{0}, 1, *this}), wrapped_(wrapped), call_(call) {
    if constexpr (!Wrapper::is_one_process) {
      ranks.rank = wrapped.communicator().rank();
      ranks.world = wrapped.communicator().world_size().value();
    }
    shape = wrapped.job_shape();
    is_one_process = Wrapper::is_one_process;
    micro_batches = wrapped.micro_batches();
    updates = wrapped.updates();
    if constexpr (TensorListing<typename Wrapper::traits::model>)
      aliases = std::move(list_tensors(wrapped.model()).aliases());
  }

  /// Gathers every rank's text, by rank. **Ranks** all. **Host** blocks.
  std::vector<std::string> operator()(std::string text) const {
    if constexpr (Wrapper::is_one_process || Wrapper::traits::alone) {
      return {std::move(text)};
    } else {
      [[maybe_unused]] const auto on = wrapped_.on_device();
      const InJobCall in(call_);
      const std::lock_guard turn(turns_);
      return all_gather_objects(wrapped_.communicator(), std::move(text));
    }
  }

  std::vector<StateEntry> entries(StateUse use) const override {
    const std::lock_guard turn(turns_);
    std::vector<StateEntry> all;
    wrapped_.list_state(use, all);
    return all;
  }
  ReplicaProgress progress() const override {
    const std::lock_guard turn(turns_);
    return wrapped_.progress();
  }
  void set_progress(const ReplicaProgress& to) const override {
    const std::lock_guard turn(turns_);
    wrapped_.set_progress(to);
  }
  void synchronize_buffers() const override {
    if constexpr (Wrapper::traits::unites_buffers) wrapped_.synchronize_buffers();
  }
  std::shared_ptr<std::byte> make_memory(std::size_t bytes) const override {
    using Memory = decltype(wrapped_.make_kept_memory(bytes));
    const auto memory = std::make_shared<Memory>(wrapped_.make_kept_memory(bytes));
    return {memory, memory->data()};
  }
  void copy_out(std::span<const StateCopy> copies) const override {
    const std::lock_guard turn(turns_);
    wrapped_.copy_out(copies);
  }
  void copy_in(const StateEntry& entry, const std::byte* from) const override {
    const std::lock_guard turn(turns_);
    wrapped_.copy_in(entry, from);
  }
  std::function<void()> copies_waiter() const override {
    return [wrapped = &wrapped_] { wrapped->await_copies(); };
  }
  void abandon([[maybe_unused]] const char* words) const override {
    if constexpr (!Wrapper::is_one_process) wrapped_.communicator().abandon(words);
  }

 private:
  Wrapper& wrapped_;
  JobCall call_;
  mutable std::mutex turns_;
};

/// Calls `f(job)` as a part of the program's call `call`; nothing for a job that was rejected.
/// **Ranks** all.
template <class Wrapper>
void with_job(Wrapper& wrapped, JobCall call, FunctionRef<void(const StatefulJob&)> f) {
  if constexpr (!requires { Wrapper::is_rejected; }) {
    if constexpr (!Wrapper::is_one_process) wrapped.require_joined("checkpoints");
    [[maybe_unused]] const auto on = wrapped.on_device();
    const InJobCall in(call);
    const WrappedJob<Wrapper> job(wrapped, call);
    f(job);
  }
}

}  // namespace lockstep::detail

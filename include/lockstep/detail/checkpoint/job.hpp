// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A type-erased job for saving and loading, and work whose error is thrown on all ranks.

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/model/tensor_list.hpp"
#include "lockstep/detail/optim/progress.hpp"

namespace lockstep::detail {

/// The ranks of a job, without the type of their communicator.
struct JointRanks {
  Rank rank;
  std::size_t world = 1;
  /// All-gathers a text, by rank. One thread at a time. **Ranks** all. **Host** blocks.
  FunctionRef<std::vector<std::string>(std::string)> gather;
};

/// How long ranks wait for each other's storage.
struct StoragePatience {
  /// The interval of heartbeats: below every sensible timeout of a collective.
  std::chrono::milliseconds heartbeat{200};
  /// When a rank first reports slow storage on stderr; the interval then doubles.
  std::chrono::milliseconds first_report = std::chrono::seconds(10);
  /// The time without progress after which storage is considered dead.
  std::chrono::milliseconds longest = std::chrono::minutes(30);
};

/// The results of every rank's `work()`, by rank, or on all ranks the first failing one's error;
/// the program may continue. `work` must not communicate. It may take longer than a collective's
/// timeout: a thread per rank sends heartbeats until all are done. A slow disk is no failure; a
/// dead rank, or storage without progress for `patience.longest`, is one on all ranks. **Ranks**
/// all.
/// **Host** blocks.
std::vector<std::string> store_together(const JointRanks& ranks, std::string_view operation,
                                        FunctionRef<std::string()> work,
                                        const StoragePatience& patience = {});

/// What saving and loading need from a wrapper, without its type, so that they are compiled once.
/// Of its functions, only `synchronize_buffers` communicates.
class StatefulJob {
 public:
  JointRanks ranks;
  JobShape shape{};
  bool is_one_process = false;       ///< do all replicas live in this process?
  std::size_t micro_batches = 0;     ///< accumulated since the last update
  std::uint64_t updates = 0;         ///< of the optimizer
  std::vector<NameAlias> aliases{};  ///< of parameters and buffers

  explicit StatefulJob(const JointRanks& of) : ranks(of) {}
  StatefulJob(const StatefulJob&) = delete;
  StatefulJob& operator=(const StatefulJob&) = delete;

  virtual std::vector<StateEntry> entries(StateUse use) const = 0;
  virtual ReplicaProgress progress() const = 0;
  virtual void set_progress(const ReplicaProgress& to) const = 0;
  virtual void synchronize_buffers() const = 0;  ///< if ranks share one set of buffers
  /// Memory that the device copies to and from fastest.
  virtual std::shared_ptr<std::byte> make_memory(std::size_t bytes) const = 0;
  virtual void copy_out(std::span<const StateCopy> copies) const = 0;
  virtual void copy_in(const StateEntry& entry, const std::byte* from) const = 0;
  /// A function that waits for the latest copies, on any thread, while the wrapper lives.
  virtual std::function<void()> copies_waiter() const = 0;
  void await_copies() const { copies_waiter()(); }
  /// Aborts all other ranks with this reason.
  virtual void abort(const char* reason) const = 0;

 protected:
  ~StatefulJob() = default;
};

/// A wrapper as a `StatefulJob`, within the program's call `call`. A mutex serialises the calling
/// thread and the heartbeat thread, which both use the communicator.
template <class Wrapper>
class WrappedJob final : public StatefulJob {
 public:
  WrappedJob(Wrapper& wrapped, JobCall call)
      : StatefulJob({Rank{0}, 1, *this}), wrapped_(wrapped), call_(call) {
    if constexpr (!Wrapper::is_one_process) {
      ranks.rank = wrapped.communicator().rank();
      ranks.world = wrapped.communicator().world_size().value();
    }
    if constexpr (requires { wrapped.release_units(); }) wrapped.release_units();
    shape = wrapped.job_shape();
    is_one_process = Wrapper::is_one_process;
    micro_batches = wrapped.micro_batches();
    updates = wrapped.updates();
    if constexpr (TensorListing<typename Wrapper::traits::model>)
      aliases = std::move(list_tensors(wrapped.model()).aliases());
  }

  /// All-gathers a text, by rank. **Ranks** all. **Host** blocks.
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
    using Memory = decltype(wrapped_.make_state_memory(bytes));
    const auto memory = std::make_shared<Memory>(wrapped_.make_state_memory(bytes));
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
  void abort([[maybe_unused]] const char* reason) const override {
    if constexpr (!Wrapper::is_one_process) wrapped_.communicator().abort(reason);
  }

 private:
  Wrapper& wrapped_;
  JobCall call_;
  mutable std::mutex turns_;
};

/// Calls `f(job)` within the program's call `call`; does nothing for a rejected job. **Ranks** all.
template <class Wrapper>
void with_job(Wrapper& wrapped, JobCall call, FunctionRef<void(const StatefulJob&)> f) {
  if constexpr (std::derived_from<Wrapper, StatefulJob>) {
    f(wrapped);
  } else if constexpr (!requires { Wrapper::is_rejected; }) {
    if constexpr (!Wrapper::is_one_process) wrapped.require_joined("checkpoints");
    [[maybe_unused]] const auto on = wrapped.on_device();
    const InJobCall in(call);
    const WrappedJob<Wrapper> job(wrapped, call);
    f(job);
  }
}

}  // namespace lockstep::detail

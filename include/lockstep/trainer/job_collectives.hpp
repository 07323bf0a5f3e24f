// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The collectives of a trainer, over the ranks of its job.

#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/observe/tally.hpp"

namespace lockstep::detail {

/// The base of a `Job` that has `enter(operation)`, which refuses a call that not all ranks make
/// and makes the job's device current while its result lives, and `own_communicator()`.
template <class Job>
class JobCollectives {
 public:
  /// The means over the tallies of all ranks. **Ranks** all. **Host** blocks.
  Scores reduce_metrics(const Tally& tally) {
    [[maybe_unused]] const auto on = job().enter("reduce_metrics");
    const InJobCall in(JobCall::reduce_metrics);
    return lockstep::reduce(comm(), tally);
  }

  /// Through which the ranks of this job communicate: all collectives, and groups of ranks
  /// (`new_group`, `join_groups`). With `ParallelStrategy<DP>` it is a world of one.
  auto& communicator() { return comm(); }

  /// The communicator of this rank's group, with `Groups<Grid<W, G>>`, and that of the ranks which
  /// have its place in the other groups: `job.group().all_reduce(sum)`. **Ranks** the group's.
  template <class J = Job>
  decltype(auto) group() {
    return static_cast<J&>(*this).ddp().group();
  }
  template <class J = Job>
  decltype(auto) across() {
    return static_cast<J&>(*this).ddp().across();
  }

  // Collectives over ranks, of one number, which is given and returned by value, or of memory: a
  // span, a vector, an array or a view. On GPUs too, memory may be the host's; it is then staged
  // and the host waits for the result. Device memory is reduced where it is.

  /// `const double mean = job.all_reduce(loss, Average{});`, or data = op over ranks, on all ranks.
  /// **Ranks** all. **Host** blocks, with device memory not.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto all_reduce(Data value, Op op = {})
    requires(SingleElement<Data>)
  {
    [[maybe_unused]] const auto on = job().enter("all_reduce");
    return comm().all_reduce(value, op);
  }
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {})
    requires(!SingleElement<std::remove_cvref_t<Data>>)
  {
    [[maybe_unused]] const auto on = job().enter("all_reduce");
    comm().all_reduce(data, op);
  }

  /// On root, the number or data = op over ranks; elsewhere what it was. **Ranks** all. **Host** as
  /// `all_reduce`.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto reduce(Data value, Rank root = Rank{0}, Op op = {})
    requires(SingleElement<Data>)
  {
    [[maybe_unused]] const auto on = job().enter("reduce");
    return comm().reduce(value, root, op);
  }
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root = Rank{0}, Op op = {})
    requires(!SingleElement<std::remove_cvref_t<Data>>)
  {
    [[maybe_unused]] const auto on = job().enter("reduce");
    comm().reduce(data, root, op);
  }

  /// Root's number, or data = root's data. **Ranks** all. **Host** as `all_reduce`.
  template <class Data>
  [[nodiscard("the result is returned")]] auto broadcast(Data value, Rank root = Rank{0})
    requires(SingleElement<Data>)
  {
    [[maybe_unused]] const auto on = job().enter("broadcast");
    return comm().broadcast(value, root);
  }
  template <class Data>
  void broadcast(Data&& data, Rank root = Rank{0})
    requires(!SingleElement<std::remove_cvref_t<Data>>)
  {
    [[maybe_unused]] const auto on = job().enter("broadcast");
    comm().broadcast(data, root);
  }

  /// Every rank's number as a vector, by rank, or out = every rank's in. **Ranks** all. **Host** as
  /// `all_reduce`.
  template <SingleElement T>
  [[nodiscard]] auto all_gather(T value) {
    [[maybe_unused]] const auto on = job().enter("all_gather");
    return comm().all_gather(value);
  }
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    [[maybe_unused]] const auto on = job().enter("all_gather");
    comm().all_gather(in, out);
  }

  /// Every rank's elements, where ranks bring different numbers of them: a `Gathered`, on all ranks
  /// or on `root`; or into `out`, with the counts as `GatheredPieces`. **Ranks** all. **Host**
  /// blocks.
  template <class In, class... Out>
  auto all_gather_variable(const In& in, Out&&... out) {
    [[maybe_unused]] const auto on = job().enter("all_gather_variable");
    return comm().all_gather_variable(in, out...);
  }
  template <class In, class... Where>
  auto gather_variable(const In& in, Where&&... out_and_root) {
    [[maybe_unused]] const auto on = job().enter("gather_variable");
    return comm().gather_variable(in, out_and_root...);
  }

  /// **Ranks** all. **Host** blocks.
  void barrier() {
    [[maybe_unused]] const auto on = job().enter("barrier");
    if constexpr (Job::is_one_process) job().dp().synchronize();
    comm().barrier();
  }

 private:
  Job& job() { return static_cast<Job&>(*this); }
  auto& comm() { return job().own_communicator(); }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step of a job whose batch norms take their statistics over several ranks.

#include "lockstep/detail/strategy/job_groups.hpp"
#include "lockstep/detail/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// The ranks over which batch norms take their statistics: those of the job, or of its group.
template <class Traits, class Comm>
class NormRanks {
  using Groups = JobGroupsOf<Traits, Comm>;

 public:
  static constexpr bool communicates = true;

  NormRanks(Comm& job, Groups& groups) : job_(&job), groups_(&groups) {}

  std::size_t world() const { return ranks().world_size().value(); }
  Rank rank() const { return ranks().rank(); }

  /// Gathers every rank's own values, by rank. **Ranks** all of these, in the order of their
  /// models' norms. **Host** blocks, or on a GPU enqueues. **Stream** the step's, captured with it.
  template <class T>
  void all_gather(std::span<const T> own, std::span<T> all) const {
    follow_job();
    ranks().all_gather(own, all, step_call<Traits, JobCall::forward>());
  }
  /// Sums values over ranks. **Ranks**, **Host** and **Stream** as `all_gather`.
  template <class T>
  void all_reduce(std::span<T> values) const {
    follow_job();
    ranks().all_reduce(values, Sum{}, step_call<Traits, JobCall::backward>());
  }
  /// Before a collective: waits for these ranks' own allocations, because an allocation on a GPU
  /// may wait for work that others have enqueued. **Ranks** all of these.
  void finish_allocations() const {
    if constexpr (requires { ranks().finish_allocations(); }) ranks().finish_allocations();
  }

 private:
  auto& ranks() const {
    if constexpr (Traits::syncs_norms_in_group) {
      return groups_->group();
    } else {
      return *job_;
    }
  }
  /// Buckets in flight belong to the job's communicator: where collectives of GPUs wait for each
  /// other, those of two communicators must have one order on all GPUs.
  void follow_job() const {
    if constexpr (Traits::syncs_norms_in_group && requires { job_->order_calls(); })
      job_->order_calls();
  }

  Comm* job_;
  Groups* groups_;
};

template <class Step, class Ranks>
class NormStep : public Step {
 public:
  NormStep(const Step& step, const Ranks& ranks) : Step(step), ranks_(ranks) {}

  const Ranks& norm_ranks() const { return ranks_; }

 private:
  Ranks ranks_;
};

/// Gives the model's step the ranks of its norms.
template <class Traits, class Comm>
struct SyncNorms : Stages<SyncNorms<Traits, Comm>> {
  constexpr explicit SyncNorms(const auto& /*gradients*/) {}

  using Ranks = std::conditional_t<Traits::syncs_norms, NormRanks<Traits, Comm>, NoNormRanks>;
  template <class Step>
  using View = NormStep<Step, Ranks>;
  template <class Step>
  static View<Step> view(const Step& step, auto& replica) {
    if constexpr (Traits::syncs_norms) {
      return {step, Ranks(replica.communicator(), replica.groups())};
    } else {
      return {step, Ranks{replica.communicator().world_size().value()}};
    }
  }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One replica of `ParallelStrategy<DP>`: a rank of DDP that is led through its steps.

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/core/strong.hpp"
#include "lockstep/core/typed_storage.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/strategy/scatter.hpp"

namespace lockstep {

/// Its members are the phases of a step, each called on this replica's thread; whatever is between
/// two of them is the caller's. What fails before replicas begin to communicate is only thrown;
/// from then on all others are told, and the job is over.
template <class Model, class Policies, class Comm>
class DpReplica {
  using Ddp = BasicDdp<Model, Policies, Comm>;
  using Traits = DdpTraits<Model, Policies>;

 public:
  using Loss = typename Ddp::Loss;

  /// **Ranks** all replicas. **Host** blocks until all have come.
  DpReplica(Comm comm, Model model, Seed seed)
      : comm_(std::move(comm)), ddp_(comm_, std::move(model), seed) {}

  Ddp& ddp() { return ddp_; }
  const Ddp& ddp() const { return ddp_; }

  /// Will the next micro-batch complete a step?
  bool completes() const { return ddp_.reducer_.micro_batches() + 1 >= Traits::micro_batches; }

  /// The optimizer's numbers are the first replica's.
  void follow(DpReplica& first) {
    if (this == &first) return;
    ddp_.optimizer() = first.ddp_.optimizer();
    ddp_.schedule() = first.ddp_.schedule();
  }

  /// Takes its share of a batch, of which it has `samples`, and which counts `weight` in the step.
  template <class Batch>
  void take(const Batch& batch, const Cut& cut, std::size_t samples, double weight) {
    samples_ = samples;
    if constexpr (Traits::weighs_shares) ddp_.reducer_.weigh(weight);
    if (samples_ != 0) placed<Batch>().at = &place(batch, cut);
  }

  void synchronize()
    requires requires(Comm& comm) { comm.synchronize(); }
  {
    comm_.synchronize();
  }

  /// The first replica's buffers are everybody's before every forward.
  void synchronize_buffers() {
    if constexpr (Traits::broadcasts_buffers) ddp_.guard([&] { ddp_.synchronize_buffers(); });
  }

  template <class Batch>
  void forward() {
    synchronize_buffers();
    if (samples_ != 0) loss_.emplace(ddp_.forward_through(*placed<Batch>().at, false));
  }

  /// Where parameters are shared nothing travels before backward is over, and all may think again.
  template <class Batch>
  void backward(bool last) {
    if constexpr (Traits::shares_parameters) {
      run_backward<Batch>(last);
    } else {
      ddp_.guard([&] { run_backward<Batch>(last); });
    }
  }

  /// The step of all, once its last micro-batch is there.
  void update() { ddp_.run_reduce_and_update(); }

  /// Forgets the micro-batches of a step whose backward has failed somewhere.
  void forget_step() { ddp_.reducer_.finish_step(); }

  /// The loss of its share.
  template <class Batch>
  void evaluate() {
    synchronize_buffers();
    if (samples_ != 0) {
      loss_.emplace(ddp_.execution_.forward(ddp_.model_, ddp_.bare_, *placed<Batch>().at));
    }
  }
  template <class Batch, class Tally>
  void evaluate(Tally& tally) {
    synchronize_buffers();
    if (samples_ != 0) ddp_.evaluate_placed(*placed<Batch>().at, tally, [&] { return samples_; });
  }

  std::size_t samples() const { return samples_; }
  const std::optional<Loss>& loss() const { return loss_; }

 private:
  template <class Batch>
  void run_backward(bool last) {
    if (samples_ != 0) {
      ddp_.backward_through(*placed<Batch>().at, last);
    } else {
      ddp_.reducer_.sit_out(last);
    }
  }

  template <class Batch>
  const auto& place(const Batch& batch, const Cut& cut) {
    if constexpr (std::is_same_v<ShareOf<Batch>, Batch>) {
      if (cut.replicas == 1) return ddp_.execution_.place(batch);
    }
    auto& share = storage_.get<std::optional<ShareOf<Batch>>>();
    take_share(batch, cut, comm_.rank().value(), share);
    return ddp_.execution_.place(*share);
  }

  /// Where the model finds its share of a `Batch`.
  template <class Placed>
  struct Place {
    const Placed* at = nullptr;
  };
  template <class Batch>
  auto& placed() {
    using Placed = std::remove_cvref_t<decltype(std::declval<DpReplica&>().place(
        std::declval<const Batch&>(), Cut{}))>;
    return storage_.get<Place<Placed>>();
  }

  Comm comm_;
  Ddp ddp_;
  TypedStorage storage_;
  std::size_t samples_ = 0;
  std::optional<Loss> loss_;
};

}  // namespace lockstep

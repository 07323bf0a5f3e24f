// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The phases of a hand-written training step, as types: each has only what may come next.

#include <type_traits>

namespace lockstep {

template <class Ddp>
class Backwarded;
template <class Ddp>
class Averaged;

/// What may not come next is a sentence. A phase hides the one member that may, and takes it from
/// here again for objects that have a name: those could be used twice.
template <class Phase>
class OutOfOrder {
 public:
  template <class P = Phase>
  void backward() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void reduce() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void update() const& {
    refuse<P>();
  }
  template <class P = Phase>
  void reduce_and_update() const& {
    refuse<P>();
  }

 private:
  template <class P>
  static void refuse() {
    static_assert(sizeof(P) == 0,
                  "lockstep: the phases of a step come in the order ddp.forward(batch)"
                  ".backward().reduce().update(), each once; use std::move for a phase that has "
                  "a name, and write reduce_and_update() to fuse the last two");
  }
};

/// After forward: the loss is known.
template <class Ddp, class Batch>
class [[nodiscard("backward comes next")]] Forwarded : public OutOfOrder<Forwarded<Ddp, Batch>> {
 public:
  using OutOfOrder<Forwarded<Ddp, Batch>>::backward;

  Forwarded(Ddp& ddp, const Batch& batch, typename Ddp::Loss loss)
      : ddp_(ddp), batch_(batch), loss_(loss) {}
  Forwarded(const Forwarded&) = delete;
  Forwarded& operator=(const Forwarded&) = delete;

  /// Of this rank's batch.
  auto loss() const { return loss_; }

  /// **Ranks** all. **Host** runs the model; buckets start to travel as they are complete.
  Backwarded<Ddp> backward() && {
    ddp_.run_backward(batch_, true);
    return Backwarded<Ddp>(ddp_, loss_);
  }

 private:
  Ddp& ddp_;
  const Batch& batch_;
  typename Ddp::Loss loss_;
};

/// After backward: gradients are this rank's own, some of them on their way.
template <class Ddp>
class [[nodiscard("reduce or reduce_and_update comes next")]] Backwarded
    : public OutOfOrder<Backwarded<Ddp>> {
 public:
  using OutOfOrder<Backwarded<Ddp>>::reduce;
  using OutOfOrder<Backwarded<Ddp>>::reduce_and_update;

  Backwarded(Ddp& ddp, typename Ddp::Loss loss) : ddp_(ddp), loss_(loss) {}
  Backwarded(const Backwarded&) = delete;
  Backwarded& operator=(const Backwarded&) = delete;

  auto loss() const { return loss_; }

  /// Gradients = their average over ranks. **Ranks** all. **Host** blocks.
  Averaged<Ddp> reduce() && {
    ddp_.run_reduce();
    return Averaged<Ddp>(ddp_, loss_);
  }

  /// Both in one pass over memory where possible; gradients are not averaged in place. Returns the
  /// loss. **Ranks** all. **Host** blocks.
  auto reduce_and_update() && {
    ddp_.run_reduce_and_update();
    return loss_;
  }

 private:
  Ddp& ddp_;
  typename Ddp::Loss loss_;
};

/// After reduce: gradients are averages, the same on all ranks, and can be looked at.
template <class Ddp>
class [[nodiscard("update comes next")]] Averaged : public OutOfOrder<Averaged<Ddp>> {
 public:
  using OutOfOrder<Averaged<Ddp>>::update;

  Averaged(Ddp& ddp, typename Ddp::Loss loss) : ddp_(ddp), loss_(loss) {}
  Averaged(const Averaged&) = delete;
  Averaged& operator=(const Averaged&) = delete;

  auto loss() const { return loss_; }

  template <class Key>
  auto grad(Key key) const {
    return ddp_.grad(key);
  }

  /// The optimizer's step. Returns the loss. **Ranks** all. **Host** blocks until the parameters
  /// are new on all ranks.
  auto update() && {
    ddp_.run_update();
    return loss_;
  }

 private:
  Ddp& ddp_;
  typename Ddp::Loss loss_;
};

/// After forward in a `no_sync` scope: backward adds to the gradients, and nothing follows.
template <class Ddp, class Batch>
class [[nodiscard("backward comes next")]] ForwardedLocally
    : public OutOfOrder<ForwardedLocally<Ddp, Batch>> {
 public:
  using OutOfOrder<ForwardedLocally<Ddp, Batch>>::backward;

  ForwardedLocally(Ddp& ddp, const Batch& batch, typename Ddp::Loss loss)
      : ddp_(ddp), batch_(batch), loss_(loss) {}
  ForwardedLocally(const ForwardedLocally&) = delete;
  ForwardedLocally& operator=(const ForwardedLocally&) = delete;

  auto loss() const { return loss_; }

  /// Returns the loss. **Ranks** each for itself.
  auto backward() && {
    ddp_.run_backward(batch_, false);
    return loss_;
  }

 private:
  Ddp& ddp_;
  const Batch& batch_;
  typename Ddp::Loss loss_;
};

/// What `no_sync` gives: a way to add up gradients without communication.
template <class Ddp>
class LocalScope {
 public:
  explicit LocalScope(Ddp& ddp) : ddp_(ddp) {}

  template <class Batch>
  auto forward(const Batch& batch) {
    const auto& placed = ddp_.execution_.place(batch);
    return ForwardedLocally<Ddp, std::remove_cvref_t<decltype(placed)>>(
        ddp_, placed, ddp_.run_forward(placed, false));
  }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward needs it again

 private:
  Ddp& ddp_;
};

}  // namespace lockstep

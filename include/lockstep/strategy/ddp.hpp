// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DDP>`: a model wrapped so that ranks train it together.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/fingerprint.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/ddp_traits.hpp"
#include "lockstep/strategy/host_execution.hpp"
#include "lockstep/strategy/initial_values.hpp"
#include "lockstep/strategy/phases.hpp"
#include "lockstep/strategy/reducer.hpp"
#include "lockstep/strategy/tracked_step.hpp"

namespace lockstep {

/// A replica of the model on this rank: its parameters, gradients and optimizer. W ranks that each
/// step on their share of a batch train like one process on the whole batch; parameters are the
/// same bits on all ranks after every step.
///
/// A world that the compiler knows to be of one costs what the bare model costs.
template <class Model, class Policies, class Comm>
class BasicDdp : public OutOfOrder<BasicDdp<Model, Policies, Comm>> {
  using Traits = DdpTraits<Model, Policies>;
  using Executing = Execution<typename Traits::template choice<axes::Device>, Traits, Comm>;
  using Gradients = Reducer<Traits, Comm, Executing>;
  using Optimizing = typename Executing::template UpdaterOf<Gradients>;

 public:
  using model_type = Model;
  using bare_step = typename Executing::Step;
  /// On a GPU a loss is computed while the host goes on: it is a number when it is asked for one.
  using Loss = typename Executing::Loss;
  /// What the model's forward and backward are given.
  using step_type =
      std::conditional_t<Traits::tracks, TrackedStep<Model, bare_step, Gradients>, bare_step>;

  /// Compares the job over ranks, then gives all of them rank 0's initial values. **Ranks** all.
  /// **Host** blocks.
  explicit BasicDdp(Comm& comm, Model model = {}, Seed seed = {})
      : comm_(comm),
        model_(std::move(model)),
        execution_(comm),
        layout_(guard([&] { return typename Traits::layout(model_); })),
        buffer_layout_(guard([&] { return typename Traits::buffer_layout(model_); })),
        parameters_(agree_and_allocate()),
        buffers_(allocate(buffer_layout_.plan().bytes)),
        reducer_(comm, execution_, layout_),
        updater_(execution_.template updater<Gradients>(comm, layout_, parameters_)),
        bare_(execution_.step(model_, {parameters_, reducer_.gradients(), buffers_})) {
    initialize([&](auto& initial) { write_initial_values(model_, initial); }, seed);
  }
  BasicDdp(const BasicDdp&) = delete;
  BasicDdp& operator=(const BasicDdp&) = delete;

  Model& model() { return model_; }
  const Model& model() const { return model_; }

  /// The optimizer's numbers: `ddp.optimizer().lr = 0.01`. The same on all ranks.
  auto& optimizer() { return updater_.options(); }
  auto& schedule() { return updater_.schedule(); }
  double learning_rate() const { return updater_.learning_rate(); }
  std::uint64_t updates() const { return updater_.steps(); }
  void set_epoch(std::uint64_t epoch) { updater_.set_epoch(epoch); }

  template <class Key>
  auto param(Key key) const {
    return bare_.param(key);
  }
  template <class Key>
  auto buffer(Key key) const {
    return bare_.buffer(key);
  }
  /// After `reduce`, the average over ranks; before, this rank's own.
  template <class Key>
  auto grad(Key key) const {
    return bare_.grad(key);
  }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    if constexpr (Traits::shares_parameters) comm_.barrier();  // nobody reads them any more
    guard([&] {
      if (comm_.rank() != Rank{0}) return;
      const typename Traits::declared_layout declared(model_);
      const BufferLayout<Model> declared_buffers(model_);
      execution_.initialize(
          model_, {parameters_, nullptr, buffers_}, updater_,
          [&](std::byte* parameters, std::byte* buffers) {
            InitialValues<Model, typename Traits::declared_layout, BufferLayout<Model>> initial(
                declared, declared_buffers, parameters, buffers, seed);
            f(initial);
          });
    });
    if constexpr (Traits::shares_parameters) {
      comm_.barrier();
    } else {
      broadcast(parameters_, layout_.plan().bytes);
      if constexpr (requires { updater_.masters(); }) {
        broadcast(updater_.masters().data(), updater_.masters().bytes());
      }
    }
    broadcast(buffers_, buffer_layout_.plan().bytes);
  }

  /// Rank 0's buffers, on all ranks. **Ranks** all. **Host** blocks.
  void synchronize_buffers() { broadcast(buffers_, buffer_layout_.plan().bytes); }

  /// One micro-batch: forward, backward and, with the last of `Accumulate<N>`, reduce and update.
  /// Batches of `no_sync` count among the N. Returns the loss of this rank's batch. **Ranks** all.
  /// **Host** blocks, or on a GPU enqueues. **Stream** the step's own.
  template <class Batch>
  Loss step(const Batch& batch) {
    const auto& placed = execution_.place(batch);
    const bool last = reducer_.micro_batches() + 1 >= Traits::micro_batches;
    return guard([&] {
      if (last) updater_.begin();
      if constexpr (Traits::captures) {
        return execution_.captured(placed, last, reducer_, [&] { enqueue(placed, last); });
      } else {
        return enqueue(placed, last);
      }
    });
  }

  /// A hand-written loop: `ddp.forward(batch).backward().reduce().update()`. Each phase is a type
  /// that has only the next one as a member; another order does not compile. **Ranks** all.
  /// **Host** blocks.
  template <class Batch>
  auto forward(const Batch& batch) {
    const auto& placed = execution_.place(batch);
    return Forwarded<BasicDdp, std::remove_cvref_t<decltype(placed)>>(*this, placed,
                                                                      run_forward(placed, true));
  }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward needs it again

  /// Batches whose gradients are only added up, on this rank alone, to travel with the next that is
  /// reduced: `ddp.no_sync().forward(batch).backward()`. As in PyTorch, the sum is not divided.
  LocalScope<BasicDdp> no_sync() {
    static_assert(Traits::tracks,
                  "lockstep: with World<1> and Accumulate<1> a step is the bare model and cannot "
                  "add up gradients; add Accumulate<N>, or use World<dynamic>");
    return LocalScope<BasicDdp>(*this);
  }

  /// The loss of a batch, with nothing kept for backward and no communication.
  template <class Batch>
  Loss evaluate(const Batch& batch) {
    return execution_.forward(model_, bare_, execution_.place(batch));
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    evaluate_placed(execution_.place(batch), tally, [&] { return batch.size(); });
  }

  /// How many graphs `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(Traits::captures)
  {
    return execution_.template graphs<Batch>();
  }

  /// What adds up the losses of many steps.
  auto loss_meter() { return execution_.meter(); }

 private:
  template <class, class, class>
  friend class DpReplica;  // runs a step phase by phase, together with others
  template <class, class>
  friend class Forwarded;
  template <class, class>
  friend class ForwardedLocally;
  template <class>
  friend class Backwarded;
  template <class>
  friend class Averaged;
  template <class>
  friend class LocalScope;

  /// The model's part and, with the last micro-batch, everything else.
  template <class Batch>
  Loss enqueue(const Batch& batch, bool last) {
    const Loss loss = forward_through(batch, last);
    backward_through(batch, last);
    if (last) updater_.reduce_and_update(reducer_);
    return loss;
  }

  template <class Batch>
  Loss forward_through(const Batch& batch, bool synchronizes) {
    static_assert(require_model<Model, step_type, Batch>());
    if constexpr (Traits::broadcasts_buffers) {
      if (synchronizes) synchronize_buffers();
    }
    return with_step([&](auto& step) { return execution_.forward(model_, step, batch); });
  }

  /// `gradients` are those of the outputs, where the loss is not this rank's own.
  template <class Batch, class... Gradient>
  void backward_through(const Batch& batch, bool synchronizes, const Gradient&... gradients) {
    if constexpr (Traits::tracks) reducer_.begin_backward(synchronizes);
    with_step([&](auto& step) { model_.backward(step, batch, gradients...); });
    if constexpr (Traits::tracks) reducer_.end_backward();
  }

  template <class Placed, class Tally, class Samples>
  void evaluate_placed(const Placed& batch, Tally& tally, const Samples& samples) {
    if constexpr (requires { model_.evaluate(bare_, batch, tally); }) {
      model_.evaluate(bare_, batch, tally);
    } else {
      const auto count = static_cast<double>(samples());
      tally.add("loss", execution_.forward(model_, bare_, batch) * count, count);
    }
  }

  // The phases.

  template <class Batch>
  Loss run_forward(const Batch& batch, bool synchronizes) {
    return guard([&] { return forward_through(batch, synchronizes); });
  }
  template <class Batch>
  void run_backward(const Batch& batch, bool synchronizes) {
    guard([&] { backward_through(batch, synchronizes); });
  }
  void run_reduce() {
    guard([&] { reducer_.reduce(); });
  }
  void run_update() {
    guard([&] {
      updater_.begin();
      updater_.update_averaged(reducer_);
    });
  }
  void run_reduce_and_update() {
    guard([&] {
      updater_.begin();
      updater_.reduce_and_update(reducer_);
    });
  }

  /// Calls `f` with the step whose gradients are written now.
  template <class F>
  auto with_step(const F& f) {
    if constexpr (!Traits::tracks) {
      return f(bare_);
    } else {
      if (reducer_.holds_gradients() && !second_)
        second_.emplace(execution_.step(model_, {parameters_, reducer_.scratch(), buffers_}));
      step_type step(reducer_.holds_gradients() ? *second_ : bare_, reducer_);
      return f(step);
    }
  }

  /// What goes wrong on this rank is said to all others before it is thrown.
  template <class F>
  auto guard(const F& f) -> decltype(f()) {
    if constexpr (Traits::alone) {
      return f();
    } else {
      try {
        return f();
      } catch (...) {
        fail();
      }
    }
  }
  [[noreturn, gnu::noinline]] void fail() {
    try {
      throw;
    } catch (const Error& error) {
      const Error named = error.rank() ? error : error.on(comm_.rank());
      comm_.abandon(named.what());
      throw named;
    } catch (const std::exception& error) {
      comm_.abandon(error.what());
      throw;
    } catch (...) {
      comm_.abandon("an exception that is no std::exception");
      throw;
    }
  }

  std::byte* agree_and_allocate() {
    if constexpr (!Traits::alone) {
      const auto fingerprint =
          fingerprint_of<Model, Policies>(layout_.infos(), buffer_layout_.infos());
      require_agreement(comm_, fingerprint, [&] {
        return job_description<Model, Policies>(layout_.infos(), buffer_layout_.infos());
      });
    }
    if constexpr (Traits::shares_parameters) {
      return bytes(comm_.template allocate_shared<std::uint8_t>(layout_.plan().bytes));
    } else {
      return allocate(layout_.plan().bytes);
    }
  }

  std::byte* allocate(std::size_t size) {
    return size == 0 ? nullptr : bytes(comm_.template allocate<std::uint8_t>(size));
  }
  static std::byte* bytes(std::span<std::uint8_t> memory) {
    return reinterpret_cast<std::byte*>(memory.data());
  }

  void broadcast(std::byte* data, std::size_t size) {
    if (size != 0) comm_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(data), size), Rank{0});
  }

  Comm& comm_;
  Model model_;
  [[no_unique_address]] Executing execution_;
  [[no_unique_address]] typename Traits::layout layout_;
  [[no_unique_address]] typename Traits::buffer_layout buffer_layout_;
  std::byte* parameters_;
  std::byte* buffers_;
  Gradients reducer_;
  Optimizing updater_;
  bare_step bare_;
  std::optional<bare_step> second_;  // for micro-batches after the first
};

}  // namespace lockstep

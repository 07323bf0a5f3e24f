// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DP>`: a model whose replicas train on shares of a batch, in one process.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/dp_evaluation.hpp"
#include "lockstep/strategy/dp_first.hpp"
#include "lockstep/strategy/dp_kept.hpp"
#include "lockstep/strategy/dp_options.hpp"
#include "lockstep/strategy/dp_replica.hpp"
#include "lockstep/strategy/dp_shares.hpp"
#include "lockstep/strategy/model_source.hpp"
#include "lockstep/strategy/replica_crew.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/scatter.hpp"

namespace lockstep {

namespace detail {
/// Replicas of a model on devices of this process: GPUs, or threads on the CPU, where they share
/// the parameters. A batch is cut into shares, replicas run them at the same time, and the result
/// is that of one model on the whole batch. `Meeting` is where replicas get their communicators.
///
/// Replicas and their parameters stay: every replica applies the same update, and unlike PyTorch's
/// they are not copied for every batch. So members of the model that a program changes after
/// construction must be changed in all replicas (`for_each_model`).
///
/// Members may be called by any thread, one at a time; the calling thread runs replica 0.
template <class Model, class Policies, class Meeting>
class BasicDp : public DpFirst<BasicDp<Model, Policies, Meeting>, Model>,
                public DpEvaluation<BasicDp<Model, Policies, Meeting>>,
                public DpKept<BasicDp<Model, Policies, Meeting>> {
  friend class DpFirst<BasicDp, Model>;
  friend class DpEvaluation<BasicDp>;
  friend class DpKept<BasicDp>;

 public:
  using traits = ReplicaTraits<Model, Policies>;
  static constexpr bool is_one_process = true;

 private:
  using LedReplica = DpReplica<Model, Policies, typename Meeting::communicator>;
  using Sync = detail::Sync;
  static constexpr std::size_t static_replicas = traits::template policy<axes::World>::static_size;

 public:
  using subgraphs = typename traits::subgraphs;
  using model_type = Model;
  using Loss = typename LedReplica::Loss;

  /// Every replica's model is constructed on the replica's own thread and device, one after the
  /// other: by default, or by `[](std::size_t replica) { return Model(...); }`. The others of a
  /// model that is given are copies of it; so are those of a model with `replicate()`. **Host**
  /// blocks until all replicas are there and have the same initial parameters.
  template <class M = Model>
  explicit BasicDp(const DpOptions& options = {}, DefaultModel = {})
      : BasicDp(options, Make{}, [&](std::size_t i, const Models& models) {
          constexpr bool replicates = requires(const M& model) { model.replicate(); };
          if constexpr (replicates) {
            if (i != 0) return replicate(*models[0]);
          }
          return seeded(options, i, &default_model<M>);
        }) {}
  template <ModelMaking<Model, std::size_t> Making>
  BasicDp(const DpOptions& options, Making&& make)
      : BasicDp(options, Make{}, [&](std::size_t i, const Models&) {
          return seeded(options, i, [&] { return made_by<Model>(make, i); });
        }) {}
  BasicDp(const DpOptions& options, Model model)
      : BasicDp(options, Make{}, [&](std::size_t i, const Models& models) {
          if constexpr (!traits::alone) {
            if (i != 0) return replicate(*models[0]);
          }
          return std::move(model);
        }) {}
  BasicDp(const BasicDp&) = delete;
  BasicDp& operator=(const BasicDp&) = delete;
  ~BasicDp() {
    crew_.run([&](std::size_t i) { replicas_[i]->settle(); },
              [&](std::size_t i) { replicas_[i].reset(); });
  }

  std::size_t replicas() const { return replicas_.size(); }

  /// The calling thread works on the first replica's GPU while the result lives.
  [[nodiscard]] auto on_device() const { return first().on_device(); }

  /// Calls `f(parameter, state, view)` for every state of the optimizer. Replicas that share the
  /// parameters have a slice of the states each, and a parameter may come in several pieces:
  /// `f(parameter, state, view, first)` gets the place of a piece's first element.
  template <class F>
  void for_each_state(F&& f) const {
    for (const auto& replica : replicas_) {
      std::as_const(*replica).replica().for_each_state(f);
      if constexpr (!traits::divides_states) return;
    }
  }

  /// Calls `f(model)` for every replica's model, one after the other, each on its replica's thread
  /// and device. **Host** blocks.
  template <class F>
  void for_each_model(F&& f) {
    [[maybe_unused]] const auto on = on_device();
    crew_.run_in_turn([&](std::size_t i) { f(replicas_[i]->replica().model()); });
  }

  /// Sets shares in proportion to these numbers, one for each replica, for devices of different
  /// speed. An empty list makes shares equal again.
  void set_shares(std::vector<double> weights) { shares_.set(std::move(weights)); }

  void set_epoch(std::uint64_t epoch) {
    for (const auto& replica : replicas_) replica->replica().set_epoch(epoch);
  }
  void begin_schedule(std::uint64_t step) {
    for (const auto& replica : replicas_) replica->replica().begin_schedule(step);
  }

  /// Writes parameters and buffers anew, on all replicas: `f(initial)`. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    run([&](std::size_t i) { replicas_[i]->initialize(f, seed); });
  }

  /// Gives all replicas the first replica's buffers, or with `Buffers<Synced>` their average.
  /// **Host** blocks.
  void synchronize_buffers() {
    run([&](std::size_t i) { replicas_[i]->synchronize_buffers(); });
  }

  /// **Host** blocks until every replica's device is idle.
  void synchronize() {
    if constexpr (StreamCommunicator<typename Meeting::communicator>)
      run([&](std::size_t i) { replicas_[i]->synchronize(); });
  }

  /// One micro-batch: replicas run their shares and, with the last of `Accumulate<N>`, update the
  /// parameters. Returns the loss of the whole batch. An exception of a model is thrown with its
  /// replica's number; if several throw, the first replica's is. The batch then has had no effect.
  /// But where replicas keep parameters of their own (`Sharding<Replicated>`, or GPUs) and backward
  /// fails, replicas have begun to communicate, and the job is over; with `CapturedStep` or
  /// `Norms<Synced>` it is in any case. **Host** blocks, or on a GPU enqueues.
  template <class Batch>
  Loss step(const Batch& batch) {
    return step(SubgraphChoice{}, batch);
  }
  /// The same with one of `Subgraphs`: `dp.step<"with_adapter"_s>(batch)`, or with a choice at run
  /// time, `dp.step(dp.subgraph("with_adapter"), batch)`.
  template <auto Set, class Batch>
  Loss step(const Batch& batch) {
    return step(Set, batch);
  }
  template <class Set, class Batch>
  Loss step(const Set& set, const Batch& batch) {
    const std::size_t subgraph = subgraph_number<subgraphs>(set);
    if constexpr (traits::alone) {
      [[maybe_unused]] const auto on = on_device();
      return replicas_[0]->run_alone(batch, subgraph);
    } else {
      for (const auto& replica : replicas_) replica->replica().choose_subgraph(subgraph);
      const BatchCut cut = scatter(batch);
      if constexpr (traits::syncs_norms) shares_.require_samples();
      if constexpr (traits::captures) {
        run_captured(batch, cut);
      } else {
        run_phases(batch, cut);
      }
      return whole_loss();
    }
  }

  /// A sub-graph by a name that is known at run time; another name is an error.
  static SubgraphChoice subgraph(std::string_view name) { return find_subgraph<subgraphs>(name); }

  /// With `Accumulate<N>`, at the end of an epoch: a step of the batches that were too few for one,
  /// if there are any; their gradients are divided by their own number. **Host** as `step`.
  void step_tail() {
    run([&](std::size_t i) { replicas_[i]->follow(*replicas_[0]); },
        [&](std::size_t i) { replicas_[i]->step_tail(); });
  }
  /// Forgets the gradients of such batches.
  void drop_tail() {
    for (const auto& replica : replicas_) replica->replica().discard_gradients();
  }

  /// Throws if a loss or gradient was not finite (`Anomaly<Stop>`), which on a GPU a later call
  /// does otherwise. **Host** blocks until all steps are done.
  void require_finite() {
    run([&](std::size_t i) { replicas_[i]->require_finite(); });
  }

  /// How many graphs `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(traits::captures)
  {
    return replicas_[0]->template graphs<Batch>();
  }

 private:
  /// The models that were made so far; the first is there before the others are made.
  using Models = std::vector<std::optional<Model>>;
  struct Make {};

  template <class F>
  static Model seeded(const DpOptions& options, std::size_t replica, const F& make) {
    return make_seeded<Model, typename traits::device>(options.seed, Rank{replica}, make);
  }

  /// `model_of(i, models)` is replica i's model, made on its thread when its device is selected.
  template <class ModelOf>
  BasicDp(const DpOptions& options, Make, const ModelOf& model_of)
      : meeting_(replicas_of<static_replicas, Meeting>(options), options.timeout, options.devices),
        root_(output_replica(options, meeting_.size())),
        crew_(meeting_.size()),
        replicas_(meeting_.size()),
        shares_(meeting_.size(), traits::syncs_norms) {
    Models models(replicas());
    crew_.run([&](std::size_t i) { meeting_.prepare(Rank{i}); });
    crew_.run_in_turn([&](std::size_t i) { models[i].emplace(model_of(i, models)); });
    crew_.run([&](std::size_t i) {
      replicas_[i] = std::make_unique<LedReplica>(meeting_.join(Rank{i}), std::move(*models[i]),
                                                  options.seed, Rank{root_});
    });
    if constexpr (gathers) {
      for (const auto& replica : replicas_) replica->join_outputs(*replicas_[root_]);
    }
  }

  /// Runs phases on all replicas. The crew's threads are on their devices; the calling one, which
  /// is the program's, may be on another.
  template <class... Phases>
  void run(const Phases&... phases) {
    [[maybe_unused]] const auto on = on_device();
    crew_.run(phases...);
  }

  auto& first() { return replicas_[0]->replica(); }
  const auto& first() const { return std::as_const(*replicas_[0]).replica(); }

  static constexpr bool gathers = traits::scatters && OutputDeclaring<Model>;

  /// Counts the samples of every replica, and makes room for their outputs.
  template <class Batch>
  BatchCut scatter(const Batch& batch) {
    static_assert(require_scattering<Batch>());
    const BatchCut cut =
        shares_.count([&](const BatchCut& by, std::size_t i) { return samples_of(batch, by, i); });
    if constexpr (traits::gathers_outputs) make_room(batch, shares_.samples());
    return cut;
  }

  template <class Batch>
  void make_room(const Batch& batch, std::size_t all) {
    if (all != samples_of(batch, BatchCut{}, 0)) {
      throw Error("DP", "parts of the batch differ in size, and some samples would be left out",
                  "give all parts the same size, or use LossOnReplica");
    }
    if (all <= replicas_[0]->output_capacity()) return;
    synchronize();  // the memory may be in use
    run([&](std::size_t i) { replicas_[i]->reserve_outputs(all); });
  }

  template <class Batch>
  void take(std::size_t i, const Batch& batch, const BatchCut& cut) {
    replicas_[i]->follow(*replicas_[0]);
    replicas_[i]->take(batch, cut, shares_[i]);
  }

  template <class Batch>
  void run_phases(const Batch& batch, const BatchCut& cut) {
    const Sync sync = first().completes_step() ? Sync::yes : Sync::no;
    bool backward_began = false;
    try {
      run_to_loss<true>(
          batch, cut, [&](std::size_t i) { replicas_[i]->template forward<Batch>(); },
          [&](std::size_t i) {
            if (i == 0) backward_began = true;
            replicas_[i]->template backward<Batch>(sync);
          },
          [&](std::size_t i) {
            if (sync == Sync::yes) replicas_[i]->update();
          });
    } catch (...) {
      if (backward_began) {
        for (const auto& replica : replicas_) replica->replica().discard_gradients();
      }
      throw;
    }
  }

  /// The whole micro-batch as one graph, which depends on the shares of all replicas.
  template <class Batch>
  void run_captured(const Batch& batch, const BatchCut& cut) {
    std::vector<std::uint64_t> digests(replicas());
    run(
        [&](std::size_t i) {
          take(i, batch, cut);
          replicas_[i]->replica().draw_anew();
          digests[i] = replicas_[i]->template digest<Batch>();
        },
        [&](std::size_t i) {
          Hash variant;
          for (const std::uint64_t digest : digests) variant.number(digest);
          if constexpr (traits::has_subgraphs)
            variant.number(replicas_[i]->replica().graph_variant());
          if constexpr (traits::gathers_outputs) variant.number(replicas_[0]->output_capacity());
          replicas_[i]->template run_captured<Batch>(variant.value());
        });
  }

  /// Runs a batch up to its loss (`forward`, if the model's output is its loss), then `then`.
  template <bool Trains, class Batch, class Forward, class... Then>
  void run_to_loss(const Batch& batch, const BatchCut& cut, const Forward& forward,
                   const Then&... then) {
    const auto share = [&](std::size_t i) {
      take(i, batch, cut);
      if constexpr (Trains) replicas_[i]->replica().draw_anew();
    };
    if constexpr (traits::gathers_outputs) {
      try {
        run(
            share, [&](std::size_t i) { replicas_[i]->template predict<Batch, Trains>(); },
            [&](std::size_t i) { replicas_[i]->template take_loss<Batch, Trains>(); }, then...);
      } catch (...) {
        // What the failed batch has enqueued may still use the rows that the next batch writes.
        run([&](std::size_t i) { replicas_[i]->settle(); });
        throw;
      }
    } else {
      run(share, forward, then...);
    }
  }

  /// The mean over all samples.
  Loss whole_loss() const {
    if constexpr (traits::gathers_outputs || LedReplica::defers_loss) {
      return replicas_[root_]->loss();
    } else {
      double loss = 0;
      for (const auto& replica : replicas_) loss += replica->loss_part();
      return loss;
    }
  }

  Meeting meeting_;
  std::size_t root_;  // the replica of the output device
  ReplicaCrew crew_;
  std::vector<std::unique_ptr<LedReplica>> replicas_;
  DpShares shares_;  // of the batch that is under way
};

}  // namespace detail

}  // namespace lockstep

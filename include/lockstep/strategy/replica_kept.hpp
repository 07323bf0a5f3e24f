// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that a checkpoint is made of, and that goes on from one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/checkpoint/state.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/optim/progress.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/policies.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica. None of its members begins to communicate.
template <class Self>
class ReplicaKept {
 public:
  /// Lists parameters, buffers, states of the optimizer and of hooks. Names and data are valid as
  /// long as the replica is. Where updates leave parameters out, the count of a parameter's updates
  /// is its state "step".
  void list_state(StateUse use, std::vector<StateEntry>& to) {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_parameters();
    list_parameters(use, to);
    list_buffers(use, to);
    list_optimizer(use, to);
    if constexpr (Self::traits::is_hooked) list_hooks(use, to);
    if constexpr (Self::traits::averages_parameters) list_own(to);
  }

  /// What the policies mean for checkpoints.
  JobShape job_shape() const {
    using traits = typename Self::traits;
    using policies = typename traits::policies;
    JobShape shape;
    shape.world = shape.replicas = self().comm_.world_size().value();
    shape.gradient_divisor = traits::sums_gradients ? 1 : static_cast<double>(shape.replicas);
    shape.micro_batches = traits::micro_batches;
    shape.keeps_own_buffers = keeps_own_buffers();
    shape.policies = policy_names(typename policies::pack{});
    shape.fingerprint =
        fingerprint_of<policies>(typename traits::declared_layout(self().model_),
                                 BufferLayout<typename traits::model>(self().model_));
    return shape;
  }

  /// Everything beside tensors. **Host** on a GPU, blocks until all steps are done.
  ReplicaProgress progress() const {
    [[maybe_unused]] const auto on = self().on_device();
    ReplicaProgress progress;
    self().updater_.tell_progress(progress);
    if constexpr (Self::traits::draws)
      progress.random_seed = self().gradients_.features().seed().value();
    if constexpr (Self::traits::joins && Self::traits::broadcasts_buffers) {
      const Rank newest = self().gradients_.features().newest();
      if (newest != Rank{0}) progress.newest_buffers = newest.value();
    }
    return progress;
  }
  /// Goes on from there: comes before tensors are copied in. Numbers that the progress does not
  /// name stay as they are. Micro-batches that were added up are forgotten; counts of updates of
  /// single parameters are the count of all. **Host** blocks.
  void set_progress(const ReplicaProgress& progress) {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_parameters();
    self().await_device();
    self().updater_.take_progress(progress);
    if constexpr (Self::traits::tracks) self().discard_gradients();
    if constexpr (Self::traits::draws) {
      if (progress.random_seed)
        self().gradients_.features().start(Seed{*progress.random_seed}, self().comm_.rank());
    }
    if constexpr (Self::traits::joins) {
      // In another world any rank will do: all have the buffers that were saved.
      const std::uint64_t newest = progress.newest_buffers.value_or(0);
      self().gradients_.features().forget_live(
          Rank{newest < self().comm_.world_size().value() ? static_cast<std::size_t>(newest) : 0});
    }
    if constexpr (Self::traits::is_hooked)
      self().gradients_.reductions().begin_anew(progress.updates);
    self().await_device();
  }

  /// Copies pieces in the types of a file. **Host** on a CPU, blocks until they are there; on a GPU
  /// it goes on, and the pieces must live until `await_copies`. **Stream** after all steps so far;
  /// later ones wait for the copies.
  void copy_out(std::span<const StateCopy> copies) {
    [[maybe_unused]] const auto on = self().on_device();
    self().copies_.out(copies);
  }
  /// Waits until the latest copies are there. Any thread may call it, while steps go on. **Host**
  /// blocks.
  void await_copies() {
    [[maybe_unused]] const auto on = self().on_device();
    self().copies_.await();
  }
  /// Writes a piece, from elements in the type of a file; a parameter also where it is held in
  /// another type. **Host** blocks.
  void copy_in(const StateEntry& entry, const std::byte* from) {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_parameters();
    self().await_device();
    self().copies_.in(entry, from);
  }
  /// Memory for copies, from where the device copies best.
  auto make_kept_memory(std::size_t bytes) const {
    [[maybe_unused]] const auto on = self().on_device();
    return typename decltype(Self::copies_)::Memory(bytes);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  bool is_first() const { return self().comm_.rank() == Rank{0}; }

  /// A whole tensor of a layout, whose elements in a file are of the kind `element`.
  StateEntry entry_of(StateRole role, std::size_t tensor, const auto& layout, ElementKind element,
                      std::byte* arena) const {
    StateEntry piece;
    piece.role = role;
    piece.tensor = tensor;
    piece.name = layout.name(tensor);
    piece.whole = layout.infos()[tensor];
    piece.whole.element = element;
    piece.count = piece.whole.count();
    piece.data = arena + layout.plan().placements[tensor].offset;
    piece.held = layout.infos()[tensor].element;
    piece.on_host = std::is_same_v<typename Self::traits::memory, HostMemory>;
    piece.rank = self().comm_.rank().value();
    return piece;
  }

  /// A model's tensors as it declares them, where they are laid out as `Types` say.
  template <class Declared, class Types>
  auto declared_infos(const auto& layout) const {
    if constexpr (std::is_same_v<Types, DeclaredTypes>) {
      return layout.infos();
    } else {
      return Declared(self().model_).infos();
    }
  }

  void list_parameters(StateUse use, std::vector<StateEntry>& to) {
    using traits = typename Self::traits;
    constexpr bool divides_masters = traits::keeps_masters && traits::divides_states;
    const bool all = use == StateUse::loading || is_first();
    if (!divides_masters && !all) return;
    const auto& layout = self().layouts_.parameters;
    const auto declared =
        declared_infos<typename traits::declared_layout, typename traits::parameter_types>(layout);
    for (std::size_t p = 0; p != declared.size(); ++p) {
      StateEntry entry =
          entry_of(StateRole::parameter, p, layout, declared[p].element, self().parameters_);
      entry.shared = traits::shares_parameters;
      if constexpr (traits::keeps_masters) {
        if (layout.plan().is_trained(p)) {
          list_masters(use, entry, to);
          continue;
        }
      }
      if (all) to.push_back(entry);
    }
  }

  /// A parameter's weights of higher precision, from all ranks together. A rank that keeps some of
  /// them loads the parameter as the model uses it as well, which it has whole.
  void list_masters(StateUse use, const StateEntry& parameter, std::vector<StateEntry>& to) {
    constexpr bool divides = Self::traits::divides_states;
    if (divides && use == StateUse::loading) to.push_back(parameter);
    if (divides && use == StateUse::saving && !self().updater_.owned().is_saved()) return;
    self().updater_.for_each_master(parameter.tensor, [&](auto values, std::size_t first) {
      StateEntry entry = parameter;
      entry.first = first;
      if constexpr (!divides) {
        entry.derived = entry.data;
        entry.derived_kind = entry.held;
      }
      entry.hold(values);
      to.push_back(entry);
    });
  }

  static constexpr bool keeps_own_buffers() {
    using traits = typename Self::traits;
    return !traits::alone && std::is_same_v<typename traits::template choice<axes::Buffers>, Local>;
  }
  void list_buffers(StateUse use, std::vector<StateEntry>& to) {
    using traits = typename Self::traits;
    if (use == StateUse::saving && !keeps_own_buffers() && !is_first()) return;
    const auto& layout = self().layouts_.buffers;
    const auto declared =
        declared_infos<BufferLayout<typename traits::model>, typename traits::buffer_types>(layout);
    for (std::size_t b = 0; b != declared.size(); ++b)
      to.push_back(entry_of(StateRole::buffer, b, layout, declared[b].element, self().buffers_));
  }

  /// A state of a parameter, of whose elements `values` are those from `first` on.
  template <class T>
  StateEntry state_of(std::size_t parameter, std::string_view state, std::span<T> values,
                      std::size_t first) const {
    StateEntry entry = entry_of(StateRole::state, parameter, self().layouts_.parameters,
                                element_kind<T>(), self().parameters_);
    entry.state = state;
    entry.first = first;
    entry.hold(values);
    return entry;
  }

  void list_optimizer(StateUse use, std::vector<StateEntry>& to) {
    using traits = typename Self::traits;
    const bool all = use == StateUse::loading || is_first();
    if (all || (traits::divides_states && self().updater_.owned().is_saved())) {
      self().updater_.for_each_state(
          [&](std::size_t p, std::string_view state, auto values, std::size_t first) {
            to.push_back(state_of(p, state, std::span(values), first));
          });
    }
    if constexpr (traits::counts_updates) {
      const std::span<std::uint64_t> counts = self().updater_.update_counts();
      for (std::size_t p = 0; all && p != counts.size(); ++p) {
        if (!self().layouts_.parameters.plan().is_trained(p)) continue;
        StateEntry entry = state_of(p, "step", counts.subspan(p, 1), 0);
        entry.whole = {entry.held, 0, {}};
        to.push_back(entry);
      }
    }
  }

  /// The states of hooks: those that are the same on all ranks as states of the optimizer are, the
  /// others by rank.
  void list_hooks(StateUse use, std::vector<StateEntry>& to) {
    self().gradients_.reductions().for_each_kept(
        [&](std::size_t p, std::string_view state, auto values, Keeper keeper) {
          using T = typename decltype(values)::element_type;
          const bool own = keeper == Keeper::each_rank;
          if (use == StateUse::saving && !own && !is_first()) return;
          StateEntry entry = state_of(p, state, values, 0);
          if (own) entry.role = StateRole::local;
          if (entry.count != entry.whole.count())  // it is no copy of the parameter
            entry.whole = {element_kind<T>(), 1, {values.size()}};
          to.push_back(entry);
        });
  }

  /// Where ranks train alone between averages: the parameters and states of every rank.
  void list_own(std::vector<StateEntry>& to) {
    std::vector<StateEntry> all;
    list_parameters(StateUse::loading, all);
    list_optimizer(StateUse::loading, all);
    for (StateEntry& entry : all) {
      // Counts of updates are the same on all ranks.
      if (!self().layouts_.parameters.plan().is_trained(entry.tensor) || !is_floating(entry.held))
        continue;
      if (entry.role == StateRole::parameter) entry.state = "parameter";
      entry.role = StateRole::local;
      entry.averaged = true;
      to.push_back(entry);
    }
  }
};

}  // namespace lockstep::detail

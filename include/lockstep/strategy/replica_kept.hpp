// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that a checkpoint is made of, and that goes on from one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/strategy/kept_copies.hpp"
#include "lockstep/strategy/policies.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica. None of its members begins to communicate.
template <class Self>
class ReplicaKept {
 public:
  /// Calls `f(const KeptPiece&)` for parameters, buffers and states of the optimizer, in the order
  /// of roles. Names and data are valid as long as the replica is.
  ///
  /// Where updates leave parameters out, the count of a parameter's updates is its state "step".
  template <KeptFor For = KeptFor::saving, class F>
  void for_each_kept(const F& f) {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_parameters();
    give_parameters<For>(f);
    give_buffers<For>(f);
    give_states<For>(f);
    give_hooks<For>(f);
    give_local<For>(f);
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
  void copy_out(std::span<const KeptCopy> copies) {
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
  void copy_in(const KeptPiece& piece, const std::byte* from) {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_parameters();
    self().await_device();
    self().copies_.in(piece, from);
  }
  /// Memory for copies, from where the device copies best.
  auto make_kept_memory(std::size_t bytes) const {
    [[maybe_unused]] const auto on = self().on_device();
    return typename decltype(Self::copies_)::Memory(bytes);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  /// Does this rank save the slices that it keeps? All groups of ranks may keep the same.
  bool saves_own() {
    if constexpr (Self::traits::shards_groups) {
      return self().updater_.gathers().space().is_saved();
    } else {
      return true;
    }
  }
  bool is_first() const { return self().comm_.rank() == Rank{0}; }

  /// A whole tensor of a layout, whose elements in a file are of the kind `element`.
  KeptPiece piece_of(KeptRole role, std::size_t tensor, const auto& layout, ElementKind element,
                     std::byte* arena) const {
    KeptPiece piece;
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

  template <KeptFor For, class F>
  void give_parameters(const F& f) {
    using traits = typename Self::traits;
    constexpr bool divides_masters = traits::keeps_masters && traits::divides_states;
    if (For == KeptFor::saving && !divides_masters && !is_first()) return;
    const auto& layout = self().layouts_.parameters;
    const auto declared =
        declared_infos<typename traits::declared_layout, typename traits::parameter_types>(layout);
    for (std::size_t p = 0; p != declared.size(); ++p) {
      KeptPiece piece =
          piece_of(KeptRole::parameter, p, layout, declared[p].element, self().parameters_);
      piece.shared = traits::shares_parameters;
      if constexpr (traits::keeps_masters) {
        if (layout.plan().is_trained(p)) {
          give_masters<For>(piece, f);
          continue;
        }
      }
      if (For == KeptFor::loading || is_first()) f(static_cast<const KeptPiece&>(piece));
    }
  }

  /// A parameter's weights of higher precision, from all ranks together. A rank that keeps some of
  /// them loads the parameter as the model uses it as well, which it has whole.
  template <KeptFor For, class F>
  void give_masters(const KeptPiece& parameter, const F& f) {
    constexpr bool divides = Self::traits::divides_states;
    if (divides && For == KeptFor::loading) f(parameter);
    if (divides && For == KeptFor::saving && !saves_own()) return;
    self().updater_.kept().for_each_master(parameter.tensor, [&](auto values, std::size_t first) {
      KeptPiece piece = parameter;
      piece.first = first;
      piece.count = values.size();
      if constexpr (!divides) {
        piece.derived = piece.data;
        piece.derived_kind = piece.held;
      }
      piece.data = reinterpret_cast<std::byte*>(values.data());
      piece.held = element_kind<typename decltype(values)::element_type>();
      f(static_cast<const KeptPiece&>(piece));
    });
  }

  template <KeptFor For, class F>
  void give_buffers(const F& f) {
    using traits = typename Self::traits;
    constexpr bool differ =
        !traits::alone && std::is_same_v<typename traits::template choice<axes::Buffers>, Local>;
    if (For == KeptFor::saving && !differ && !is_first()) return;
    const auto& layout = self().layouts_.buffers;
    const auto declared =
        declared_infos<BufferLayout<typename traits::model>, typename traits::buffer_types>(layout);
    for (std::size_t b = 0; b != declared.size(); ++b)
      f(piece_of(KeptRole::buffer, b, layout, declared[b].element, self().buffers_));
  }

  template <KeptFor For, class F>
  void give_states(const F& f) {
    using traits = typename Self::traits;
    const bool all = For == KeptFor::loading || is_first();
    const auto& layout = self().layouts_.parameters;
    const auto give = [&](std::size_t p, std::string_view state, const auto& values,
                          std::size_t first) {
      using T = typename std::remove_cvref_t<decltype(values)>::element_type;
      KeptPiece piece = piece_of(KeptRole::state, p, layout, element_kind<T>(), self().parameters_);
      piece.state = state;
      piece.first = first;
      piece.count = values.size();
      piece.data = reinterpret_cast<std::byte*>(values.data());
      piece.held = element_kind<T>();
      return piece;
    };
    if (all || (traits::divides_states && saves_own())) {
      self().updater_.for_each_state([&](auto... state) { f(give(state...)); });
    }
    if constexpr (traits::counts_updates) {
      const std::span<std::uint64_t> counts = self().updater_.update_counts();
      for (std::size_t p = 0; all && p != counts.size(); ++p) {
        if (!layout.plan().is_trained(p)) continue;
        KeptPiece piece = give(p, "step", counts.subspan(p, 1), 0);
        piece.whole = {piece.held, 0, {}};
        f(static_cast<const KeptPiece&>(piece));
      }
    }
  }

  /// The states of hooks: those that are the same on all ranks as states of the optimizer are, the
  /// others by rank.
  template <KeptFor For, class F>
  void give_hooks(const F& f) {
    if constexpr (Self::traits::is_hooked) {
      const auto& layout = self().layouts_.parameters;
      self().gradients_.reductions().for_each_kept(
          [&](std::size_t p, std::string_view state, auto values, Keeper keeper) {
            using T = typename decltype(values)::element_type;
            const bool own = keeper == Keeper::each_rank;
            if (For == KeptFor::saving && !own && !is_first()) return;
            KeptPiece piece = piece_of(own ? KeptRole::local : KeptRole::state, p, layout,
                                       element_kind<T>(), nullptr);
            piece.state = state;
            if (values.size() != piece.whole.count()) {  // it is no copy of the parameter
              piece.whole = {element_kind<T>(), 1, {values.size()}};
              piece.count = values.size();
            }
            piece.data = reinterpret_cast<std::byte*>(values.data());
            piece.held = element_kind<T>();
            f(static_cast<const KeptPiece&>(piece));
          });
    }
  }

  /// Where ranks train alone between averages: the parameters and states of every rank.
  template <KeptFor For, class F>
  void give_local(const F& f) {
    if constexpr (Self::traits::averages_parameters) {
      const auto give = [&](const KeptPiece& piece) {
        // Counts of updates are the same on all ranks.
        if (!self().layouts_.parameters.plan().is_trained(piece.tensor) || !is_floating(piece.held))
          return;
        KeptPiece own = piece;
        if (piece.role == KeptRole::parameter) own.state = "parameter";
        own.role = KeptRole::local;
        own.averaged = true;
        f(static_cast<const KeptPiece&>(own));
      };
      give_parameters<KeptFor::loading>(give);
      give_states<KeptFor::loading>(give);
    }
  }
};

}  // namespace lockstep::detail

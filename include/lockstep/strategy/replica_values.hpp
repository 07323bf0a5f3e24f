// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that hands out its tensors: to be looked at, and to be written
/// before training begins.

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/strategy/initial_values.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica.
template <class Self>
class ReplicaValues {
 public:
  /// Calls `f(name, view)` for every parameter, in the order of declaration, with the view that
  /// `param` gives; likewise for gradients and buffers. On a GPU, views are of device memory, and
  /// the host waits for the GPU first.
  template <class F>
  void for_each_parameter(F&& f) const {
    [[maybe_unused]] const auto on = self().on_device();
    self().let_host_look();
    self().await_device();
    self().step_.for_each_parameter(f);
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_device();
    self().step_.for_each_gradient(f);
  }
  template <class F>
  void for_each_buffer(F&& f) const {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_device();
    self().step_.for_each_buffer(f);
  }
  /// Calls `f(parameter, state, view)` for every state of the optimizer that this rank keeps, as a
  /// view of one axis, and for weights of higher precision under the name "master". With
  /// `Sharding<HostShared>` and `Sharding<ZeroRedundancy>` a rank keeps its slices alone, and not
  /// every parameter has elements in them: `f(parameter, state, view, first)` gets the place of the
  /// view's first element in the parameter.
  template <class F>
  void for_each_state(F&& f) const {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_device();
    const auto& layout = self().layouts_.parameters;
    const auto give = [&](std::size_t p, std::string_view state, const auto& values,
                          std::size_t first) {
      using T = typename std::remove_cvref_t<decltype(values)>::element_type;
      hand_out_state(
          f, layout.name(p), state,
          make_view<typename Self::traits::memory, true, element_kind<T>(), dynamic>(
              reinterpret_cast<std::byte*>(values.data()), Extents<dynamic>{values.size()}),
          first);
    };
    if constexpr (Self::traits::keeps_masters) {
      for (std::size_t p = 0; p != layout.infos().size(); ++p) {
        if (!layout.plan().is_trained(p)) continue;
        self().updater_.kept().for_each_master(
            p, [&](auto values, std::size_t first) { give(p, "master", values, first); });
      }
    }
    self().updater_.for_each_state(give);
  }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    using traits = typename Self::traits;
    [[maybe_unused]] const auto on = self().on_device();
    auto& comm = self().comm_;
    const auto masters = allocate_masters();
    self().settle_allocations();
    self().await_parameters();
    if constexpr (traits::shares_parameters) comm.barrier();  // no rank reads them any more
    if (comm.rank() == Rank{0}) write_initial_values(f, seed, masters);
    if constexpr (traits::shares_parameters) {
      comm.barrier();
    } else {
      self().broadcast(self().parameters_, self().layouts_.parameters.plan().all_bytes);
      if constexpr (traits::keeps_masters) self().updater_.kept().distribute_masters(masters);
    }
    if constexpr (traits::joins) self().gradients_.forget_live();
    self().broadcast_buffers();
    self().await_device();  // who looks at the values next need not know of streams
  }
  /// Writes the values that the model gives itself, or the default ones.
  void initialize_from_model(Seed seed) {
    if constexpr (Self::traits::draws) start_random(seed);
    initialize([&](auto& initial) { initialize_model(self().model_, initial); }, seed);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  /// Random numbers of steps begin from rank 0's seed, which is the one that a checkpoint has.
  void start_random(Seed seed) {
    [[maybe_unused]] const auto on = self().on_device();
    auto& comm = self().comm_;
    if constexpr (!Self::traits::alone) {
      self().settle_allocations();
      seed = Seed{comm.broadcast(seed.value(), Rank{0})};
    }
    self().random_.start(seed, comm.rank());
  }

  /// Room for weights of higher precision; nothing where there are none.
  auto allocate_masters() const {
    if constexpr (Self::traits::keeps_masters) {
      return self().updater_.kept().allocate_masters();
    } else {
      return nullptr;
    }
  }

  template <class F>
  void write_initial_values(F&& f, Seed seed, [[maybe_unused]] const auto& allocated) {
    using Model = typename Self::model_type;
    using Declared = typename Self::traits::declared_layout;
    const Declared declared(self().model_);
    const BufferLayout<Model> declared_buffers(self().model_);
    std::byte* masters = nullptr;
    if constexpr (Self::traits::keeps_masters)
      masters = self().updater_.kept().masters_in(allocated);
    self().execution_.initialize(self().model_, {self().parameters_, nullptr, self().buffers_},
                                 masters, [&](auto parameters, auto buffers) {
                                   InitialValues<Model, Declared, BufferLayout<Model>,
                                                 decltype(parameters), decltype(buffers)>
                                       initial(declared, declared_buffers, parameters, buffers,
                                               seed);
                                   f(initial);
                                 });
  }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's optimizer on a GPU: fused kernels, one for each bucket or run of buckets.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update_by_kind.cuh"
#include "lockstep/optim/update_clock.hpp"

namespace lockstep {

/// Everything is enqueued on the compute stream. What changes from step to step lies in device
/// memory, where `begin` puts it: the rest may be replayed as part of a graph.
///
/// Without a norm to wait for, a bucket is updated when it has landed, while later ones travel.
template <class Traits, class Comm, class Gradients>
class GpuUpdater : public UpdateClock<typename Traits::rule, typename Traits::curve> {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using TheOptimizer = typename Traits::template policy<axes::Optimizer>;

 public:
  /// `state` is what one step leaves to the next, in device memory.
  GpuUpdater(Comm& comm, StepState* state, const layout& where, std::byte* parameters)
      : comm_(comm),
        layout_(where),
        parameters_(parameters),
        masters_(Traits::keeps_masters ? widened(where.plan().bytes) : 0),
        states_(Rule::states * widened(where.plan().bytes)),
        numbers_(2 * detail::size_of_numbers(TheOptimizer{})),
        inputs_(detail::size_of_inputs(TheOptimizer{})),
        partials_(plan_partials() * sizeof(double)),
        state_(state) {}

  /// The weights as declared, where the model's are in another type. They begin where the
  /// parameters do, and have as many elements.
  const DeviceArena& masters() const
    requires(Traits::keeps_masters)
  {
    return masters_;
  }

  /// The next update begins: what the host knows of it goes to the GPU. **Stream** before
  /// everything below.
  void begin() {
    const double rate = this->advance();
    constexpr double scale = 1 / static_cast<double>(Traits::micro_batches);
    if constexpr (decides || Traits::skips_unused) {
      detail::store_inputs(TheOptimizer{}, stream(), inputs_.data(), this->options(), rate, scale);
    }
    if constexpr (!decides) {
      detail::store_numbers(TheOptimizer{}, stream(), numbers_.data(), this->options(), rate,
                            this->steps(), scale);
    }
  }

  /// Averages the gradients and updates the parameters. **Ranks** all. **Host** enqueues, and waits
  /// for usage where unused parameters are skipped. **Stream** after backward.
  void reduce_and_update(Gradients& gradients) {
    if constexpr (Traits::skips_unused) count_used(gradients);
    if constexpr (decides) decide(gradients);
    if constexpr (Traits::skips_unused) {
      gradients.reduce();
      update_used(gradients);
    } else if constexpr (decides || Traits::alone) {
      for_each<Pieces::runs>([&]<class T, std::size_t Count>(std::type_identity<T>,
                                                             Size<Count> count, std::size_t,
                                                             std::size_t offset) {
        update<T>(gradients, offset, count, numbers_.data());
      });
    } else {
      for_each<Pieces::buckets>([&]<class T, std::size_t Count>(std::type_identity<T>,
                                                                Size<Count> count, std::size_t b,
                                                                std::size_t offset) {
        gradients.wait(b);
        update<T>(gradients, offset, count, numbers_.data());
      });
    }
    gradients.finish_step();
  }

  /// The same where gradients are averaged already.
  void update_averaged(Gradients& gradients) { reduce_and_update(gradients); }

 private:
  /// Do a step's numbers depend on its gradients?
  static constexpr bool decides = Traits::clips || Traits::scales_loss;
  /// With more buckets than this, kernels for each size would cost the compiler more than they
  /// save.
  static constexpr std::size_t most_kernels = 32;

  template <class T>
  static constexpr ElementKind travelling = element_kind<typename Traits::template travelling<T>>();
  /// Master weights are as declared, which is float.
  template <class T>
  static constexpr ElementKind master =
      Traits::keeps_masters ? ElementKind::f32 : element_kind<T>();

  /// Where something of each element begins that is kept in wider types: in float for elements of
  /// 16 bits, else in their own.
  static constexpr std::size_t widened(std::size_t offset) {
    bool has_16_bits = false;
    for (std::size_t k = 0; k != Traits::kinds().size; ++k)
      has_16_bits = has_16_bits || element_size(Traits::kinds().kinds[k]) == 2;
    return has_16_bits ? 2 * offset : offset;
  }

  cudaStream_t stream() const { return comm_.gpu().stream(); }
  double* partials() const { return reinterpret_cast<double*>(partials_.data()); }

  /// What a pass goes over: buckets, which land one by one, or runs of them, fewer and longer.
  enum class Pieces : std::uint8_t { buckets, runs };

  template <Pieces What>
  static constexpr auto pieces_of(const auto& plan) {
    if constexpr (What == Pieces::buckets) {
      return std::pair{plan.bucket_table, plan.bucket_count};
    } else {
      const auto table = make_runs(plan);
      return std::pair{table.runs, table.size};
    }
  }

  /// Calls `f(type, count, number, offset)` for each. Counts are constants where shapes are.
  template <Pieces What, class F>
  void for_each(const F& f) const {
    if constexpr (has_constant<What>()) {
      constexpr auto pieces = pieces_of<What>(layout::plan());
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(std::type_identity<ElementOf<pieces.first[I].element>>{},
           Size<pieces.first[I].count()>{}, I, pieces.first[I].offset),
         ...);
      }(std::make_index_sequence<pieces.second>{});
    } else {
      const auto pieces = pieces_of<What>(layout_.plan());
      for (std::size_t i = 0; i != pieces.second; ++i) {
        Traits::with_element(pieces.first[i].element, [&]<class T>(std::type_identity<T> type) {
          f(type, Size<dynamic>{pieces.first[i].count()}, i, pieces.first[i].offset);
        });
      }
    }
  }

  template <Pieces What>
  static constexpr bool has_constant() {
    if constexpr (Traits::has_dynamic_parameters) {
      return false;
    } else {
      return pieces_of<What>(layout::plan()).second <= most_kernels;
    }
  }

  /// Norm, clip factor and loss scale, from averages as they land.
  void decide(Gradients& gradients) {
    for_each<Pieces::buckets>([&]<class T, std::size_t Count>(std::type_identity<T>,
                                                              Size<Count> count, std::size_t b,
                                                              std::size_t offset) {
      gradients.wait(b);
      detail::squares_by_kind<travelling<T>, Count>(
          stream(), averages<T>(gradients, offset, count.value()), partials() + partials_before_[b],
          count.value());
    });
    StepLimits limits;
    if constexpr (Traits::clips) limits.max_norm = Traits::template policy<axes::Clip>::norm;
    limits.scales_loss = Traits::scales_loss;
    detail::decide_numbers(TheOptimizer{}, stream(), inputs_.data(), partials(),
                           partials_before_.back(), limits, state_, numbers_.data());
  }

  /// Where each bucket's partial sums begin; how many there are in all.
  std::size_t plan_partials() {
    partials_before_.assign(1, 0);
    for_each<Pieces::buckets>([&]<class T, std::size_t Count>(std::type_identity<T>,
                                                              Size<Count> count, std::size_t,
                                                              std::size_t) {
      partials_before_.push_back(partials_before_.back() +
                                 square_partials<ElementOf<travelling<T>>>(count.value()));
    });
    return partials_before_.back();
  }

  template <class T>
  static std::byte* averages(Gradients& gradients, std::size_t offset, std::size_t count) {
    return reinterpret_cast<std::byte*>(
        gradients.template averages<T>(offset, count * sizeof(T)).data());
  }

  template <class T, std::size_t Count>
  void update(Gradients& gradients, std::size_t offset, Size<Count> count,
              const std::byte* numbers) {
    std::array<std::byte*, Rule::states + 1> states{};  // one more: without states there were none
    for (std::size_t k = 0; k != Rule::states; ++k)
      states[k] = states_.data() + widened(k * layout_.plan().bytes + offset);
    std::byte* const parameters = parameters_ + offset;
    std::byte* const master_weights =
        Traits::keeps_masters ? masters_.data() + widened(offset) : parameters;
    detail::update_by_kind<master<T>, travelling<T>, element_kind<T>(), Count>(
        TheOptimizer{}, stream(), numbers, master_weights,
        averages<T>(gradients, offset, count.value()), states.data(), parameters, count.value());
  }

  void count_used(Gradients& gradients) {
    used_ = gradients.agree_on_usage();
    for (std::size_t p = 0; p != Traits::parameters; ++p) updates_[p] += used_[p];
  }

  /// Parameters each by itself, as the host's updater does it.
  void update_used(Gradients& gradients) {
    for (std::size_t p = 0; p != Traits::parameters; ++p) {
      if (used_[p] == 0) continue;
      const auto& place = layout_.plan().placements[p];
      std::byte* const own = numbers_.data() + detail::size_of_numbers(TheOptimizer{});
      detail::renumber_for(TheOptimizer{}, stream(), inputs_.data(), numbers_.data(), updates_[p],
                           own);
      Traits::with_element(
          layout_.plan().bucket_table[place.bucket].element, [&]<class T>(std::type_identity<T>) {
            update<T>(gradients, place.offset, Size<dynamic>{place.bytes / sizeof(T)}, own);
          });
    }
  }

  Comm& comm_;
  const layout& layout_;
  std::byte* parameters_;
  DeviceArena masters_;
  DeviceArena states_;
  DeviceArena numbers_;  // the step's, and a parameter's own
  DeviceArena inputs_;
  std::vector<std::size_t> partials_before_;
  DeviceArena partials_;
  StepState* state_;
  typename Gradients::Usage used_{};                         // where unused ones are skipped
  std::array<std::uint64_t, Traits::parameters> updates_{};  // of each parameter, likewise
};

}  // namespace lockstep

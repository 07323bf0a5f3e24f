// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater of a GPU: fused kernels, one for each bucket or run of buckets.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/group_pieces.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update_by_kind.cuh"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/anomaly_error.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/gpu_counted_update.cuh"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// All work is enqueued on the compute stream. Numbers that change from step to step lie in device
/// memory, where `begin` puts them: the rest may be replayed as part of a graph.
///
/// Without a norm to wait for, a bucket is updated when it has landed, while later ones travel.
template <class Traits, class Comm>
class GpuUpdater
    : public UpdateClock<typename Traits::rule, typename Traits::curve, typename Traits::groups> {
  using Clock = typename GpuUpdater::UpdateClock;
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using OptimizerPolicy = typename Traits::template policy<axes::Optimizer>;
  using Counted = std::conditional_t<Traits::counts_updates,
                                     GpuCountedUpdates<Comm, OptimizerPolicy>, NoCountedUpdates>;

 public:
  template <class Execution>
  GpuUpdater(Comm& comm, const Execution& execution, const layout& where, std::byte* parameters)
      : comm_(comm),
        layout_(where),
        parameters_(parameters),
        runs_(where),
        masters_(Traits::keeps_masters ? widened(where.plan().bytes) : 0),
        states_(Rule::states * widened(where.plan().bytes)),
        group_table_(where),
        group_pieces_(upload_groups()),
        numbers_(groups * size_of_numbers(OptimizerPolicy{})),
        inputs_(groups * size_of_inputs(OptimizerPolicy{})),
        partials_(plan_partials() * sizeof(double)),
        state_(execution.step_state()),
        seen_(stops ? sizeof(std::uint32_t) : 0),
        found_(stops ? sizeof(AnomalyRecord) : 0),
        loss_(execution.loss_value()),
        counted_(comm, where.plan(), [this](std::size_t p) { return group_of(p); }) {
    const AnomalyRecord nothing;
    if (stops) copy_now(found_.data(), &nothing, sizeof nothing);
  }

  /// The weights in their declared type, laid out as the parameters, which have another type.
  const DeviceArena& masters() const
    requires(Traits::keeps_masters)
  {
    return masters_;
  }
  /// Those of one parameter.
  std::span<float> master_of(std::size_t parameter) const
    requires(Traits::keeps_masters)
  {
    return {reinterpret_cast<float*>(masters_at(layout_.plan().placements[parameter].offset)),
            layout_.infos()[parameter].count()};
  }

  /// And those of a bucket.
  std::span<float> masters_of(const Bucket& bucket) const
    requires(Traits::keeps_masters)
  {
    return {reinterpret_cast<float*>(masters_at(bucket.offset)), bucket.count()};
  }

  /// Begins the next update, from the sum of so many micro-batches, which becomes the average over
  /// ranks by `factor`: stores its numbers on the GPU. **Stream** before the members below.
  void begin(std::size_t micro_batches = Traits::micro_batches, double factor = 1) {
    if constexpr (stops) {
      if (*seen()) [[unlikely]]
        report();
    }
    const double rate = this->advance();
    const double scale = factor / static_cast<double>(micro_batches);
    if constexpr (Traits::has_groups) {
      for (std::size_t group = 0; group != groups; ++group) {
        const auto options = this->group_options().of(group);
        store(group, options, this->rate_of(options), scale);
      }
    } else {
      store(0, this->options(), rate, scale);
    }
  }

  /// Throws if a step had an anomaly. **Host** blocks until all steps are done.
  void require_finite() {
    if constexpr (stops) {
      comm_.synchronize();
      if (*seen()) report();
    }
  }

  /// How many updates were left out because of `Anomaly<Skip>`. **Host** blocks.
  std::uint64_t skipped() const { return step_state().skips; }

  /// **Host** enqueues. **Stream** after backward.
  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    if constexpr (Traits::counts_updates) {
      update_counted(gradients);
      return;
    }
    if constexpr (decides) decide(gradients);
    if constexpr (decides || !Traits::reduces) {
      for_each<Pieces::runs>([&](auto piece) { update_piece(gradients, piece); });
    } else {
      for_each<Pieces::buckets>([&](auto bucket) {
        gradients.wait(bucket.number);
        update_piece(gradients, bucket);
      });
    }
  }

  /// Buckets that are averaged already are not waited for.
  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    reduce_and_update(gradients);
  }

  /// Calls `f(parameter, state, values, 0)` for every state: the parameter's number, the state's
  /// name, its values.
  template <class F>
  void for_each_state(const F& f) const {
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (!layout_.plan().is_trained(p)) continue;
      Traits::with_element(layout_.infos()[p].element, [&]<class T>(std::type_identity<T>) {
        using A = Accumulator<T>;
        const auto states = states_at(layout_.plan().placements[p].offset);
        for (std::size_t k = 0; k != Rule::states; ++k) {
          f(p, state_name<Rule>(k),
            std::span<A>(reinterpret_cast<A*>(states[k]), layout_.infos()[p].count()),
            std::size_t{0});
        }
      });
    }
  }
  /// Where parameters can be left out: how many updates each parameter had, in device memory.
  std::span<std::uint64_t> update_counts() { return counted_.updates(); }

  /// **Host** blocks.
  void tell_progress(ReplicaProgress& progress) const {
    Clock::tell_progress(progress);
    const StepState state = step_state();
    progress.skipped = state.skips;
    progress.counted = decides ? state.updates : this->steps();
    if constexpr (Traits::scales_loss) progress.loss_scale = state.loss_scale;
  }
  /// **Host** blocks.
  void take_progress(const ReplicaProgress& progress) {
    Clock::take_progress(progress);
    StepState state = step_state();
    state.updates = progress.counted;
    state.skips = progress.skipped;
    if (progress.loss_scale) state.loss_scale = *progress.loss_scale;
    copy_now(state_, &state, sizeof state);
    if constexpr (Traits::counts_updates) counted_.set_updates(progress.counted);
  }

 private:
  /// Do a step's numbers depend on its gradients?
  static constexpr bool decides = Traits::clips || Traits::scales_loss || Traits::skips_anomalies;
  /// Does a step that is not finite end the job?
  static constexpr bool stops = Traits::stops_at_anomaly;
  /// Do update kernels look for one? Where losses are scaled, gradients that are not finite are
  /// part of the method: their steps are skipped, until the scale is too small.
  static constexpr bool watches = stops && !Traits::scales_loss;
  static constexpr std::size_t groups = Traits::groups::count;
  /// With more buckets than this, kernels for each size would cost the compiler more than they
  /// save.
  static constexpr std::size_t most_kernels = 32;

  template <class T>
  static constexpr ElementKind travelling = element_kind<typename Traits::template travelling<T>>();
  /// Master weights are as declared, which is float.
  template <class T>
  static constexpr ElementKind master =
      Traits::keeps_masters ? ElementKind::f32 : element_kind<T>();

  /// The offset of states or master weights, which are in float for elements of 16 bits, else in
  /// the elements' own type.
  static constexpr std::size_t widened(std::size_t offset) {
    bool has_16_bits = false;
    for (std::size_t k = 0; k != Traits::kinds().size; ++k)
      has_16_bits = has_16_bits || element_size(Traits::kinds().kinds[k]) == 2;
    return has_16_bits ? 2 * offset : offset;
  }

  cudaStream_t stream() const { return comm_.gpu().stream(); }

  /// **Host** blocks until all steps are done.
  StepState step_state() const {
    comm_.synchronize();
    StepState state;
    copy_now(&state, state_, sizeof state);
    return state;
  }

  /// Set by a kernel, and read without waiting for it.
  const volatile std::uint32_t* seen() const {
    return reinterpret_cast<const volatile std::uint32_t*>(seen_.data());
  }
  AnomalyWatch watch() const {
    if constexpr (!stops) return {};
    return {reinterpret_cast<AnomalyRecord*>(found_.data()),
            reinterpret_cast<std::uint32_t*>(seen_.data()), loss_};
  }

  /// The job is over: kernels change nothing any more, and a later call says the same.
  [[noreturn, gnu::cold, gnu::noinline]] void report() const {
    comm_.synchronize();
    AnomalyRecord record;
    copy_now(&record, found_.data(), sizeof record);
    if (record.scale) {
      throw anomaly_error("so many steps in a row overflowed that the loss scale is nearly zero",
                          record.step)
          .on(comm_.rank());
    }
    if (record.loss) throw anomaly_error("the loss is not finite", record.step).on(comm_.rank());
    const std::size_t elements = (record.gradient - averages_.first) / averages_.travelling;
    throw anomaly_error(layout_, elements * averages_.element, "not finite",
                        Traits::alone ? "" : "as the average over ranks", record.step)
        .on(comm_.rank());
  }

  std::byte* numbers_of(std::size_t group) const {
    return numbers_.data() + group * size_of_numbers(OptimizerPolicy{});
  }
  std::byte* inputs_of(std::size_t group) const {
    return inputs_.data() + group * size_of_inputs(OptimizerPolicy{});
  }

  /// Stores the numbers of a group's update on the GPU.
  void store(std::size_t group, const typename Rule::Options& options, double rate, double scale) {
    if constexpr (decides || Traits::counts_updates)
      store_inputs(OptimizerPolicy{}, stream(), inputs_of(group), options, rate, scale, watch());
    if constexpr (!decides) {
      store_numbers(OptimizerPolicy{}, stream(), numbers_of(group), options, rate, this->steps(),
                    scale, watch());
    }
  }

  /// Where groups begin and end, in device memory.
  DeviceArena upload_groups() const {
    if constexpr (Traits::has_groups) {
      const auto& table = group_table_.table;
      DeviceArena pieces(table.size * sizeof(GroupPiece));
      copy_now(pieces.data(), table.begin(), pieces.bytes());
      return pieces;
    } else {
      return DeviceArena(0);
    }
  }
  double* partials() const { return reinterpret_cast<double*>(partials_.data()); }

  /// The pieces of a pass: buckets, which land one by one, or runs of them, which are longer.
  enum class Pieces : std::uint8_t { buckets, runs };

  template <class T, std::size_t Count>
  struct Piece {
    [[no_unique_address]] Size<Count> count;
    std::size_t number;  // by its place in the arena
    std::size_t offset;  // bytes
  };

  template <Pieces What>
  static constexpr auto pieces_of(const auto& plan, const auto& runs) {
    if constexpr (What == Pieces::buckets) {
      return plan.buckets();
    } else {
      return std::span<const Run>(runs.begin(), runs.end());
    }
  }

  /// Calls `f(piece)` for each piece. Counts are constants where shapes are.
  template <Pieces What, class F>
  void for_each(const F& f) const {
    if constexpr (has_constants<What>()) {
      constexpr auto pieces = pieces_of<What>(layout::plan(), LayoutRuns<layout>::table);
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        (f(Piece<ElementOf<pieces[I].element>, pieces[I].count()>{{}, I, pieces[I].offset}), ...);
      }(std::make_index_sequence<pieces.size()>{});
    } else {
      std::size_t number = 0;
      for (const auto& piece : pieces_of<What>(layout_.plan(), runs_.table)) {
        Traits::with_element(piece.element, [&]<class T>(std::type_identity<T>) {
          f(Piece<T, dynamic>{Size<dynamic>{piece.count()}, number++, piece.offset});
        });
      }
    }
  }

  template <Pieces What>
  static constexpr bool has_constants() {
    if constexpr (layout::is_static) {
      return pieces_of<What>(layout::plan(), LayoutRuns<layout>::table).size() <= most_kernels;
    } else {
      return false;
    }
  }

  /// Computes norm, clip factor and loss scale from averages as they land.
  template <class Gradients>
  void decide(Gradients& gradients) {
    for_each<Pieces::buckets>([&]<class T, std::size_t Count>(Piece<T, Count> bucket) {
      gradients.wait(bucket.number);
      double* const own = partials() + partials_before_[bucket.number];
      if constexpr (Traits::skips_zero_gradients) {
        counted_.template use_nonzero<travelling<T>>(
            bucket.offset, sizeof(T), averages(gradients, bucket), bucket.count.value(), own);
      } else {
        squares_by_kind<travelling<T>, Count>(stream(), averages(gradients, bucket), own,
                                              bucket.count.value());
      }
    });
    StepLimits limits;
    if constexpr (Traits::clips) limits.max_norm = Traits::template policy<axes::Clip>::norm;
    limits.scales_loss = Traits::scales_loss;
    limits.skips = Traits::skips_anomalies;
    decide_numbers(OptimizerPolicy{}, stream(), inputs_.data(), partials(), partials_before_.back(),
                   limits, state_, numbers_.data());
    if constexpr (Traits::has_groups && !Traits::counts_updates) {
      decide_group_numbers(OptimizerPolicy{}, stream(), inputs_.data(), state_, numbers_.data(),
                           groups);
    }
  }

  /// Plans where each bucket's partial sums begin. Returns their number.
  std::size_t plan_partials() {
    partials_before_.assign(1, 0);
    for_each<Pieces::buckets>([&]<class T, std::size_t Count>(Piece<T, Count> bucket) {
      partials_before_.push_back(partials_before_.back() +
                                 square_partials<ElementOf<travelling<T>>>(bucket.count.value()));
    });
    return partials_before_.back();
  }

  template <class Gradients, class T, std::size_t Count>
  static std::byte* averages(Gradients& gradients, const Piece<T, Count>& piece) {
    return reinterpret_cast<std::byte*>(
        gradients.template averages<T>(piece.offset, piece.count.value() * sizeof(T)).data());
  }

  /// The states of the elements from `offset` on; one more, so that the array is never empty.
  std::array<std::byte*, Rule::states + 1> states_at(std::size_t offset) const {
    std::array<std::byte*, Rule::states + 1> states{};
    for (std::size_t k = 0; k != Rule::states; ++k)
      states[k] = states_.data() + widened(k * layout_.plan().bytes + offset);
    return states;
  }
  /// The parameters from `offset` on in the type in which they are kept.
  std::byte* masters_at(std::size_t offset) const {
    return Traits::keeps_masters ? masters_.data() + widened(offset) : parameters_ + offset;
  }

  template <class Gradients, class T, std::size_t Count>
  void update(Gradients& gradients, const Piece<T, Count>& piece, const std::byte* numbers) {
    update_by_kind<master<T>, travelling<T>, element_kind<T>(), Count, watches>(
        OptimizerPolicy{}, stream(), numbers, masters_at(piece.offset),
        watched_averages(gradients, piece), states_at(piece.offset).data(),
        parameters_ + piece.offset, piece.count.value());
  }

  /// The averages of a piece. It is remembered where they begin, for what a kernel may find there.
  template <class Gradients, class T, std::size_t Count>
  std::byte* watched_averages(Gradients& gradients, const Piece<T, Count>& piece) {
    std::byte* const average = averages(gradients, piece);
    if constexpr (watches) {
      using Travelling = typename Traits::template travelling<T>;
      averages_ = {
          reinterpret_cast<std::uintptr_t>(average) - piece.offset / sizeof(T) * sizeof(Travelling),
          sizeof(Travelling), sizeof(T)};
    }
    return average;
  }

  /// Updates a piece with the step's numbers, each of its parameters with those of its group.
  template <class Gradients, class T, std::size_t Count>
  void update_piece(Gradients& gradients, const Piece<T, Count>& piece) {
    if constexpr (Traits::has_groups) {
      update_groups_by_kind<master<T>, travelling<T>, element_kind<T>(), Count, watches>(
          OptimizerPolicy{}, stream(), numbers_.data(),
          GroupPieces{reinterpret_cast<const GroupPiece*>(group_pieces_.data()),
                      group_table_.table.size, piece.offset},
          masters_at(piece.offset), watched_averages(gradients, piece),
          states_at(piece.offset).data(), parameters_ + piece.offset, piece.count.value());
    } else {
      update(gradients, piece, numbers_.data());
    }
  }

  std::size_t group_of([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::has_groups) return group_table_.table.groups[parameter];
    return 0;
  }

  /// Updates the parameters that the step uses, each with its own count of updates, as the host's
  /// updater does: those that some rank has used, or whose averages are not all zero.
  template <class Gradients>
  void update_counted(Gradients& gradients) {
    constexpr bool finds = Traits::skips_zero_gradients;
    const auto& plan = layout_.plan();
    if constexpr (finds && !decides && Traits::reduces) {
      for_each<Pieces::buckets>([&]<class T, std::size_t Count>(const Piece<T, Count>& bucket) {
        gradients.wait(bucket.number);
        use_nonzero(gradients, bucket);
        const Bucket& members = plan.bucket_table[bucket.number];
        counted_.number(inputs_.data(), numbers_.data(), members.first_arrival, members.parameters);
        update_used(gradients, bucket);
      });
    } else {
      if constexpr (!finds) {
        gradients.reduce();
        counted_.use(gradients.used());
        if constexpr (!Traits::alone) counted_.agree();
      }
      if constexpr (decides) {
        decide(gradients);
      } else if constexpr (finds) {
        for_each<Pieces::runs>([&](const auto& run) { use_nonzero(gradients, run); });
      }
      counted_.number(inputs_.data(), numbers_.data(), 0, plan.trained);
      for_each<Pieces::runs>([&](const auto& run) { update_used(gradients, run); });
    }
  }
  template <class Gradients, class T, std::size_t Count>
  void use_nonzero(Gradients& gradients, const Piece<T, Count>& piece) {
    counted_.template use_nonzero<travelling<T>>(piece.offset, sizeof(T),
                                                 averages(gradients, piece), piece.count.value());
  }
  template <class Gradients, class T, std::size_t Count>
  void update_used(Gradients& gradients, const Piece<T, Count>& piece) {
    update_counted_by_kind<master<T>, travelling<T>, element_kind<T>(), watches>(
        OptimizerPolicy{}, stream(), numbers_.data(), counted_.numbers(),
        counted_.where(piece.offset, sizeof(T)), masters_at(piece.offset),
        watched_averages(gradients, piece), states_at(piece.offset).data(),
        parameters_ + piece.offset, piece.count.value());
  }

  Comm& comm_;
  const layout& layout_;
  std::byte* parameters_;
  [[no_unique_address]] LayoutRuns<layout> runs_;
  DeviceArena masters_;
  DeviceArena states_;
  [[no_unique_address]] GroupsOf<Traits> group_table_;
  DeviceArena group_pieces_;
  DeviceArena numbers_;  // the step's for every group
  DeviceArena inputs_;
  std::vector<std::size_t> partials_before_;
  DeviceArena partials_;
  StepState* state_;
  // A kernel may still write to host memory when this ends: device memory, which is freed first,
  // is freed when the GPU is done.
  PinnedArena seen_;   // is there an anomaly?
  DeviceArena found_;  // its record
  const double* loss_;
  /// Where averages begin, and the sizes of an average and of the parameter's element.
  struct {
    std::uintptr_t first = 0;
    std::size_t travelling = 1;
    std::size_t element = 1;
  } averages_;
  [[no_unique_address]] Counted counted_;
};

template <class Traits, class Comm>
struct UpdaterOn<Cuda, Traits, Comm> {
  using type = GpuUpdater<Traits, Comm>;
};

}  // namespace lockstep::detail

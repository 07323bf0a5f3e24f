// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater of a GPU: fused kernels, one for each bucket or run of buckets.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update_by_kind.cuh"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/gpu_anomaly.cuh"
#include "lockstep/strategy/gpu_counted_update.cuh"
#include "lockstep/strategy/gpu_groups.cuh"
#include "lockstep/strategy/gpu_kept.cuh"
#include "lockstep/strategy/published_parameters.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/feature/join.cuh"
#include "lockstep/strategy/update_pieces.hpp"

namespace lockstep::detail {

/// All work is enqueued on the compute stream. Numbers that change from step to step lie in device
/// memory, where `begin` puts them: the rest may be replayed as part of a graph.
///
/// Without a norm to wait for, a bucket is updated when it has landed, while later ones travel.
///
/// Where ranks own shards of buckets, a rank updates its own, keeps states and master weights of
/// these alone, and gets the others' parameters from them.
template <class Traits, class Comm>
class GpuUpdater
    : public UpdateClock<typename Traits::rule, typename Traits::curve, typename Traits::groups>,
      public GpuAnomaly<Traits, Comm> {
  using Clock = typename GpuUpdater::UpdateClock;
  using Anomalies = GpuAnomaly<Traits, Comm>;
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using OptimizerPolicy = typename Traits::template policy<axes::Optimizer>;
  using Counted = std::conditional_t<Traits::counts_updates,
                                     GpuCountedUpdates<Comm, OptimizerPolicy>, NoCountedUpdates>;
  template <class T, std::size_t Count>
  using Piece = UpdatePiece<T, Count>;

 public:
  template <class Execution>
  GpuUpdater(Comm& comm, const Execution& execution, const layout& where, std::byte* parameters)
      : Anomalies(comm, where, execution.loss_value()),
        parameters_(parameters),
        kept_(comm, where),
        published_(comm, where, parameters),
        group_table_(where),
        numbers_(groups * size_of_numbers(OptimizerPolicy{})),
        inputs_(groups * size_of_inputs(OptimizerPolicy{})),
        partials_(plan_partials() * sizeof(double)),
        squares_(adds_squares ? comm.template allocate<double>(1).data() : nullptr),
        state_(execution.step_state()),
        counted_(comm, where.plan(), [this](std::size_t p) { return group_table_.of(p); }) {}

  /// The states and master weights of the parameters.
  const GpuKept<Traits, Comm>& kept() const { return kept_; }
  std::size_t state_bytes() const { return kept_.state_bytes(); }
  /// The parameters that come from other ranks, bucket by bucket.
  auto& gathers()
    requires(Traits::shards)
  {
    return published_;
  }

  /// The master weights of a bucket, of which this rank updates all.
  std::span<float> masters_of(const Bucket& bucket) const
    requires(Traits::keeps_masters)
  {
    return {reinterpret_cast<float*>(masters_at(bucket.offset)), bucket.count()};
  }

  /// Begins the next update, from the sum of so many micro-batches, which becomes the average over
  /// ranks by `factor`: stores its numbers on the GPU. **Stream** before the members below.
  void begin(std::size_t micro_batches = Traits::micro_batches, double factor = 1) {
    this->require_none_seen();
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

  /// How many updates were left out because of `Anomaly<Skip>`. **Host** blocks.
  std::uint64_t skipped() const { return step_state().skips; }

  /// **Host** enqueues. **Stream** after backward.
  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    if constexpr (Traits::divides_by_live) {
      gradients.wait(0);
      if (!gradients.features().is_averaged()) {
        count_live_ranks(OptimizerPolicy{}, stream(), gradients.features().join_flags().device_live(),
                         this->comm_.world_size().value(), inputs_.data(), numbers_.data(), groups);
      }
    }
    if constexpr (decides && !Traits::counts_updates) decide(gradients);
    if constexpr (Traits::counts_updates) {
      update_counted(gradients);
    } else if constexpr (decides || !Traits::reduces) {
      kept_.template for_each<Pieces::runs>([&](auto piece) { update_piece(gradients, piece); });
    } else {
      kept_.template for_each<Pieces::buckets>([&](auto bucket) {
        gradients.wait(bucket.number);
        update_piece(gradients, bucket);
      });
    }
    if constexpr (Traits::divides_states) publish(gradients);
  }

  /// Buckets that are averaged already are not waited for.
  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    reduce_and_update(gradients);
  }

  template <class F>
  void for_each_state(const F& f) const {
    kept_.for_each_state(f);
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
  static constexpr bool watches = Anomalies::watches;
  static constexpr std::size_t groups = Traits::groups::count;
  /// Are the squares of what ranks own added up over ranks?
  static constexpr bool adds_squares = decides && Traits::divides_states;

  template <class T>
  static constexpr ElementKind travelling = element_kind<typename Traits::template travelling<T>>();
  /// Master weights are as declared, which is float.
  template <class T>
  static constexpr ElementKind master =
      Traits::keeps_masters ? ElementKind::f32 : element_kind<T>();

  cudaStream_t stream() const { return this->comm_.gpu().stream(); }

  /// **Host** blocks until all steps are done.
  StepState step_state() const {
    this->comm_.synchronize();
    StepState state;
    copy_now(&state, state_, sizeof state);
    return state;
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
      store_inputs(OptimizerPolicy{}, stream(), inputs_of(group), options, rate, scale,
                   this->watch());
    if constexpr (!decides) {
      store_numbers(OptimizerPolicy{}, stream(), numbers_of(group), options, rate, this->steps(),
                    scale, this->watch());
    }
  }

  double* partials() const { return reinterpret_cast<double*>(partials_.data()); }

  /// Computes norm, clip factor and loss scale from averages as they land.
  template <class Gradients>
  void decide(Gradients& gradients) {
    std::size_t place = 0;
    kept_.template for_each<Pieces::buckets>(
        [&]<class T, std::size_t Count>(const Piece<T, Count>& bucket) {
          gradients.wait(bucket.number);
          double* const own = partials() + partials_before_[place++];
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
    if constexpr (adds_squares) {
      launch_add_partials(stream(), partials(), partials_before_.back(), squares_);
      published_.space().add_others(*squares_);
    }
    decide_numbers(OptimizerPolicy{}, stream(), inputs_.data(),
                   adds_squares ? squares_ : partials(), adds_squares ? 1 : partials_before_.back(),
                   limits, state_, numbers_.data());
    if constexpr (Traits::has_groups && !Traits::counts_updates) {
      decide_group_numbers(OptimizerPolicy{}, stream(), inputs_.data(), state_, numbers_.data(),
                           groups);
    }
  }

  /// Lets all ranks have the parameters that this one has updated. A graph ends with all of them
  /// here. **Ranks** all.
  template <class Gradients>
  void publish(Gradients& gradients) {
    gradients.reduce();  // also of buckets in which this rank owns nothing
    published_.start_all();
    if constexpr (Traits::captures) published_.wait_all();
  }

  /// Plans where each piece's partial sums begin. Returns their number.
  std::size_t plan_partials() {
    partials_before_.assign(1, 0);
    kept_.template for_each<Pieces::buckets>([&]<class T, std::size_t Count>(
                                                 const Piece<T, Count>& bucket) {
      partials_before_.push_back(partials_before_.back() +
                                 square_partials<ElementOf<travelling<T>>>(bucket.count.value()));
    });
    return partials_before_.back();
  }

  /// The averages of a piece; where gradients are given away, they lie in slices by bucket.
  template <class Gradients, class T, std::size_t Count>
  std::byte* averages(Gradients& gradients, const Piece<T, Count>& piece) const {
    if constexpr (Traits::frees_gradients) {
      return reinterpret_cast<std::byte*>(
          gradients.template slice_averages<T>(piece.number, Shard{}).data() +
          kept_.within(piece.offset) / sizeof(T));
    } else {
      return reinterpret_cast<std::byte*>(
          gradients.template averages<T>(piece.offset, piece.count.value() * sizeof(T)).data());
    }
  }

  /// The parameters from `offset` on in the type in which they are kept.
  std::byte* masters_at(std::size_t offset) const {
    return Traits::keeps_masters ? kept_.masters_at(offset) : parameters_ + offset;
  }

  template <class Gradients, class T, std::size_t Count>
  void update(Gradients& gradients, const Piece<T, Count>& piece, const std::byte* numbers) {
    update_by_kind<master<T>, travelling<T>, element_kind<T>(), Count, watches>(
        OptimizerPolicy{}, stream(), numbers, masters_at(piece.offset),
        watched_averages(gradients, piece), kept_.states_at(piece.offset).data(),
        parameters_ + piece.offset, piece.count.value());
  }

  /// The averages of a piece. It is remembered where they are, for what a kernel may find there.
  template <class Gradients, class T, std::size_t Count>
  std::byte* watched_averages(Gradients& gradients, const Piece<T, Count>& piece) {
    std::byte* const average = averages(gradients, piece);
    if constexpr (watches) {
      // In slices by bucket, or in one arena.
      constexpr bool apart = Traits::frees_gradients;
      constexpr std::size_t size = sizeof(typename Traits::template travelling<T>);
      const std::size_t before = apart ? kept_.within(piece.offset) : piece.offset;
      this->averages_.note(
          apart ? piece.number : 0, average - before / sizeof(T) * size, piece.offset - before,
          apart ? before / sizeof(T) + piece.count.value() : this->layout_.plan().bytes / sizeof(T),
          size, sizeof(T));
    }
    return average;
  }

  /// Updates a piece with the step's numbers, each of its parameters with those of its group.
  template <class Gradients, class T, std::size_t Count>
  void update_piece(Gradients& gradients, const Piece<T, Count>& piece) {
    if constexpr (Traits::has_groups) {
      update_groups_by_kind<master<T>, travelling<T>, element_kind<T>(), Count, watches>(
          OptimizerPolicy{}, stream(), numbers_.data(), group_table_.from(piece.offset),
          masters_at(piece.offset), watched_averages(gradients, piece),
          kept_.states_at(piece.offset).data(), parameters_ + piece.offset, piece.count.value());
    } else {
      update(gradients, piece, numbers_.data());
    }
  }

  /// Updates the parameters that the step uses, each with its own count of updates, as the host's
  /// updater does: those that some rank has used, or whose averages are not all zero.
  template <class Gradients>
  void update_counted(Gradients& gradients) {
    constexpr bool finds = Traits::skips_zero_gradients;
    const auto& plan = this->layout_.plan();
    if constexpr (finds && !decides && Traits::reduces && !Traits::divides_states) {
      kept_.template for_each<Pieces::buckets>([&]<class T, std::size_t Count>(
                                                   const Piece<T, Count>& bucket) {
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
        if constexpr (!Traits::alone && !Traits::subgraphs_agree) counted_.agree();
      }
      if constexpr (decides) {
        decide(gradients);
      } else if constexpr (finds) {
        if constexpr (Traits::reduces) gradients.reduce();
        kept_.template for_each<Pieces::runs>(
            [&](const auto& run) { use_nonzero(gradients, run); });
      }
      // A rank that owns a part of a parameter has seen that part alone.
      if constexpr (finds && Traits::divides_states) counted_.agree();
      counted_.number(inputs_.data(), numbers_.data(), 0, plan.trained);
      kept_.template for_each<Pieces::runs>([&](const auto& run) { update_used(gradients, run); });
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
        watched_averages(gradients, piece), kept_.states_at(piece.offset).data(),
        parameters_ + piece.offset, piece.count.value());
  }

  std::byte* parameters_;
  GpuKept<Traits, Comm> kept_;
  [[no_unique_address]] PublishedParameters<Traits, Comm> published_;
  GpuGroups<Traits> group_table_;
  DeviceArena numbers_;  // the step's for every group
  DeviceArena inputs_;
  std::vector<std::size_t> partials_before_;
  DeviceArena partials_;
  double* squares_;  // of what all ranks own, in the communicator's memory
  StepState* state_;
  [[no_unique_address]] Counted counted_;
};

template <class Traits, class Comm>
struct UpdaterOn<Cuda, Traits, Comm> {
  using type = GpuUpdater<Traits, Comm>;
};

}  // namespace lockstep::detail

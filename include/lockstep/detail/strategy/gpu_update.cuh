// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The passes of an update on a GPU: fused kernels, one for each bucket or run of buckets.

#include "lockstep/detail/strategy/features.cuh"
#include "lockstep/detail/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// All work is enqueued on the compute stream. Constants, counts and flags lie in device memory,
/// where kernels compute them: the host does not wait, and a captured step holds it all.
template <class Traits, class Comm>
class GpuUpdate {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using StepCounter = detail::StepCounter<Rule, typename Traits::curve, typename Traits::groups>;
  using OptimizerPolicy = typename Traits::template policy<axes::Optimizer>;
  static constexpr bool decides = decides_steps<Traits>;
  static constexpr bool finds = Traits::skips_zero_gradients;
  static constexpr bool counts = Traits::counts_updates;
  static constexpr bool has_table = TableLayout<Traits>::is_needed;
  /// Does an anomaly end the job? Kernels record it, and the host checks at the next step.
  static constexpr bool stops = Traits::stops_at_anomaly;
  /// Do update kernels look for anomalies? With a scaled loss, gradients that are not finite are
  /// expected: their steps are skipped, until the scale is too small.
  static constexpr bool watches = stops && !Traits::scales_loss;
  static constexpr std::size_t groups = Traits::groups::count;
  static constexpr bool adds_squares = decides && Traits::divides_states;

  template <class T>
  static constexpr ElementKind reduce_kind =
      element_kind<typename Traits::template reduce_type<T>>();
  /// Master weights are float, as declared.
  template <class T>
  static constexpr ElementKind master =
      Traits::keeps_masters ? ElementKind::f32 : element_kind<T>();

 public:
  /// Squares are summed bucket by bucket, as reductions complete.
  static constexpr Pieces observed = Pieces::buckets;

  template <class Execution, class Owned>
  GpuUpdate(Comm& comm, const Execution& execution, const layout& where, const Owned& owned,
            const StepCounter& counter)
      : comm_(comm),
        layout_(where),
        counter_(counter),
        seen_(stops ? sizeof(std::uint32_t) : 0),
        found_(stops ? 1 : 0),
        loss_(execution.loss_value()),
        state_(execution.step_state()),
        table_(where),
        pieces_(device_copy_of(table_.pieces)),
        groups_(device_copy_of(table_.groups)),
        numbers_(OptimizerPolicy{}, groups, counts ? table_.rows() : 0),
        updates_(counts ? table_.rows() : 0),
        partials_(plan_partials(owned)) {
    if constexpr (stops) {
      const AnomalyRecord nothing;
      copy_now(found_.data(), &nothing, sizeof nothing);
    }
    if constexpr (adds_squares) squares_ = comm.template allocate<double>(1).data();
    if constexpr (counts) used_ = comm.template allocate<std::uint8_t>(table_.rows());
  }

  /// Begins an update: stores its constants on the GPU. **Stream** before the members below.
  void begin(std::size_t micro_batches, double factor) {
    const double scale = factor / static_cast<double>(micro_batches);
    for (std::size_t group = 0; group != groups; ++group) {
      const auto options = counter_.group_options().of(group);
      const double rate = counter_.rate_of(options);
      if constexpr (decides || counts)
        numbers_.store_inputs(stream(), group, {options, rate, scale, watch()});
      if constexpr (!decides) {
        auto numbers = step_numbers<Rule>(options, rate, counter_.steps(), scale);
        numbers.watch = watch();
        numbers_.store(stream(), group, numbers);
      }
    }
  }
  /// Divides sums by the number of ranks that still have batches.
  void count_live(auto& gradients) {
    gradients.wait(0);
    if (gradients.features().is_averaged()) return;
    launch_count_live(stream(), gradients.features().join_flags().device_live(),
                      comm_.world_size().value(), numbers_);
  }
  /// Selects the parameters that any rank has used; a captured step contains this rank's usage.
  /// **Ranks** all. **Stream** in its order, after all reductions.
  void use(auto& gradients) {
    gradients.reduce();
    launch_store_flags(stream(), used_.data(), gradients.features().used());
    if constexpr (!Traits::alone && !Traits::subgraphs_agree) agree();
  }

  /// The first pass over averages: sums squares, and finds parameters with nonzero gradients.
  template <class T, std::size_t Count>
  void observe(const UpdatePiece<T, Count>& piece, auto averages) {
    using Element = ElementOf<reduce_kind<T>>;  // reached through its kind, for nvcc
    double* const partials = decides ? partials_.data() + partials_before_[piece.number] : nullptr;
    if constexpr (finds) {
      launch_find_used<Element>(stream(), averages.data(), where(piece.offset, sizeof(T)),
                                used_.data(), partials, piece.count.value());
    } else {
      launch_squares<Element, Count>(stream(), averages.data(), partials, piece.count.value());
    }
  }

  /// Computes norm, clip factor, loss scale and rows. Kernels read whether to skip. **Ranks** all.
  bool decide(const auto& owned) {
    if constexpr (adds_squares) {
      launch_kernel<add_partials<double>>("sum of partials", stream(), 1, decide_threads,
                                          partials_.data(), partials_.size(), squares_);
      owned.sum_over_owners(*squares_);
    }
    if constexpr (decides)
      launch_decide(stream(), numbers_.inputs(), adds_squares ? squares_ : partials_.data(),
                    adds_squares ? 1 : partials_.size(), step_limits<Traits>(), state_,
                    numbers_.step());
    // A rank that owns a part of a parameter has seen only that part.
    if constexpr (finds && Traits::divides_states) agree();
    if constexpr (counts) {
      numbers_.number_rows(stream(), {groups_.data(), used_.data(), updates_.data()}, 0,
                           table_.rows());
    } else if constexpr (decides && has_table) {  // group 0 has the step's
      numbers_.number_rows(stream(), {groups_.data()}, 1, table_.rows());
    }
    return true;
  }

  /// A function that updates a piece from its averages, in one kernel.
  template <class T, std::size_t Count>
  auto pass(const UpdatePiece<T, Count>& piece, std::size_t /*first*/, std::byte* parameters,
            std::byte* masters, std::byte* const* states) const {
    return [this, &piece, parameters, masters, states](std::size_t /*at*/, auto averages) {
      auto* const data = reinterpret_cast<std::byte*>(averages.data());
      update_by_kind<master<T>, reduce_kind<T>, element_kind<T>(), Count, watches, has_table>(
          stream(), numbers_.step(), numbers_.rows(), where(piece.offset, sizeof(T)), masters, data,
          states, parameters, piece.count.value());
    };
  }

  static constexpr void end() {}
  /// Throws if a kernel has reported an anomaly so far. **Host** does not block.
  void require_none_seen() const {
    if constexpr (stops) {
      // A kernel sets it; the host reads it without waiting.
      if (*reinterpret_cast<const volatile std::uint32_t*>(seen_.data())) [[unlikely]]
        report();
    }
  }
  /// Throws if a step had an anomaly. **Host** blocks until all steps are done.
  void require_finite() const {
    if constexpr (stops) {
      comm_.synchronize();
      require_none_seen();
    }
  }

  /// **Host** blocks until all steps are done.
  StepState state() const {
    comm_.synchronize();
    StepState state;
    copy_now(&state, state_, sizeof state);
    return state;
  }
  /// **Host** blocks.
  void set_state(const StepState& state) { copy_now(state_, &state, sizeof state); }
  /// Each parameter's count of updates, in device memory, written in stream order.
  std::span<std::uint64_t> updates() const { return updates_; }
  /// **Host** blocks.
  void set_updates(std::uint64_t updates) {
    const std::vector<std::uint64_t> all(table_.rows(), updates);
    copy_now(updates_.data(), all.data(), this->updates().size_bytes());
  }

 private:
  AnomalyWatch watch() const {
    if constexpr (!stops) return {};
    return {found_.data(), reinterpret_cast<std::uint32_t*>(seen_.data()), loss_};
  }
  /// The job is over: kernels change nothing any more, and later calls throw the same.
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
    throw anomaly_error(layout_, record.gradient, "not finite",
                        Traits::alone ? "" : "as the average over ranks", record.step)
        .on(comm_.rank());
  }

  cudaStream_t stream() const { return comm_.gpu().stream(); }
  /// The table for a kernel over elements of `element` bytes at `offset` of the arena.
  TablePieces where(std::size_t offset, std::size_t element) const {
    return {pieces_.data(), pieces_.size(), offset, element};
  }

  /// Takes the maximum over ranks of the usage flags. **Ranks** all.
  void agree() { comm_.all_reduce(used_, Max{}, step_call_of_thread()); }

  /// Plans where each bucket's partial sums begin. Returns their number.
  std::size_t plan_partials(const auto& owned) {
    partials_before_.assign(1, 0);
    if constexpr (decides) {
      owned.template for_each<Pieces::buckets>(
          [&]<class T, std::size_t Count>(const UpdatePiece<T, Count>& bucket) {
            partials_before_.push_back(
                partials_before_.back() +
                square_partials<ElementOf<reduce_kind<T>>>(bucket.count.value()));
          });
    }
    return partials_before_.back();
  }

  Comm& comm_;
  const layout& layout_;
  const StepCounter& counter_;
  // A kernel may still write to pinned memory: freeing device memory first waits for the GPU.
  PinnedArena seen_;  // has an anomaly been seen?
  DeviceElements<AnomalyRecord> found_;
  const double* loss_;
  StepState* state_;
  TableLayout<Traits> table_;
  DeviceElements<TablePiece> pieces_;
  DeviceElements<std::uint16_t> groups_;  // by row
  decltype(DeviceNumbers(OptimizerPolicy{}, 0, 0)) numbers_;
  DeviceElements<std::uint64_t> updates_;     // by parameter
  std::vector<std::size_t> partials_before_;  // by bucket
  DeviceElements<double> partials_;
  double* squares_ = nullptr;     // over all owners, in the communicator's memory
  std::span<std::uint8_t> used_;  // by parameter, in the communicator's memory
};

}  // namespace lockstep::detail

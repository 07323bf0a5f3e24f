// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The execution and the update passes of the host: plain loops, synchronous.

#include "lockstep/detail/strategy/initial_values.hpp"
#include "lockstep/detail/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// Is every value zero? Most gradients have a nonzero value in their first block.
template <class T>
bool all_zero(std::span<const T> values) {
  using A = Accumulator<T>;
  constexpr std::size_t block = 64;
  for (std::size_t i = 0; i < values.size(); i += block) {
    const std::size_t end = std::min(values.size(), i + block);
    bool found = false;
    for (std::size_t j = i; j < end; ++j) found |= static_cast<A>(values[j]) != A{0};
    if (found) return false;
  }
  return true;
}

template <class Traits, class Comm>
class HostUpdate {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using StepCounter = detail::StepCounter<Rule, typename Traits::curve, typename Traits::groups>;
  static constexpr bool decides = decides_steps<Traits>;
  static constexpr bool finds = Traits::skips_zero_gradients;
  static constexpr bool counts = Traits::counts_updates;
  static constexpr bool has_table = TableLayout<Traits>::is_needed;
  /// Is the sum of gradients divided by another number than that of all ranks?
  static constexpr bool divides = Traits::micro_batches > 1 || Traits::divides_by_live;

 public:
  /// Sums of squares are taken over whole runs.
  static constexpr Pieces observed = Pieces::runs;

  HostUpdate(Comm& comm, const auto& /*execution*/, const layout& where, const auto& /*owned*/,
             const StepCounter& counter)
      : comm_(comm),
        layout_(where),
        counter_(counter),
        table_(where),
        rows_(table_.rows()),
        used_(counts ? table_.rows() : 0),
        updates_(counts ? table_.rows() : 0) {}

  void begin(std::size_t micro_batches, double /*factor*/) {
    if constexpr (divides) divisor_ = static_cast<double>(micro_batches);
    if constexpr (decides) squares_ = 0;
    if constexpr (finds) std::ranges::fill(used_, std::uint8_t{0});
  }
  /// Turns averages over all ranks into averages over the live ones.
  void count_live(auto& gradients) { divisor_ *= gradients.features().live_share(gradients); }
  /// Selects the parameters that any rank has used. **Ranks** all.
  void use(auto& gradients) {
    const auto& used = gradients.features().agree_on_usage(gradients);
    std::copy(used.begin(), used.end(), used_.begin());
  }

  /// The first pass over averages: sums squares, and finds parameters with nonzero gradients.
  template <class T, std::size_t Count>
  void observe(const UpdatePiece<T, Count>& piece,
               std::type_identity_t<std::span<const T>> averages) {
    if constexpr (decides) squares_ += sum_of_squares<T>(averages);
    if constexpr (finds) {
      table_.for_each_row(piece.offset, piece.offset + piece.bytes(),
                          [&](std::size_t row, std::size_t begin, std::size_t end) {
                            const auto part = averages.subspan((begin - piece.offset) / sizeof(T),
                                                               (end - begin) / sizeof(T));
                            if (used_[row] == 0 && !all_zero(part)) used_[row] = 1;
                          });
    }
  }

  /// Computes the constants, after the first pass. Returns whether to update. **Ranks** all.
  bool decide(const auto& owned) {
    if constexpr (decides) {
      owned.sum_over_owners(squares_);
      scale_ = decide_scale(1, divisor_, squares_, step_limits<Traits>(), state_);
    } else if constexpr (divides) {
      scale_ = 1 / divisor_;
    }
    // A rank that owns a part of a parameter has seen only that part.
    if constexpr (finds && Traits::divides_states)
      comm_.all_reduce(used_, Max{}, step_call<Traits>());
    if constexpr (has_table) number_rows();
    return !(decides && state_.skipped);
  }

  /// Updates a piece: `pass(at, averages)` its elements from index `at` on.
  template <class T>
  struct Pass {
    using A = Accumulator<T>;
    static constexpr bool scales = Traits::clips || divides;
    using Scale = std::conditional_t<scales, Scaled<A>, std::identity>;

    HostUpdate& update;
    decltype(Rule::template at<A>({}, 0.0, 1)) constants;  // where there is no table
    Scale scale;
    T* parameters;  // of index 0
    StatesOf<Rule, T> states;
    std::size_t offset;  // of index 0, in bytes of the arena

    void operator()(std::size_t at, std::span<const T> averages, auto... sources) const {
      bool finite = true;
      if constexpr (has_table) {
        const std::size_t from = offset + at * sizeof(T);
        update.table_.for_each_row(
            from, from + averages.size_bytes(),
            [&](std::size_t row, std::size_t begin, std::size_t end) {
              const StepNumbers<Rule>& own = update.rows_[row];
              if (own.skip) return;
              finite &=
                  apply(own.template in<A>().update, (begin - offset) / sizeof(T),
                        averages.subspan((begin - from) / sizeof(T), (end - begin) / sizeof(T)));
            });
      } else {
        finite = apply(constants, at, averages);
      }
      if constexpr (Traits::stops_at_anomaly) {
        if (!finite) [[unlikely]]
          update.anomaly_.note(offset, at, averages, std::span<T* const>(sources)...);
      }
    }

   private:
    friend HostUpdate;
    bool apply(const auto& row, std::size_t at, std::span<const T> averages) const {
      StatesOf<Rule, T> here = states;
      for (auto& state : here) state += at;
      return update_elements<Rule, Traits::stops_at_anomaly, T>(
          row, parameters + at, averages.data(), here, averages.size(), scale);
    }
  };

  /// The pass over a piece whose indices begin with `first`.
  template <class T, std::size_t Count>
  Pass<T> pass(const UpdatePiece<T, Count>& piece, std::size_t first, std::byte* parameters,
               std::byte* /*masters*/, std::byte* const* states) {
    using A = Accumulator<T>;
    Pass<T> pass{*this, constants<A>(),
                 {},    reinterpret_cast<T*>(parameters) - first,
                 {},    piece.offset - first * sizeof(T)};
    if constexpr (Pass<T>::scales) pass.scale.factor = static_cast<A>(scale_);
    for (std::size_t k = 0; k != Rule::states; ++k)
      pass.states[k] = reinterpret_cast<A*>(states[k]) - first;
    return pass;
  }

  /// Ends the update. Throws if a gradient was not finite.
  void end() {
    if constexpr (Traits::stops_at_anomaly) {
      if (anomaly_.is_there()) [[unlikely]]
        anomaly_.report(layout_, Traits::alone ? "" : "as the average over ranks",
                        counter_.steps());
    }
  }
  /// On the host, anomalies throw where they are found.
  static constexpr void require_none_seen() {}
  static constexpr void require_finite() {}

  const StepState& state() const { return state_; }
  void set_state(const StepState& state) { state_ = state; }
  /// Each parameter's count of updates, where updates leave parameters out.
  std::span<std::uint64_t> updates() { return updates_; }
  void set_updates(std::uint64_t updates) { std::ranges::fill(updates_, updates); }

 private:
  std::uint64_t number() const {
    if constexpr (decides) return state_.updates;
    return counter_.steps();
  }
  template <class A>
  auto constants() const {
    if constexpr (has_table) return decltype(Rule::template at<A>({}, 0.0, 1)){};
    return Rule::template at<A>(counter_.options(), counter_.rate_of(counter_.options()), number());
  }

  void number_rows() {
    for (std::size_t row = 0; row != rows_.size(); ++row) {
      StepNumbers<Rule>& own = rows_[row];
      own.skip = (decides && state_.skipped) || (counts && used_[row] == 0);
      if (own.skip) continue;
      std::uint64_t update = number();
      if constexpr (counts) update = ++updates_[row];
      const auto options = counter_.group_options().of(table_.groups[row]);
      own = step_numbers<Rule>(options, counter_.rate_of(options), update, scale_);
    }
  }

  Comm& comm_;
  const layout& layout_;
  const StepCounter& counter_;
  double divisor_ = static_cast<double>(Traits::micro_batches);
  double scale_ = 1;
  double squares_ = 0;
  StepState state_;
  TableLayout<Traits> table_;
  std::vector<StepNumbers<Rule>> rows_;
  std::vector<std::uint8_t> used_;
  std::vector<std::uint64_t> updates_;
  NotedAnomaly anomaly_;  // of the current update
};

/// Adds up the losses of an epoch; with `Skips`, the finite ones.
template <bool Skips>
class LossMeter {
 public:
  void reset() { totals_ = {}; }
  void add(double loss, std::size_t samples) {
    latest_ = loss;
    if constexpr (Skips) {
      if (!is_finite(loss)) return;
    }
    totals_.sum += loss * static_cast<double>(samples);
    totals_.samples += static_cast<double>(samples);
  }
  double latest() const { return latest_; }
  LossTotals totals() const { return totals_; }
  void set_totals(const LossTotals& totals) { totals_ = totals; }

 private:
  double latest_ = 0;
  LossTotals totals_;
};

template <class Traits, class Comm>
class DeviceExecution<Cpu, Traits, Comm> : public HookDevice<Cpu> {
 public:
  using Arena = HostArena;
  using Loss = double;
  using Meter = LossMeter<Traits::skips_anomalies>;
  using Step = typename Traits::bare_step;
  using UpdatePasses = HostUpdate<Traits, Comm>;
  struct OnDevice {
    constexpr explicit OnDevice(const Comm&) {}
    static constexpr void select(const Comm&) {}
    static constexpr void leave() {}
    static constexpr void return_to(const Comm&) {}
  };

  constexpr explicit DeviceExecution(Comm& comm) : HookDevice<Cpu>(comm) {
    static_assert(Execution<DeviceExecution>);
  }

  static Step step(const TensorLayouts<Traits>& layouts, Arenas arenas) {
    return Step(layouts.parameters, layouts.buffers, arenas);
  }

  template <class Batch>
  static const Batch& to_device(const Batch& batch) {
    return batch;  // NOLINT(bugprone-return-const-ref-from-parameter): no temporary comes here
  }
  template <class Batch>
  static const Batch& to_device(const Batch&& batch) = delete;  // it would be gone by backward

  static double forward(auto& model, auto& step, const auto& batch) {
    return static_cast<double>(model.forward(step, batch));
  }
  static double loss(auto& model, auto& step, const auto& batch, const auto& outputs,
                     const auto& gradients) {
    return static_cast<double>(model.loss(step, batch, outputs, gradients));
  }

  static constexpr bool is_far_from(const DeviceExecution&) { return false; }
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }
  static void zero(std::byte* data, std::size_t bytes) { std::memset(data, 0, bytes); }

  static Meter meter() { return {}; }

  template <class T>
  static void add(std::span<T> sum, std::span<const T> more) {
    using A = Accumulator<T>;
    for (std::size_t i = 0; i != sum.size(); ++i)
      sum[i] = static_cast<T>(static_cast<A>(sum[i]) + static_cast<A>(more[i]));
  }

  static void initialize(const typename Traits::model&, Arenas arenas, std::byte* /*masters*/,
                         const auto& write) {
    write(ArenaValues{arenas.parameters}, ArenaValues{arenas.buffers});
  }
};

}  // namespace lockstep::detail

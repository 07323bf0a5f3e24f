// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's gradients: born in their buckets, added up over micro-batches, averaged over ranks.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/in_flight.hpp"
#include "lockstep/strategy/readiness.hpp"

namespace lockstep {

/// Follows a backward pass. The model writes gradients and marks each as ready; in a pass that
/// synchronises, a bucket's reduction starts with its last gradient, buckets strictly in order.
/// (Where parameters are shared by a host, nothing starts early: reduction and update are one pass,
/// and no rank may write parameters while another is in backward.)
///
/// A micro-batch after the first writes into a second arena, and `ready` adds it to the first while
/// it is still in the cache: models only ever overwrite, and nothing is ever zeroed.
template <class Traits, class Comm, class Executing>
class Reducer {
  using layout = typename Traits::layout;

 public:
  /// By parameter: did any rank use it since the last update?
  using Usage = std::array<std::uint8_t, Traits::parameters>;

  Reducer(Comm& comm, Executing& execution, const layout& where)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        gradients_(reinterpret_cast<std::byte*>(
            comm.template allocate<std::uint8_t>(where.plan().bytes).data())),
        averages_(travelling_arena()),
        works_(where.plan().bucket_count) {}

  std::byte* gradients() const { return gradients_; }

  /// Where a bucket's averages are: among the gradients, unless they travel in another type.
  template <class T>
  std::span<typename Traits::template travelling<T>> averages(std::size_t offset,
                                                              std::size_t bytes) const {
    using Travelling = typename Traits::template travelling<T>;
    return elements_at<Travelling>(averages_, offset / sizeof(T) * sizeof(Travelling),
                                   bytes / sizeof(T) * sizeof(Travelling));
  }

  /// The second arena, made when it is first needed.
  std::byte* scratch() {
    if (!scratch_) scratch_.emplace(layout_.plan().bytes);
    return scratch_->data();
  }

  /// How many micro-batches are added up.
  std::size_t micro_batches() const { return micro_batches_; }

  /// Is there a micro-batch whose gradients are not in the parameters yet?
  bool holds_gradients() const { return micro_batches_ != 0; }

  void begin_backward(bool synchronizes) {
    synchronizes_ = synchronizes;
    next_ = 0;
    readiness_.reset(layout_.plan());
  }

  /// What this rank's micro-batches count from now on, beside 1 for each rank on average.
  void weigh(double weight)
    requires(Traits::weighs_shares)
  {
    weight_ = weight;
  }

  template <class Tensor>
  void ready() {
    const auto& plan = layout_.plan();
    readiness_.mark(Tensor::index, plan.placements[Tensor::index].bucket);
    using T = ElementOf<Traits::parameter_types::of(Tensor::info.element)>;
    if constexpr (Traits::weighs_shares) {
      if (weight_ != 1) scale_written<T>(Tensor::index);
    }
    if (holds_gradients()) add_scratch<T>(Tensor::index);
    if constexpr (starts_early) {
      if (synchronizes_) start_complete();
    }
  }

  void end_backward() {
    if constexpr (Traits::skips_unused) {
      take_unused_as_zero();
    } else if (!readiness_.all_ready()) {
      throw Error("backward", "no gradient came for " + readiness_.missing_names(),
                  "let backward write and mark every parameter, or add UnusedParameters<Zero>");
    }
    ++micro_batches_;
  }

  /// A micro-batch in which this rank has no samples: it counts as zeros, and uses no parameter.
  void sit_out(bool synchronizes) {
    begin_backward(synchronizes);
    take_unused_as_zero();
    ++micro_batches_;
  }

  /// Averages every bucket that is not averaged yet. **Ranks** all. **Host** blocks.
  void reduce() {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) wait(b);
  }

  /// Blocks until one bucket is averaged.
  void wait(std::size_t b) {
    if constexpr (!Traits::alone) {
      const Bucket& bucket = layout_.plan().bucket_table[b];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        if constexpr (starts_early) {
          works_.template wait<typename Traits::template travelling<T>>(b);
        } else {
          comm_.all_reduce(elements_at<T>(gradients_, bucket.offset, bucket.bytes),
                           reduction_of_gradients<Traits::sums_gradients>());
        }
      });
    }
  }

  /// Which parameters any rank has used. **Ranks** all, where unused ones are skipped. **Host**
  /// blocks, for the buckets too that are under way: they come first, and here each has its type.
  const Usage& agree_on_usage() {
    if constexpr (starts_early) reduce();
    if constexpr (!Traits::alone) comm_.all_reduce(used_, Max{});
    return used_;
  }

  /// A micro-batch has run without this reducer, as part of a captured graph.
  void note_replay(bool last) {
    if (last) {
      finish_step();
    } else {
      ++micro_batches_;
    }
  }

  /// Forgets a micro-batch that was to be captured and could not be.
  void rewind(std::size_t micro_batches) {
    works_.forget();
    micro_batches_ = micro_batches;
  }

  /// The gradients are in the parameters: the next micro-batch is the first again.
  void finish_step() {
    micro_batches_ = 0;
    if constexpr (Traits::skips_unused) used_.fill(0);
  }

 private:
  static constexpr bool starts_early = !Traits::alone && !Traits::shares_parameters;

  void start_complete() {
    const auto& plan = layout_.plan();
    for (; next_ != plan.bucket_count && readiness_.is_complete(next_); ++next_) {
      if (next_ >= Comm::most_under_way) wait(next_ - Comm::most_under_way);
      const Bucket& bucket = plan.bucket_table[next_];
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        const auto travelling = averages<T>(bucket.offset, bucket.bytes);
        if constexpr (!std::is_same_v<T, typename Traits::template travelling<T>>) {
          execution_.cast(travelling, elements_at<T>(gradients_, bucket.offset, bucket.bytes));
        }
        works_.start(comm_, next_, travelling);
      });
    }
  }

  void take_unused_as_zero() {
    const auto& plan = layout_.plan();
    for (std::size_t p = 0; p != Traits::parameters; ++p) {
      if (readiness_.is_ready(p)) {
        used_[p] = 1;
        continue;
      }
      const auto& place = plan.placements[p];
      if (!holds_gradients()) execution_.zero(gradients_ + place.offset, place.bytes);
      readiness_.mark(p, place.bucket);
    }
    if constexpr (starts_early) {
      if (synchronizes_) start_complete();
    }
  }

  /// The gradient that the model has just written counts more or less than another rank's.
  template <class T>
  void scale_written(std::size_t parameter) {
    const auto& place = layout_.plan().placements[parameter];
    std::byte* const arena = holds_gradients() ? scratch_->data() : gradients_;
    execution_.scale(elements_at<T>(arena, place.offset, place.bytes), weight_);
  }

  template <class T>
  void add_scratch(std::size_t parameter) {
    const auto& place = layout_.plan().placements[parameter];
    execution_.add(elements_at<T>(gradients_, place.offset, place.bytes),
                   std::span<const T>(elements_at<T>(scratch_->data(), place.offset, place.bytes)));
  }

  std::byte* travelling_arena() {
    std::byte* arena = gradients_;
    Traits::with_element(
        layout_.plan().bucket_table[0].element, [&]<class T>(std::type_identity<T>) {
          using Travelling = typename Traits::template travelling<T>;
          if constexpr (!std::is_same_v<T, Travelling>) {
            arena = reinterpret_cast<std::byte*>(
                comm_.template allocate<Travelling>(layout_.plan().bytes / sizeof(T)).data());
          }
        });
    return arena;
  }

  Comm& comm_;
  Executing& execution_;
  const layout& layout_;
  std::byte* gradients_;
  std::byte* averages_;
  std::optional<typename Executing::Arena> scratch_;
  Readiness<typename Traits::model> readiness_;
  InFlight<Traits, Comm> works_;
  std::size_t next_ = 0;           // the bucket that is to start next
  std::size_t micro_batches_ = 0;  // whose gradients are added up
  bool synchronizes_ = false;
  double weight_ = 1;
  Usage used_{};
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the gradients of buckets are averaged over ranks: whole, in slices, or through hooks.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/hook/pipeline.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/feature/join.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// How gradients are reduced over ranks. A folded sum is an average but for one factor, by which
/// the norm and the update multiply anyway, so that the division costs no pass over memory.
enum class GradientReduction : std::uint8_t {
  sum,
  average,
  folded_sum,
  /// A sum of many `Half` could leave its range. Each is divided before by a power of two that is
  /// not less than the number of ranks, which is exact.
  folded_sum_of_halves,
};

/// A communicator that makes an average of a sum and one more pass: `averages_by_sums`.
template <class Comm>
concept AveragingBySums = requires { requires Comm::averages_by_sums; };

template <class Traits, class Comm>
constexpr GradientReduction gradient_reduction() {
  if constexpr (Traits::sums_gradients) return GradientReduction::sum;
  // Hooks see averages, as those of PyTorch do.
  if constexpr (!AveragingBySums<Comm> || Traits::alone || Traits::is_hooked)
    return GradientReduction::average;
  const bool has_halves = []<std::size_t... K>(std::index_sequence<K...>) {
    return (
        std::is_same_v<typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>,
                       Half> ||
        ...);
  }(std::make_index_sequence<Traits::kinds().size>{});
  return has_halves ? GradientReduction::folded_sum_of_halves : GradientReduction::folded_sum;
}

/// The reduction as an operation. Its type comes from a value, not from the traits: nvcc writes a
/// type the way it was reached, and a job's policies cannot be written into a kernel's name.
template <GradientReduction How>
constexpr auto reduction_of_gradients(std::size_t ranks) {
  if constexpr (How == GradientReduction::average) {
    return Average{};
  } else if constexpr (How == GradientReduction::folded_sum_of_halves) {
    return PreMultipliedSum<float>(1 / static_cast<float>(std::bit_ceil(ranks)));
  } else {
    return Sum{};
  }
}

/// The factor that makes averages of the results.
constexpr double folded_factor(GradientReduction how, std::size_t ranks) {
  const auto number = static_cast<double>(ranks);
  if (how == GradientReduction::folded_sum) return 1 / number;
  if (how == GradientReduction::folded_sum_of_halves)
    return static_cast<double>(std::bit_ceil(ranks)) / number;
  return 1;
}

/// One slot per bucket for the handle of a call on its elements. `Start` begins such a call:
/// `Start::on(space, std::span<T>)` returns its handle. Handles stay where they are made, and their
/// type depends on the bucket's elements: there is a row of slots for each of `Ts`.
template <class Start, class Space, class... Ts>
class BucketHandles {
 public:
  explicit BucketHandles(std::size_t buckets) : buckets_(buckets) { forget(); }

  /// Drops every handle: the calls were part of a capture that failed and never happened.
  void forget() {
    std::apply([&](auto&... row) { (row.reset(buckets_), ...); }, rows_);
  }

  template <class T>
  void start(Space& space, std::size_t bucket, std::span<T> elements) {
    std::get<Row<T>>(rows_).slots[bucket].emplace(Begin<T>{space, elements});
  }

  template <class T>
  bool is_under_way(std::size_t bucket) const {
    return std::get<Row<T>>(rows_).slots[bucket].has_value();
  }

  /// Waits for a bucket's call, if one is under way.
  template <class T>
  void wait(std::size_t bucket) {
    auto& slot = std::get<Row<T>>(rows_).slots[bucket];
    if (!slot) return;
    slot->wait();
    slot.reset();
  }

 private:
  template <class T>
  using Handle = decltype(Start::on(std::declval<Space&>(), std::declval<std::span<T>>()));

  /// Converts to the handle itself, so that the handle is made in its slot.
  template <class T>
  struct Begin {
    Space& space;
    std::span<T> elements;
    operator Handle<T>() const { return Start::on(space, elements); }
  };

  template <class T>
  struct Row {
    std::unique_ptr<std::optional<Handle<T>>[]> slots;

    void reset(std::size_t buckets) {
      for (std::size_t b = 0; slots != nullptr && b != buckets; ++b)
        if (slots[b]) slots[b]->forget();
      slots = std::make_unique<std::optional<Handle<T>>[]>(buckets);
    }
  };

  std::size_t buckets_;
  std::tuple<Row<Ts>...> rows_;
};

template <class Start, class Space, class Traits, std::size_t... K>
auto travelling_handles(std::index_sequence<K...>)
    -> BucketHandles<Start, Space,
                     typename Traits::template travelling<ElementOf<Traits::kinds().kinds[K]>>...>;

/// The handles of calls on a job's gradients, in the types in which these travel.
template <class Start, class Space, class Traits>
using TravellingHandles = decltype(travelling_handles<Start, Space, Traits>(
    std::make_index_sequence<Traits::kinds().size>{}));

/// Begins to reduce a whole bucket over all ranks.
template <class Traits, class Comm>
struct ReduceWhole {
  template <class T>
  static auto on(Comm& comm, std::span<T> gradients) {
    constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
    return comm.all_reduce_async(gradients, reduction_of_gradients<how>(comm.world_size().value()),
                                 step_call<Traits, JobCall::backward>());
  }
};

/// The reductions of a job's buckets. All kinds are made from the communicator, the execution and
/// the layout, and have `start(comm, bucket, gradients)` when a bucket is complete,
/// `wait<T>(bucket)`, after which its averages lie where its gradients were, and `forget()`. This
/// one all-reduces whole buckets.
template <class Traits, class Comm>
class BucketReductions : public TravellingHandles<ReduceWhole<Traits, Comm>, Comm, Traits> {
 public:
  BucketReductions(const Comm&, const auto& /*execution*/, const auto& layout)
      : BucketReductions::BucketHandles(layout.plan().bucket_count) {}
};

/// A pipeline of hooks for every bucket, in a row for each type of elements.
template <class Traits, class Comm, class Execution>
class HookedReductions {
  using layout = typename Traits::layout;
  using Device = HookDevice<typename Traits::device>;
  using Hooked = HookedBucket<Comm, Device>;
  using Stages = typename Traits::hooks::stages;
  template <class T>
  using Travelling = typename Traits::template travelling<T>;

 public:
  HookedReductions(Comm& comm, Execution&, const layout& where) : device_(comm), layout_(where) {
    const auto& plan = layout_.plan();
    slots_ = std::make_unique<Slot[]>(plan.bucket_count);
    std::apply([&](auto&... row) { (row.resize(plan.bucket_count), ...); }, rows_);
    for (std::size_t b = 0; b != plan.bucket_count; ++b) {
      const Bucket& bucket = plan.bucket_table[b];
      Slot& slot = slots_[b];
      for (const std::size_t p : plan.members(b)) slot.tensors.push_back(tensor(bucket, p));
      slot.count = bucket.count() + flags_behind<Traits>(b, comm.world_size());
      slot.bucket.emplace(comm, device_, b, slot.count, std::span<const HookedTensor>(slot.tensors),
                          steps_, bytes_);
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        std::get<Row<Travelling<T>>>(rows_).slots[b].emplace(*slot.bucket);
      });
    }
  }
  HookedReductions(const HookedReductions&) = delete;
  HookedReductions& operator=(const HookedReductions&) = delete;

  /// Drops what is under way: it was part of a capture that failed and never happened, nor did the
  /// latest micro-batch.
  void forget() {
    steps_ = steps_before_;
    bytes_ = bytes_before_;
    for_each_pipeline([](std::size_t, auto& pipeline) { pipeline.forget(); });
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) slots_[b].under_way = false;
  }

  template <class T>
  void start(Comm&, std::size_t bucket, std::span<T> gradients) {
    slots_[bucket].under_way = true;
    slots_[bucket].gradients = reinterpret_cast<std::byte*>(gradients.data());
    std::get<Row<T>>(rows_).slots[bucket]->begin(gradients);
  }

  /// Waits for a bucket's averages, if they are under way. **Ranks** all, in the order of buckets.
  template <class T>
  void wait(std::size_t bucket) {
    Slot& slot = slots_[bucket];
    if (!slot.under_way) return;
    if constexpr (Stages::has_rounds && !StreamCommunicator<Comm>) {
      // A further round would find the other buckets' calls before its own, and would finish them
      // without knowing their types.
      for_each_pipeline([](std::size_t, auto& pipeline) { pipeline.settle(); });
    }
    slot.under_way = false;
    std::get<Row<T>>(rows_).slots[bucket]->finish(
        {reinterpret_cast<T*>(slot.gradients), slot.count});
  }

  /// A step is over, whichever buckets have travelled in it.
  void count_step() { ++steps_; }
  /// Goes on after so many, with states that are zero until they are copied in.
  void begin_anew(std::uint64_t steps) {
    steps_ = steps;
    for_each_kept(
        [&](std::size_t, std::string_view, auto values, Keeper) { device_.zero(values); });
  }
  /// The bytes that this rank has handed to collectives.
  std::uint64_t bytes_sent() const { return bytes_; }
  void count_sent(std::size_t bytes) { bytes_ += bytes; }

  // Where steps are captured.

  /// The next micro-batch may be captured, and `completes` a step or not. Returns the kind of work
  /// that hooks do in it.
  std::uint64_t begin_graph(bool completes) {
    note_sent();
    steps_before_ = steps_;
    bytes_before_ = bytes_;
    if (!completes) return 0;
    // The device must know the step's number whether the step is captured or replayed.
    if constexpr (requires { device_.set_step(steps_); }) device_.set_step(steps_);
    return Stages::phase(steps_);
  }
  /// A step has run as a graph.
  void replayed() {
    for (const auto& [known, sent] : sent_) {
      if (known == Stages::phase(steps_)) bytes_ += sent;
    }
    ++steps_;
  }

  /// Calls `f(parameter, state, values, keeper)` for all that hooks keep from step to step.
  template <class F>
  void for_each_kept(const F& f) {
    for_each_pipeline([&](std::size_t, auto& pipeline) { pipeline.for_each_kept(f); });
  }

 private:
  template <class T>
  struct Row {
    std::unique_ptr<std::optional<Pipeline<T, Comm, Device, Stages>>[]> slots;

    void resize(std::size_t buckets) {
      slots = std::make_unique<std::optional<Pipeline<T, Comm, Device, Stages>>[]>(buckets);
    }
  };
  struct Slot {
    std::vector<HookedTensor> tensors;
    std::optional<Hooked> bucket;
    std::byte* gradients = nullptr;
    std::size_t count = 0;  // of elements, with join flags
    bool under_way = false;
  };

  /// Other steps of the kind of the latest one, if that was enqueued, will send as much.
  void note_sent() {
    if (steps_ == steps_before_) return;
    const std::uint64_t phase = Stages::phase(steps_before_);
    for (auto& [known, sent] : sent_) {
      if (known == phase) return;
    }
    sent_.emplace_back(phase, bytes_ - bytes_before_);
  }

  template <std::size_t... K>
  static auto make_rows(std::index_sequence<K...>)
      -> std::tuple<Row<Travelling<ElementOf<Traits::kinds().kinds[K]>>>...>;

  HookedTensor tensor(const Bucket& bucket, std::size_t parameter) const {
    const auto& info = layout_.infos()[parameter];
    HookedTensor tensor;
    tensor.parameter = parameter;
    tensor.first = (layout_.plan().placements[parameter].offset - bucket.offset) /
                   element_size(bucket.element);
    const std::size_t count = info.count();
    tensor.rows = info.rank == 0 ? 1 : info.extents[0];
    tensor.columns = tensor.rows == 0 ? 0 : count / tensor.rows;
    return tensor;
  }

  /// Calls `f(bucket, pipeline)` for all buckets in their order.
  template <class F>
  void for_each_pipeline(const F& f) {
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
      Traits::with_element(layout_.plan().bucket_table[b].element,
                           [&]<class T>(std::type_identity<T>) {
                             f(b, *std::get<Row<Travelling<T>>>(rows_).slots[b]);
                           });
    }
  }

  [[no_unique_address]] Device device_;
  const layout& layout_;
  std::uint64_t steps_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t steps_before_ = 0;  // the latest micro-batch that could be captured
  std::uint64_t bytes_before_ = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sent_;  // bytes by phase, of captured steps
  std::unique_ptr<Slot[]> slots_;
  decltype(make_rows(std::make_index_sequence<Traits::kinds().size>{})) rows_;
};

/// Those of which each rank gets its slice alone.
template <class Traits, class Comm>
class ShardReductions;

template <class Traits, class Comm, class Execution>
auto choose_reductions() {
  if constexpr (Traits::scatters_buckets) {
    return std::type_identity<ShardReductions<Traits, Comm>>{};
  } else if constexpr (Traits::is_hooked) {
    return std::type_identity<HookedReductions<Traits, Comm, Execution>>{};
  } else {
    return std::type_identity<BucketReductions<Traits, Comm>>{};
  }
}
template <class Traits, class Comm, class Execution>
using ReductionsOf = typename decltype(choose_reductions<Traits, Comm, Execution>())::type;

}  // namespace lockstep::detail

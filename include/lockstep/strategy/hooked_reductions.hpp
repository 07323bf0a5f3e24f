// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions of buckets through a job's hooks.

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

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/hook/hook_device.hpp"
#include "lockstep/hook/pipeline.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/riders.hpp"

namespace lockstep::detail {

/// A pipeline of hooks for every bucket, in a row for each type of elements, with the members of
/// `BucketReductions`.
template <class Traits, class Comm, class Execution>
class HookedReductions {
  using layout = typename Traits::layout;
  using Device = HookDevice<typename Traits::device, Comm>;
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
      slot.count = bucket.count() + riders_behind<Traits>(b, comm.world_size());
      slot.bucket.emplace(comm, device_, b, slot.count, std::span<const HookedTensor>(slot.tensors),
                          steps_, bytes_);
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        std::get<Row<Travelling<T>>>(rows_).slots[b].emplace(*slot.bucket);
      });
    }
  }
  HookedReductions(const HookedReductions&) = delete;
  HookedReductions& operator=(const HookedReductions&) = delete;

  /// Drops what is under way: it was part of a capture that failed and never happened.
  void forget() {
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
  /// How many steps are over.
  std::uint64_t steps() const { return steps_; }
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

  /// The kind of the step that comes next.
  std::uint64_t phase() const { return Stages::phase(steps_); }
  /// Tells a device that the step comes next, whether it is captured or replayed.
  void tell_step() {
    if constexpr (requires { device_.set_step(steps_); }) device_.set_step(steps_);
  }
  /// A step has been enqueued, after which there were so many steps and bytes more: others of its
  /// kind will send as much.
  void note_step(std::uint64_t steps, std::uint64_t bytes) {
    if (steps_ == steps) return;
    const std::uint64_t phase = Stages::phase(steps);
    for (auto& [known, sent] : sent_) {
      if (known == phase) return;
    }
    sent_.emplace_back(phase, bytes_ - bytes);
  }
  /// A step has run as a graph.
  void note_replay() {
    for (const auto& [known, sent] : sent_) {
      if (known == phase()) bytes_ += sent;
    }
    ++steps_;
  }
  /// Steps since so many steps and bytes were part of a capture that failed.
  void go_back(std::uint64_t steps, std::uint64_t bytes) {
    steps_ = steps;
    bytes_ = bytes;
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
    std::size_t count = 0;  // of elements, with riders
    bool under_way = false;
  };

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
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sent_;  // bytes by phase, of captured steps
  std::unique_ptr<Slot[]> slots_;
  decltype(make_rows(std::make_index_sequence<Traits::kinds().size>{})) rows_;
};

}  // namespace lockstep::detail

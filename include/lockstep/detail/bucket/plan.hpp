// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The bucket plan: the offsets of parameters in an arena, and what is reduced together.

#include "lockstep/detail/bucket/buckets.hpp"
#include "lockstep/detail/model/tensor.hpp"

namespace lockstep::detail {

/// The bucket of a frozen parameter.
inline constexpr std::size_t no_bucket = dynamic;

/// The location of a parameter and its gradient. Frozen parameters lie behind all others.
struct Placement {
  std::size_t bucket = 0;
  std::size_t offset = 0;  // bytes from the arena's start, a multiple of `arena_alignment`
  std::size_t bytes = 0;
};

/// A contiguous piece of the arena with elements of one type.
struct Bucket {
  ElementKind element = ElementKind::unsupported;
  std::size_t offset = 0;  // bytes from the arena's start, aligned
  std::size_t bytes = 0;   // with the padding inside, without the room behind
  std::size_t parameters = 0;
  std::size_t first_arrival = 0;  // index of the first member in `BucketPlan::arrivals`
  std::size_t completed_by = 0;   // the parameter whose gradient is expected last

  constexpr std::size_t count() const { return bytes / element_size(element); }
};

/// Adjacent buckets of one element type without room between them. Passes that treat every element
/// alike, such as an optimizer's update, iterate over runs instead of buckets.
struct Run {
  ElementKind element = ElementKind::unsupported;
  std::size_t offset = 0;  // bytes from the arena's start
  std::size_t bytes = 0;
  std::size_t first_bucket = 0;
  std::size_t buckets = 0;

  constexpr std::size_t count() const { return bytes / element_size(element); }
};

/// A table of values that change during training; on the heap if large, to spare the stack.
template <class T, std::size_t Count>
using SmallTable = Table<T, (Count <= 256) ? Count : dynamic>;
template <class T, std::size_t Count>
constexpr SmallTable<T, Count> make_small_table(std::size_t size) {
  return make_table<T, (Count <= 256) ? Count : dynamic>(size);
}

/// The plan of `Count` parameters, a constant or `dynamic`.
template <std::size_t Count>
struct BucketPlan {
  template <class T>
  using Table = Table<T, Count>;

  Table<Placement> placements{};  // by parameter, in declaration order
  Table<std::size_t> arrivals{};  // parameters by bucket, then in order of arrival
  Table<Bucket> bucket_table{};   // the first `bucket_count` are in use
  std::size_t bucket_count = 0;
  Table<Run> run_table{};  // the first `run_count` are in use
  std::size_t run_count = 0;
  std::size_t trained = 0;    // parameters in buckets
  std::size_t bytes = 0;      // of all buckets: the size of a gradient arena
  std::size_t all_bytes = 0;  // with frozen parameters: the size of a parameter arena

  constexpr bool is_trained(std::size_t parameter) const {
    return placements[parameter].bucket != no_bucket;
  }

  /// The buckets, in order of completion and reduction.
  constexpr std::span<const Bucket> buckets() const { return {bucket_table.data(), bucket_count}; }

  constexpr std::span<const Run> runs() const { return {run_table.data(), run_count}; }

  /// The parameters of a bucket, in order of arrival.
  constexpr std::span<const std::size_t> members(std::size_t bucket) const {
    return {arrivals.data() + bucket_table[bucket].first_arrival, bucket_table[bucket].parameters};
  }
};

constexpr bool is_never_frozen(std::size_t /*tensor*/) { return false; }
constexpr std::string_view is_of_no_unit(std::size_t /*tensor*/) { return ""; }

/// Plans buckets over `tensors`, given in declaration order, as PyTorch's DDP does once it knows
/// the order of gradients: iterate in reverse, append to the open bucket of the element type, close
/// it when its bytes, without padding, reach the limit. Each element type has its own first bucket.
/// Buckets are ordered by completion, so that none waits for a later one. Frozen tensors are left
/// out. `room`, a multiple of `arena_alignment`, is the padding behind every bucket. Consecutive
/// tensors with one name `unit_of(tensor)` that is not empty fill a bucket of their own, however
/// large.
template <std::size_t Count, class IsFrozen = bool (*)(std::size_t),
          class UnitOf = std::string_view (*)(std::size_t)>
constexpr BucketPlan<Count> make_bucket_plan(std::span<const TensorInfo> tensors,
                                             BucketLimits limits,
                                             IsFrozen is_frozen = is_never_frozen,
                                             std::size_t room = 0, UnitOf unit_of = is_of_no_unit) {
  const std::size_t count = tensors.size();
  BucketPlan<Count> plan;
  plan.placements = make_table<Placement, Count>(count);
  plan.arrivals = make_table<std::size_t, Count>(count);
  plan.bucket_table = make_table<Bucket, Count>(count);
  plan.run_table = make_table<Run, Count>(count);
  // Buckets are numbered by opening until all are known, then by completion.
  auto opening = make_table<std::size_t, Count>(count);       // by parameter
  auto completed_by = make_table<std::size_t, Count>(count);  // by opening number
  auto completion = make_table<std::size_t, Count>(count);    // by opening number

  struct Open {
    std::size_t number = dynamic;  // `dynamic`: no open bucket
    std::size_t bytes = 0;
    std::size_t limit = 0;
  };
  std::array<Open, element_kinds> open{};
  for (Open& bucket : open) bucket.limit = limits.first;
  std::size_t opened = 0;
  std::string_view unit;  // of the latest tensor; empty: none
  for (std::size_t i = count; i-- != 0;) {
    if (is_frozen(i)) {
      plan.placements[i].bucket = no_bucket;
      continue;
    }
    if (const std::string_view own = unit_of(i); own != unit) {
      unit = own;
      for (Open& bucket : open) {
        if (bucket.number != dynamic) bucket = {dynamic, 0, limits.cap};
        if (unit.empty() && bucket.limit == too_large) bucket.limit = limits.cap;
        if (!unit.empty()) bucket.limit = too_large;
      }
    }
    Open& bucket = open[static_cast<std::size_t>(tensors[i].element)];
    if (bucket.number == dynamic) bucket.number = opened++;
    opening[i] = bucket.number;
    completed_by[bucket.number] = i;
    bucket.bytes += tensors[i].bytes();
    if (bucket.bytes >= bucket.limit) bucket = {dynamic, 0, limits.cap};
  }
  for (std::size_t i = count; i-- != 0;) {
    if (plan.is_trained(i) && completed_by[opening[i]] == i)
      completion[opening[i]] = plan.bucket_count++;
  }

  for (std::size_t i = count; i-- != 0;) {
    plan.placements[i].bytes = tensors[i].bytes();
    if (!plan.is_trained(i)) continue;
    plan.placements[i].bucket = completion[opening[i]];
    Bucket& bucket = plan.bucket_table[plan.placements[i].bucket];
    bucket.element = tensors[i].element;
    bucket.completed_by = i;
    bucket.parameters += 1;
  }
  for (std::size_t b = 0, arrived = 0; b != plan.bucket_count; ++b) {
    plan.bucket_table[b].first_arrival = arrived;
    arrived += plan.bucket_table[b].parameters;
    plan.trained = arrived;
  }
  auto& listed = completion;  // reused: how many members of each bucket are listed
  for (std::size_t& n : listed) n = 0;
  for (std::size_t i = count; i-- != 0;) {
    if (!plan.is_trained(i)) continue;
    const std::size_t b = plan.placements[i].bucket;
    plan.arrivals[plan.bucket_table[b].first_arrival + listed[b]++] = i;
  }
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    Bucket& bucket = plan.bucket_table[b];
    bucket.offset = plan.bytes;
    for (const std::size_t i : plan.members(b)) {
      plan.placements[i].offset = plan.bytes;
      plan.bytes += align_up(plan.placements[i].bytes);
    }
    bucket.bytes = plan.bytes - bucket.offset;
    if (b == 0 || room != 0 || plan.bucket_table[b - 1].element != bucket.element)
      plan.run_table[plan.run_count++] = {bucket.element, bucket.offset, 0, b, 0};
    Run& run = plan.run_table[plan.run_count - 1];
    run.bytes += bucket.bytes;
    ++run.buckets;
    plan.bytes += room;
  }
  plan.all_bytes = plan.bytes;
  for (std::size_t i = 0; i != count; ++i) {
    if (plan.is_trained(i)) continue;
    plan.placements[i].offset = plan.all_bytes;
    plan.all_bytes += align_up(plan.placements[i].bytes);
  }
  return plan;
}

}  // namespace lockstep::detail

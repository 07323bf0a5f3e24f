// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs: the longest pieces of an arena with elements of one type. Usually the whole arena.

#include <cstddef>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"

namespace lockstep::detail {

/// Neighbouring buckets of one element type, without room between them. Passes that treat every
/// element alike, such as an optimizer's update, go over runs and need not stop at buckets.
struct Run {
  ElementKind element = ElementKind::unsupported;
  std::size_t offset = 0;  // bytes from the arena's start
  std::size_t bytes = 0;
  std::size_t first_bucket = 0;
  std::size_t buckets = 0;

  constexpr std::size_t count() const { return bytes / element_size(element); }
};

template <std::size_t Count>
struct RunTable {
  Table<Run, Count> runs{};
  std::size_t size = 0;

  constexpr const Run* begin() const { return runs.data(); }
  constexpr const Run* end() const { return runs.data() + size; }
};

template <std::size_t Count>
constexpr RunTable<Count> make_runs(const BucketPlan<Count>& plan) {
  RunTable<Count> table;
  table.runs = make_table<Run, Count>(plan.bucket_count);
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    const Bucket& bucket = plan.bucket_table[b];
    const Run* const before = table.size == 0 ? nullptr : &table.runs[table.size - 1];
    if (before == nullptr || before->element != bucket.element ||
        before->offset + before->bytes != bucket.offset)
      table.runs[table.size++] = {bucket.element, bucket.offset, 0, b, 0};
    Run& run = table.runs[table.size - 1];
    run.bytes += bucket.bytes;
    ++run.buckets;
  }
  return table;
}

/// The runs of a layout: a constant and an empty type where the compiler knows its plan.
template <class Layout>
struct LayoutRuns {
  static constexpr auto table = make_runs(Layout::plan());
  constexpr explicit LayoutRuns(const Layout&) {}
};
template <class Layout>
  requires(!Layout::is_static)
struct LayoutRuns<Layout> {
  RunTable<Layout::count> table;
  explicit LayoutRuns(const Layout& layout) : table(make_runs(layout.plan())) {}
};

}  // namespace lockstep::detail

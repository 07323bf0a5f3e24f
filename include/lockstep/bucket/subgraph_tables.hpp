// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sub-graphs of a layout as tables: which parameters and how many of each bucket a set
/// uses, and what lies between them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// A piece of an arena of gradients.
struct ArenaPiece {
  std::size_t offset = 0;  // bytes
  std::size_t bytes = 0;
};

/// What a backward pass of one set needs to know.
template <std::size_t Count>
struct SubgraphTable {
  Table<std::uint8_t, Count> uses{};    // by parameter; 1 for members that are trained
  Table<std::size_t, Count> members{};  // by bucket
  Table<ArenaPiece, Count> unused{};    // gradients that stay zero, neighbours together
  std::size_t unused_pieces = 0;
  std::size_t parameters = 0;  // in all buckets

  constexpr bool contains(std::size_t parameter) const { return uses[parameter] != 0; }
};

/// `contains(parameter)` says who is a member.
template <std::size_t Count, class Contains>
constexpr SubgraphTable<Count> make_subgraph_table(const BucketPlan<Count>& plan,
                                                   const Contains& contains) {
  SubgraphTable<Count> table;
  table.uses = make_table<std::uint8_t, Count>(plan.placements.size());
  table.members = make_table<std::size_t, Count>(plan.placements.size());
  table.unused = make_table<ArenaPiece, Count>(plan.placements.size());
  bool after_unused = false;
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    for (const std::size_t p : plan.members(b)) {
      const Placement& placement = plan.placements[p];
      if (contains(p)) {
        table.uses[p] = 1;
        ++table.members[b];
        ++table.parameters;
        after_unused = false;
        continue;
      }
      if (!after_unused) table.unused[table.unused_pieces++].offset = placement.offset;
      ArenaPiece& piece = table.unused[table.unused_pieces - 1];
      piece.bytes = placement.offset + placement.bytes - piece.offset;
      after_unused = true;
    }
  }
  return table;
}

/// The tables of all sets, the whole model's first: constants and an empty type where the compiler
/// knows the plan.
template <class Layout, class List>
struct LayoutSubgraphs {
  static constexpr auto tables = [] {
    std::array<SubgraphTable<Layout::count>, List::count> all{};
    for (std::size_t set = 0; set != List::count; ++set) {
      all[set] = make_subgraph_table(
          Layout::plan(), [set](std::size_t p) { return List::contains(set, Layout::name(p)); });
    }
    return all;
  }();
  constexpr explicit LayoutSubgraphs(const Layout&) {}
};
template <class Layout, class List>
  requires(!Layout::is_static)
struct LayoutSubgraphs<Layout, List> {
  std::array<SubgraphTable<Layout::count>, List::count> tables;

  explicit LayoutSubgraphs(const Layout& layout) {
    for (std::size_t set = 0; set != List::count; ++set) {
      tables[set] = make_subgraph_table(
          layout.plan(), [&](std::size_t p) { return List::contains(set, layout.name(p)); });
      // A model lists its tensors at run time: a set may turn out to be empty.
      if (tables[set].parameters == 0) refuse_empty(set);
    }
  }

 private:
  [[noreturn]] static void refuse_empty(std::size_t set) {
    throw Error(
        "Subgraphs",
        "sub-graph " + std::string(List::name_of(set)) + " contains no parameter that is trained",
        "compare its patterns with the names that the model lists, and with Frozen");
  }
};

}  // namespace lockstep::detail

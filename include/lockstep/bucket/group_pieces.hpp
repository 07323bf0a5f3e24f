// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The pieces of an arena whose parameters are updated with the same numbers.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// Neighbouring parameters of one group. A piece begins where the one before it ends.
struct GroupPiece {
  std::size_t end = 0;  // bytes from the arena's start
  std::size_t group = 0;
};

/// The group of every parameter, and the pieces of the arena in order.
template <std::size_t Count>
struct GroupTable {
  Table<std::uint16_t, Count> groups{};
  Table<GroupPiece, Count> pieces{};
  std::size_t size = 0;

  constexpr const GroupPiece* begin() const { return pieces.data(); }
  constexpr const GroupPiece* end() const { return pieces.data() + size; }

  /// The piece that holds the byte at `offset`.
  constexpr const GroupPiece* at(std::size_t offset) const {
    const GroupPiece* piece = begin();
    for (std::size_t left = size; left != 0;) {
      const std::size_t half = left / 2;
      if (piece[half].end <= offset) {
        piece += half + 1;
        left -= half + 1;
      } else {
        left = half;
      }
    }
    return piece;
  }
};

/// `group_of(parameter)` is the number of its group.
template <std::size_t Count, class GroupOf>
constexpr GroupTable<Count> make_group_table(const BucketPlan<Count>& plan,
                                             const GroupOf& group_of) {
  GroupTable<Count> table;
  table.groups = make_table<std::uint16_t, Count>(plan.placements.size());
  table.pieces = make_table<GroupPiece, Count>(plan.placements.size());
  for (std::size_t p = 0; p != plan.placements.size(); ++p)
    table.groups[p] = static_cast<std::uint16_t>(group_of(p));
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    for (const std::size_t p : plan.members(b)) {
      const Placement& placement = plan.placements[p];
      const std::size_t group = table.groups[p];
      if (table.size == 0 || table.pieces[table.size - 1].group != group)
        table.pieces[table.size++].group = group;
      table.pieces[table.size - 1].end = placement.offset + align_up(placement.bytes);
    }
  }
  return table;
}

/// All parameters are in one group.
struct OneGroup {
  constexpr explicit OneGroup(const auto&) {}
};

/// The groups of a layout's parameters: a constant and an empty type where the compiler knows its
/// plan.
template <class Layout, class Groups>
struct LayoutGroups {
  static constexpr auto table = make_group_table(Layout::plan(), [](std::size_t p) {
    return Groups::group_of(Layout::name(p), Layout::infos()[p].rank);
  });
  constexpr explicit LayoutGroups(const Layout&) {}
};
template <class Layout, class Groups>
  requires(!Layout::is_static)
struct LayoutGroups<Layout, Groups> {
  GroupTable<Layout::count> table;
  explicit LayoutGroups(const Layout& layout)
      : table(make_group_table(layout.plan(), [&](std::size_t p) {
          return Groups::group_of(layout.name(p), layout.infos()[p].rank);
        })) {
    if constexpr (Layout::count == dynamic) require_all(layout);
  }

 private:
  /// A model lists its tensors at run time: throws if a group turns out to be empty.
  void require_all(const Layout& layout) const {
    for (std::size_t group = 1; group != Groups::count; ++group) {
      bool found = false;
      for (std::size_t p = 0; p != table.groups.size(); ++p)
        found = found || (table.groups[p] == group && layout.plan().is_trained(p));
      if (!found) {
        fail("ParameterGroups",
             {"group ", group, " of ", Groups::count - 1, " has no parameter that is trained"},
             "compare its patterns with the names that the model lists; an earlier group or Frozen "
             "may have them all");
      }
    }
  }
};

}  // namespace lockstep::detail

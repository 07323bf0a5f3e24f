// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which sub-graphs the backward passes of a step use.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/subgraph_tables.hpp"
#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// The sub-graph of a backward pass, and those of all since the last update.
template <class Traits>
class SubgraphUsage : LayoutSubgraphs<typename Traits::layout, typename Traits::subgraphs> {
  using layout = typename Traits::layout;
  using Usage = typename Traits::Usage;

 public:
  explicit SubgraphUsage(const layout& where) : SubgraphUsage::LayoutSubgraphs(where) {}

  /// The next pass uses a set.
  void choose(std::size_t set) { set_ = set; }
  std::size_t set() const { return set_; }
  /// Its parameters count as used.
  void note(Usage& used) {
    chosen_ |= 1U << set_;
    const auto& uses = table().uses;
    for (std::size_t p = 0; p != used.size(); ++p) used[p] |= uses[p];
  }
  /// Those of the pass.
  const auto& table() const { return this->tables[set_]; }
  /// The sets since the last update, this one included, by bits.
  std::uint32_t chosen() const { return chosen_ | 1U << set_; }

  /// A number that differs where this pass, or the update after it, has other work to do.
  std::uint64_t variant() const { return std::uint64_t{set_} << 32 | chosen(); }

  /// An update has been made.
  void forget() { chosen_ = 0; }

  /// Has a gradient of the set not arrived?
  bool misses_some(const auto& readiness) const {
    for (std::size_t p = 0; p != table().uses.size(); ++p) {
      if (table().contains(p) && !readiness.is_ready(p)) return true;
    }
    return false;
  }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse_missing(const layout& where,
                                                             const auto& readiness) const {
    std::string names;
    for (std::size_t p = 0, listed = 0; p != table().uses.size() && listed != 8; ++p) {
      if (table().contains(p) && !readiness.is_ready(p))
        names.append(listed++ == 0 ? "" : ", ").append(where.name(p));
    }
    const std::string set = set_ == whole_model
                                ? "the whole model"
                                : "sub-graph " + std::string(Traits::subgraphs::name_of(set_));
    fail("backward",
         {"no gradient came for ", std::string_view(names), " of ", std::string_view(set)},
         "let backward write and mark every parameter of the sub-graph that the step uses");
  }

 private:
  std::size_t set_ = whole_model;
  std::uint32_t chosen_ = 0;
};

/// A job without sub-graphs.
struct NoSubgraphUsage {
  constexpr explicit NoSubgraphUsage(const auto&) {}
  static constexpr void forget() {}
};

template <class Traits>
using SubgraphUsageOf =
    typename std::conditional_t<Traits::has_subgraphs, std::type_identity<SubgraphUsage<Traits>>,
                                std::type_identity<NoSubgraphUsage>>::type;

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of gradients that knows which parameters passes have used, and of which
/// sub-graphs.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/subgraph_usage.hpp"

namespace lockstep::detail {

/// A base of `Self`, the gradients.
template <class Self, class Traits>
class UsedParameters {
  using layout = typename Traits::layout;

 public:
  using Usage = typename Traits::Usage;

  /// Which parameters this rank has used since the last update.
  const Usage& used() const { return used_; }
  /// Has this rank used a parameter since the last update? Where nobody keeps count, it has.
  bool is_used([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::notes_usage) return used_[parameter] != 0;
    return true;
  }

  /// **Host** blocks. Waits for the buckets under way first: a communicator that finishes them
  /// inside of another call no longer knows their types.
  const Usage& agree_on_usage() {
    if constexpr (!Traits::alone && !Traits::subgraphs_agree) {
      if constexpr (Traits::reduces_early) self().reduce();
      self().comm_.all_reduce(used_, Max{}, step_call<Traits, JobCall::backward>());
    }
    return used_;
  }

  /// No parameter has been used since the last update.
  void forget_usage() {
    if constexpr (Traits::notes_usage) std::ranges::fill(used_, std::uint8_t{0});
    sets_.forget();
  }

  /// The set of the next pass, and those since the last update.
  auto& subgraphs() { return sets_; }
  const auto& subgraphs() const { return sets_; }
  auto kept_usage() const { return std::pair(used_, sets_); }
  void set_usage(const auto& kept) { std::tie(used_, sets_) = kept; }
  /// The parameters of the next pass's set count as used.
  void note_subgraph() { sets_.note(used_); }

 protected:
  explicit UsedParameters(const layout& where)
      : sets_(where), used_(make_kept_table<std::uint8_t, layout::count>(where.infos().size())) {}

  /// Gradients outside of the set are zero, unless earlier micro-batches have brought some.
  void begin_subgraph() {
    const auto& table = sets_.table();
    if constexpr (Traits::frees_gradients) {  // memory comes bucket by bucket: zeros come last
      self().readiness_.reset();
      return;
    }
    self().readiness_.reset(table);
    for (std::size_t i = 0; !self().pass_.adds && i != table.unused_pieces; ++i)
      self().execution_.zero(self().arena_ + table.unused[i].offset, table.unused[i].bytes);
  }

  /// Is a bucket reduced? All are, unless every rank knows that no rank has used a member.
  bool travels([[maybe_unused]] std::size_t bucket) const {
    if constexpr (Traits::subgraphs_agree && !Traits::frees_gradients) {
      for (const std::size_t p : self().layout_.plan().members(bucket)) {
        if (used_[p] != 0) return true;
      }
      return false;
    } else {
      return true;
    }
  }

  [[noreturn, gnu::cold, gnu::noinline]] void refuse_missing() const {
    if constexpr (Traits::has_subgraphs) {
      sets_.refuse_missing(self().layout_, self().readiness_);
    } else {
      throw Error("backward", "no gradient came for " + self().readiness_.missing_names(),
                  "let backward write and mark every parameter, or add UnusedParameters<Zero>");
    }
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

 protected:
  [[no_unique_address]] SubgraphUsageOf<Traits> sets_;
  Usage used_;
};

}  // namespace lockstep::detail

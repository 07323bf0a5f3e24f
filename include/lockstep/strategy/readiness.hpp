// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which gradients of a backward pass have arrived, and which buckets they complete.

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// The readiness of the parameters of one layout, which must outlive it.
template <class Layout>
class Readiness {
 public:
  explicit Readiness(const Layout& layout)
      : layout_(layout),
        ready_(make_kept_table<std::uint8_t, Layout::count>(layout.infos().size())),
        missing_(make_kept_table<std::size_t, Layout::count>(layout.plan().bucket_count)) {}

  /// A backward pass begins: no gradient has arrived.
  void reset() {
    const auto& plan = layout_.plan();
    for (std::uint8_t& ready : ready_) ready = 0;
    for (std::size_t b = 0; b != plan.bucket_count; ++b)
      missing_[b] = plan.bucket_table[b].parameters;
    all_missing_ = plan.trained;
  }

  /// One of a sub-graph begins: nothing is expected of parameters that it does not use.
  template <class Table>
  void reset(const Table& table) {
    for (std::size_t p = 0; p != ready_.size(); ++p) ready_[p] = table.contains(p) ? 0 : 1;
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) missing_[b] = table.members[b];
    all_missing_ = table.parameters;
  }

  /// Marks a gradient as arrived; it must be the first time in this pass.
  void mark(std::size_t parameter) {
    if (parameter >= ready_.size() || ready_[parameter] != 0) [[unlikely]]
      refuse(parameter);
    ready_[parameter] = 1;
    --missing_[layout_.plan().placements[parameter].bucket];
    --all_missing_;
  }

  bool is_ready(std::size_t parameter) const { return ready_[parameter] != 0; }
  bool is_complete(std::size_t bucket) const { return missing_[bucket] == 0; }
  bool all_ready() const { return all_missing_ == 0; }

  /// The names of parameters whose gradients have not arrived, at most eight.
  std::string missing_names() const {
    constexpr std::size_t most = 8;
    std::string names;
    std::size_t listed = 0;
    for (std::size_t p = 0; p < ready_.size() && listed < most; ++p) {
      if (!is_ready(p) && layout_.plan().is_trained(p))
        names.append(listed++ == 0 ? "" : ", ").append(layout_.name(p));
    }
    if (all_missing_ > most) names += text({" and ", all_missing_ - most, " more"});
    return names;
  }

 private:
  [[noreturn, gnu::noinline]] void refuse(std::size_t parameter) const {
    if (parameter >= ready_.size()) {
      fail("backward", {"parameter ", parameter, " of ", ready_.size(), " was marked ready"},
           "number parameters from 0, in the order in which the model lists them");
    }
    fail("backward", {"the gradient of ", layout_.name(parameter), " was marked ready twice"},
         "call step.ready once for each parameter, when its gradient is complete");
  }

  const Layout& layout_;
  KeptTable<std::uint8_t, Layout::count> ready_;   // by parameter
  KeptTable<std::size_t, Layout::count> missing_;  // gradients, by bucket
  std::size_t all_missing_ = 0;
};

}  // namespace lockstep::detail

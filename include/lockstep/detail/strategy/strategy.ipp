// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Non-template definitions of this folder.

#include "lockstep/detail/bucket/bucket.ipp"
#include "lockstep/detail/strategy/agreement.hpp"
#include "lockstep/detail/strategy/scatter.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

LOCKSTEP_INLINE void describe(std::string& text, std::string_view role, std::string_view name,
                              const TensorInfo& info) {
  text += detail::text({role, " ", name, " ", element_name(info.element)});
  for (std::size_t j = 0; j != info.rank; ++j) {
    text += detail::text({j == 0 ? " " : " x ", info.extents[j]});
  }
  text += info.is_frozen ? " frozen\n" : "\n";
}

LOCKSTEP_INLINE std::string_view line_at(std::string_view text, std::size_t number) {
  for (; number != 0 && text.find('\n') != std::string_view::npos; --number)
    text.remove_prefix(text.find('\n') + 1);
  return text.empty() ? "nothing more" : text.substr(0, text.find('\n'));
}

LOCKSTEP_INLINE void fail_agreement(const char* what, const std::string& first,
                                    const std::string& others, std::size_t other, Rank me) {
  std::size_t line = 0;
  while (line_at(first, line) == line_at(others, line) && line_at(first, line) != "nothing more") {
    ++line;
  }
  const bool of_jobs = std::string_view(what) == "jobs";
  fail("DDP",
       {of_jobs ? "ranks have different jobs: rank 0 has \""
                : "ranks have different parameters: rank 0 has \"",
        line_at(first, line), "\" and rank ", other, " has \"", line_at(others, line), "\""},
       of_jobs ? "start the same program with the same settings on all ranks"
               : "change parameters on all ranks alike, or by initialize; if the program changes "
                 "none, look for faulty memory or a race in the model",
       me);
}

LOCKSTEP_INLINE void BatchShares::require_samples() const {
  for (std::size_t i = 0; i != rows_.size(); ++i) {
    if (rows_[i].count != 0) continue;
    throw Error("DP",
                text({"replica ", i, " has no sample of a batch of ", samples_,
                      ", and batch norms take their statistics over all ", rows_.size(),
                      " replicas (Norms<Synced>)"}),
                "give every replica a sample, and leave out a last batch that is too small "
                "(drop_last), or use Norms<Local>");
  }
}

LOCKSTEP_INLINE std::size_t replicas_of(const DpOptions& options, std::size_t static_replicas,
                                        std::size_t (*devices)()) {
  std::size_t wanted = options.replicas;
  if (const std::size_t listed = options.devices.size(); listed != 0) {
    if (wanted != dynamic && wanted != listed) {
      fail("DP", {wanted, " replicas are wanted and ", listed, " devices are listed"},
           "leave replicas out: every device has one");
    }
    wanted = listed;
  }
  if (wanted == 0) fail("DP", {"no replicas are wanted"}, "ask for one at least");
  if (wanted == dynamic) wanted = static_replicas == dynamic ? devices() : static_replicas;
  return wanted;
}

LOCKSTEP_INLINE std::size_t output_replica(const DpOptions& options, std::size_t replicas) {
  if (!options.output_device) return 0;
  const std::size_t wanted = *options.output_device;
  if (options.devices.empty() && wanted < replicas) return wanted;
  for (std::size_t i = 0; i != options.devices.size(); ++i)
    if (options.devices[i] == wanted) return i;
  fail("DP", {"output_device ", wanted, " has no replica"}, "name one of the devices");
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

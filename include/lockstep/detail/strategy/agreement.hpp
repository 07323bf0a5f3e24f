// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks compare their jobs before they exchange gradients, or their parameters when a
/// program asks for it, and report the first difference.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/model/tensor.hpp"
#include "lockstep/detail/policy/pack.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The compiler's spelling of a type, for messages. Not `constexpr`: compiling would take long.
template <class T>
std::string_view spelling() {
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find("T = ") + 4;
  return text.substr(begin, text.find_first_of(";]", begin) - begin);
}
template <class... Ps>
std::vector<std::string> policy_names(PolicyPack<Ps...>) {
  return {std::string(spelling<Ps>())...};
}

void describe(std::string& text, std::string_view role, std::string_view name,
              const TensorInfo& info);

/// Throws an error with the first line in which the texts of rank 0 and of `other` differ.
[[noreturn]] void fail_agreement(const char* what, const std::string& first,
                                 const std::string& others, std::size_t other, Rank me);

template <class... Ps>
void describe(std::string& text, PolicyPack<Ps...>) {
  for (std::string_view policy : {spelling<Ps>()...}) text.append("policy ").append(policy) += '\n';
}

void describe_all(std::string& text, std::string_view role, const auto& tensors) {
  std::size_t tensor = 0;
  for (const TensorInfo& info : tensors.infos()) {
    describe(text, role, tensors.name(tensor++), info);
  }
}

/// A description of a job, with a line for each part of its fingerprint.
template <class Policies>
std::string job_description(const auto& parameters, const auto& buffers) {
  std::string text = detail::text({"lockstep ", version, "\n"});
  describe(text, typename Policies::pack{});
  describe_all(text, "parameter", parameters);
  describe_all(text, "buffer", buffers);
  return text;
}

/// Throws if fingerprints differ; only then calls `describe()`. `what` they are of: "jobs" or
/// "parameters". **Ranks** all. **Host** blocks.
template <Communicator C, class Describe>
void require_agreement(C& comm, const char* what, std::uint64_t fingerprint,
                       const Describe& describe) {
  const std::size_t world = comm.world_size().value();
  std::vector<std::uint64_t> all(world);
  comm.all_gather(std::array{fingerprint}, all);
  std::size_t other = 1;
  while (other < world && all[other] == all[0]) ++other;
  if (other >= world) return;
  const std::vector<std::string> texts = all_gather_objects(comm, describe());
  try {
    comm.barrier();         // all ranks have what they need to name the difference before one ends
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): another has named it already
  }
  fail_agreement(what, texts[0], texts[other], other, comm.rank());
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

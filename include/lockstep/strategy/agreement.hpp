// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks compare jobs before they exchange a gradient, and name the first difference.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/objects.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// A compiler's spelling of a type: good enough to show, never to compare.
template <class T>
constexpr std::string_view spelling() {
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find("T = ") + 4;
  return text.substr(begin, text.find_first_of(";]", begin) - begin);
}

template <class... Ps>
void describe(std::string& text, PolicyPack<Ps...>) {
  ((text.append("policy ").append(spelling<Ps>()) += '\n'), ...);
}

inline void describe(std::string& text, std::string_view role, const auto& tensors) {
  std::size_t tensor = 0;
  for (const TensorInfo& info : tensors.infos()) {
    text.append(role).append(" ").append(tensors.name(tensor++)).append(" ");
    text += element_name(info.element);
    for (std::size_t j = 0; j != info.rank; ++j)
      text += (j == 0 ? " " : " x ") + std::to_string(info.extents[j]);
    text += '\n';
  }
}

inline std::string line_at(std::string_view text, std::size_t number) {
  for (; number != 0 && text.find('\n') != std::string_view::npos; --number)
    text.remove_prefix(text.find('\n') + 1);
  return text.empty() ? "nothing more" : std::string(text.substr(0, text.find('\n')));
}

/// A job in words, a line for everything that its fingerprint covers.
template <class Policies>
std::string job_description(const auto& parameters, const auto& buffers) {
  std::string text = "lockstep " + std::string(version) + "\n";
  describe(text, Policies{});
  describe(text, "parameter", parameters);
  describe(text, "buffer", buffers);
  return text;
}

/// Throws on all ranks unless they have the same fingerprint. `describe()` is called only if they
/// have not. **Ranks** all. **Host** blocks.
template <Communicator C, class Describe>
void require_agreement(C& comm, std::uint64_t fingerprint, const Describe& describe) {
  const std::size_t world = comm.world_size().value();
  std::vector<std::uint64_t> all(world);
  comm.all_gather(std::array{fingerprint}, all);
  std::size_t other = 1;
  while (other < world && all[other] == all[0]) ++other;
  if (other >= world) return;
  const std::vector<std::string> jobs = all_gather_objects(comm, describe());
  std::size_t line = 0;
  while (line_at(jobs[0], line) == line_at(jobs[other], line) &&
         line_at(jobs[0], line) != "nothing more") {
    ++line;
  }
  throw Error("DDP",
              "ranks have different jobs: rank 0 has \"" + line_at(jobs[0], line) + "\" and rank " +
                  std::to_string(other) + " has \"" + line_at(jobs[other], line) + "\"",
              "start the same program with the same settings on all ranks", comm.rank());
}

}  // namespace lockstep::detail

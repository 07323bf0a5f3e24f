// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The axes of communication: what connects ranks, and what advances asynchronous calls.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Progress : WithName<"Progress"> {};
struct Backend : WithName<"Backend"> {};
}  // namespace axes

/// The rank's own calls advance the calls in flight: no core is taken from the model.
struct Callers : WithName<"Callers">, Choice<axes::Progress> {};

/// A thread advances the calls in flight, for hosts with more cores than ranks.
struct HelperThread : WithName<"HelperThread">, Choice<axes::Progress> {};

/// The policy that says who advances asynchronous calls: `Progress<HelperThread>`.
template <class Who>
struct Progress : detail::ChoicePolicy<axes::Progress, Who> {};

/// Shared memory: ranks of one host, or threads of one process that share GPUs.
struct Shm : WithName<"Shm">, Choice<axes::Backend> {};

/// Sockets through the Gloo library: many hosts, CPU memory (device memory is staged).
struct Gloo : WithName<"Gloo">, Choice<axes::Backend> {};

/// The MPI that the program is linked with: clusters. Sums are in rank order in every world.
struct Mpi : WithName<"Mpi">, Choice<axes::Backend> {};

/// The same, with MPI's own reductions, whose order MPI chooses: for worlds of hundreds of ranks,
/// and networks that reduce by themselves.
struct MpiAnyOrder : WithName<"MpiAnyOrder">, Choice<axes::Backend> {};

/// NVIDIA's collectives: GPUs only.
struct Nccl : WithName<"Nccl">, Choice<axes::Backend> {};

/// One backend inside a host and another between hosts.
template <class Inside, class Between>
struct Hierarchical : Choice<axes::Backend> {
 private:
  /// The name holds both backends, so that jobs with other backends have another fingerprint.
  static constexpr auto text = [] {
    std::array<char, Inside::name.size() + Between::name.size() + 16> joined{};
    char* out = joined.data();
    for (std::string_view part : {std::string_view("Hierarchical<"), Inside::name,
                                  std::string_view(", "), Between::name, std::string_view(">")}) {
      for (char c : part) *out++ = c;
    }
    return joined;
  }();

 public:
  static constexpr std::string_view name{text.data(), text.size()};
};
static_assert(Hierarchical<Shm, Gloo>::name == "Hierarchical<Shm, Gloo>");

/// The policy that says through what ranks communicate: `Backend<Shm>`.
template <class Transport>
struct Backend : detail::ChoicePolicy<axes::Backend, Transport> {};

}  // namespace lockstep

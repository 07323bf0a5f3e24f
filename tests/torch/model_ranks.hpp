// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The modules of cases.hpp on ranks, and what is said where that fails.

#include <ATen/Parallel.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "comm/ranks.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/store/store.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "torch/cases.hpp"

namespace torch_tests {

using ranks::Ends;
using ranks::require;
using ranks::Shared;
using Ddp = DistributedDataParallel<Model, Optimizer<SGDMomentum>>;

/// Runs `f(comm)` on real processes, which LibTorch needs even for one rank: a process that has
/// used it with threads cannot fork.
Ends run(std::size_t world, auto f) {
  return ranks::run_processes(world, std::chrono::seconds(20), [&](Shared& comm) {
    at::set_num_threads(1);
    f(comm);
  });
}
void all_well(std::size_t world, auto f) {
  const Ends ends = run(world, f);
  for (std::size_t rank = 0; rank != world; ++rank)
    BOOST_TEST(ends[rank] == "", "rank " << rank << " of " << world << ": " << ends[rank]);
}
inline void all_say(const Ends& ends, const std::string& words) {
  for (std::size_t rank = 0; rank != ends.size(); ++rank)
    BOOST_TEST(ends[rank].find(words) != std::string::npos,
               "rank " << rank << " does not say \"" << words << "\": " << ends[rank]);
}
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Runs `f(session)` on every rank.
void run_sessions(std::size_t world, const auto& f) {
  spawn(
      AsProcesses{}, world,
      [&](const Membership& member, Store&) {
        require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
        at::set_num_threads(1);
        Session session(member, Store(member.host, member.port, member.secret, member.timeout));
        f(session);
      },
      std::chrono::seconds(30));
}

}  // namespace torch_tests

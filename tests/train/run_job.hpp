// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job on real processes, whose output nobody reads.

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/store/store.hpp"
#include "lockstep/detail/trainer/options.hpp"
#include "require.hpp"

namespace job_test {

using ::require;

/// Runs `f(job)` on every rank; what a rank throws is thrown here, with its number.
template <class Job, class F>
void run(std::size_t ranks, const F& f, const lockstep::TrainerOptions& options = {}) {
  using namespace lockstep;
  spawn(
      AsProcesses{}, ranks,
      [&](const Membership& member, Store&) {
        require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
        Session session(member, Store(member.host, member.port, member.secret, member.timeout));
        Job job(session, {}, options);
        f(job);
      },
      std::chrono::seconds(30));
}

/// The words with which it fails.
template <class Job, class F>
std::string failure(std::size_t ranks, const F& f) {
  try {
    run<Job>(ranks, f);
    return "nothing failed";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace job_test

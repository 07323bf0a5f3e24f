// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A program's whole `main`: be a rank, start ranks, or run alone.

#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/self_launch.hpp"

namespace lockstep {

/// Says why this rank fails: to the launcher, where lockstep's own has given a pipe for that, else
/// on stderr, once and in one piece. Returns the exit status, 1.
inline int report_failure(const std::exception_ptr& thrown, std::optional<Rank> rank,
                          const Descriptor& launcher) {
  Failure failure = Failure::of(thrown);
  if (!failure.rank) failure.rank = rank;  // of a process with several, the launcher knows one
  std::fflush(nullptr);
  if (!launcher || !write_all(launcher.get(), failure.bytes())) {
    std::fputs((failure.text(rank) + "\n").c_str(), stderr);
  }
  return 1;
}

/// `int main(int argc, char** argv) { return launch(argc, argv, [](Session& session) { ... }); }`
///
/// Started by a launcher (lockstep's, torchrun, mpirun, srun), the process is a rank: it joins and
/// calls `f(session)`. Started with `--ranks N` it launches N ranks of itself. Otherwise it is a
/// world of one. The exit status is what `f` returns (0 for void), 1 after an exception, which is
/// printed with the rank's number, or the launcher's.
/// With `default_ranks` it launches that many where nobody says otherwise.
/// Ranks: all call it, being their `main`. Host: blocks until all have joined, then runs `f`.
/// Stream: none.
template <class F>
int launch(int argc, char** argv, F&& f, std::size_t default_ranks = dynamic) {
  std::optional<Rank> rank;
  Descriptor launcher;
  try {
    LaunchOptions options = parse_options(argc, argv);
    auto place = environment(options.rendezvous).placement();
    const auto timeout =
        options.timeout.value_or(environment().timeout().value_or(default_timeout));
    if (!options.ranks && !place && default_ranks != dynamic && default_ranks > 1)
      options.ranks = default_ranks;
    if (options.ranks) {
      // A task of its own inside an allocation may well start ranks; a rank among others may not.
      if (!place || (place->world == WorldSize{1} && !place->hosted)) {
        return launch_ranks(std::move(options), timeout);
      }
      throw Error("launch", "--ranks was given to a rank that " + place->launcher + " started",
                  "leave the number of ranks to one of the two", place->rank);
    }
    rank = place ? place->rank : Rank{0};
    if (place) launcher = inherited_pipe(place->report_fd);
    // Through a pipe stdio would keep lines back until a block is full: the user would see them
    // late, and those before a crash never.
    if (place && place->hosted) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    Session session = place ? join(*std::move(place), timeout) : join_alone(timeout);
    session.set_arguments(std::move(options.rest));
    if constexpr (std::is_void_v<std::invoke_result_t<F, Session&>>) {
      std::forward<F>(f)(session);
      return 0;
    } else {
      return static_cast<int>(std::forward<F>(f)(session));
    }
  } catch (...) {
    return report_failure(std::current_exception(), rank, launcher);
  }
}

}  // namespace lockstep

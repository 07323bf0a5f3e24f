// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `spawn<N>(f)`: a job inside a program, its ranks threads or forked processes.

#include <concepts>
#include <cstddef>
#include <utility>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

namespace detail {
using RankFunction = FunctionRef<void(const Membership&, Store&)>;

void spawn_threads(std::size_t ranks, RankFunction f, std::chrono::milliseconds timeout);
void spawn_processes(std::size_t ranks, RankFunction f, std::chrono::milliseconds timeout);
}  // namespace detail

/// Ranks are threads of this process, as several ranks on one GPU must be.
struct AsThreads {};

/// Ranks are forked copies of this process, which carry on from the call of `spawn`.
struct AsProcesses {};

/// Runs `f(const Membership&, Store&)` on `ranks` threads, all on the same `f`. When one throws,
/// the store is closed, so that the others do not wait for it in vain; the first exception is
/// thrown here once all have returned.
template <class F>
void spawn(AsThreads, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  detail::spawn_threads(ranks, f, timeout);
}

/// Runs `f(const Membership&, Store&)` in `ranks` forked processes, supervised as launched ones
/// are: output prefixed, the first failure ends the rest and is thrown here. Call it while no other
/// thread runs, like fork itself.
template <class F>
void spawn(AsProcesses, std::size_t ranks, F&& f,
           std::chrono::milliseconds timeout = default_timeout) {
  detail::spawn_processes(ranks, f, timeout);
}

/// Runs a number of ranks that the compiler knows: `spawn<4>(f)` as threads,
/// `spawn<4>(AsProcesses{}, f)` as processes.
template <std::size_t Ranks, class How, class F>
  requires std::same_as<How, AsThreads> || std::same_as<How, AsProcesses>
void spawn(How how, F&& f, std::chrono::milliseconds timeout = default_timeout) {
  static_assert(Ranks > 0, "lockstep: spawn needs at least one rank");
  spawn(how, Ranks, std::forward<F>(f), timeout);
}

template <std::size_t Ranks, class F>
void spawn(F&& f, std::chrono::milliseconds timeout = default_timeout) {
  spawn<Ranks>(AsThreads{}, std::forward<F>(f), timeout);
}

}  // namespace lockstep

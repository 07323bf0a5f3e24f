// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Tells all other ranks of an exception on this rank before it is thrown.

#include <exception>

#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// Tells all ranks of the exception that is being handled, and throws it on.
template <class Comm>
[[noreturn, gnu::noinline]] void tell_and_rethrow(Comm& comm) {
  try {
    throw;
  } catch (const Error& error) {
    const Error named = error.rank() ? error : error.on(comm.rank());
    comm.abandon(named.what());
    throw named;
  } catch (const std::exception& error) {
    comm.abandon(error.what());
    throw;
  } catch (...) {
    comm.abandon("an exception that is no std::exception");
    throw;
  }
}

/// Calls `f()`. Where it throws, every other rank's call fails with the same words, and the job is
/// over. A world that the compiler knows to be of one (`Alone`) has nobody to tell.
template <bool Alone, class Comm, class F>
auto tell_others_of(Comm& comm, const F& f) -> decltype(f()) {
  if constexpr (Alone) {
    return f();
  } else {
    try {
      return f();
    } catch (...) {
      tell_and_rethrow(comm);
    }
  }
}

/// Calls `f()`, and tells the other ranks of a replica's communicator if it throws, also those that
/// are in a call of the job's groups.
template <class Replica, class F>
auto tell_others(Replica& replica, const F& f) -> decltype(f()) {
  if constexpr (Replica::traits::has_job_groups) {
    return tell_others_of<Replica::traits::alone>(replica.groups(), f);
  } else {
    return tell_others_of<Replica::traits::alone>(replica.communicator(), f);
  }
}

}  // namespace lockstep::detail

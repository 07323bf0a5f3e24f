// SPDX-License-Identifier: Apache-2.0
// The library `lockstep::compiled`: the definitions that are no templates, compiled once instead of
// in every program. It is compiled with LOCKSTEP_COMPILED defined, as the programs that link it
// are.
#define LOCKSTEP_LIBRARY
#include "lockstep/detail/checkpoint/checkpoint.ipp"
#include "lockstep/detail/comm/comm.ipp"
#include "lockstep/detail/core/core.ipp"
#include "lockstep/detail/core/storage.ipp"
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/data/files.ipp"
#include "lockstep/detail/launch/launch.ipp"
#include "lockstep/detail/norm/norm.ipp"
#include "lockstep/detail/observe/metrics.ipp"
#include "lockstep/detail/observe/observe.ipp"
#include "lockstep/detail/observe/trace.ipp"
#include "lockstep/detail/store/store.ipp"
#include "lockstep/detail/strategy/strategy.ipp"
#include "lockstep/detail/trainer/trainer.ipp"

template <>
const char lockstep::detail::LibraryOfThisVersion<lockstep::detail::version_key()>::is_linked = 1;

// SPDX-License-Identifier: Apache-2.0
// The library `lockstep::compiled`: the definitions that are no templates, compiled once instead of
// in every program. It is compiled with LOCKSTEP_COMPILED defined, as the programs that link it
// are.
#define LOCKSTEP_LIBRARY
#include "lockstep/checkpoint/checkpoint.ipp"
#include "lockstep/comm/comm.ipp"
#include "lockstep/core/core.ipp"
#include "lockstep/core/storage.ipp"
#include "lockstep/data/data.ipp"
#include "lockstep/data/files.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#include "lockstep/norm/norm.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"

template <>
const char lockstep::detail::LibraryOfThisVersion<lockstep::detail::version_key()>::is_linked = 1;

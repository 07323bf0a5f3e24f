// SPDX-License-Identifier: Apache-2.0
// The library `lockstep::compiled`: the definitions that are no templates, compiled once instead of
// in every program. It is compiled with LOCKSTEP_COMPILED defined, as the programs that link it
// are.
#define LOCKSTEP_LIBRARY
#include "lockstep/lockstep.ipp"

template <>
const char lockstep::detail::LibraryOfThisVersion<lockstep::detail::version_key()>::is_linked = 1;

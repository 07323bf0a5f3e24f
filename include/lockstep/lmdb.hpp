// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Data sets in LMDB files: reading needs nothing else, writing links with -llmdb.

#include "lockstep/data.hpp"
#include "lockstep/detail/data/lmdb.hpp"

#if !defined(LOCKSTEP_COMPILED) && __has_include(<lmdb.h>)
#include "lockstep/detail/data/write_lmdb.ipp"
#endif

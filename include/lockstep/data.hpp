// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Data sets (not LMDB: <lockstep/lmdb.hpp>), transforms, samplers, loaders, staging.

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/data/sampler.hpp"
#include "lockstep/detail/data/stage.hpp"
#include "lockstep/detail/data/tokens.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/comm/comm.ipp"
#include "lockstep/detail/core/core.ipp"
#include "lockstep/detail/core/storage.ipp"
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/data/files.ipp"
#include "lockstep/detail/launch/launch.ipp"
#include "lockstep/detail/store/store.ipp"
#endif

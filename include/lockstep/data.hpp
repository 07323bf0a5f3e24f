// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Data sets (not LMDB: <lockstep/lmdb.hpp>), transforms, samplers, loaders, staging.

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/feed.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/npy.hpp"
#include "lockstep/data/pipeline.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/data/stage.hpp"
#include "lockstep/data/tokens.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/comm.ipp"
#include "lockstep/core/core.ipp"
#include "lockstep/core/storage.ipp"
#include "lockstep/data/data.ipp"
#include "lockstep/data/files.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#endif

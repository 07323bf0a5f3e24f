// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs.

#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/data/collate.hpp"
#include "lockstep/data/distributed_sampler.hpp"
#include "lockstep/data/in_memory_dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/map.hpp"
#include "lockstep/device/device_count.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/hook/compress_to.hpp"
#include "lockstep/hook/local_sgd.hpp"
#include "lockstep/hook/no_reduction.hpp"
#include "lockstep/hook/power_sgd.hpp"
#include "lockstep/hook/top_k.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/spawn.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/norm/batch_norm.hpp"
#include "lockstep/norm/dropout.hpp"
#include "lockstep/norm/layer_norm.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/number_text.hpp"
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/observe/tally.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/split.hpp"
#include "lockstep/topology/transposed.hpp"
#include "lockstep/trainer/ddp.hpp"
#include "lockstep/trainer/dp.hpp"
#include "lockstep/trainer/launch_job.hpp"
#include "lockstep/trainer/loading.hpp"
#include "lockstep/trainer/process_group.hpp"
#include "lockstep/trainer/saving.hpp"
#include "lockstep/trainer/trainer.hpp"
#include "lockstep/version.hpp"

#if __has_include(<zlib.h>)  // IDX files come compressed; a program that reads them links -lz
#include "lockstep/data/fashion_mnist.hpp"
#endif

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/lockstep.ipp"
#endif

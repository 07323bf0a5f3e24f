// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer` and `launch<Job>`: a job's loop, its data in memory, its metrics.

#include "lockstep/ddp.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/observe/display.hpp"
#include "lockstep/detail/observe/scores.hpp"
#include "lockstep/detail/observe/summary.hpp"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/dp.hpp"

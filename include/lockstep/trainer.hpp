// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer` and `launch<Job>`: a job's loop, its data in memory, its metrics.

#include "lockstep/data/dataset.hpp"
#include "lockstep/ddp.hpp"
#include "lockstep/dp.hpp"
#include "lockstep/observe/display.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/observe/summary.hpp"
#include "lockstep/trainer/launch_job.hpp"
#include "lockstep/trainer/trainer.hpp"

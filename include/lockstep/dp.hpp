// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: one process with a thread for each replica.

#include "lockstep/ddp.hpp"

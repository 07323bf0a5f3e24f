// SPDX-License-Identifier: Apache-2.0
// For binaries whose tests communicate or train: they include most of the library anyway.
#include "lockstep/lockstep.hpp"
#include "pch.hpp"

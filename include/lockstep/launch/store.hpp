// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The key-value store by which ranks find each other: `StoreServer`, which one process of a
/// job runs, and `Store`, which every rank has.

#include "lockstep/launch/store_client.hpp"
#include "lockstep/launch/store_server.hpp"

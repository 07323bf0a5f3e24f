// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's headers as system headers wherever they are found (CPATH): their warnings are not
/// ours.
#pragma GCC system_header

#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

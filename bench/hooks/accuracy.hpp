// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What hooks cost in accuracy.

#include <string>

/// Trains example 03's job for four epochs with a hook that is named, and prints the accuracy on
/// the test images: `bench_hooks accuracy PowerSGD-1 --ranks 2`.
int accuracy(const std::string& hook, int argc, char** argv);

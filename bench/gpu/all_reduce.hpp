// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The all-reduce of ranks that are threads and share a GPU, against a copy of as many bytes.

#include <cstddef>
#include <map>
#include <vector>

#include "kernels.hpp"

namespace bench {

/// 2, 4 and 8 threads on the first GPU; each call by itself, and many in one graph. The times are
/// the host's, per call, with the launches. The peer copies the data of one rank on the device: an
/// all-reduce of W ranks moves W times as many bytes, so 1 / W is a ratio at the memory's speed.
std::vector<Comparison> compare_all_reduce();

/// NCCL among processes on the same GPU, which it knows through sockets only, by bytes. An unfair
/// peer, and the only one there is on one GPU. Empty where PyTorch is not installed.
std::map<std::size_t, Times> nccl_over_sockets(std::size_t ranks);

}  // namespace bench

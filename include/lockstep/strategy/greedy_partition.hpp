// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch's division of parameters among ranks: `Sharding<ZeroRedundancy, ByTensor>`.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace lockstep::detail {

/// The owner of each tensor, given their sizes in elements: the largest first, and of equal ones
/// the earlier, each goes to the rank that has the fewest elements so far, the lowest of several.
/// ZeroRedundancyOptimizer divides parameters the same way.
inline std::vector<std::size_t> partition_greedily(std::span<const std::size_t> sizes,
                                                   std::size_t ranks) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order,
                           [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::size_t> load(ranks);
  std::vector<std::size_t> owners(sizes.size());
  for (const std::size_t tensor : order) {
    const auto least = std::ranges::min_element(load);
    owners[tensor] = static_cast<std::size_t>(least - load.begin());
    *least += sizes[tensor];
  }
  return owners;
}

}  // namespace lockstep::detail

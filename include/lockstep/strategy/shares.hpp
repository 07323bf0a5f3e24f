// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which rows of a batch each replica gets: PyTorch's chunks, or shares by weight.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

namespace lockstep::detail {

/// Rows [first, first + count) of a batch.
struct RowRange {
  std::size_t first = 0;
  std::size_t count = 0;
  friend constexpr bool operator==(const RowRange&, const RowRange&) = default;
};

/// Replica i's rows of `size`, as `torch.chunk` cuts them: ceil(size / replicas) each, until none
/// are left. Of 5 rows, 4 replicas get 2, 2, 1 and 0.
constexpr RowRange chunk(std::size_t size, std::size_t replicas, std::size_t i) {
  const std::size_t most = (size + replicas - 1) / replicas;
  const std::size_t first = std::min(i * most, size);
  return {first, std::min(most, size - first)};
}

/// Replica i's rows of `size` in proportion to its weight: rounded down, and the rows that are left
/// go to the largest remainders (of equal ones, to the lower replica). Only the proportions of
/// weights matter.
inline RowRange weighted_share(std::size_t size, std::span<const double> weights, std::size_t i) {
  double all = 0;
  for (double weight : weights) all += weight;
  const auto exact = [&](std::size_t k) { return static_cast<double>(size) * (weights[k] / all); };
  const auto remainder = [&](std::size_t k) { return exact(k) - std::floor(exact(k)); };
  std::size_t left = size;
  for (std::size_t k = 0; k != weights.size(); ++k) left -= static_cast<std::size_t>(exact(k));
  const auto count = [&](std::size_t k) {
    std::size_t before = 0;  // replicas whose remainder comes first
    for (std::size_t j = 0; j != weights.size(); ++j)
      before += remainder(j) > remainder(k) || (remainder(j) == remainder(k) && j < k);
    return static_cast<std::size_t>(exact(k)) + (before < left ? 1 : 0);
  };
  std::size_t first = 0;
  for (std::size_t k = 0; k != i; ++k) first += count(k);
  return {first, count(i)};
}

/// How a batch is cut: into chunks, or by weight where there are weights.
struct BatchCut {
  std::size_t replicas = 1;
  std::span<const double> weights;  // one for each replica, or none

  RowRange rows(std::size_t size, std::size_t replica) const {
    return weights.empty() ? chunk(size, replicas, replica)
                           : weighted_share(size, weights, replica);
  }
};

/// The samples of a batch that a replica has, and the number that all replicas have.
struct BatchPart {
  RowRange samples;
  std::size_t all = 0;
  std::size_t largest = 0;  // number of samples that any replica has
};

}  // namespace lockstep::detail

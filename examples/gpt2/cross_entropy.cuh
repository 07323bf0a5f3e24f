// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The loss of a language model: scores turn into their own gradients where they are.

#include <cfloat>
#include <cstddef>
#include <cub/block/block_reduce.cuh>

#include "gpt2/row.cuh"
#include "gpt2/windows.cuh"

namespace gpt2 {

inline constexpr unsigned score_threads = 512;

/// A part of the softmax's denominator, relative to its largest term, in powers of two.
struct Powers {
  float largest;
  float sum;

  template <unsigned Count>
  __device__ void add(const float (&scores)[Count]) {
    float next = largest;
#pragma unroll
    for (const float score : scores) next = fmaxf(next, score);
    sum *= exp2f(largest - next);
    largest = next;
#pragma unroll
    for (const float score : scores) sum += exp2f(score - next);
  }
};
struct Joined {
  __device__ Powers operator()(const Powers& a, const Powers& b) const {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * exp2f(a.largest - largest) + b.sum * exp2f(b.largest - largest)};
  }
};

inline constexpr float log2_of_e = 1.4426950408889634f;

/// The sum of the weights of all places, in every thread.
inline __device__ float total_weight(const Windows& windows) {
  float sum = 0;
  for (std::size_t i = 0; i < windows.count; ++i) sum += windows.weights[i];
  return sum * static_cast<float>(windows.length);
}

/// A block for each row of `stride` scores, of which the first `tokens` count: its loss, and in
/// training the gradient of the mean by its scores in their place. The scores are read twice, the
/// second time from the cache.
template <bool Trains>
LOCKSTEP_KERNEL __launch_bounds__(score_threads, 3)
    score_rows(BFloat16* all_scores, unsigned stride, unsigned tokens, Windows windows,
               std::size_t first_place, float* losses) {
  const std::size_t place = first_place + blockIdx.x;
  const unsigned target = windows.next(place);
  BFloat16* const scores = all_scores + std::size_t{blockIdx.x} * stride;
  Packet* const packets = reinterpret_cast<Packet*>(scores);
  const unsigned whole = tokens / Packet::size;
  Powers own{-FLT_MAX, 0};
#pragma unroll 2
  for (unsigned p = threadIdx.x; p < whole; p += score_threads) {
    const Packet packet = packets[p];
    float powers[Packet::size];
#pragma unroll
    for (unsigned i = 0; i < Packet::size; ++i)
      powers[i] = static_cast<float>(packet.at[i]) * log2_of_e;
    own.add(powers);
  }
  const unsigned behind = whole * Packet::size + threadIdx.x;
  if (behind < tokens) own.add<1>({static_cast<float>(scores[behind]) * log2_of_e});

  using Reduce = cub::BlockReduce<Powers, score_threads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ float shared_log_sum, shared_share, shared_target;
  const Powers all = Reduce(storage).Reduce(own, Joined{});
  if (threadIdx.x == 0) {
    const float weight = windows.weights[place / windows.length];
    shared_log_sum = all.largest + log2f(all.sum);
    shared_target = static_cast<float>(scores[target]) * log2_of_e;
    losses[place] = weight * (shared_log_sum - shared_target) / log2_of_e;
    shared_share = weight / total_weight(windows);
  }
  if constexpr (Trains) {
    __syncthreads();
    const float log_sum = shared_log_sum, share = shared_share;
    const auto gradient = [&](BFloat16 score) {
      return BFloat16(exp2f(static_cast<float>(score) * log2_of_e - log_sum) * share);
    };
#pragma unroll 2
    for (unsigned p = threadIdx.x; p < whole; p += score_threads) {
      Packet packet = packets[p];
#pragma unroll
      for (unsigned i = 0; i < Packet::size; ++i) packet.at[i] = gradient(packet.at[i]);
      packets[p] = packet;
    }
    if (behind < stride) scores[behind] = behind < tokens ? gradient(scores[behind]) : BFloat16(0);
    __syncthreads();
    if (threadIdx.x == 0) scores[target] = BFloat16((exp2f(shared_target - log_sum) - 1) * share);
  }
}

/// The sum of all losses over the sum of weights, and that sum, from one block.
static __global__ void __launch_bounds__(score_threads)
    add_losses(const float* losses, Windows windows, double* mean, float* weight) {
  using Reduce = cub::BlockReduce<double, score_threads>;
  __shared__ typename Reduce::TempStorage storage;
  double own = 0;
  for (std::size_t i = threadIdx.x; i < windows.places(); i += score_threads) own += losses[i];
  const double sum = Reduce(storage).Sum(own);
  if (threadIdx.x != 0) return;
  const float total = total_weight(windows);
  *mean = sum / total;
  if (weight != nullptr) *weight = total;
}

}  // namespace gpt2

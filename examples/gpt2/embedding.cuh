// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The gradients of GPT-2's two embeddings, in an order of sums that never changes.

#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "device_array.cuh"
#include "gpt2/row.cuh"
#include "gpt2/windows.cuh"

namespace gpt2 {

static __global__ void list_places(Windows windows, std::uint16_t* tokens, std::uint32_t* places) {
  const std::size_t place = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (place >= windows.places()) return;
  tokens[place] = static_cast<std::uint16_t>(windows.token(place));
  places[place] = static_cast<std::uint32_t>(place);
}

/// first[t]: where the places of token t begin among the sorted ones.
static __global__ void find_first(const std::uint16_t* sorted, std::size_t count,
                                  std::size_t tokens, std::uint32_t* first) {
  const std::size_t token = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token > tokens) return;
  std::size_t low = 0, high = count;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (sorted[middle] < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  first[token] = static_cast<std::uint32_t>(low);
}

inline constexpr unsigned embedding_groups = 4;

/// A block's sum of the rows `row(first)`, ..., `row(last - 1)`: the threads of a group have a
/// packet each, and the groups take rows by turns. The result is in the first group.
template <std::size_t Width>
__device__ void add_rows(std::size_t first, std::size_t last, const BFloat16* rows, auto&& row,
                         float (&sum)[Packet::size]) {
  __shared__ float parts[embedding_groups][Packet::size][Width / Packet::size];
#pragma unroll 4
  for (std::size_t i = first + threadIdx.y; i < last; i += embedding_groups) {
    const auto packet = reinterpret_cast<const Packet*>(rows + row(i) * Width)[threadIdx.x];
#pragma unroll
    for (unsigned k = 0; k < Packet::size; ++k) sum[k] += static_cast<float>(packet.at[k]);
  }
  if (threadIdx.y != 0) {
    for (unsigned k = 0; k < Packet::size; ++k) parts[threadIdx.y][k][threadIdx.x] = sum[k];
  }
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (unsigned group = 1; group < embedding_groups; ++group)
    for (unsigned k = 0; k < Packet::size; ++k) sum[k] += parts[group][k][threadIdx.x];
}

template <std::size_t Width>
__device__ void store_row(const float (&sum)[Packet::size], BFloat16* row) {
  Packet packet;
  for (unsigned k = 0; k < Packet::size; ++k) packet.at[k] = BFloat16(sum[k]);
  reinterpret_cast<Packet*>(row)[threadIdx.x] = packet;
}

/// to = the output layer's gradient of the embedding + the rows of all places with the token.
template <std::size_t Width>
LOCKSTEP_KERNEL __launch_bounds__(Width / Packet::size * embedding_groups)
    token_gradients(const float* of_output, const BFloat16* rows, const std::uint32_t* first,
                    const std::uint32_t* places, BFloat16* to) {
  const std::size_t token = blockIdx.x;
  float sum[Packet::size] = {};
  if (threadIdx.y == 0) {
    const float* const from = of_output + token * Width + threadIdx.x * Packet::size;
    for (unsigned k = 0; k < Packet::size; ++k) sum[k] = from[k];
  }
  add_rows<Width>(
      first[token], first[token + 1], rows, [&](std::size_t i) -> std::size_t { return places[i]; },
      sum);
  if (threadIdx.y == 0) store_row<Width>(sum, to + token * Width);
}

/// to[position] = the sum over windows; zero behind their end.
template <std::size_t Width>
LOCKSTEP_KERNEL __launch_bounds__(Width / Packet::size * embedding_groups)
    position_gradients(const BFloat16* rows, std::size_t windows, std::size_t length,
                       BFloat16* to) {
  const std::size_t position = blockIdx.x;
  float sum[Packet::size] = {};
  add_rows<Width>(
      0, position < length ? windows : 0, rows,
      [&](std::size_t window) { return window * length + position; }, sum);
  if (threadIdx.y == 0) store_row<Width>(sum, to + position * Width);
}

/// For batches with `places` places and a vocabulary of `tokens`.
template <std::size_t Width>
class EmbeddingGradients {
 public:
  EmbeddingGradients(std::size_t places, std::size_t tokens)
      : tokens_(tokens),
        unsorted_(places),
        sorted_(places),
        unsorted_places_(places),
        places_(places),
        first_(tokens + 1),
        room_(sort(nullptr, nullptr, places)),
        memory_(room_) {}

  /// From the gradient by the embedded rows, and the output layer's, which shares the embedding.
  void operator()(cudaStream_t stream, const Windows& windows, const BFloat16* d,
                  const float* of_output, BFloat16* of_tokens, BFloat16* of_positions,
                  std::size_t positions) {
    const auto blocks = [](std::size_t threads) {
      return static_cast<unsigned>((threads + 255) / 256);
    };
    const dim3 row(Width / Packet::size, embedding_groups);
    list_places<<<blocks(windows.places()), 256, 0, stream>>>(windows, unsorted_, unsorted_places_);
    lockstep::check_launch("list_places");
    sort(memory_, stream, windows.places());
    find_first<<<blocks(tokens_ + 1), 256, 0, stream>>>(sorted_, windows.places(), tokens_, first_);
    lockstep::check_launch("find_first");
    token_gradients<Width><<<static_cast<unsigned>(tokens_), row, 0, stream>>>(of_output, d, first_,
                                                                               places_, of_tokens);
    lockstep::check_launch("token_gradients");
    position_gradients<Width><<<static_cast<unsigned>(positions), row, 0, stream>>>(
        d, windows.count, windows.length, of_positions);
    lockstep::check_launch("position_gradients");
  }

 private:
  /// Returns how much memory it takes; without memory it does nothing else. Stable, so that the
  /// places of a token are in order.
  std::size_t sort(void* memory, cudaStream_t stream, std::size_t places) {
    std::size_t bytes = memory == nullptr ? 0 : room_;
    lockstep::check_cuda(
        cub::DeviceRadixSort::SortPairs(memory, bytes, +unsorted_, +sorted_, +unsorted_places_,
                                        +places_, static_cast<int>(places), 0, 16, stream),
        "cub::DeviceRadixSort::SortPairs");
    return bytes;
  }

  std::size_t tokens_;
  DeviceArray<std::uint16_t> unsorted_, sorted_;
  DeviceArray<std::uint32_t> unsorted_places_, places_, first_;
  std::size_t room_;
  DeviceArray<std::byte> memory_;
};

}  // namespace gpt2

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Combining all ranks' values on a GPU, always in rank order: bitwise equal on every GPU.

#include "lockstep/detail/comm/rank_gpu.cuh"
#include "lockstep/detail/device/cuda/vector.cuh"

namespace lockstep::detail {

/// A pass over packets of 16 bytes; single elements after them, or if an address is not aligned.
struct PacketPass {
  static constexpr unsigned threads = 512;  // of a block

  std::size_t packets;
  std::size_t count;

  LOCKSTEP_HOST_DEVICE std::size_t steps(std::size_t per_packet) const {
    return packets + (count - packets * per_packet);
  }

  /// Cuts elements into packets if all addresses and strides, whose bitwise or is `bits`, allow it.
  template <class T>
  static PacketPass cut(std::size_t count, std::uintptr_t bits) {
    return {bits % 16 == 0 ? count / packet_size<T> : 0, count};
  }

  /// Enough blocks for every step, but not more than `most`.
  template <class T>
  dim3 grid(std::size_t most, std::size_t pieces = 1) const {
    const std::size_t wanted = (steps(packet_size<T>) + threads - 1) / threads;
    return dim3(static_cast<unsigned>(std::min(wanted, most)), static_cast<unsigned>(pieces));
  }

  /// Calls `f.operator()<N>(i)` for the N elements at i of every packet or single element.
  template <std::size_t PerPacket, class F>
  __device__ void for_each_packet(const F& f) const {
    const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < steps(PerPacket); i += stride) {
      if (i < packets) {
        f.template operator()<PerPacket>(i * PerPacket);
      } else {
        f.template operator()<1>(packets * PerPacket + (i - packets));
      }
    }
  }
};

template <std::size_t N, class T>
__device__ Packet<T, N> load_some(const T* from) {
  if constexpr (N == 1) {
    return {*from};
  } else {
    return load_packet<Caching::keep, N>(from);
  }
}
template <std::size_t N, class T>
__device__ void store_some(T* to, const Packet<T, N>& packet) {
  if constexpr (N == 1) {
    *to = packet.at[0];
  } else {
    store_packet<Caching::keep, N>(to, packet);
  }
}

template <class T>
struct GatheredValues {
  static constexpr std::size_t static_ranks = dynamic;
  const T* begin;
  std::size_t stride;
  __device__ const T* operator()(unsigned w) const { return begin + w * stride; }
};

/// Piece p, at element p * stride of every rank's values, goes to out[p] and `targets` - 1 more.
template <class T, class Values, std::size_t MostOuts>
struct Combination {
  Values values;
  T* out[MostOuts];
  PacketPass pass;
  std::size_t stride;
  unsigned targets;
  unsigned ranks;
};

/// Every rank's value is loaded, in rank order, before any result is stored: outs may be ins.
template <class T, class Op, class Values, std::size_t MostOuts>
LOCKSTEP_KERNEL __launch_bounds__(PacketPass::threads)
    combine(const __grid_constant__ Combination<T, Values, MostOuts> work, const Op op) {
  const unsigned piece = blockIdx.y;
  work.pass.template for_each_packet<packet_size<T>>([&]<std::size_t N>(std::size_t i) {
    using Accumulated = decltype(op.prepare(T{}));
    constexpr std::size_t known = Values::static_ranks;
    [[maybe_unused]] constexpr std::size_t together = known == dynamic ? 4 : known;
    const unsigned ranks = known == dynamic ? work.ranks : static_cast<unsigned>(known);
    const std::size_t from = piece * work.stride + i;
    Accumulated sum[N];
    const Packet<T, N> first = load_some<N>(work.values(0) + from);
#pragma unroll
    for (std::size_t j = 0; j < N; ++j) sum[j] = op.prepare(first.at[j]);
#pragma unroll together
    for (unsigned w = 1; w < ranks; ++w) {
      const Packet<T, N> next = load_some<N>(work.values(w) + from);
#pragma unroll
      for (std::size_t j = 0; j < N; ++j) sum[j] = op.combine(sum[j], op.prepare(next.at[j]));
    }
    Packet<T, N> result;
#pragma unroll
    for (std::size_t j = 0; j < N; ++j) result.at[j] = op.template finish<T>(sum[j], ranks);
#pragma unroll together
    for (unsigned t = 0; t < work.targets; ++t) store_some<N>(work.out[piece + t] + i, result);
  });
}

template <class T, class Value, class Op>
LOCKSTEP_KERNEL prepare_elements(const T* from, std::size_t count, Value* to, std::size_t padded,
                                 Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < padded;
       i += step) {
    to[i] = i < count ? op.prepare(from[i]) : Value{};
  }
}

template <class Value, class T, class Op>
LOCKSTEP_KERNEL finish_elements(const Value* from, T* to, std::size_t count, std::size_t ranks,
                                Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = op.template finish<T>(from[i], ranks);
  }
}

/// Kernels in the order of a stream; for host memory loops, for which the host blocks.
class StreamPasses : public StreamCopies {
 public:
  using StreamCopies::StreamCopies;

  static bool takes(const void* data) { return is_device(data); }

  template <class T, class Op>
  void combine(std::span<const T> gathered, std::span<T> out, const Op& op) const {
    static_assert(ReduceOp<Op, T>,
                  "lockstep: this reduce operation is not defined for these elements");
    if (out.empty()) return;
    if (!is_device(out.data())) return HostPasses::combine(gathered, out, op);
    const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(gathered.data()) |
                                reinterpret_cast<std::uintptr_t>(out.data()) | out.size_bytes();
    using E = SameElement<T>;
    const Combination<E, GatheredValues<E>, 1> work{
        {gathered.data(), out.size()},
        {out.data()},
        PacketPass::cut<T>(out.size(), bits),
        0,
        1,
        static_cast<unsigned>(gathered.size() / out.size())};
    launch_kernel<detail::combine<E, Op, GatheredValues<E>, 1>>(
        "combine", stream_, work.pass.template grid<T>(most_blocks), PacketPass::threads, work, op);
  }

  template <class T, class Value, class Op>
  void prepare(std::span<const T> from, std::span<Value> to, const Op& op) const {
    if (to.empty()) return;
    launch_kernel<prepare_elements<T, Value, Op>>("prepare_elements", stream_, blocks(to.size()),
                                                  threads, from.data(), from.size(), to.data(),
                                                  to.size(), op);
  }

  template <class Value, class T, class Op>
  void finish(std::span<const Value> from, std::span<T> to, const Op& op, std::size_t ranks) const {
    if (from.empty()) return;
    launch_kernel<finish_elements<Value, T, Op>>("finish_elements", stream_, blocks(from.size()),
                                                 threads, from.data(), to.data(), from.size(),
                                                 ranks, op);
  }

 private:
  static constexpr unsigned threads = 256;
  static constexpr std::size_t most_blocks = 1024;  // bound by memory: more blocks gain nothing

  static unsigned blocks(std::size_t count) {
    return static_cast<unsigned>(std::min(most_blocks, (count + threads - 1) / threads));
  }
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Casts gradients to another type and back, and adds micro-batches: one launch per bucket.

#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/device/cuda/vector.cuh"

namespace lockstep::detail {

using PackShape = PassShape<256, 4>;

/// The arithmetic is in double if one side is double, else in float. The result is rounded once.
template <class From, class To>
using CastArithmetic =
    std::conditional_t<std::is_same_v<Accumulator<From>, double>, double, Accumulator<To>>;

template <class From, class To>
struct CastPass {
  using A = CastArithmetic<From, To>;
  static constexpr std::size_t packet = packet_size<From, To>;

  const From* from;
  To* to;
  A factor;

  template <std::size_t N>
  __device__ Packet<From, N> load(std::size_t at) const {
    return load_packet<Caching::stream, N>(from + at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const Packet<From, N>& loaded) const {
    Packet<To, N> out;
#pragma unroll
    for (std::size_t i = 0; i < N; ++i) {
      const auto value = static_cast<A>(static_cast<Accumulator<From>>(loaded.at[i]));
      out.at[i] = static_cast<To>(static_cast<Accumulator<To>>(factor * value));
    }
    store_packet<Caching::keep>(to + at, out);  // read next by the reduction or the update
  }
};

template <class T>
struct AddPass {
  using A = Accumulator<T>;
  static constexpr std::size_t packet = packet_size<T>;

  T* sum;
  const T* more;

  template <std::size_t N>
  struct Loaded {
    Packet<T, N> sum;
    Packet<T, N> more;
  };
  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at) const {
    return {load_packet<Caching::keep, N>(sum + at), load_packet<Caching::stream, N>(more + at)};
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const Loaded<N>& loaded) const {
    Packet<T, N> out;
#pragma unroll
    for (std::size_t i = 0; i < N; ++i) {
      out.at[i] =
          static_cast<T>(static_cast<A>(loaded.sum.at[i]) + static_cast<A>(loaded.more.at[i]));
    }
    store_packet<Caching::keep>(sum + at, out);
  }
};

template <class Shape, class Pass, std::size_t Count>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads) pass_kernel(Pass pass, Size<Count> count) {
  pass_over_tile<Shape, Pass::packet>(pass, blockIdx.x, count.value());
}

template <class Shape, std::size_t Count, class Pass>
void launch_pass(cudaStream_t stream, const char* name, const Pass& pass, std::size_t count) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(tiles_of<Shape, Pass::packet>(count));
  launch_kernel<pass_kernel<Shape, Pass, Count>>(name, stream, blocks, Shape::threads, pass,
                                                 make_size<Count>(count));
}

/// `to[i] = factor * from[i]`: casts gradients to the type of a bucket, or back. A static `Count`
/// is compiled into the kernel. **Stream** in its order. **Host** does not block.
template <std::size_t Count = dynamic, class Shape = PackShape, FloatingElement From,
          FloatingElement To>
void launch_cast(cudaStream_t stream, const From* from, To* to, double factor,
                 std::size_t count = Count) {
  using Pass = CastPass<From, To>;
  require_alignment("cast", {from, to});
  launch_pass<Shape, Count>(stream, "cast", Pass{from, to, static_cast<typename Pass::A>(factor)},
                            count);
}

/// The same for whole arrays, which must be aligned to 16 bytes.
template <class To, class From>
void cast_async(std::span<To> to, std::span<From> from, double factor, cudaStream_t stream) {
  launch_cast<dynamic, PackShape, SameElement<std::remove_const_t<From>>, SameElement<To>>(
      stream, from.data(), to.data(), factor, to.size());
}

/// `sum[i] += more[i]` for micro-batches. **Stream** in its order. **Host** does not block.
template <std::size_t Count = dynamic, class Shape = PackShape, Element T>
void launch_add(cudaStream_t stream, T* sum, const std::type_identity_t<T>* more,
                std::size_t count = Count) {
  require_alignment("add", {sum, more});
  launch_pass<Shape, Count>(stream, "add", AddPass<T>{sum, more}, count);
}

}  // namespace lockstep::detail

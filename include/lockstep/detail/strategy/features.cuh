// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Features on a GPU: join flags, keys of random numbers, and the checked mode of gradients.

#include "lockstep/detail/device/cuda/step_graph.cuh"
#include "lockstep/detail/optim/constants.cuh"
#include "lockstep/detail/strategy/feature/checked_gradients.hpp"
#include "lockstep/detail/strategy/feature/join.hpp"
#include "lockstep/detail/strategy/feature/random.hpp"

namespace lockstep::detail {

template <class T>
LOCKSTEP_KERNEL write_join_flags(T* flags, std::size_t count, std::size_t rank, bool is_live) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) flags[i] = join_flag<T>(i, rank, is_live);
}

/// One thread reads all flags: they are few, and other buckets are still in flight.
template <class T>
LOCKSTEP_KERNEL read_flags(const T* flags, std::size_t count, double scale, LiveRanks* live) {
  *live = read_join_flags(flags, count, scale, live->lowest);
}

/// Divides by the live ranks instead of all: multiplies the scales of all groups by `world / live`.
template <class Rule>
LOCKSTEP_KERNEL count_live(const LiveRanks* live, double world, StepInputs<Rule>* inputs,
                           StepNumbers<Rule>* numbers, std::size_t groups) {
  const std::size_t group = threadIdx.x;
  if (group >= groups || live->count == 0) return;
  const double factor = world / static_cast<double>(live->count);
  inputs[group].scale *= factor;
  numbers[group].in_double.scale *= factor;
  numbers[group].in_float.scale = static_cast<float>(numbers[group].in_double.scale);
}

template <class R>
void launch_count_live(cudaStream_t stream, const LiveRanks* live, std::size_t world,
                       const DeviceNumbers<R>& numbers) {
  launch_kernel<count_live<R>>("live ranks", stream, 1, static_cast<unsigned>(numbers.groups()),
                               live, static_cast<double>(world), numbers.inputs(), numbers.step(),
                               numbers.groups());
}

template <class Comm>
class JoinFlags<Cuda, Comm> {
 public:
  explicit JoinFlags(Comm& comm) : comm_(comm) {}

  template <class T>
  void write(std::span<T> flags, bool is_live) {
    constexpr unsigned threads = 128;
    launch_kernel<write_join_flags<SameElement<T>>>(
        "join flags", stream(), blocks_for(flags.size(), threads), threads, flags.data(),
        flags.size(), comm_.rank().value(), is_live);
  }
  template <class T>
  void read(std::span<T> flags, double scale) {
    launch_kernel<read_flags<SameElement<T>>>("join flags", stream(), 1, 1, flags.data(),
                                              flags.size(), scale, device_live());
    is_known_ = false;
  }

  /// The live ranks of the latest round. **Host** blocks until its first bucket has been reduced.
  const LiveRanks& live() const {
    if (!is_known_) {
      comm_.synchronize();
      copy_now(&known_, device_live(), sizeof known_);
      is_known_ = true;
    }
    return known_;
  }
  /// The same in device memory. **Stream** after `read`.
  LiveRanks* device_live() const { return live_.data(); }

  /// Forgets all rounds; `lowest` counts as the lowest live rank. **Host** blocks.
  void reset(std::size_t lowest) {
    known_ = {0, lowest};
    is_known_ = true;
    comm_.synchronize();
    copy_now(device_live(), &known_, sizeof known_);
  }

 private:
  cudaStream_t stream() const { return comm_.gpu().stream(); }

  Comm& comm_;
  DeviceElements<LiveRanks> live_{1};
  mutable LiveRanks known_;
  mutable bool is_known_ = true;
};

/// Keys lie in device memory, so that a replayed graph reads the current ones.
template <class Comm>
class RandomKeyStore<Cuda, Comm> {
 public:
  explicit RandomKeyStore(Comm& comm) : comm_(comm) {}
  RandomKeys* keys() const { return keys_.data(); }
  /// `key` is device memory, which the host does not read.
  static DeviceLayerRandom draw(const std::uint64_t* key, std::uint64_t layer) {
    return {key, layer};
  }
  void store(const RandomKeys& keys) { launch_store(comm_.gpu().stream(), keys_.data(), keys); }

 private:
  Comm& comm_;
  DeviceElements<RandomKeys> keys_{1};
};

template <class Bits>
LOCKSTEP_KERNEL fill_bits(Bits* data, Bits bits, std::size_t count) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride)
    data[i] = bits;
}

/// Lowers `*first` to `base` + the index of the first element that is not written.
template <class Bits>
LOCKSTEP_KERNEL find_unwritten(const Bits* data, UnwrittenBits<Bits> unwritten, std::size_t count,
                               unsigned long long base, unsigned long long* first) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    if (unwritten.are(data[i])) {
      atomicMin(first, base + i);
      return;
    }
  }
}

/// A captured step is not checked, because the host cannot wait; the eager steps before it are.
template <>
class WrittenCheck<Cuda> {
 public:
  explicit WrittenCheck(auto& comm) : stream_(comm.gpu().stream()) { clear(); }

  template <class T>
  void spoil(std::span<T> gradient) {
    if (gradient.empty() || is_capturing()) return;
    using Bits = typename decltype(unwritten<T>())::Bits;
    launch_kernel<fill_bits<Bits>>("fill_bits", stream_, blocks, threads,
                                   reinterpret_cast<Bits*>(gradient.data()), unwritten<T>().pattern,
                                   gradient.size());
  }

  template <class T>
  void inspect(std::size_t parameter, std::span<const T> gradient) {
    if (gradient.empty() || is_capturing()) return;
    using Bits = typename decltype(unwritten<T>())::Bits;
    launch_kernel<find_unwritten<Bits>>(
        "find_unwritten", stream_, blocks, threads, reinterpret_cast<const Bits*>(gradient.data()),
        unwritten<T>(), gradient.size(), static_cast<unsigned long long>(parameter) << element_bits,
        first_.data());
  }

  /// **Host** blocks until the stream is empty.
  std::optional<Unwritten> take() {
    if (is_capturing()) return std::nullopt;
    unsigned long long found = none;
    copy_async(&found, first_.data(), sizeof found, stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    if (found == none) return std::nullopt;
    clear();
    return Unwritten{static_cast<std::size_t>(found >> element_bits),
                     static_cast<std::size_t>(found & ((1ULL << element_bits) - 1))};
  }

 private:
  static constexpr unsigned long long none = ~0ULL;
  static constexpr int element_bits = 40;  // the other bits are the parameter's index
  static constexpr unsigned blocks = 256;
  static constexpr unsigned threads = 256;

  void clear() {
    check_cuda(cudaMemsetAsync(first_.data(), 0xff, sizeof none, stream_), "cudaMemsetAsync");
  }
  bool is_capturing() const { return capture_status(stream_) != cudaStreamCaptureStatusNone; }

  cudaStream_t stream_;
  DeviceElements<unsigned long long> first_{1};
};

}  // namespace lockstep::detail

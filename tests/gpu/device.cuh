// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What tests on a GPU share: is there one, arrays that notice stray writes, numbers, and
/// differences in words. Large arrays are filled and judged on the device: the host's programs are
/// not optimised, and would take a minute for what takes a GPU a second.

#include <cuda_runtime.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/macros.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "skipped.hpp"

namespace gpu_test {

/// Where there is none, a case says so and ends.
inline bool has_gpu() {
  if (lockstep::detail::visible_gpus() != 0) return true;
  say_skipped("a case on a GPU (there is no CUDA device here)");
  return false;
}

template <class T>
LOCKSTEP_HOST_DEVICE double number(T value) {
  return static_cast<double>(static_cast<lockstep::detail::Accumulator<T>>(value));
}

template <class T>
LOCKSTEP_HOST_DEVICE T rounded(double value) {
  return static_cast<T>(static_cast<lockstep::detail::Accumulator<T>>(value));
}

/// A number in [-1, 1) for each seed and index, the same on host and device: the mixing step of
/// SplitMix64 (Steele, Lea and Flood, 2014).
LOCKSTEP_HOST_DEVICE inline double random_number(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t bits = (seed << 40) + (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  return static_cast<double>(bits >> 11) * 0x1p-52 - 1;
}

template <class F>
__global__ void call_with_each(std::size_t count, F f) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    f(i);
  }
}

/// Calls `f(i)` on the device, for every i below `count`. **Stream** in its order. **Host** does
/// not block.
template <class F>
void enqueue_for_each(cudaStream_t stream, std::size_t count, const F& f) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>((count + 255) / 256, 2048));
  call_with_each<<<blocks, 256, 0, stream>>>(count, f);
  lockstep::check_launch("call_with_each");
}

/// The same on the default stream. **Host** blocks until everything on the device is done.
template <class F>
void for_each_on_device(std::size_t count, const F& f) {
  enqueue_for_each(nullptr, count, f);
  lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// Writes `value(i)` to every element.
template <class T, class Value>
struct Writing {
  T* data;
  Value value;
  __device__ void operator()(std::size_t i) const { data[i] = rounded<T>(value(i)); }
};

struct RandomNumbers {
  std::uint64_t seed;
  double factor = 1;
  bool positive = false;
  LOCKSTEP_HOST_DEVICE double operator()(std::size_t i) const {
    const double x = random_number(seed, i);
    return factor * (positive && x < 0 ? -x : x);
  }
};

constexpr unsigned char poison = 0xff;  // NaN in every type
/// How many bytes behind an array nobody may touch, and what is in them.
constexpr std::size_t guard = 4096;
constexpr unsigned char fence = 0xa5;

/// An array in device memory, full of NaN until it is written, with a zone behind it that nobody
/// may touch.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count), memory_(bytes() + guard) {
    fill(0, poison, bytes());
    fill(bytes(), fence, guard);
    // Other streams must not begin before it is full.
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    upload(values);
  }

  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  const unsigned char* raw() const { return reinterpret_cast<const unsigned char*>(data()); }
  std::size_t bytes() const { return count_ * sizeof(T); }

  void upload(const std::vector<T>& values) {
    lockstep::check_cuda(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyDefault),
                         "cudaMemcpy");
    // Other streams must not begin before it has arrived.
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// Every element becomes `value(i)`, which is called on the device.
  template <class Value>
  void write(const Value& value) {
    for_each_on_device(count_, Writing<T, Value>{data(), value});
  }
  /// **Host** blocks until everything on the device is done.
  std::vector<T> download() const {
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> values(count_);
    lockstep::check_cuda(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDefault),
                         "cudaMemcpy");
    return values;
  }
  /// Empty, or where the zone behind was written.
  std::string stray_write() const {
    std::vector<unsigned char> zone(guard);
    lockstep::check_cuda(
        cudaMemcpy(zone.data(), memory_.data() + bytes(), guard, cudaMemcpyDefault), "cudaMemcpy");
    for (std::size_t i = 0; i != guard; ++i) {
      if (zone[i] != fence) return "byte " + std::to_string(i) + " behind the array was written";
    }
    return {};
  }

  static constexpr unsigned char poison = gpu_test::poison;

 private:
  void fill(std::size_t at, int value, std::size_t size) {
    lockstep::check_cuda(cudaMemset(memory_.data() + at, value, size), "cudaMemset");
  }

  std::size_t count_;
  lockstep::DeviceArena memory_;
};

/// What a judge says of one element.
struct CompositionCheck {
  bool wrong = false;
  char what[16] = "";
  double have = 0;
  double want = 0;
};

template <class Judge>
struct FindingWrong {
  Judge judge;
  unsigned long long* first;
  __device__ void operator()(std::size_t i) const {
    if (judge(i).wrong) atomicMin(first, static_cast<unsigned long long>(i));
  }
};
template <class Judge>
struct Telling {
  Judge judge;
  std::size_t count;
  const unsigned long long* first;
  CompositionCheck* verdict;
  __device__ void operator()(std::size_t) const {
    if (*first < count) *verdict = judge(*first);
  }
};

/// Empty, or a verdict on element `at` of `count` in words.
inline std::string in_words(const CompositionCheck& said, std::size_t at, std::size_t count) {
  if (at >= count) return {};
  char text[200];
  std::snprintf(text, sizeof text, "element %zu of %zu: %s is %.17g, expected %.17g", at, count,
                said.what, said.have, said.want);
  return text;
}

/// Empty, or what is wrong with the first element of which `judge(i)`, which is called on the
/// device, says so. **Host** blocks until everything on the device is done.
template <class Judge>
std::string first_wrong(std::size_t count, const Judge& judge) {
  lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const DeviceArray<unsigned long long> first(std::vector<unsigned long long>{count});
  for_each_on_device(count, FindingWrong<Judge>{judge, first.data()});
  const std::size_t at = first.download()[0];
  if (at == count) return {};
  const DeviceArray<CompositionCheck> verdict(1);
  for_each_on_device(1, Telling<Judge>{judge, count, first.data(), verdict.data()});
  return in_words(verdict.download()[0], at, count);
}

/// Judges bytes by those of another array, or by one value.
struct SameBytes {
  const unsigned char* have;
  const unsigned char* want;
  unsigned char all = 0;  // where `want` is null
  __device__ CompositionCheck operator()(std::size_t i) const {
    const unsigned char wanted = want == nullptr ? all : want[i];
    return {have[i] != wanted, "a byte", static_cast<double>(have[i]), static_cast<double>(wanted)};
  }
};

/// Judges the zones behind several arrays, one after the other.
struct WholeFences {
  static constexpr std::size_t most = 20;
  const unsigned char* zones[most];
  __device__ CompositionCheck operator()(std::size_t i) const {
    const unsigned char have = zones[i / guard][i % guard];
    return {have != fence, "a fence", static_cast<double>(have), static_cast<double>(fence)};
  }
};

/// Checks whose arrays are filled, used and judged in the order of one stream, in the same memory
/// one check after the other, while the host goes on. The host waits once, for all verdicts:
/// beside other programs on the same GPU each wait takes as long as their turns, and a suite that
/// waits for every array takes minutes instead of seconds.
class EnqueuedChecks {
 public:
  /// `bytes`: of all arrays of the largest check, their fences not counted.
  EnqueuedChecks(std::size_t bytes, std::size_t most_verdicts)
      : memory_(bytes + WholeFences::most * (guard + alignment)),
        firsts_(most_verdicts * sizeof(unsigned long long)),
        verdicts_(most_verdicts * sizeof(CompositionCheck)),
        most_(most_verdicts) {
    lockstep::check_cuda(cudaMemset(firsts_.data(), 0xff, firsts_.bytes()), "cudaMemset");
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  cudaStream_t stream() const { return stream_; }

  /// Arrays from here on take the place of those of earlier checks. `name` is what reports say.
  void begin(std::string name) {
    name_ = std::move(name);
    used_ = 0;
    arrays_ = 0;
  }

  /// An array full of NaN, with a fence behind it.
  template <class T>
  T* array(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (arrays_ == WholeFences::most || used_ + bytes + guard > memory_.bytes())
      throw std::logic_error("EnqueuedChecks: the arrays of a check are too many or too large");
    std::byte* const data = memory_.data() + used_;
    fill(data, poison, bytes);
    fill(data + bytes, fence, guard);
    fences_.zones[arrays_++] = reinterpret_cast<const unsigned char*>(data + bytes);
    used_ = (used_ + bytes + guard + alignment - 1) / alignment * alignment;
    return reinterpret_cast<T*>(data);
  }

  template <class T, class Value>
  void write(T* data, std::size_t count, const Value& value) {
    enqueue_for_each(stream_, count, Writing<T, Value>{data, value});
  }

  /// `judge(i)` is called on the device for every i below `count`.
  template <class Judge>
  void judge(std::string what, std::size_t count, const Judge& judge) {
    if (names_.size() == most_) throw std::logic_error("EnqueuedChecks: too many verdicts");
    unsigned long long* const first =
        reinterpret_cast<unsigned long long*>(firsts_.data()) + names_.size();
    CompositionCheck* const verdict =
        reinterpret_cast<CompositionCheck*>(verdicts_.data()) + names_.size();
    enqueue_for_each(stream_, count, FindingWrong<Judge>{judge, first});
    enqueue_for_each(stream_, 1, Telling<Judge>{judge, count, first, verdict});
    names_.push_back(name_ + ": " + what);
    counts_.push_back(count);
  }
  template <class T>
  void judge_same(std::string what, std::size_t count, const T* have, const T* want) {
    judge(std::move(what), count * sizeof(T),
          SameBytes{reinterpret_cast<const unsigned char*>(have),
                    reinterpret_cast<const unsigned char*>(want)});
  }
  template <class T>
  void judge_unwritten(std::string what, std::size_t count, const T* have) {
    judge(std::move(what), count * sizeof(T),
          SameBytes{reinterpret_cast<const unsigned char*>(have), nullptr, poison});
  }
  /// Those of all arrays of this check.
  void judge_fences() { judge("what is behind the arrays", arrays_ * guard, fences_); }

  /// One assertion for each verdict. **Host** blocks until the stream is empty.
  void report() const {
    std::vector<unsigned long long> firsts(names_.size());
    std::vector<CompositionCheck> verdicts(names_.size());
    download(firsts, firsts_);
    download(verdicts, verdicts_);
    stream_.synchronize();
    BOOST_TEST_REQUIRE(!names_.empty());
    for (std::size_t v = 0; v != names_.size(); ++v) {
      BOOST_TEST_CONTEXT(names_[v]) {
        BOOST_TEST(in_words(verdicts[v], firsts[v], counts_[v]) == "");
      }
    }
  }

 private:
  static constexpr std::size_t alignment = 256;

  void fill(std::byte* data, int value, std::size_t bytes) {
    lockstep::check_cuda(cudaMemsetAsync(data, value, bytes, stream_), "cudaMemsetAsync");
  }
  template <class T>
  void download(std::vector<T>& to, const lockstep::DeviceArena& from) const {
    lockstep::check_cuda(cudaMemcpyAsync(to.data(), from.data(), to.size() * sizeof(T),
                                         cudaMemcpyDeviceToHost, stream_),
                         "cudaMemcpyAsync");
  }

  lockstep::DeviceArena memory_;
  lockstep::DeviceArena firsts_;  // the first wrong element of each verdict
  lockstep::DeviceArena verdicts_;
  std::size_t most_;
  lockstep::CudaStream stream_;
  std::string name_;
  std::size_t used_ = 0;
  std::size_t arrays_ = 0;
  WholeFences fences_{};
  std::vector<std::string> names_;
  std::vector<std::size_t> counts_;
};

/// Empty, or the first element that is further than `relative * magnitude + absolute` from what is
/// wanted; its magnitude is what is wanted, unless given. NaN is near NaN only.
template <class T>
std::string difference(const std::vector<double>& want, const std::vector<T>& have, double relative,
                       double absolute, const std::vector<double>& magnitude = {}) {
  for (std::size_t i = 0; i != want.size(); ++i) {
    const double got = number(have[i]);
    const double size = std::abs(magnitude.empty() ? want[i] : magnitude[i]);
    if (std::isnan(want[i]) && std::isnan(got)) continue;
    if (want[i] == got || std::abs(got - want[i]) <= relative * size + absolute) continue;
    char text[160];
    std::snprintf(text, sizeof text, "element %zu of %zu: expected %.17g, got %.17g", i,
                  want.size(), want[i], got);
    return text;
  }
  return {};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Numbers in [-1, 1), the same every time.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : seed_(seed) {}
  double next() { return random_number(seed_, index_++); }
  template <class T>
  std::vector<T> values(std::size_t count, bool positive = false) {
    std::vector<T> all(count);
    for (T& value : all) {
      const double x = next();
      value = rounded<T>(positive ? std::abs(x) : x);
    }
    return all;
  }

 private:
  std::uint64_t seed_;
  std::uint64_t index_ = 0;
};

/// Around packets, tiles and grids, and some that are neither.
inline std::vector<std::size_t> sizes() {
  std::vector<std::size_t> all{1,    2,    3,    4,    5,    7,    8,    9,     15,      16,
                               17,   31,   63,   64,   255,  1000, 1023, 2047,  2048,    2049,
                               4095, 4096, 4097, 8191, 8192, 8193, 9999, 65537, 1000003, 3000017};
  Numbers random(7);
  for (int i = 0; i != 6; ++i) {
    all.push_back(1 + static_cast<std::size_t>((random.next() + 1) * 200000));
  }
  return all;
}

}  // namespace gpu_test

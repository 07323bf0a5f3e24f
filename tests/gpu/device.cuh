// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What tests on a GPU share: is there one, arrays that notice stray writes, and differences
/// in words.

#include <cuda_runtime.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace gpu_test {

/// Where there is none, a case says so and ends.
inline bool has_gpu() {
  if (lockstep::visible_gpus() != 0) return true;
  BOOST_TEST_MESSAGE("not run: no CUDA device here");
  return false;
}

/// An array in device memory, full of NaN until it is written, with a zone behind it that nobody
/// may touch.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count), memory_(bytes() + guard) {
    fill(0, poison, bytes());
    fill(bytes(), fence, guard);
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    upload(values);
  }

  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

  void upload(const std::vector<T>& values) {
    lockstep::check_cuda(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyDefault),
                         "cudaMemcpy");
    // Other streams must not begin before it has arrived.
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
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

 private:
  static constexpr std::size_t guard = 4096;
  static constexpr unsigned char poison = 0xff;  // NaN in every type
  static constexpr unsigned char fence = 0xa5;

  std::size_t bytes() const { return count_ * sizeof(T); }
  void fill(std::size_t at, int value, std::size_t size) {
    lockstep::check_cuda(cudaMemset(memory_.data() + at, value, size), "cudaMemset");
    lockstep::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  std::size_t count_;
  lockstep::DeviceArena memory_;
};

template <class T>
double number(T value) {
  return static_cast<double>(static_cast<lockstep::Accumulator<T>>(value));
}

template <class T>
T rounded(double value) {
  return static_cast<T>(static_cast<lockstep::Accumulator<T>>(value));
}

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
  explicit Numbers(std::uint64_t seed) : state_(seed * 2 + 1) {}
  double next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) * 0x1p-52 - 1;
  }
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
  std::uint64_t state_;
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

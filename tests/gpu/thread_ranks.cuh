// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs a function on ranks that are threads, all on the GPUs there are, and says what became
/// of each.

#include <cuda_runtime.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/participants.hpp"
#include "lockstep/detail/comm/threads/communicator.cuh"
#include "require.hpp"
#include "skipped.hpp"

namespace thread_ranks {

using ::require;

using namespace lockstep;
using namespace std::chrono_literals;
using participants::Ends;
using participants::run_threads;

/// Cases on a GPU that many checks share take longer than others.
struct GpuCase : Watchdog {
  GpuCase() : Watchdog(240s) {}
};

/// Where there is no GPU, a case says so and ends.
inline bool no_gpu() {
  if (detail::visible_gpus() != 0) return false;
  say_skipped("a case on a GPU (there is no CUDA device here)");
  return true;
}

/// Where GPUs exchange data through the host, several pieces of it are a small array already.
inline std::size_t most_staged = 64 * 1024;

/// `f(communicator)` on every rank.
template <std::size_t Ranks = dynamic, class F>
Ends run(std::size_t world, const F& f, std::chrono::milliseconds timeout = 60s) {
  const auto shared = std::make_shared<detail::threads::SharedWorld>(WorldSize{world}, most_staged);
  return run_threads(world, [&](Rank rank) {
    auto gpu = std::make_shared<Gpu>(rank, rank.value() % detail::visible_gpus());
    ThreadCommunicator<Ranks> comm(shared, rank, std::move(gpu), timeout);
    f(comm);
  });
}

inline void expect_all_fine(const Ends& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    BOOST_TEST(ends[r].empty(), "rank " << r << ": " << ends[r]);
  }
}

inline constexpr std::size_t nobody = static_cast<std::size_t>(-1);

/// Every rank but the culprit ends with words that contain all of `parts`.
inline void expect_words(const Ends& ends, std::size_t culprit,
                         const std::vector<std::string>& parts) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    if (r == culprit) continue;
    for (const std::string& part : parts) {
      BOOST_TEST(ends[r].find(part) != std::string::npos,
                 "rank " << r << " lacks '" << part << "', it said: '" << ends[r] << "'");
    }
  }
}

/// Copies in the rank's stream's order. **Host** blocks until it has arrived.
template <class C, class T>
void upload(C& comm, const std::vector<T>& from, std::span<T> to) {
  check_cuda(cudaMemcpyAsync(to.data(), from.data(), to.size_bytes(), cudaMemcpyDefault,
                             comm.gpu().stream()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(comm.gpu().stream()), "cudaStreamSynchronize");
}
template <class C, class T>
std::vector<T> download(C& comm, std::span<T> from) {
  std::vector<T> values(from.size());
  check_cuda(cudaMemcpyAsync(values.data(), from.data(), from.size_bytes(), cudaMemcpyDefault,
                             comm.gpu().stream()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(comm.gpu().stream()), "cudaStreamSynchronize");
  return values;
}

inline std::size_t mixed(std::size_t rank, std::size_t i) {
  std::size_t x = (i + 1) * 0x9e3779b97f4a7c15u + (rank + 1) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 31;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 29);
}

/// What rank `rank` holds at place i: any bits of an integer, or a number in [-1, 1) with a full
/// mantissa, so that the order in which ranks are combined shows.
template <class T>
T value(std::size_t rank, std::size_t i) {
  const std::size_t x = mixed(rank, i);
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>(x >> 11) * 0x1p-52 - 1;
  } else if constexpr (FloatingElement<T>) {
    return static_cast<T>(static_cast<float>(x >> 40) * 0x1p-23f - 1);
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
std::vector<T> values(std::size_t rank, std::size_t count, std::size_t first = 0) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = value<T>(rank, first + i);
  return all;
}

/// The reference: combine in rank order, element by element.
template <class T, class Op>
std::vector<T> reduced(const Op& op, std::size_t world, std::size_t count, std::size_t first = 0) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i) {
    auto sum = op.prepare(value<T>(0, first + i));
    for (std::size_t w = 1; w < world; ++w) {
      sum = op.combine(sum, op.prepare(value<T>(w, first + i)));
    }
    all[i] = op.template finish<T>(sum, world);
  }
  return all;
}

template <class T>
std::string bits(const T& value) {
  unsigned long long all = 0;
  std::memcpy(&all, &value, sizeof(T));
  char text[96];
  std::snprintf(text, sizeof text, "%.17g (0x%llx)",
                static_cast<double>(static_cast<detail::Accumulator<T>>(value)), all);
  return text;
}

/// Equal to the last bit, or the first element that is not.
template <class T>
void require_equal(const std::vector<T>& got, const std::vector<T>& expected,
                   const std::string& what) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], sizeof(T)) == 0) continue;
    throw std::runtime_error(what + ": element " + std::to_string(i) + " of " +
                             std::to_string(expected.size()) + ": expected " + bits(expected[i]) +
                             ", got " + bits(got[i]));
  }
}

}  // namespace thread_ranks

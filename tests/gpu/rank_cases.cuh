// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What programs share whose ranks try a communicator on GPUs, a case at a time.

#include <cuda_runtime.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "exercise.cuh"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/macros.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/launch/launch.hpp"

namespace exercise {

using Clock = std::chrono::steady_clock;

template <class T>
LOCKSTEP_KERNEL add_one(T* data, std::size_t count) {
  for (std::size_t i = threadIdx.x; i < count; i += blockDim.x) data[i] += T(1);
}

/// Keeps the stream busy by the clock on the wall, however many ranks share the GPU.
template <class T>
LOCKSTEP_KERNEL spend(T nanoseconds) {
  T begin = 0;
  T now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

inline void enqueue_add_one(cudaStream_t stream, std::span<float> data) {
  add_one<<<1, 256, 0, stream>>>(data.data(), data.size());
  check_launch("add_one");
}
inline void enqueue_pause(cudaStream_t stream, std::chrono::nanoseconds time) {
  spend<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(time.count()));
  check_launch("spend");
}

/// In the order of the communicator's compute stream. **Host** blocks.
template <class Comm>
std::vector<float> downloaded(Comm& comm, std::span<const float> data) {
  std::vector<float> host(data.size());
  check_cuda(cudaMemcpyAsync(host.data(), data.data(), data.size_bytes(), cudaMemcpyDeviceToHost,
                             comm.gpu().stream()),
             "cudaMemcpyAsync");
  comm.synchronize();
  return host;
}

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void require_words(const Error& error, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    require(contains(error.text(), part),
            "the error does not say '" + part + "'; it says: " + error.text());
}

/// What `f` throws, and in how many seconds.
inline std::pair<Error, double> failure_of(const std::function<void()>& f) {
  const Clock::time_point begin = Clock::now();
  try {
    f();
  } catch (const Error& error) {
    return {error, seconds_since(begin)};
  }
  throw std::runtime_error("no error came within " + std::to_string(seconds_since(begin)) + " s");
}

inline void print_failure(const Error& error, double seconds) {
  std::printf("  %.2f s%s: %s\n", seconds, error.is_consequence() ? ", a consequence" : "",
              error.text());
}

/// Sums of ones that the GPU has yet to write, under way while it is busy with something else.
/// Returns for how many seconds the host was kept.
template <class Comm>
double sums_of_a_busy_stream(Comm& comm, std::size_t n, std::chrono::nanoseconds busy) {
  const auto world = static_cast<float>(comm.world_size().value());
  const cudaStream_t stream = comm.gpu().stream();
  std::vector<std::span<float>> data;
  for (int b = 0; b < 4; ++b) data.push_back(comm.template allocate<float>(n));
  // Kernels are loaded, connections and memory made at first use, which may take the host's time.
  const auto spare = comm.template allocate<float>(n);
  enqueue_pause(stream, std::chrono::nanoseconds(1));
  enqueue_add_one(stream, spare);
  comm.all_reduce(spare, Sum{});
  comm.all_reduce(spare, Average{});
  comm.all_reduce(spare, Max{});
  comm.barrier();
  enqueue_pause(stream, busy);
  for (const auto& span : data) enqueue_add_one(stream, span);
  const Clock::time_point begin = Clock::now();
  auto w0 = comm.all_reduce_async(data[0], Sum{});
  auto w1 = comm.all_reduce_async(data[1], Average{});
  auto w2 = comm.all_reduce_async(data[2], Max{});
  const double kept = seconds_since(begin);
  {
    auto w3 = comm.all_reduce_async(data[3], Sum{});
    require(!w3.test(), "a call behind a busy stream is not over");
    w1.wait();
    w0.wait();
    enqueue_add_one(stream, data[0]);
    w2.wait();
  }  // w3 waits here
  const float wanted[] = {world + 1, 1, 1, world};
  for (std::size_t b = 0; b < 4; ++b) {
    const std::vector<float> host = downloaded(comm, data[b]);
    for (std::size_t i = 0; i < n; ++i)
      if (host[i] != wanted[b]) {
        require(false, "buffer " + std::to_string(b) + ", element " + std::to_string(i) + " is " +
                           text(host[i]) + ", expected " + text(wanted[b]));
      }
  }
  return kept;
}

/// The model may compute for longer than the time limit.
template <class Comm>
void patience(Comm& comm) {
  const auto data = comm.template allocate<float>(100);
  comm.all_reduce(data);
  comm.barrier();
  comm.set_timeout(std::chrono::milliseconds(1500));
  enqueue_pause(comm.gpu().stream(), std::chrono::seconds(3));
  comm.all_reduce(data);
  comm.synchronize();
  comm.set_timeout(std::chrono::seconds(60));
  comm.barrier();
}

/// Rank 1 is killed among reductions; whoever waits for it must not wait for the time limit.
template <class Comm>
void killed(Comm& comm, std::size_t count) {
  comm.set_timeout(std::chrono::seconds(10));
  const auto data = comm.template allocate<float>(count);
  for (int step = 0; step < 1000; ++step) {
    if (step == 5 && comm.rank() == Rank{1}) ::raise(SIGKILL);
    comm.all_reduce(data);
    comm.synchronize();
  }
  throw std::runtime_error("rank 1 was not missed");
}

using Case = void (*)(Session&);
using Cases = std::map<std::string, Case>;

inline void run_case(const Cases& cases, Session& session, const std::string& name) {
  const auto found = cases.find(name);
  if (found == cases.end()) throw std::runtime_error("there is no case '" + name + "'");
  const Clock::time_point begin = Clock::now();
  found->second(session);
  session.store().barrier("end of " + name, session.rank(), session.world());
  if (session.rank() == Rank{0})
    std::printf("ok %s %zu ranks %.1f s\n", name.c_str(), session.world().value(),
                seconds_since(begin));
}

/// A program's `main`: `program --ranks N CASE`, or `program gpus`, which says how many there are.
inline int main_of(int argc, char** argv, const Cases& cases) {
  if (detail::visible_gpus() == 0) {
    std::puts("not run: no GPU here");
    return 0;
  }
  return launch(argc, argv, [&](Session& session) {
    const std::string name = session.arguments().size() > 1 ? session.arguments()[1] : "";
    if (name == "gpus") {
      std::printf("%zu\n", detail::visible_gpus());
      return;
    }
    run_case(cases, session, name);
  });
}

}  // namespace exercise

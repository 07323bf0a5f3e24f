// SPDX-License-Identifier: Apache-2.0
#include "peers.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>

#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "gloo.hpp"
#endif

namespace bench {

PlainStaged::PlainStaged(void* shared, std::size_t rank, std::size_t ranks, std::size_t count)
    : barrier_(static_cast<Barrier*>(shared)),
      inputs_(reinterpret_cast<float*>(barrier_ + 1)),
      result_(inputs_ + ranks * count),
      rank_(rank),
      ranks_(ranks),
      count_(count) {}

void PlainStaged::all_reduce(std::span<float> data) {
  const std::size_t begin = data.size() * rank_ / ranks_;
  const std::size_t end = data.size() * (rank_ + 1) / ranks_;
  std::memcpy(inputs_ + rank_ * count_, data.data(), data.size_bytes());
  barrier_->wait(static_cast<std::uint32_t>(ranks_));
  constexpr std::size_t block = 1024;  // in the first-level cache: the result is written once
  for (std::size_t i = begin; i < end; i += block) {
    float sum[block];
    const std::size_t n = std::min(block, end - i);
    std::memcpy(sum, inputs_ + i, n * sizeof(float));
    for (std::size_t w = 1; w < ranks_; ++w) {
      const float* const input = inputs_ + w * count_ + i;
      for (std::size_t j = 0; j < n; ++j) sum[j] += input[j];
    }
    std::memcpy(result_ + i, sum, n * sizeof(float));
  }
  barrier_->wait(static_cast<std::uint32_t>(ranks_));
  std::memcpy(data.data(), result_, data.size_bytes());
}

#if LOCKSTEP_GLOO
std::function<void(std::span<float>)> make_gloo(const std::filesystem::path& folder,
                                                std::size_t rank, std::size_t ranks) {
  gloo::rendezvous::FileStore store(folder);
  auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
  const auto context =
      std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), static_cast<int>(ranks));
  context->setTimeout(std::chrono::seconds(20));
  context->connectFullMesh(store, device);
  return [context](std::span<float> data) {
    gloo::AllreduceOptions options(context);
    options.setOutput(data.data(), data.size());
    void (*const sum)(void*, const void*, const void*, std::size_t) = &gloo::sum<float>;
    options.setReduceFunction(sum);
    gloo::allreduce(options);
  };
}
#else
std::function<void(std::span<float>)> make_gloo(const std::filesystem::path&, std::size_t,
                                                std::size_t) {
  return {};
}
#endif

std::function<void(std::span<float>)> connect_gloo(const std::filesystem::path& folder,
                                                   std::size_t rank, std::size_t ranks,
                                                   std::atomic<std::size_t>& without,
                                                   Stand& stand) {
  std::function<void(std::span<float>)> reduce;
  try {
    reduce = make_gloo(folder, rank, ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %zu: Gloo: %s\n", rank, error.what());
  }
  if (!reduce) ++without;
  stand.barrier();
  return without == 0 ? reduce : nullptr;
}

void copy(const float* from, float* to, std::size_t count) {
  asm volatile("" : "+r"(from), "+r"(to)::"memory");
  std::memcpy(to, from, count * sizeof(float));
  asm volatile("" ::: "memory");
}

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches that lie in a GPU's memory or are copied from pinned memory are those of the
/// host's loader, bit for bit; and so is what a job makes of them. Run on GPUs, and on those that
/// the host plays.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "image_dataset.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/pinned.cuh"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/data/resident.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

namespace data_checks {

using namespace lockstep;
using thread_ranks::require;
using Numbers = std::vector<double>;

/// Images of random bytes, some more of them than whole batches.
inline ImageDataset images(std::size_t samples, std::size_t width) {
  std::vector<std::uint8_t> pixels(samples * width), labels(samples);
  std::uint32_t state = 7;
  const auto next = [&] {
    return static_cast<std::uint8_t>((state = state * 1664525 + 1013904223) >> 24);
  };
  for (auto& pixel : pixels) pixel = next();
  for (auto& label : labels) label = next() % 10;
  return {std::move(pixels), std::move(labels), 10, {.mean = 0.3f, .deviation = 0.7f}};
}

/// Rows for the network of the other checks.
inline InMemoryDataset<double, std::int32_t> rows(std::size_t samples, std::size_t width) {
  const auto batch = train::labelled<double>(train::reference_batch(samples, width, 3, 1, 0));
  return {batch.inputs, batch.labels};
}

template <class T>
std::vector<T> host_copy(const T* from, std::size_t count, cudaStream_t stream) {
  std::vector<T> to(count);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  check_cuda(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return to;
}

template <class T, class Values>
bool same_bits(const std::vector<T>& got, const Values& want) {
  return got.size() == want.size() &&
         (got.empty() || std::memcmp(got.data(), want.data(), got.size() * sizeof(T)) == 0);
}

/// All batches of an epoch, as the host's loader makes them.
template <class Sampler, class Source>
auto host_epoch(const Source& source, Sampler sampler, LoaderOptions options) {
  std::vector<typename Source::batch_type> batches;
  options.workers = 0;
  DataLoader loader(source, sampler, options);
  for (const auto& batch : loader) batches.push_back(batch);
  return batches;
}

/// The same epoch from `there`, uploaded batch by batch; the loop is left and resumed once.
template <class Sampler, class There, class Host>
void compare_epoch(const There& there, Sampler sampler, const LoaderOptions& options,
                   const std::vector<Host>& want, cudaStream_t stream) {
  BatchUpload<typename There::batch_type> upload;
  std::size_t k = 0;
  const auto compare = [&](const auto& batch) {
    require(k < want.size(), "there are more batches than the host's loader has");
    const auto& on_device = upload(batch, stream);
    const Host& host = want[k++];
    const std::string which = "batch " + std::to_string(k) + ": other ";
    require(batch.size() == host.size() && on_device.size() == host.size() &&
                on_device.width == host.width,
            which + "shape");
    require(same_bits(host_copy(on_device.inputs, host.inputs.size(), stream), host.inputs),
            which + "inputs");
    require(same_bits(host_copy(on_device.labels, host.size(), stream), host.labels),
            which + "labels");
    require(same_bits(host_copy(on_device.weights, host.size(), stream), host.weights),
            which + "weights");
  };
  const std::size_t leave_at = want.size() / 2;
  SamplerState state;
  {
    DataLoader loader(there, sampler, options);
    for (const auto& batch : loader) {
      if (k == leave_at) break;
      compare(batch);
      state = loader.state();
    }
  }
  DataLoader loader(there, sampler, options);
  if (leave_at != 0) loader.resume(state);
  for (const auto& batch : loader) compare(batch);
  require(k == want.size(), "there are fewer batches than the host's loader has");
}

template <class Sampler, class Source>
void compare_batches(const Source& source, std::size_t world, LoaderOptions options) {
  const CudaStream stream;
  const DeviceResident resident(source);
  const Pinned pinned(source);
  for (std::size_t r = 0; r < world; ++r) {
    Sampler sampler(source.size(), WorldSize{world}, Rank{r}, {.shuffle = true, .seed = Seed{5}});
    for (const std::uint64_t epoch : {0, 1}) {
      sampler.set_epoch(Epoch{epoch});
      const auto want = host_epoch(source, sampler, options);
      compare_epoch(resident, sampler, options, want, stream);
      compare_epoch(pinned, sampler, options, want, stream);
    }
  }
}

/// Memory of any kind instead of a data set.
inline void compare_memory() {
  const auto batch = train::labelled<double>(train::reference_batch(29, 7, 3, 1, 0));
  LoaderOptions options;
  options.batch_size = 6;
  DistributedSampler<> sampler(29, WorldSize{2}, Rank{1});
  const CudaStream stream;
  compare_epoch(DeviceResident(batch.inputs, batch.labels), sampler, options,
                host_epoch(rows(29, 7), sampler, options), stream);
}

/// Rows of bytes and of doubles, of a width that packets divide and of one that they do not; last
/// batches that are smaller, batches larger than the data, and weights of 0.
inline void compare_all_batches() {
  LoaderOptions options;
  options.workers = 2;
  for (const std::size_t width : {12, 7}) {
    const ImageDataset bytes = images(53, width);
    options.batch_size = 8;
    compare_batches<DistributedSampler<Padding, TorchShuffle>>(bytes, 1, options);
    options.batch_size = 5;
    compare_batches<DistributedSampler<Masked, KeyedShuffle>>(bytes, 3, options);
    options.batch_size = 1000;
    compare_batches<DistributedSampler<Masked, KeyedShuffle>>(bytes, 2, options);
  }
  options.batch_size = 6;
  options.drop_last = true;
  compare_batches<DistributedSampler<Exact, InOrder>>(rows(29, 7), 2, options);
  const auto pipeline = rows(29, 7) | map([](auto& sample) { ++sample.label; }) | stacked();
  compare_batches<DistributedSampler<Exact, InOrder>>(pipeline, 2, options);
  compare_memory();
}

using Network = train::GpuPlainMlp<double, dynamic, dynamic, dynamic>;

inline Network network() {
  Network network;
  network.in = 7;
  network.hidden = 9;
  network.out = 3;
  return network;
}

inline Numbers all_numbers(auto& job) {
  Numbers all;
  train::PlainMlp<1, 1, 1>::for_each_parameter(job, [&](const auto& view) {
    const auto some = host_copy(view.data_handle(), view.size(), nullptr);
    all.insert(all.end(), some.begin(), some.end());
  });
  return all;
}

/// Evaluates all samples in the middle of a loop over the same data.
template <class Job, class Data>
double evaluate_all(Job& job, const Data& data, std::size_t world, std::size_t rank) {
  DistributedSampler<Exact, InOrder> shares(data.size(), WorldSize{world}, Rank{rank});
  DataLoader loader(data, shares, {.batch_size = 3});
  double sum = 0;
  for (const auto& batch : loader) sum += job.evaluate(batch);
  return sum;
}

/// What a program may do with its batches: two epochs and a half, in which a batch is left out, one
/// is used twice, all are evaluated, and the loop is left and resumed. No step is waited for.
template <class Job, class Data>
Numbers train_on(Job& job, const Data& data, std::size_t world, std::size_t rank) {
  Numbers numbers;
  SamplerState state;
  {
    DistributedSampler<Masked> sampler(data.size(), WorldSize{world}, Rank{rank});
    DataLoader loader(data, sampler, {.batch_size = 10});
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      sampler.set_epoch(Epoch{epoch});
      std::size_t k = 0;
      for (const auto& batch : loader) {
        ++k;
        if (epoch == 1 && k == 3) continue;
        job.step(batch);
        if (epoch == 1 && k == 2) job.step(batch);
        if (k == 4) numbers.push_back(evaluate_all(job, data, world, rank));
        if (epoch == 2 && k == 3) break;
      }
    }
    state = loader.state();
  }
  DistributedSampler<Masked> sampler(data.size(), WorldSize{world}, Rank{rank});
  DataLoader loader(data, sampler, {.batch_size = 10});
  loader.resume(state);
  for (const auto& batch : loader) job.step(batch);
  return numbers;
}

template <class Comm>
using Ddp = detail::BasicDdp<Network,
                             CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, Clip<0.5>,
                                               CapturedStep, Buckets<BucketLimits{300, 700}>>,
                             Comm>;

/// Ranks train on the host's batches, on pinned ones and on resident ones, and end with the same
/// bits. The last batch is smaller, so much that its parts would lie elsewhere in memory of its
/// own.
inline void train_with_all_batches(std::size_t ranks) {
  const auto data = rows(93, 7);
  thread_ranks::expect_all_fine(thread_ranks::run(ranks, [&](auto& comm) {
    const auto train = [&](const auto& source) {
      Ddp<std::remove_reference_t<decltype(comm)>> ddp(comm, network());
      Numbers numbers = train_on(ddp, source, ranks, comm.rank().value());
      comm.synchronize();
      const Numbers parameters = all_numbers(ddp);
      numbers.insert(numbers.end(), parameters.begin(), parameters.end());
      using Batch = typename std::remove_cvref_t<decltype(source)>::batch_type;
      require(ddp.template captured_graphs<Batch>() >= 2, "nothing was captured");
      return numbers;
    };
    const Numbers want = train(data);
    require(same_bits(train(Pinned(data)), want), "pinned batches give other numbers");
    require(same_bits(train(DeviceResident(data)), want), "resident batches give other numbers");
  }));
}

/// Replicas of DP gather their shares, each on its own GPU.
inline void train_replicas_with_all_batches(std::size_t replicas) {
  const auto data = rows(93, 7);
  const auto train = [&](const auto& source) {
    DataParallel<Network, Device<Cuda>, Optimizer<AdamW>> dp({.replicas = replicas}, network());
    Numbers numbers = train_on(dp, source, 1, 0);
    dp.synchronize();
    const Numbers parameters = all_numbers(dp);
    numbers.insert(numbers.end(), parameters.begin(), parameters.end());
    return numbers;
  };
  const Numbers want = train(data);
  require(same_bits(train(Pinned(data)), want), "pinned batches give other numbers");
  require(same_bits(train(DeviceResident(data)), want), "resident batches give other numbers");
}

/// Samples that a program chooses itself.
inline void load_by_hand() {
  const CudaStream stream;
  const ImageDataset bytes = images(20, 12);
  const DeviceResident resident(bytes);
  typename DeviceResident<ImageDataset>::batch_type batch;
  ImageDataset::batch_type want;
  BatchUpload<decltype(batch)> upload;
  for (const std::vector<std::size_t>& indices :
       {std::vector<std::size_t>{3, 3, 19}, {0}, {7, 6, 5, 4, 3}}) {
    bytes.load(indices, want);
    resident.load(indices, batch);
    const auto& on_device = upload(batch, stream);
    require(on_device.size() == indices.size(), "other sizes");
    require(same_bits(host_copy(on_device.inputs, want.inputs.size(), stream), want.inputs),
            "other inputs");
    require(same_bits(host_copy(on_device.labels, want.labels.size(), stream), want.labels),
            "other labels");
  }
  std::string words;
  try {
    resident.load(std::vector<std::size_t>{20}, batch);
  } catch (const Error& error) {
    words = error.what();
  }
  require(words.find("DeviceResident: sample 20 of 20") != std::string::npos, words);
}

}  // namespace data_checks

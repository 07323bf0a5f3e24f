// SPDX-License-Identifier: Apache-2.0
// Data at the speed of a GPU's step. Example 04's network on a set of Fashion-MNIST's shape, its
// step one CUDA graph: microseconds a step, the loader's included, against the step alone, whose
// batch lies on the GPU already. Then whole epochs of a job, in samples a second.
//
//   bench_loader_gpu
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comparison_table.hpp"
#include "image_dataset.hpp"
#include "load.hpp"
#include "measure.hpp"
#include "mlp.cuh"
#include "resident.cuh"
#include "timing.cuh"

namespace {

using namespace bench;

using Network = GpuMlp<float, 784, 512, 10>;
using Ddp =
    DistributedDataParallel<Network, Device<Cuda>, World<1>, Optimizer<AdamW>, CapturedStep>;

/// A rank whose epochs are measured.
class Contender {
 public:
  virtual ~Contender() = default;
  Contender() = default;
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  virtual void run_epoch() = 0;
  virtual std::size_t steps() const = 0;

  void measure() {
    comm_.synchronize();
    const auto start = Clock::now();
    run_epoch();
    comm_.synchronize();
    times_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                     static_cast<double>(steps()));
  }
  Times times() const { return summary(times_); }

 protected:
  CudaLoopbackCommunicator comm_{std::make_shared<Gpu>(Rank{0}, 0)};
  Ddp ddp_{comm_};

 private:
  std::vector<double> times_;
};

class StepAlone : public Contender {
 public:
  StepAlone(const Resident& data, std::size_t steps) : batch_(data.batch()), steps_(steps) {}
  void run_epoch() override {
    for (std::size_t i = 0; i != steps_; ++i) ddp_.step(batch_);
  }
  std::size_t steps() const override { return steps_; }

 private:
  DeviceBatch<float, std::int32_t> batch_;
  std::size_t steps_;
};

/// A loop over data, all batches full.
template <class Data>
class WithLoader : public Contender {
 public:
  WithLoader(const Data& data, std::size_t batch_size, std::size_t workers)
      : sampler_(data.size(), WorldSize{1}, Rank{0}),
        loader_(data, sampler_, options(batch_size, workers)) {}
  void run_epoch() override {
    sampler_.set_epoch(Epoch{epoch_++});
    for (const auto& batch : loader_) ddp_.step(batch);
  }
  std::size_t steps() const override { return loader_.size(); }

 private:
  static LoaderOptions options(std::size_t batch_size, std::size_t workers) {
    LoaderOptions options;
    options.batch_size = batch_size;
    options.drop_last = true;
    options.workers = workers;
    return options;
  }

  DistributedSampler<> sampler_;
  DataLoader<Data, DistributedSampler<>> loader_;
  std::uint64_t epoch_ = 0;
};

/// Samples that the program chooses: their numbers go up and their rows are gathered before every
/// step, where a loader's are gathered beside the step before.
class ByHand : public Contender {
 public:
  ByHand(const DeviceResident<ImageDataset>& data, std::size_t rows)
      : data_(data), indices_(rows), steps_(data.size() / rows) {}
  void run_epoch() override {
    for (std::size_t i = 0; i != steps_; ++i) {
      for (std::size_t k = 0; k != indices_.size(); ++k)
        indices_[k] = (i * indices_.size() + k) * 7919 % data_.size();
      data_.load(indices_, batch_);
      ddp_.step(batch_);
    }
  }
  std::size_t steps() const override { return steps_; }

 private:
  const DeviceResident<ImageDataset>& data_;
  std::vector<std::size_t> indices_;
  std::size_t steps_;
  DeviceResident<ImageDataset>::batch_type batch_;
};

template <class Data>
std::unique_ptr<Contender> with_loader(const Data& data, std::size_t rows, std::size_t workers) {
  return std::make_unique<WithLoader<Data>>(data, rows, workers);
}

void compare_steps(const ImageDataset& data, std::size_t rows, double target,
                   ComparisonTable& table) {
  const Resident there(rows, 784, 10);
  const Pinned pinned(data);
  const DeviceResident resident(data);
  std::vector<std::unique_ptr<Contender>> contenders;
  contenders.push_back(std::make_unique<StepAlone>(there, data.size() / rows));
  contenders.push_back(with_loader(data, rows, 1));
  contenders.push_back(with_loader(data, rows, 2));
  contenders.push_back(with_loader(pinned, rows, 1));
  contenders.push_back(with_loader(pinned, rows, 2));
  contenders.push_back(std::make_unique<ByHand>(resident, rows));
  contenders.push_back(with_loader(resident, rows, 0));
  for (const auto& contender : contenders) contender->run_epoch();  // the step is captured
  for (int round = 0; round < 9; ++round)
    for (const auto& contender : contenders) contender->measure();

  const Times alone = contenders[0]->times();
  const std::string what =
      "batch " + std::to_string(rows) + ": step with its loader over the step alone, ";
  const std::vector<std::string> names = {"",
                                          "host, 1 worker",
                                          "host, 2 workers",
                                          "Pinned, 1 worker",
                                          "Pinned, 2 workers",
                                          "DeviceResident, samples chosen by the program",
                                          "DeviceResident"};
  for (std::size_t i = 1; i != contenders.size(); ++i) {
    const bool is_last = i + 1 == contenders.size();
    table.row(what + names[i], contenders[i]->times(), alone, is_last ? target : 0, true);
  }
}

/// Whole epochs of example 04's job on one rank: samples a second.
template <class Data>
Times epochs_of(const Data& data) {
  using Job = Trainer<Network, Device<Cuda>, World<1>, CapturedStep, Sampler<Distributed, Padding>,
                      Optimizer<AdamW>, Schedule<Cosine>>;
  Session session = lockstep::detail::join_alone();
  Job job(session);
  std::vector<double> rates;
  for (auto epoch : job.epochs(9)) {
    const auto start = Clock::now();
    for (const auto& batch : epoch.batches(data, 128)) job.step(batch);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (epoch.number() > 1) rates.push_back(static_cast<double>(data.size()) / seconds);
  }
  return summary(rates);
}

void compare_epochs(const ImageDataset& data, ComparisonTable& table) {
  const double target = 1.3e6;
  const auto tell = [&](const char* name, const Times& rate, double wanted) {
    std::printf(
        "| batch 128, epochs of a job, %s: samples a second | %.0f | | | | | %s |\n", name,
        rate.median,
        wanted == 0 ? "" : (rate.median >= wanted ? "1.3 million met" : "1.3 million MISSED"));
    table.add({{"measure", std::string("samples a second, ") + name},
               {"lockstep", rate.median},
               {"target", wanted},
               {"met", rate.median >= wanted}});
  };
  tell("host", epochs_of(data), 0);
  tell("Pinned", epochs_of(Pinned(data)), 0);
  tell("DeviceResident", epochs_of(DeviceResident(data)), target);
}

}  // namespace

int main() try {
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench loader: there is no GPU here\n");
    return 1;
  }
  const OthersLoad others;
  std::printf(
      "loaders on a GPU; MLP 784-512-512-10, AdamW, one CUDA graph; microseconds a step\n\n");
  const ImageDataset data = generated_dataset("train");
  ComparisonTable table;
  compare_steps(data, 64, 1.05, table);
  compare_steps(data, 128, 0, table);
  compare_epochs(data, table);
  table.write("loader_gpu");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench loader: %s\n", error.what());
  return 1;
}

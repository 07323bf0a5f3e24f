// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Epochs from every source: how many samples a second come out of the loader.

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "files.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/pipeline.hpp"
#include "measure.hpp"
#include "rate_table.hpp"
#include "torch_loader.hpp"

namespace bench {

struct Options {
  int rounds = 3;
  std::string folder = LOCKSTEP_SOURCE_DIR "/build/bench";
  std::string only{};     ///< of the sources, this one
  std::size_t batch = 0;  ///< of the batch sizes, this one
};

/// Seconds of whole epochs, begun by the shuffle.
template <class Source>
class OwnEpochs {
 public:
  OwnEpochs(const Source& source, const Case& of)
      : sampler_(source.size(), WorldSize{1}, Rank{0}),
        loader_(source, sampler_, {.batch_size = of.batch, .workers = of.workers}) {}

  double run(std::uint64_t epoch) {
    const auto begin = Clock::now();
    sampler_.set_epoch(Epoch{epoch});
    std::size_t count = 0;
    for (const auto& batch : loader_) count += batch.size();
    if (count != sampler_.size()) throw std::runtime_error("samples are missing");
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Contents contents(std::uint64_t epoch) {
    sampler_.set_epoch(Epoch{epoch});
    Contents all;
    for (const auto& batch : loader_) all.add(batch);
    return all;
  }

 private:
  DistributedSampler<> sampler_;
  DataLoader<Source, DistributedSampler<>> loader_;
};

/// The least that could be done: the rows of the same draws are copied, and nothing else is.
inline double copy_rows(const Samples& samples, std::size_t batch, std::uint64_t epoch) {
  DistributedSampler<> sampler(samples.size(), WorldSize{1}, Rank{0});
  sampler.set_epoch(Epoch{epoch});
  std::vector<std::size_t> draws;
  for (const std::size_t draw : sampler) draws.push_back(draw);
  static std::vector<float> rows;
  rows.resize(batch * samples.width);
  const auto begin = Clock::now();
  for (std::size_t k = 0; k != draws.size(); ++k) {
    std::memcpy(rows.data() + k % batch * samples.width, samples.row(draws[k]).data(),
                samples.width * sizeof(float));
    asm volatile("" : : "r"(rows.data()) : "memory");
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Rates {
 public:
  explicit Rates(const Options& options)
      : options_(options),
        files_(samples_, options.folder),
        torch_(files_.path(), samples_.size()) {
    std::printf("%zu images of %zu pixels, %zu cores; %s\n\n", samples_.size(), samples_.width,
                cores(), torch_.text().c_str());
  }

  nlohmann::json run() {
    RateTable table(samples_.size());
    const InMemoryDataset<float, std::int32_t> memory(samples_.inputs, samples_.labels);
    const ImageDataset idx = idx_dataset("train", {.folder = files_.path()});
    compare(table, "memory", memory);
    compare(table, "idx", idx);
    compare(table, "npy", files_.npy());
#if LOCKSTEP_LMDB
    compare(table, "lmdb", lmdb_dataset<float, std::int32_t>(files_.file("train.lmdb")));
#endif
    return table.rows();
  }

 private:
  void compare(RateTable& table, const std::string& name, const auto& source) {
    if (!options_.only.empty() && options_.only != name) return;
    require_same(name, source);
    const auto augmented = source | augmenting();
    for (const std::size_t batch : {64, 512}) {
      if (options_.batch != 0 && options_.batch != batch) continue;
      cases(table, {name, false, batch, 0}, source);
      cases(table, {name, true, batch, 0}, augmented);
    }
  }

  /// Both sides must draw the same rows, or their times cannot be compared.
  void require_same(const std::string& name, const auto& source) {
    const Case asked{name, false, 64, 2};
    if (!torch_.knows(asked)) return;
    const Contents own = OwnEpochs(source, asked).contents(1);
    const Contents peer = torch_.contents({name, false, 64, 0}, 1);
    if (own.count != peer.count || own.labels != peer.labels ||
        std::abs(own.total - peer.total) > 1e-6 * std::abs(own.total)) {
      throw std::runtime_error(name + ": PyTorch has loaded other samples");
    }
  }

  /// One way through an epoch, in seconds; fast ones have several turns in a round.
  struct Turn {
    std::string name;
    int times;
    std::function<double(std::uint64_t epoch)> run;
  };

  /// With 0, 1 and 2 workers; PyTorch with 0 and 2. All take turns; the first round warms up.
  template <class Source>
  void cases(RateTable& table, const Case& asked, const Source& source) {
    std::vector<std::unique_ptr<OwnEpochs<Source>>> own;
    std::vector<Turn> turns = {
        {"copy", 4, [&](std::uint64_t e) { return copy_rows(samples_, asked.batch, e); }}};
    for (const std::size_t workers : {0, 1, 2}) {
      own.push_back(std::make_unique<OwnEpochs<Source>>(source, asked.with(workers)));
      turns.push_back({"own" + std::to_string(workers), 4,
                       [epochs = own.back().get()](std::uint64_t e) { return epochs->run(e); }});
    }
    const auto by_torch = [&](const std::string& name, const Case& of) {
      if (!torch_.knows(of)) return;
      turns.push_back({name + std::to_string(of.workers), 1,
                       [this, of](std::uint64_t e) { return torch_.run(of, e); }});
    };
    for (const std::size_t workers : {0, 2}) {
      by_torch("torch", asked.with(workers));
      by_torch("batched", asked.with(workers, true));
    }
    std::map<std::string, std::vector<double>> seconds;
    std::uint64_t epoch = 0;
    for (int round = 0; round <= options_.rounds; ++round) {
      for (const Turn& turn : turns) {
        for (int i = 0; i != turn.times; ++i) {
          const double taken = turn.run(++epoch);
          if (round != 0) seconds[turn.name].push_back(taken);
        }
      }
    }
    for (const std::size_t workers : {0, 1, 2}) {
      const std::string number = std::to_string(workers);
      table.row(asked.with(workers), summary(seconds["own" + number]), summary(seconds["copy"]),
                summary(seconds["torch" + number]), summary(seconds["batched" + number]));
    }
  }

  Options options_;
  Samples samples_ = all_samples();
  SampleFiles files_;
  TorchLoader torch_;
};

}  // namespace bench

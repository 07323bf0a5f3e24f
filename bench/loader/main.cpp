// SPDX-License-Identifier: Apache-2.0
// An epoch of Fashion-MNIST's 60,000 images through the loader, from memory and from files, as they
// are and augmented: samples a second against PyTorch's DataLoader on the same files, and against a
// memcpy of the same rows. Then the step of example 03's network on two ranks, with its loader,
// over the step alone.
//
//   bench_loader [--rounds 3] [--folder build/bench] [--only memory]
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "comparison_table.hpp"
#include "files.hpp"
#include "load.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/lockstep.hpp"
#include "measure.hpp"
#include "mlp.hpp"
#include "python_peer.hpp"

namespace {

using namespace bench;

struct Options {
  int rounds = 3;
  std::string folder = LOCKSTEP_SOURCE_DIR "/build/bench";
  std::string only;
};

/// What is asked of a loader, by the names that loader.py knows.
struct Case {
  std::string source;
  bool transform;
  std::size_t batch;
  std::size_t workers;
  bool batched = false;  ///< PyTorch's data set is indexed with a list, and nothing is collated

  std::string text() const {
    return source + (transform ? ", augmented" : "") + ", batch " + std::to_string(batch) + ", " +
           std::to_string(workers) + (workers == 1 ? " worker" : " workers");
  }
};

/// What came out of an epoch, whichever way it came: places count, and so do all bytes.
struct Contents {
  std::uint64_t labels = 0;
  double total = 0;
  std::size_t count = 0;

  void add(const Samples& batch) {
    for (std::size_t i = 0; i != batch.size(); ++i)
      labels += (count + i) * static_cast<std::uint64_t>(batch.labels[i]);
    for (const float x : batch.inputs) total += x;
    count += batch.size();
  }
};

/// Seconds of whole epochs, begun by the shuffle.
class Epochs {
 public:
  virtual ~Epochs() = default;
  virtual double run(std::uint64_t epoch) = 0;
  virtual Contents contents(std::uint64_t epoch) = 0;
};

template <class Source>
class OwnEpochs final : public Epochs {
 public:
  OwnEpochs(const Source& source, const Case& of)
      : sampler_(source.size(), WorldSize{1}, Rank{0}),
        loader_(source, sampler_, {.batch_size = of.batch, .workers = of.workers}) {}

  double run(std::uint64_t epoch) override {
    const auto begin = Clock::now();
    sampler_.set_epoch(Epoch{epoch});
    std::size_t count = 0;
    for (const auto& batch : loader_) count += batch.size();
    if (count != sampler_.size()) throw std::runtime_error("samples are missing");
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Contents contents(std::uint64_t epoch) override {
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
double copy_rows(const Samples& samples, std::size_t batch, std::uint64_t epoch) {
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

/// loader.py, if PyTorch is here.
class TorchLoader {
 public:
  TorchLoader(const std::string& folder, std::size_t samples)
      : peer_(LOCKSTEP_SOURCE_DIR "/bench/loader/loader.py", {folder, std::to_string(samples)}) {}

  bool knows(const Case& asked) const {
    return peer_.is_there() && (asked.source != "lmdb" || peer_.hello()["lmdb"].is_string());
  }
  std::string text() const {
    if (!peer_.is_there()) return "no PyTorch here: its columns stay empty";
    const auto& lmdb = peer_.hello()["lmdb"];
    return "PyTorch " + peer_.hello()["torch"].get<std::string>() + ", numpy " +
           peer_.hello()["numpy"].get<std::string>() +
           (lmdb.is_string() ? ", lmdb " + lmdb.get<std::string>() : ", no lmdb");
  }

  double run(const Case& asked, std::uint64_t epoch) {
    return ask(asked, epoch, false)["seconds"].get<double>();
  }
  Contents contents(const Case& asked, std::uint64_t epoch) {
    const nlohmann::json said = ask(asked, epoch, true);
    return {said["labels"], said["total"], said["count"]};
  }

 private:
  nlohmann::json ask(const Case& asked, std::uint64_t epoch, bool check) {
    return peer_.ask(nlohmann::json{{"source", asked.source},
                                    {"transform", asked.transform},
                                    {"batch", asked.batch},
                                    {"workers", asked.workers},
                                    {"batched", asked.batched},
                                    {"epoch", epoch},
                                    {"check", check}}
                         .dump());
  }
  PythonPeer peer_;
};

/// Samples a second, side by side.
class RateTable {
 public:
  explicit RateTable(std::size_t samples) : samples_(static_cast<double>(samples)) {
    std::printf(
        "| thousands of samples a second | lockstep | best | memcpy / lockstep | PyTorch | best | "
        "ratio | PyTorch without collation | ratio | target |\n|---|---|---|---|---|---|---|---|---"
        "|---|\n");
  }

  /// Seconds of epochs.
  void row(const Case& of, Times own, Times copied, Times torch, Times batched) {
    std::printf("| %s | %.0f | %.0f | %.2f |", of.text().c_str(), rate(own.median),
                rate(own.minimum), copied.median / own.median);
    if (torch.known) {
      std::printf(" %.1f | %.1f | %.1fx |", rate(torch.median), rate(torch.minimum),
                  torch.median / own.median);
    } else {
      std::printf(" - | - | - |");
    }
    if (batched.known) {
      std::printf(" %.1f | %.1fx |", rate(batched.median), batched.median / own.median);
    } else {
      std::printf(" | |");
    }
    const bool has_target = torch.known && of.batch == 64;
    const bool met = torch.median / own.median >= 10;
    std::printf(" %s |\n", !has_target ? "" : met ? "10 met" : "10 MISSED");
    std::fflush(stdout);
    add(of.text() + ", us a batch, against PyTorch", of, own, torch, has_target ? 10 : 0);
    if (batched.known) {
      add(of.text() + ", us a batch, against PyTorch without collation", of, own, batched, 0);
    }
    add(of.text() + ", us a batch, against memcpy", of, own, copied, 0);
  }
  const nlohmann::json& rows() const { return rows_; }

 private:
  double rate(double seconds) const { return samples_ / seconds / 1e3; }
  void add(const std::string& measure, const Case& of, Times own, Times peer, double target) {
    const double scale = 1e6 * static_cast<double>(of.batch) / samples_;
    nlohmann::json row{{"measure", measure}, {"lockstep", own.median * scale}};
    row["peer"] = peer.known ? nlohmann::json(peer.median * scale) : nlohmann::json(nullptr);
    row["ratio"] = peer.known ? nlohmann::json(peer.median / own.median) : nlohmann::json(nullptr);
    row["target"] = target == 0 ? nlohmann::json(nullptr) : nlohmann::json(target);
    row["met"] = !peer.known || target == 0 || peer.median / own.median >= target;
    rows_.push_back(row);
  }

  double samples_;
  nlohmann::json rows_ = nlohmann::json::array();
};

class Bench {
 public:
  explicit Bench(const Options& options)
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
    return table.rows();
  }

 private:
  void compare(RateTable& table, const std::string& name, const auto& source) {
    if (!options_.only.empty() && options_.only != name) return;
    require_same(name, source);
    for (const std::size_t batch : {64, 512}) cases(table, {name, false, batch, 0}, source);
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

  /// With 0, 1 and 2 workers; PyTorch with 0 and 2, by turns.
  void cases(RateTable& table, Case asked, const auto& source) {
    std::map<std::string, std::vector<double>> seconds;
    std::vector<std::pair<std::string, std::function<double(std::uint64_t)>>> turns;
    turns.emplace_back("copy",
                       [&](std::uint64_t e) { return copy_rows(samples_, asked.batch, e); });
    std::vector<std::unique_ptr<Epochs>> own;
    for (const std::size_t workers : {0, 1, 2}) {
      asked.workers = workers;
      own.push_back(std::make_unique<OwnEpochs<std::remove_cvref_t<decltype(source)>>>(source,
                                                                                      asked));
      turns.emplace_back("own" + std::to_string(workers),
                         [epochs = own.back().get()](std::uint64_t e) { return epochs->run(e); });
    }
    for (int round = 0; round <= 4 * options_.rounds; ++round) {
      for (const auto& [name, run] : turns) {
        const double taken = run(static_cast<std::uint64_t>(round));
        if (round != 0) seconds[name].push_back(taken);
      }
    }
    // A worker process of PyTorch's is asked for an epoch before it counts.
    const auto by_torch = [&](std::size_t workers, bool batched) {
      Case of = asked;
      of.workers = workers;
      of.batched = batched;
      std::vector<double> taken;
      if (!torch_.knows(of)) return taken;
      for (int round = 0; round <= options_.rounds; ++round) {
        const double each = torch_.run(of, static_cast<std::uint64_t>(round));
        if (round != 0) taken.push_back(each);
      }
      return taken;
    };
    for (const std::size_t workers : {0, 2}) {
      seconds["torch" + std::to_string(workers)] = by_torch(workers, false);
      if (!asked.transform && asked.source != "lmdb")
        seconds["batched" + std::to_string(workers)] = by_torch(workers, true);
    }
    for (const std::size_t workers : {0, 1, 2}) {
      asked.workers = workers;
      const std::string number = std::to_string(workers);
      table.row(asked, summary(seconds["own" + number]), summary(seconds["copy"]),
                summary(seconds["torch" + number]), summary(seconds["batched" + number]));
    }
  }

  Options options_;
  Samples samples_ = all_samples();
  SampleFiles files_;
  TorchLoader torch_;
};

/// Batches without end: epoch after epoch.
template <class Source>
class Stream {
 public:
  Stream(const Source& source, std::size_t rank, std::size_t ranks, LoaderOptions options)
      : sampler_(source.size(), WorldSize{ranks}, Rank{rank}), loader_(source, sampler_, options) {}

  const auto& next() {
    if (at_) ++*at_;
    if (!at_ || *at_ == std::default_sentinel) {
      sampler_.set_epoch(Epoch{epoch_++});
      at_.emplace(loader_.begin());
    }
    return **at_;
  }

 private:
  using Loader = DataLoader<Source, DistributedSampler<>>;

  DistributedSampler<> sampler_;
  Loader loader_;
  std::optional<typename Loader::Iterator> at_;
  std::uint64_t epoch_ = 0;
};

constexpr std::size_t most_ways = 8;

struct Common {
  Track track;
  Times times[most_ways];
};

/// Example 03's step on so many ranks: on one batch that is there, and on the loader's.
void measure_steps(ComparisonTable& table, const Samples& samples, std::size_t ranks) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = lockstep::detail::shm::Engine::make_file(WorldSize{ranks});
  const std::string address = lockstep::detail::shm::Engine::address(file);
  const InMemoryDataset<float, std::int32_t> dataset(samples.inputs, samples.labels);
  std::vector<std::string> names;
  const std::vector<std::size_t> workers = {0, 1, 2};
  for (const std::size_t count : workers)
    names.push_back("memory, " + std::to_string(count) + " workers");
  run_ranks(ranks, Clock::now() + std::chrono::minutes(5), [&](std::size_t rank) {
    ShmCommunicator<> comm(Rank{rank}, WorldSize{ranks},
                           lockstep::detail::shm::Engine::open(address), std::chrono::minutes(1));
    DistributedDataParallel<Mlp<float, 784, 256, 10>> ddp(comm);
    ddp.optimizer().lr = 0.01;
    std::vector<std::size_t> first(64);
    for (std::size_t i = 0; i != first.size(); ++i) first[i] = i;
    Samples one;
    dataset.load(first, one);
    std::vector<Contestant> contestants = {
        {"alone", {}, [&](std::size_t, std::size_t iterations) {
           for (std::size_t i = 0; i != iterations; ++i) ddp.step(one);
         }}};
    std::vector<std::unique_ptr<Stream<InMemoryDataset<float, std::int32_t>>>> streams;
    for (const std::size_t count : workers) {
      streams.push_back(std::make_unique<Stream<InMemoryDataset<float, std::int32_t>>>(
          dataset, rank, ranks, LoaderOptions{.batch_size = 64, .workers = count}));
      contestants.push_back(
          {"loaded", {}, [&, stream = streams.back().get()](std::size_t, std::size_t iterations) {
             for (std::size_t i = 0; i != iterations; ++i) ddp.step(stream->next());
           }});
    }
    Stand stand(common.track, rank, ranks);
    const auto times = stand.race(contestants, 0);
    if (rank != 0) return;
    for (std::size_t i = 0; i != times.size(); ++i) common.times[i] = summary(times[i]);
  });
  for (std::size_t i = 0; i != names.size(); ++i) {
    table.row("step of the MLP, batch 64, " + std::to_string(ranks) + " ranks, loader " + names[i] +
                  " / step alone",
              common.times[i + 1], common.times[0], 1.03, true);
  }
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    if (word == "--rounds") options.rounds = std::stoi(argv[i + 1]);
    if (word == "--folder") options.folder = argv[i + 1];
    if (word == "--only") options.only = argv[i + 1];
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const OthersLoad others;
  const nlohmann::json rates = Bench(parse(argc, argv)).run();
  std::printf("\nthe step and its data, microseconds\n\n");
  ComparisonTable table;
  for (const auto& row : rates) table.add(row);
  const Samples samples = all_samples();
  measure_steps(table, samples, 1);
  measure_steps(table, samples, 2);
  table.write("loader");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench loader: %s\n", error.what());
  return 1;
}

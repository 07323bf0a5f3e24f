// SPDX-License-Identifier: Apache-2.0
// A step with AdamW on two ranks, by who keeps what: every rank everything (Replicated), parameters
// once in shared memory (HostShared), states once over all ranks (ZeroRedundancy and its kinds);
// through shared memory and through Gloo; against PyTorch's DDP with and without
// ZeroRedundancyOptimizer. And the memory that each takes of a rank.
//
//   bench_zero [rounds]        3: PyTorch and lockstep take turns, round by round
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comparison_table.hpp"
#include "load.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "mlp.hpp"
#include "models.hpp"
#include "torch_lines.hpp"
#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "lockstep/detail/store/server.hpp"
#include "lockstep/gloo.hpp"
#endif

namespace {

using namespace bench;
using Network = Mlp<float, 784, 256, 10>;
using Batch = LabelledBatch<float, int>;

constexpr std::size_t ranks = 2;
constexpr std::size_t most_ways = 16;
constexpr std::chrono::seconds time_limit{900};

/// What rank 0 sees of a way to train, and what both ranks keep.
struct Seen {
  char name[48];
  Times step;
  std::array<double, ranks> state_bytes;
  std::array<double, ranks> gradient_bytes;
  std::array<double, ranks> mebibytes;
};

struct Common {
  Track track;
  Seen seen[most_ways];
};

/// The ways of one rank: jobs that step by turns.
class Ways {
 public:
  Ways(Common& common, std::size_t rank) : common_(common), rank_(rank) {}

  template <class... Policies>
  void add(const std::string& name, auto& comm) {
    using Job = DistributedDataParallel<Network, Optimizer<AdamW>, Policies...>;
    stand_.barrier();
    const double before = own_mebibytes();
    auto job = std::make_shared<Job>(comm);
    for (int i = 0; i < 3; ++i) job->step(batch_);
    stand_.barrier();  // pages are shared by now
    Seen& seen = common_.seen[contestants_.size()];
    seen.mebibytes[rank_] = own_mebibytes() - before;
    seen.state_bytes[rank_] = static_cast<double>(job->state_bytes());
    seen.gradient_bytes[rank_] = static_cast<double>(job->gradient_bytes());
    if (rank_ == 0) std::snprintf(seen.name, sizeof seen.name, "%s", name.c_str());
    contestants_.push_back({name, {}, [this, job](std::size_t, std::size_t iterations) {
                              for (std::size_t i = 0; i < iterations; ++i) job->step(batch_);
                            }});
  }

  void race() {
    const auto times = stand_.race(contestants_, 0);
    if (rank_ != 0) return;
    for (std::size_t w = 0; w < times.size(); ++w) common_.seen[w].step = summary(times[w]);
  }

 private:
  Common& common_;
  std::size_t rank_;
  Stand stand_{common_.track, rank_, ranks};
  const Batch batch_ = random_batch<float, int>(32, 784, 10);
  std::vector<Contestant> contestants_;
};

#if LOCKSTEP_GLOO
/// Two ranks of one host that meet over sockets. The first serves the store, in a thread that only
/// its own process has.
class Sockets {
 public:
  Sockets(std::size_t rank, lockstep::detail::Descriptor& listener)
      : port_(lockstep::detail::local_port(listener.get())) {
    if (rank == 0)
      server_ = std::make_unique<lockstep::detail::StoreServer>(secret, std::move(listener));
  }

  GlooCommunicator<ranks> join(std::size_t rank) const {
    const Membership member{Rank{rank}, WorldSize{ranks}, rank,   ranks,  "127.0.0.1",
                            port_,      "benchmark",      secret, seconds};
    Store store(member.host, member.port, member.secret, seconds);
    return make_gloo_communicator<ranks>(member, store);
  }

 private:
  static constexpr const char* secret = "only this benchmark knows";
  static constexpr std::chrono::seconds seconds{60};

  std::uint16_t port_;
  std::unique_ptr<lockstep::detail::StoreServer> server_;
};
#endif

/// Everyone's turn.
std::vector<Seen> measure(Clock::time_point deadline) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = lockstep::detail::shm::Engine::make_file(WorldSize{ranks});
  const std::string address = lockstep::detail::shm::Engine::address(file);
#if LOCKSTEP_GLOO
  auto listener = lockstep::detail::listen_on("127.0.0.1", 0);
#endif
  run_ranks(ranks, deadline, [&](std::size_t rank) {
    ShmCommunicator<ranks> shm(Rank{rank}, WorldSize{ranks},
                               lockstep::detail::shm::Engine::open(address),
                               std::chrono::minutes(1));
    Ways ways(common, rank);
    using W = World<ranks>;
    ways.add<W, Sharding<HostShared>>("Shm, HostShared", shm);
    ways.add<W, Sharding<Replicated>>("Shm, Replicated", shm);
    ways.add<W, Sharding<ZeroRedundancy>>("Shm, ZeroRedundancy", shm);
    ways.add<W, Sharding<ZeroRedundancy, Gradients>>("Shm, ZeroRedundancy, Gradients", shm);
#if LOCKSTEP_GLOO
    const Sockets sockets(rank, listener);
    auto gloo = sockets.join(rank);
    using G = Backend<Gloo>;
    ways.add<W, G, Sharding<Replicated>>("Gloo, Replicated", gloo);
    ways.add<W, G, Sharding<ZeroRedundancy>>("Gloo, ZeroRedundancy", gloo);
    ways.add<W, G, Sharding<ZeroRedundancy, Gradients>>("Gloo, ZeroRedundancy, Gradients", gloo);
#endif
    ways.race();
  });
  std::vector<Seen> seen;
  for (const Seen& way : common.seen)
    if (way.name[0] != '\0') seen.push_back(way);
  return seen;
}

/// PyTorch's; unknown where it is not installed.
Seen torch(const std::string& how) {
  Seen seen{};
  std::snprintf(seen.name, sizeof seen.name, "PyTorch, %s", how.c_str());
  each_torch_line("torchrun --standalone --nproc-per-node 2 " LOCKSTEP_SOURCE_DIR
                  "/bench/zero/zero.py " +
                      how + " 2>/dev/null",
                  120, "step", [&](const nlohmann::json& read) {
                    seen.step = {true, read["median"], read["minimum"]};
                    seen.state_bytes = {read["states"][0], read["states"][1]};
                  });
  return seen;
}

/// Of all rounds: the median of medians and the least minimum, by name.
class Results {
 public:
  void add(const Seen& seen) {
    for (auto& [way, medians] : ways_) {
      if (std::string(way.name) != seen.name) continue;
      medians.push_back(seen.step.median);
      way.step.known = way.step.known || seen.step.known;
      way.step.minimum = std::min(way.step.minimum, seen.step.minimum);
      way.step.median = median(medians);
      return;
    }
    ways_.push_back({seen, {seen.step.median}});
  }
  Times step(const std::string& name) const {
    for (const auto& [way, medians] : ways_)
      if (way.name == name) return way.step;
    return {};
  }
  const auto& all() const { return ways_; }

 private:
  std::vector<std::pair<Seen, std::vector<double>>> ways_;
};

void print_memory(const Results& results, ComparisonTable& table) {
  double whole = 0;
  for (const auto& [way, medians] : results.all())
    if (std::string(way.name) == "Shm, Replicated") whole = way.state_bytes[0];
  // Each of AdamW's two states of a bucket ends at a multiple of 256 bytes.
  const double allowed =
      whole / ranks +
      2. * 256 * static_cast<double>(detail::Layout<Network>::plan().buckets().size());
  std::printf(
      "\n| | bytes of AdamW's states, rank 0 | rank 1 | of Replicated's | target | bytes of "
      "gradients | a rank's memory, MiB |\n|---|---|---|---|---|---|---|\n");
  for (const auto& [way, medians] : results.all()) {
    if (!way.step.known) continue;
    const double most = std::max(way.state_bytes[0], way.state_bytes[1]);
    const bool slices = std::string(way.name).find("ZeroRedundancy") != std::string::npos;
    std::printf("| %s | %.0f | %.0f | %.4f | %s |", way.name, way.state_bytes[0],
                way.state_bytes[1], most / whole,
                !slices           ? ""
                : most <= allowed ? "1/2 and 256 bytes for each state of a bucket met"
                                  : "1/2 and 256 bytes for each state of a bucket MISSED");
    if (way.mebibytes[0] > 0) {
      std::printf(" %.0f | %.2f |\n", way.gradient_bytes[0], way.mebibytes[0]);
    } else {
      std::printf(" - | - |\n");
    }
    table.add({{"measure", std::string(way.name) + ", states"},
               {"bytes", most},
               {"of_replicated", most / whole},
               {"mebibytes", way.mebibytes[0]}});
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 3;
  const Clock::time_point deadline = Clock::now() + time_limit;
  const OthersLoad others;
  Results results;
  for (int round = 0; round < rounds; ++round) {
    for (const char* how : {"plain", "zero", "views"}) results.add(torch(how));
    for (const Seen& seen : measure(deadline)) results.add(seen);
  }
  std::printf(
      "one step of MLP 784-256-256-10 (270k parameters), batch 32 a rank, AdamW, %zu ranks, %zu "
      "cores; microseconds, median of %d rounds\n\n",
      ranks, cores(), rounds);
  ComparisonTable table;
  const auto row = [&](const std::string& own, const char* word, const std::string& peer,
                       double target, bool lower = false) {
    const Times mine = results.step(own);
    if (mine.known) table.row(own + word + peer, mine, results.step(peer), target, lower);
  };
  row("Shm, ZeroRedundancy", " over ", "Shm, HostShared", 1.05, true);
  row("Shm, ZeroRedundancy", " against ", "Shm, Replicated", 0);
  row("Shm, ZeroRedundancy", " against ", "PyTorch, zero", 5);
  row("Shm, ZeroRedundancy", " against ", "PyTorch, views", 5);
  row("Shm, ZeroRedundancy, Gradients", " against ", "Shm, Replicated", 0);
  for (const char* kind : {"", ", Gradients"}) {
    const std::string own = std::string("Gloo, ZeroRedundancy") + kind;
    row(own, " against ", "Gloo, Replicated", 0);
    row(own, " against ", "PyTorch, zero", 0);
  }
  row("Gloo, Replicated", " against ", "PyTorch, plain", 0);
  row("Shm, HostShared", " against ", "PyTorch, plain", 0);
  print_memory(results, table);
  table.write("zero");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench zero: %s\n", error.what());
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// How long a DDP step takes over a link of 1 Gbit/s, and how many bytes it sends, by what hooks
// make of gradients; against PyTorch's DDP with its hooks on the same hosts. And what compression
// costs in accuracy: Fashion-MNIST after four epochs on two ranks. bench/hooks/run makes the hosts
// and starts this program on each; without arguments it is that script.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accuracy.hpp"
#include "models.hpp"

#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "lockstep/gloo.hpp"
#include "mlp.hpp"

namespace {

using namespace bench;
using Network = Mlp<float, 784, 256, 10>;
using Clock = std::chrono::steady_clock;

/// Compression begins before anything is measured; hooks.py has the same.
constexpr PowerSgdOptions at_once{.start = 2};

/// Bytes that have left this host through the network, TCP's own included.
double sent_bytes() {
  std::ifstream devices("/proc/self/net/dev");
  for (std::string word; devices >> word;) {
    if (word != "eth0:") continue;
    double count = 0;
    for (int i = 0; i < 9; ++i) devices >> count;  // the ninth is what was sent
    return count;
  }
  return 0;
}

/// The ways of one rank: jobs that step by turns.
class Ways {
 public:
  explicit Ways(Session& session)
      : session_(session),
        comm_(lockstep::detail::make_communicator<CanonicalPolicies<Backend<Gloo>>>(session)) {}

  template <class... Policies>
  void add(const std::string& name) {
    auto job = std::make_shared<
        DistributedDataParallel<Network, Backend<Gloo>, Optimizer<SGD>, Policies...>>(comm_);
    job->optimizer().lr = 0.01;
    for (int i = 0; i < 10; ++i) job->step(batch_);
    ways_.push_back({name, [this, job] { job->step(batch_); }, {}, 0});
  }

  /// Prints what rank 0 sees, in microseconds and bytes a step. hooks.py does it in the same way.
  void race() {
    constexpr int turns = 9;
    constexpr int steps = 8;  // a whole period of LocalSGD<8>
    for (int turn = 0; turn < turns; ++turn) {
      for (Way& way : ways_) {
        comm_.barrier();
        const double before = sent_bytes();
        const auto begin = Clock::now();
        for (int i = 0; i < steps; ++i) way.step();
        const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
        way.times.push_back(taken.count() / steps);
        way.bytes = (sent_bytes() - before) / steps;
      }
    }
    if (session_.rank() != Rank{0}) return;
    for (Way& way : ways_) {
      std::sort(way.times.begin(), way.times.end());
      std::printf("measured %s: %.1f %.1f %.0f\n", way.name.c_str(),
                  way.times[way.times.size() / 2], way.times.front(), way.bytes);
    }
    std::fflush(stdout);
  }

 private:
  struct Way {
    std::string name;
    std::function<void()> step;
    std::vector<double> times;
    double bytes;
  };

  Session& session_;
  GlooCommunicator<> comm_;
  const LabelledBatch<float, int> batch_ = random_batch<float, int>(32, 784, 10);
  std::vector<Way> ways_;
};

int race(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    Ways ways(session);
    ways.add<>("no hook");
    ways.add<Hooks<CompressTo<BFloat16>>>("CompressTo<BFloat16>");
    ways.add<Hooks<CompressTo<Half>>>("CompressTo<Half>");
    ways.add<Hooks<PowerSGD<1, at_once>>>("PowerSGD<1>");
    ways.add<Hooks<PowerSGD<2, at_once>>>("PowerSGD<2>");
    ways.add<Hooks<LocalSGD<8>>>("LocalSGD<8>");
    ways.race();
  });
}

}  // namespace
#else
static int race(int, char**) { return 2; }
#endif

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "accuracy") return accuracy(argv[2], argc, argv);
  if (argc > 1) return race(argc, argv);
  const char* const script = LOCKSTEP_SOURCE_DIR "/bench/hooks/run";
  execl("/bin/bash", "bash", script, argv[0], LOCKSTEP_GLOO ? "gloo" : "", nullptr);
  std::perror("bench hooks: bash");
  return 1;
}

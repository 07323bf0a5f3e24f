// SPDX-License-Identifier: Apache-2.0
// What tests/network/run starts on every host: a small job over a backend that it names.
//
//   job train BACKEND STEPS          Fashion-MNIST by DDP; every rank prints a hash of all
//                                    parameters. More than a thousand steps never end.
//   job train BACKEND STEPS FOLDER   the same with checkpoints; the last rank dies halfway, unless
//                                    the job was started again
//   job sum BACKEND                  sums without end, each of which is checked, until something
//                                    fails
//
// BACKEND is flat, fed (which is flat, and rank 0 reads for all) or hierarchical (where the first
// rank of each host reads for the second).
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fashion_mnist.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/gloo.hpp"
#include "mlp.hpp"

using Network = Mlp<float, 784, 32, 10>;

/// Where programs have it: the library has no other of this name.
template <class How, class... Ps>
using Job = Trainer<Network, ParallelStrategy<DDP>, Backend<How>, Optimizer<SGDMomentum>, Ps...>;

namespace {

template <class J>
std::uint64_t hash_of_parameters(const J& job) {
  detail::Hash hash;
  const auto add = [&](auto view) {
    hash.text({reinterpret_cast<const char*>(view.data_handle()), view.size() * sizeof(float)});
  };
  add(job.param("fc1.weight"_p));
  add(job.param("fc1.bias"_p));
  add(job.param("fc2.weight"_p));
  add(job.param("fc2.bias"_p));
  add(job.param("fc3.weight"_p));
  add(job.param("fc3.bias"_p));
  return hash.value();
}

/// On the 10,000 images of the test split: reading all 60,000 would take most of the time.
template <class How, class... Ps>
void train(Session& session, std::size_t steps, const std::string& folder) {
  Job<How, Ps...> job(session);
  const auto images = job.open([] { return fashion_mnist("test"); });
  const bool never_ends = steps > 1000;
  job.optimizer().lr = 0.05;
  if (!folder.empty()) job.checkpoints({.folder = folder, .every_steps = 3});
  const auto resumed = job.resume();
  std::size_t step = resumed ? resumed->step : 0;
  const bool dies = !folder.empty() && detail::restart_count() == 0 &&
                    job.rank().value() + 1 == job.world_size().value();
  for (auto epoch : job.epochs(never_ends ? 1'000'000 : 1)) {
    for (const auto& batch : epoch.batches(images, 64 / job.world_size().value())) {
      job.step(batch);
      if (++step == steps) break;
      if (never_ends && step == 6) std::printf("ready\n");
      if (dies && step == steps / 2) std::raise(SIGKILL);
    }
  }
  const double accuracy = job.evaluate(images, 500)["accuracy"];
  std::printf("accuracy %.4f, parameters %016llx\n", accuracy,
              static_cast<unsigned long long>(hash_of_parameters(job)));
}

/// Every element of every sum is known, so that a wrong one cannot pass.
template <class How>
int sum(Session& session) {
  auto comm = detail::make_communicator<CanonicalPolicies<Backend<How>>>(session);
  const std::size_t world = comm.world_size().value();
  const auto share = static_cast<float>(comm.rank().value() + 1);
  const auto whole = static_cast<float>(world * (world + 1) / 2);
  std::vector<float> data(100'000);
  for (std::size_t step = 0;; ++step) {
    const auto base = [&](std::size_t i) { return static_cast<float>((i + step) % 97); };
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = share * base(i);
    comm.all_reduce(data, Sum{});
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (data[i] == whole * base(i)) continue;
      std::printf("WRONG SUM: %g at %zu of step %zu\n", static_cast<double>(data[i]), i, step);
      return 9;
    }
    if (step == 5) std::printf("ready\n");
    if (step % 100 == 99) std::printf("%zu sums\n", step + 1);
    // About as long as a sum takes: other tests want the processors, too.
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

template <class How, class... Ps>
int behave(Session& session) {
  const auto& words = session.arguments();
  if (words.at(1) == "sum") return sum<How>(session);
  train<How, Ps...>(session, std::stoul(words.at(3)), words.size() > 4 ? words[4] : "");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    using Pairs = Groups<Grid<dynamic, 2>>;
    const std::string& backend = session.arguments().at(2);
    if (backend == "flat") return behave<Gloo>(session);
    if (backend == "fed") return behave<Gloo, Pairs, Feed<ScatterThenBroadcast>>(session);
    return behave<Hierarchical<Shm, Gloo>, Pairs, Feed<LeaderOfGroup>>(session);
  });
}

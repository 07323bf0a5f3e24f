// SPDX-License-Identifier: Apache-2.0
// A step with AdamW of a stack of 12 equal blocks, and what a rank keeps: Replicated, ZeRO with
// gradients, FullyShard, and PyTorch's DDP and fully_shard (FSDP2), on two hosts over Gloo.
// bench/fully_sharded/run makes the hosts and starts this program on each; without arguments it is
// that script.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "lockstep/gloo.hpp"
#include "matrix.hpp"
#include "memory.hpp"

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

/// x := x + relu(W x), 12 times; the loss is the mean of x * x / 2. fsdp.py has the same.
template <std::size_t Width>
struct Stack {
  static constexpr std::size_t blocks = 12, width = Width;
  using Block = ParameterList<Parameter<"weight", float, width, width>>;
  using Parameters = ParameterList<Repeat<"blocks", blocks, Block>>;

  float forward(auto& step, const std::vector<float>& batch) {
    rows = batch.size() / width;
    x[0] = batch;
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      run(B, step.param("blocks"_p / at<B> / "weight"_p).data_handle());
      step.done("blocks"_p / at<B>);
    });
    const auto out = matrix(x[blocks].data(), rows, width);
    return out.squaredNorm() / static_cast<float>(2 * out.size());
  }
  void backward(auto& step, const std::vector<float>&) {
    dx = x[blocks];
    for (float& d : dx) d /= static_cast<float>(dx.size());
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      constexpr auto weight = "blocks"_p / at<blocks - 1 - B> / "weight"_p;
      go_back(blocks - 1 - B, step.param(weight).data_handle(), step.grad(weight).data_handle());
      step.done("blocks"_p / at<blocks - 1 - B>);
      step.ready(weight);
    });
  }

 private:
  static void each(const auto& f) {
    [&]<std::size_t... B>(std::index_sequence<B...>) {
      (f(std::integral_constant<std::size_t, B>{}), ...);
    }(std::make_index_sequence<blocks>{});
  }
  void run(std::size_t b, const float* weight) {
    const auto in = matrix(x[b].data(), rows, width);
    auto active = resized(relu[b], rows, width);
    active.noalias() = in * matrix(weight, width, width).transpose();
    active = active.cwiseMax(0);
    auto out = resized(x[b + 1], rows, width);
    out = in + active;
  }
  void go_back(std::size_t b, const float* weight, float* gradient) {
    auto d = matrix(dx.data(), rows, width);
    auto active = matrix(relu[b].data(), rows, width);
    active = (active.array() > 0).select(d, 0.f);
    auto to = matrix(gradient, width, width);
    to.noalias() = active.transpose() * matrix(x[b].data(), rows, width);
    d.noalias() += active * matrix(weight, width, width);
  }

  std::size_t rows = 0;
  std::array<std::vector<float>, blocks + 1> x;
  std::array<std::vector<float>, blocks> relu;
  std::vector<float> dx;
};

/// How long this rank waits for units, and how often.
struct UnitWaits : Observer<UnitWaits> {
  static inline double microseconds = 0;
  static inline std::size_t count = 0;

  class Span {
   public:
    explicit Span(const SpanName& name)
        : is_wait_(std::string_view(name.name) == "wait for unit") {}
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() {
      if (!is_wait_) return;
      microseconds += std::chrono::duration<double, std::micro>(Clock::now() - begin_).count();
      ++count;
    }

   private:
    bool is_wait_;
    Clock::time_point begin_ = Clock::now();
  };
};

/// The share of gathers that a rank did not wait for: its waits against as many gathers alone.
void measure_hidden(auto& comm, std::size_t unit) {
  if (UnitWaits::count == 0) return;
  const std::size_t part = unit / comm.world_size().value();
  std::vector<float> own(part), whole(part * comm.world_size().value());
  constexpr int gathers = 30;
  comm.barrier();
  const auto begin = Clock::now();
  for (int i = 0; i < gathers; ++i) comm.all_gather(own, whole);
  const double alone =
      std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / gathers;
  if (comm.rank() == Rank{0})
    std::printf("measured hidden %.3f \n",
                1 - UnitWaits::microseconds / (alone * static_cast<double>(UnitWaits::count)));
}

template <std::size_t Width, class... Policies>
void run(Session& session) {
  auto comm = detail::make_communicator<CanonicalPolicies<Backend<Gloo>>>(session);
  const double before = bench::own_mebibytes();
  DistributedDataParallel<Stack<Width>, Backend<Gloo>, Optimizer<AdamW>,
                          Buckets<BucketLimits{1, 1}>, Observers<UnitWaits>, Policies...>
      ddp(comm);
  ddp.optimizer().lr = 1e-4;
  const std::size_t rows = std::stoul(session.arguments().at(2));
  std::vector<float> batch(rows * Width);
  RandomStream random(Seed{1});
  for (float& x : batch) x = static_cast<float>(random.normal());
  for (int i = 0; i < 3; ++i) ddp.step(batch);
  UnitWaits::microseconds = 0;
  UnitWaits::count = 0;
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    comm.barrier();
    const auto begin = Clock::now();
    ddp.step(batch);
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  const double memory = bench::own_mebibytes() - before;
  measure_hidden(comm, Width * Width);
  if (session.rank() != Rank{0}) return;
  std::printf("measured step %.1f %.1f\n", times[times.size() / 2], times.front());
  std::printf("measured memory %.1f \n", memory);
  std::printf("measured kept %zu \n",
              ddp.parameter_bytes() + ddp.gradient_bytes() + ddp.state_bytes());
}

template <std::size_t Width>
void run_way(Session& session) {
  const std::string how(session.arguments().at(1));
  if (how == "replicated") {
    run<Width, Sharding<Replicated>>(session);
  } else if (how == "zero") {
    run<Width, Sharding<ZeroRedundancy, Gradients>>(session);
  } else if (how == "fully") {
    run<Width, Sharding<FullyShard>>(session);
  } else if (how == "five") {  // units at a time, of which three are gathered in advance
    run<Width, Sharding<FullyShard, GatheredUnits<5>>>(session);
  } else {
    run<Width, Sharding<FullyShard, ReshardAfterForward<false>>>(session);
  }
}

}  // namespace

int be_a_rank(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    if (session.arguments().at(3) == "512") {
      run_way<512>(session);
    } else {
      run_way<2048>(session);
    }
  });
}
#else
int be_a_rank(int, char**) { return 2; }
#endif

int main(int argc, char** argv) {
  if (argc > 1) return be_a_rank(argc, argv);
  if (!LOCKSTEP_GLOO) {
    std::printf("bench fully_sharded: Gloo is not installed (Debian: libgloo-dev)\n");
    return 0;
  }
  const char* const script = LOCKSTEP_SOURCE_DIR "/bench/fully_sharded/run";
  execl("/bin/bash", "bash", script, argv[0], nullptr);
  std::perror("bench fully_sharded: bash");
  return 1;
}

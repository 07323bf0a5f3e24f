// SPDX-License-Identifier: Apache-2.0
// GPT-2 of examples/gpt2.
//
//   gpt2_gpu ways                                 ways to train a small one give the same numbers
//   gpt2_gpu once                                 two steps of it, for a sanitizer
//   gpt2_gpu steps FOLDER WINDOWS STEPS WRITTEN RANKS
//                                 the one of 124 million parameters, on weights and tokens that
//                                 gpt2.py has written: all losses, and gradients of the first steps
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gpt2/gpt2.cuh"
#include "gpt2/hugging_face.hpp"
#include "lockstep/detail/comm/threads/communicator.cuh"
#include "require.hpp"

namespace {

using namespace lockstep;
using gpt2::Recompute;
using Batch = DeviceBatch<std::uint16_t, std::int32_t>;

constexpr std::size_t small_context = 128, small_vocabulary = 1000;
template <Recompute Again>
using Small = gpt2::Gpt2<2, 256, 4, small_context, small_vocabulary, Again>;

template <class Model, class... Policies>
using Ddp = DistributedDataParallel<Model, Device<Cuda>, Optimizer<AdamW>,
                                    Precision<Mixed<BFloat16>>, Policies...>;

/// Batches on the GPU, from the windows of all steps.
class Batches {
 public:
  Batches(const std::vector<std::uint16_t>& tokens, std::size_t windows, std::size_t length)
      : windows_(windows),
        width_(length + 1),
        tokens_(tokens.size()),
        labels_(windows),
        weights_(windows) {
    copy(tokens, tokens_);
    copy(std::vector<float>(windows, 1.f), weights_);
  }
  /// The share of a rank of the `step`-th batch.
  Batch operator()(std::size_t step, std::size_t rank = 0, std::size_t world = 1) const {
    const std::size_t share = windows_ / world;
    return {tokens_ + (step * windows_ + rank * share) * width_, +labels_, +weights_, share,
            width_};
  }

 private:
  template <class T>
  static void copy(const std::vector<T>& from, const DeviceArray<T>& to) {
    check_cuda(cudaMemcpy(+to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }

  std::size_t windows_, width_;
  DeviceArray<std::uint16_t> tokens_;
  DeviceArray<std::int32_t> labels_;
  DeviceArray<float> weights_;
};

template <class T>
std::vector<T> on_host(auto view) {
  std::vector<T> numbers(view.size());
  check_cuda(cudaMemcpy(numbers.data(), view.data_handle(), numbers.size() * sizeof(T),
                        cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  return numbers;
}

constexpr std::size_t small_windows = 8, small_steps = 12;

std::vector<std::uint16_t> small_tokens() {
  std::vector<std::uint16_t> tokens(small_steps * small_windows * (small_context + 1));
  RandomStream random(Seed{1});
  for (auto& token : tokens)  // few of them often, as in a text
    token = static_cast<std::uint16_t>(random.below(random.below(small_vocabulary) + 1));
  return tokens;
}

struct Training {
  std::vector<double> losses;  // means over ranks
  std::vector<std::uint16_t> parameters;
  friend bool operator==(const Training&, const Training&) = default;
};

template <Recompute Again, class... Policies>
Training train(auto& comm, std::size_t steps = small_steps, const std::string& weights = {}) {
  using Model = Small<Again>;
  const std::size_t rank = comm.rank().value(), world = comm.world_size().value();
  const Batches batches(small_tokens(), small_windows, Model::context);
  Ddp<Model, Policies...> ddp(comm, [&] { return Model({}, weights); });
  ddp.optimizer().lr = 1e-3;
  Training training;
  for (std::size_t step = 0; step != steps; ++step) {
    // One address for all steps, as a loader gives it, so that a captured step is replayed.
    const Batch batch = batches(step % 3, rank, world);
    const double loss = ddp.step(batch);
    training.losses.push_back(comm.all_reduce(loss, Average{}));
  }
  ddp.for_each_parameter([&](std::string_view, auto view) {
    for (const BFloat16 number : on_host<BFloat16>(view))
      training.parameters.push_back(number.bits());
  });
  return training;
}

template <Recompute Again, class... Policies>
Training alone(std::size_t steps = small_steps, const std::string& weights = {}) {
  CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
  return train<Again, World<1>, Policies...>(comm, steps, weights);
}

/// Calls `f(comm)` on threads, the ranks of one GPU.
void on_ranks(std::size_t ranks, const auto& f) {
  const auto world = std::make_shared<detail::threads::SharedWorld>(WorldSize{ranks});
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r != ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        ThreadCommunicator<dynamic> comm(world, Rank{r}, std::make_shared<Gpu>(Rank{r}, 0),
                                         std::chrono::seconds(60));
        f(comm);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

template <class... Policies>
Training among(std::size_t ranks) {
  std::vector<Training> all(ranks);
  on_ranks(ranks, [&](auto& comm) {
    all[comm.rank().value()] = train<Recompute::none, Backend<Shm>, Policies...>(comm);
  });
  for (const Training& other : all) require(other == all[0], "ranks have other numbers");
  return all[0];
}

void require_near(const Training& got, const Training& wanted, double share, const char* how) {
  for (std::size_t step = 0; step != small_steps; ++step)
    require(std::abs(got.losses[step] - wanted.losses[step]) <= share * wanted.losses[step],
            std::string(how) + ": the loss of step " + std::to_string(step) + " is " +
                std::to_string(got.losses[step]) + " instead of " +
                std::to_string(wanted.losses[step]));
  std::printf("ok %s\n", how);
}
void require_same(const Training& got, const Training& wanted, const char* how) {
  require_near(got, wanted, 0, how);
  require(got.parameters == wanted.parameters, std::string(how) + ": other parameters");
}

void check_ways() {
  const Training wanted = alone<Recompute::none>();
  require(wanted.losses.back() < wanted.losses.front() - 0.2, "it learns nothing");
  require_same(alone<Recompute::none>(), wanted, "a second run");
  require_same(alone<Recompute::none, CapturedStep>(), wanted, "a captured step");
  require_same(alone<Recompute::block>(), wanted, "blocks computed again");
  require_near(alone<Recompute::gelu>(), wanted, 0.002, "GELU computed again");
  const Training two = among<>(2);
  require_near(two, wanted, 0.002, "two ranks");
  require_near(among<>(4), wanted, 0.002, "four ranks");
  require_same(among<Sharding<ZeroRedundancy>>(2), two, "ZeRO");
  require_same(among<Sharding<FullyShard, Units<"h.*">>>(2), two, "fully sharded");
  require_same(among<CapturedStep>(2), two, "two ranks, captured");

  // What is written for Hugging Face is read again.
  const auto path = std::filesystem::temp_directory_path() / "lockstep-gpt2-test.safetensors";
  std::vector<gpt2::HuggingFaceTensor> tensors;
  {
    CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
    Ddp<Small<Recompute::none>, World<1>> ddp(comm);
    ddp.for_each_parameter([&](std::string_view name, auto view) {
      auto& tensor =
          tensors.emplace_back(std::string(name), Small<Recompute::none>::shape_in_file(name, view),
                               std::vector<float>());
      for (const BFloat16 number : on_host<BFloat16>(view))
        tensor.numbers.push_back(static_cast<float>(number));
    });
  }
  gpt2::write_hugging_face(path, tensors);
  require(alone<Recompute::none>(0, path).parameters == alone<Recompute::none>(0).parameters,
          "weights that were written and read are others");
  std::filesystem::remove(path);
  std::printf("ok weights of Hugging Face\n");
}

template <class T>
std::vector<T> read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<T> all(static_cast<std::size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(all.data()),
            static_cast<std::streamsize>(all.size() * sizeof(T)));
  return all;
}

void make_steps(const std::string& folder, std::size_t windows, std::size_t steps,
                std::size_t written, std::size_t ranks) {
  using Model = gpt2::Gpt2<>;
  const auto tokens = read_all<std::uint16_t>(folder + "/tokens.bin");
  const std::string algorithms = Model::choose(windows / ranks);
  on_ranks(ranks, [&](auto& comm) {
    const std::size_t rank = comm.rank().value();
    const Batches batches(tokens, windows, Model::context);
    Ddp<Model, Backend<Shm>> ddp(
        comm, [&] { return Model(algorithms, folder + "/weights.safetensors"); });
    ddp.optimizer().lr = 1e-4;
    std::ofstream losses, names;
    if (rank == 0) {
      losses.open(folder + "/losses.txt");
      names.open(folder + "/names.txt");
      losses.precision(9);
    }
    for (std::size_t step = 0; step != steps; ++step) {
      const Batch batch = batches(step, rank, ranks);
      auto averaged = ddp.forward(batch).backward().reduce();
      if (rank == 0 && step < written) {
        std::ofstream gradients(folder + "/gradients." + std::to_string(step) + ".bin",
                                std::ios::binary);
        averaged.for_each_gradient([&](std::string_view name, auto view) {
          const auto numbers = on_host<BFloat16>(view);
          gradients.write(reinterpret_cast<const char*>(numbers.data()),
                          static_cast<std::streamsize>(numbers.size() * sizeof numbers[0]));
          if (step == 0) names << name << ' ' << numbers.size() << '\n';
        });
      }
      const double loss = std::move(averaged).update();
      losses << comm.all_reduce(loss, Average{}) << '\n';
    }
  });
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "ways") check_ways();
  if (what == "once") alone<Recompute::none>(2);
  if (what == "steps" && argc == 7)
    make_steps(argv[2], std::stoul(argv[3]), std::stoul(argv[4]), std::stoul(argv[5]),
               std::stoul(argv[6]));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "FAILED: %s\n", error.what());
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// Sharding<FullyShard> on a GPU that is full but for so much memory of each rank that the model's
// parameters alone take one and a half times as much. Ranks initialise, train, save and resume it,
// to the same losses as without a break: memory_limit --ranks 8. One rank, which would need all of
// parameters, gradients and states, is told that memory is out: memory_limit --ranks 1 alone.
#include <thrust/iterator/counting_iterator.h>
#include <cstdint>
#include <cstdio>
#include <cub/device/device_reduce.cuh>
#include <cuda/std/functional>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "device_array.cuh"
#include "lockstep/checkpoint.hpp"
#include "lockstep/lockstep.cuh"
#include "require.hpp"

namespace {

using namespace lockstep;

constexpr std::size_t blocks = 64, numbers = std::size_t{4} << 20;
constexpr std::size_t parameter_bytes = blocks * numbers * sizeof(float);
constexpr std::size_t limit = parameter_bytes * 2 / 3;  // of a rank

/// x[i] = phase / numbers, for phases of a row that differ from rank to rank.
struct Input {
  std::size_t first;
  __device__ float operator()(std::size_t i) const {
    return static_cast<float>((i + first) % 16) / (8.f * numbers);
  }
  bool operator==(const Input&) const = default;
};
struct Term {
  Input x;
  const float* w;
  __device__ float operator()(std::size_t i) const { return x(i) * w[i] * w[i]; }
};

/// loss = the mean of (y_b - b / blocks)^2 / 2
LOCKSTEP_KERNEL add_errors(float* outputs, double* loss) {
  *loss = 0;
  for (std::size_t b = 0; b != blocks; ++b) {
    outputs[b] -= static_cast<float>(b) / blocks;
    *loss += outputs[b] * outputs[b] / (2.0 * blocks);
  }
}
LOCKSTEP_KERNEL write_gradient(Input x, const float* w, const float* error, float* gradient) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  gradient[i] = 2 * x(i) * w[i] * *error / blocks;
}

/// y_b = sum of x w_b^2, for every block; both passes read its parameters.
class Blocks {
  using Block = ParameterList<Parameter<"weight", float, numbers>>;

 public:
  using Parameters = ParameterList<Repeat<"blocks", blocks, Block>>;

  void initialize(auto& initial) {
    std::uint32_t state = 1;
    initial.for_each_parameter([&](auto, auto weight) {
      for (std::size_t i = 0; i != weight.size(); ++i) {
        state = state * 1664525u + 1013904223u;
        weight.data_handle()[i] = static_cast<float>(state >> 8) / (1 << 24);
      }
    });
  }
  void forward(auto& step, const Input& x) {
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      const float* const w = step.param("blocks"_p / at<B> / "weight"_p).data_handle();
      std::size_t bytes = scratch_bytes;
      check_cuda(
          cub::DeviceReduce::TransformReduce(
              scratch_, bytes, thrust::counting_iterator<std::size_t>(0), outputs_ + B,
              static_cast<int>(numbers), cuda::std::plus<>{}, Term{x, w}, 0.f, step.stream()),
          "cub::DeviceReduce::TransformReduce");
      step.done("blocks"_p / at<B>);
    });
    add_errors<<<1, 1, 0, step.stream()>>>(outputs_, step.loss());
    check_launch("add_errors");
  }
  void backward(auto& step, const Input& x) {
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      constexpr std::size_t b = blocks - 1 - B;
      constexpr auto weight = "blocks"_p / at<b> / "weight"_p;
      write_gradient<<<numbers / 256, 256, 0, step.stream()>>>(
          x, step.param(weight).data_handle(), outputs_ + b, step.grad(weight).data_handle());
      check_launch("write_gradient");
      step.done("blocks"_p / at<b>);
      step.ready(weight);
    });
  }

 private:
  static constexpr std::size_t scratch_bytes = 1 << 20;

  static void each(const auto& f) {
    [&]<std::size_t... B>(std::index_sequence<B...>) {
      (f(std::integral_constant<std::size_t, B>{}), ...);
    }(std::make_index_sequence<blocks>{});
  }

  DeviceArray<char> scratch_{scratch_bytes};
  DeviceArray<float> outputs_{blocks};
};

using Job = DistributedDataParallel<Blocks, Device<Cuda>, Backend<Shm>, Optimizer<AdamW>,
                                    Sharding<FullyShard, Units<"blocks.*">>>;

/// Takes all memory of the GPU but what `ranks` may have, once.
void fill_gpu(std::size_t ranks) {
  static std::once_flag filled;
  std::call_once(filled, [&] {
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    require(free > ranks * limit, "the GPU has less memory than the ranks' limits");
    static const DeviceArena ballast(free - ranks * limit);
  });
}

std::string checkpoint() {
  return std::filesystem::temp_directory_path() / "lockstep-memory-limit" / "model";
}
constexpr int steps = 3;
using Losses = std::vector<double>;
Losses train(Job& job, const Input& x) {
  Losses losses;
  for (int i = 0; i != steps; ++i) losses.push_back(job.step(x));
  return losses;
}
std::mutex mutex;
std::map<Rank, Losses> wanted;  // after the checkpoint

void train_and_save(Session& session) {
  auto comm = make_thread_communicator(session.membership(), session.store());
  comm.barrier();  // all ranks have their streams and buffers
  fill_gpu(comm.world_size().value());
  Job job(comm);
  job.optimizer().lr = 0.01;
  const std::size_t kept = job.parameter_bytes() + job.gradient_bytes() + job.state_bytes();
  if (comm.rank() == Rank{0})
    std::printf("a rank may have %zu MiB; parameters take %zu, its parts of all, and rings, %zu\n",
                limit >> 20, parameter_bytes >> 20, kept >> 20);
  const Input x{comm.rank().value()};
  const Losses first = train(job, x);
  save(job, checkpoint());
  const Losses later = train(job, x);
  require(later.back() < first.front(), "it learns nothing");
  const std::lock_guard lock(mutex);
  wanted[comm.rank()] = later;
}

void resume_and_train(Session& session) {
  auto comm = make_thread_communicator(session.membership(), session.store());
  Job job(comm);
  job.optimizer().lr = 0.01;
  const Resumed from = resume(job, checkpoint());
  require(from.step == steps, "it resumes at step " + std::to_string(from.step));
  const Losses losses = train(job, Input{comm.rank().value()});
  const std::lock_guard lock(mutex);
  require(losses == wanted[comm.rank()], "it resumes with other numbers");
}

void expect_no_room(Session& session) {
  auto comm = make_thread_communicator(session.membership(), session.store());
  fill_gpu(1);
  try {
    Job job(comm);
  } catch (const Error& error) {
    const std::string words = error.what();
    require(words.find("out of memory; take a smaller model") != words.npos, words);
    std::printf("ok memory_limit, one rank: %s\n", words.c_str());
    return;
  }
  require(false, "a model of six times the memory that there is was built");
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  if (std::string_view(argv[argc - 1]) == "alone")
    return launch_threads(argc, argv, expect_no_room);
  const auto folder = std::filesystem::path(checkpoint()).parent_path();
  std::filesystem::create_directories(folder);
  int status = launch_threads(argc, argv, train_and_save);
  if (status == 0) status = launch_threads(argc, argv, resume_and_train);
  std::filesystem::remove_all(folder);
  if (status == 0) std::puts("ok memory_limit");
  return status;
}

// SPDX-License-Identifier: Apache-2.0
// A training to which something happens; tests/faults/run starts its ranks and does the rest.
//
//   job BACKEND FAULT RANK STEP [FOLDER]
//
// BACKEND is shm, gloo or hierarchical, mpi in a program for tests/mpi/run, and nccl in one whose
// GPUs and whose NCCL the host plays, with MPI between hosts in the one that is both. FAULT is what
// this rank does at this step: throw, skip, sleep (for long), count, type, operation, nan, flip (a
// bit of a parameter, which all ranks look for), model (it trains another one) or stubborn (all
// ranks ignore SIGTERM); none: nothing. A rank prints `ready` after a few steps, and at the end a
// hash of the parameters. With a folder, the job saves every 5 steps and resumes.
#if LOCKSTEP_EMULATED_NCCL
#include "gpu/emulated/kernels.hpp"  // before the library's headers
//
#endif
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/core/hash.hpp"
#if LOCKSTEP_EMULATED_NCCL
#include "gpu/emulated/nccl.hpp"
#if LOCKSTEP_MPI
#include "lockstep/mpi_nccl.cuh"
#else
#include "lockstep/nccl.cuh"
#endif
#elif LOCKSTEP_MPI
#include "lockstep/mpi.hpp"
#else
#include "lockstep/gloo.hpp"
#endif
#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

constexpr std::size_t samples = 480;

/// y = weight . x, squared error, for a batch of one sample.
template <std::size_t Width>
struct Line {
  using Parameters = ParameterList<Parameter<"weight", float, Width>>;
  float error = 0;
  float forward(auto& step, auto& batch) {
    const auto weight = step.param("weight"_p);
    error = -batch.labels[0];
    for (std::size_t i = 0; i != Width; ++i) error += weight(i) * batch.inputs[0] / Width;
    return error * error;
  }
  void backward(auto& step, auto& batch) {
    const auto gradient = step.grad("weight"_p);
    for (std::size_t i = 0; i != Width; ++i) gradient(i) = 2 * error * batch.inputs[0] / Width;
    step.ready("weight"_p);
  }
};

#if LOCKSTEP_EMULATED_NCCL
LOCKSTEP_KERNEL line_error(const float* weight, std::size_t width, const float* x, const float* y,
                           float* error, double* loss) {
  *error = -*y;
  for (std::size_t i = 0; i != width; ++i) *error += weight[i] * *x / static_cast<float>(width);
  *loss = *error * *error;
}
LOCKSTEP_KERNEL line_gradient(const float* error, std::size_t width, const float* x, float* g) {
  for (std::size_t i = 0; i != width; ++i) g[i] = 2 * *error * *x / static_cast<float>(width);
}

/// The same on a GPU.
template <std::size_t Width>
struct GpuLine {
  using Parameters = ParameterList<Parameter<"weight", float, Width>>;
  DeviceArena error{sizeof(float)};
  void forward(auto& step, auto& batch) {
    detail::launch_kernel<line_error>(
        "line_error", step.stream(), 1, 1, step.param("weight"_p).data_handle(), Width,
        batch.inputs, batch.labels, reinterpret_cast<float*>(error.data()), step.loss());
  }
  void backward(auto& step, auto& batch) {
    detail::launch_kernel<line_gradient>("line_gradient", step.stream(), 1, 1,
                                         reinterpret_cast<const float*>(error.data()), Width,
                                         batch.inputs, step.grad("weight"_p).data_handle());
    step.ready("weight"_p);
  }
};
template <class How, std::size_t Width>
using JobOf = Trainer<GpuLine<Width>, Device<Cuda>, Backend<How>, Anomaly<Stop>>;
#else
template <class How, std::size_t Width>
using JobOf = Trainer<Line<Width>, Backend<How>, Sharding<Replicated>, Anomaly<Stop>>;
#endif

/// The host reads and writes what lies on GPUs that it plays.
void wait_for_gpu() {
#if LOCKSTEP_EMULATED_NCCL
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
#endif
}

template <class How, std::size_t Width>
void train(Session& session) {
  const auto& arguments = session.arguments();
  const std::string& fault = arguments.at(2);
  const bool is_culprit = session.rank().value() == std::stoul(arguments.at(3));
  const std::size_t at = std::stoul(arguments.at(4));
  JobOf<How, Width> job(session);
  job.optimizer().lr = 0.01;
  if (arguments.size() > 5) job.checkpoints({.folder = arguments[5], .every_steps = 5});
  const auto resumed = job.resume();
  std::size_t step = resumed ? resumed->step : 0;
  const InMemoryDataset<float, float> data(std::vector<float>(samples, 1),
                                           std::vector<float>(samples, 2));
  for (auto epoch : job.epochs(1)) {
    for (auto batch : epoch.batches(data, 1)) {
      ++step;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (step == 4) std::puts("ready");
      if (step == at) {
        if (is_culprit && fault == "throw") throw std::runtime_error("out of luck");
        if (is_culprit && fault == "skip") continue;
        if (is_culprit && fault == "sleep") {
          std::puts("sleeps");
          std::this_thread::sleep_for(std::chrono::minutes(5));
        }
        if (is_culprit && fault == "nan") batch.labels[0] = std::numeric_limits<float>::quiet_NaN();
        std::vector<float> floats(is_culprit && fault == "count" ? 11 : 10);
        std::vector<std::int32_t> integers(10);
        if (is_culprit && fault == "type") {
          job.communicator().all_reduce(integers);
        } else if (is_culprit && fault == "operation") {
          job.communicator().all_reduce(floats, Max{});
        } else if (fault == "count" || fault == "type" || fault == "operation") {
          job.communicator().all_reduce(floats);
        }
      }
      job.step(batch);
      if (fault == "flip") {
        if (step == at && is_culprit) {
          wait_for_gpu();
          const float* const first = job.param("weight"_p).data_handle();
          *const_cast<char*>(reinterpret_cast<const char*>(first)) ^= 1;
        }
        job.ddp().check_replicas();
      }
    }
  }
  wait_for_gpu();
  detail::Hash hash;
  job.for_each_parameter([&](std::string_view, auto view) {
    hash.text({reinterpret_cast<const char*>(view.data_handle()), view.size() * sizeof(float)});
  });
  std::printf("parameters %016llx\n", static_cast<unsigned long long>(hash.value()));
}

template <class How>
int run(Session& session) {
  const auto& arguments = session.arguments();
  const bool is_other =
      arguments.at(2) == "model" && session.rank().value() == std::stoul(arguments.at(3));
  is_other ? train<How, 2000>(session) : train<How, 1000>(session);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    const auto& arguments = session.arguments();
    if (arguments.at(2) == "stubborn") std::signal(SIGTERM, SIG_IGN);
#if LOCKSTEP_EMULATED_NCCL
    emulated::host.gpus = 4;
    emulated::nccl::between_processes = true;
#if LOCKSTEP_MPI
    return run<Hierarchical<Nccl, Mpi>>(session);
#else
    return run<Nccl>(session);
#endif
#elif LOCKSTEP_MPI
    return arguments.at(1) == "shm" ? run<Shm>(session) : run<Mpi>(session);
#else
    if (arguments.at(1) == "shm") return run<Shm>(session);
    if (arguments.at(1) == "gloo") return run<Gloo>(session);
    return run<Hierarchical<Shm, Gloo>>(session);
#endif
  });
}

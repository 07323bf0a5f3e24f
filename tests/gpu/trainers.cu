// SPDX-License-Identifier: Apache-2.0
// Trainers on GPUs: trainers --ranks N nccl|gloo|shm [CHECK]. Every check is a program of a user,
// run by N ranks and by one alone: both must see the same losses and scores and end with the same
// parameters.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "contents.hpp"
#include "gpu/check_names.hpp"
#include "gpu/plain_mlp.cuh"
#include "lockstep/lockstep.cuh"
#include "lockstep/nvtx.cuh"
#include "lockstep/trace.cuh"
#include "train/checkpoint_files.hpp"
#if LOCKSTEP_HAS_NCCL
#include "lockstep/nccl.cuh"
#endif
#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.cuh"
#endif

namespace {

using namespace lockstep;
using namespace train;

using Model = GpuPlainMlp<double, 12, 16, 4>;
template <class... Policies>
using Job = Trainer<Model, Device<Cuda>, Optimizer<AdamW>, Policies...>;
using Alone = Job<World<1>>;
#if LOCKSTEP_HAS_NCCL
static_assert(std::is_same_v<Job<>, Job<Backend<Nccl>>>, "NCCL is what a GPU job has by default");
#endif

InMemoryDataset<double, std::int32_t> make_data(std::size_t rows, std::size_t number) {
  const auto batch = labelled<double>(reference_batch(rows, 12, 4, number, 0));
  return {batch.inputs, batch.labels};
}
const auto& samples() {
  static const auto data = make_data(48, 3);
  return data;
}
/// A number that no world divides.
const auto& others() {
  static const auto data = make_data(53, 5);
  return data;
}

/// What a program has seen, in order: numbers that must not depend on the number of ranks.
using Seen = std::vector<double>;

void add_parameters(auto& job, Seen& seen) {
  job.barrier();
  PlainMlp<1, 1, 1>::for_each_parameter(job, [&](const auto& view) {
    const std::size_t before = seen.size();
    seen.resize(before + view.size());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check_cuda(cudaMemcpy(seen.data() + before, view.data_handle(), view.size() * sizeof(double),
                          cudaMemcpyDefault),
               "cudaMemcpy");
  });
}

/// Epochs over the same batches of twelve, however many ranks share them, with an evaluation each.
void run_epochs_on(const auto& train, const auto& test, auto& job, double rate,
                   std::uint64_t epochs, Seen& seen) {
  job.optimizer().lr = rate;
  for (auto epoch : job.epochs(epochs)) {
    for (const auto& batch : epoch.batches(train, 12 / job.world_size().value())) job.step(batch);
    seen.push_back(epoch.summary().loss.value());
    seen.push_back(job.evaluate(test, 7)["loss"]);
  }
  add_parameters(job, seen);
}
void run_epochs(auto& job, double rate, std::uint64_t epochs, Seen& seen) {
  run_epochs_on(samples(), others(), job, rate, epochs, seen);
}

template <class J>
Seen train_and_evaluate(Session& session) {
  Seen seen;
  J job(session);
  run_epochs(job, 0.01, 4, seen);
  return seen;
}

/// The same with data that `hold` makes of the host's.
template <class J, class Hold>
auto train_from(const Hold& hold) {
  return [hold](Session& session) {
    Seen seen;
    J job(session);
    const auto train = hold(samples());
    const auto test = hold(others());
    run_epochs_on(train, test, job, 0.01, 4, seen);
    return seen;
  };
}

/// A job that records what its GPU does, and NVTX ranges: every step is on the track of its rank's
/// compute stream.
template <class BackendPolicy>
Seen train_traced(Session& session) {
  using J = Job<BackendPolicy, Observers<Trace, GpuTrace, Nvtx>>;
  Seen seen;
  Job<BackendPolicy> other(session);
  TrainerOptions options;
  options.observers.trace =
      "/tmp/lockstep-traced-" + std::to_string(other.broadcast(::getpid())) + ".json";
  {
    J job(session, detail::DefaultModel{}, options);
    run_epochs(job, 0.01, 4, seen);
  }
  if (session.rank() == Rank{0}) {
    const std::string trace = contents(options.observers.trace);
    std::filesystem::remove(options.observers.trace);
    std::size_t spans = 0;
    for (std::size_t at = 0; (at = trace.find("gpu_user_annotation", at)) != trace.npos; ++at)
      ++spans;
    if (spans < 16 * 3 * session.world().value())  // steps, and the phases of each
      throw std::runtime_error("traced: " + std::to_string(spans) + " spans of GPUs");
  }
  return seen;
}

/// A `break` out of the batches, one out of the epochs, and more epochs after that.
template <class J>
Seen leave_early(Session& session) {
  Seen seen;
  J job(session);
  for (auto epoch : job.epochs(5)) {
    std::size_t steps = 0;
    for (const auto& batch : epoch.batches(samples(), 12 / job.world_size().value())) {
      job.step(batch);
      if (++steps == 2 && epoch.number() == 1) break;
    }
    seen.push_back(epoch.summary().loss.value());
    seen.push_back(static_cast<double>(epoch.summary().samples));
    const double loss = job.evaluate(others(), 7)["loss"];
    seen.push_back(loss);
    if (epoch.number() == 2) break;
  }
  run_epochs(job, 0.02, 2, seen);
  return seen;
}

/// Two jobs side by side, in turn, and a third when they are gone.
template <class J>
Seen train_several(Session& session) {
  Seen seen;
  {
    J first(session);
    J second(session);
    run_epochs(first, 0.01, 2, seen);
    run_epochs(second, 0.03, 2, seen);
    run_epochs(first, 0.02, 1, seen);
  }
  J third(session);
  run_epochs(third, 0.02, 2, seen);
  return seen;
}

/// Makes a stream and memory when it is constructed, and uses them in every step.
struct Homed : Model {
  Homed() : Homed(2) {}
  explicit Homed(int number) : number(number), memory(256) {
    check_cuda(cudaGetDevice(&made_on), "cudaGetDevice");
  }
  void forward(auto& step, const auto& batch) {
    check_cuda(cudaMemsetAsync(memory.data(), number, 256, own), "cudaMemsetAsync");
    own.synchronize();
    Model::forward(step, batch);
  }
  int number;
  int made_on = -1;
  CudaStream own;
  DeviceArena memory;
};

/// A job's model is made on its rank's GPU, however the job gets it; the program's current GPU may
/// be another one in every call, and the calling thread too.
template <class J>
Seen stay_at_home(Session& session) {
  using Own = detail::BasicTrainer<Homed, typename J::policies>;
  Own by_default(session);
  Own job(session, [](Session&) { return Homed(3); });
  int home = -1;
  {
    const auto on = job.on_device();
    check_cuda(cudaGetDevice(&home), "cudaGetDevice");
  }
  if (job.model().made_on != home || by_default.model().made_on != home || job.model().number != 3)
    throw std::runtime_error("home: the model was made elsewhere");
  const int other = (home + 1) % static_cast<int>(detail::cuda_devices());
  check_cuda(cudaSetDevice(other), "cudaSetDevice");
  Seen seen;
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      run_epochs(by_default, 0.01, 2, seen);
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
  run_epochs(job, 0.02, 2, seen);
  int current = -1;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current != other) throw std::runtime_error("home: the program's GPU has changed");
  check_cuda(cudaSetDevice(home), "cudaSetDevice");
  return seen;
}

/// The tensors of a job of `resume` on a host.
struct HostTwin {
  using Parameters = typename GpuPlainMlp<float, 12, 16, 4>::Parameters;
};

/// A captured job in 16 bits, with all that a step can have: saved in the middle of an epoch and of
/// a step while it goes on, and gone on from in a job made anew, it ends with the same bits. A job
/// on a host takes them over and gives them back.
template <class BackendPolicy>
void resume_captured(Session& session) {
  using Captured =
      Trainer<GpuPlainMlp<float, 12, 16, 4>, Device<Cuda>, Optimizer<AdamW>, Precision<Mixed<Half>>,
              CapturedStep, Accumulate<2>, Clip<1>, Schedule<Cosine>, BackendPolicy>;
  using OnHost =
      Trainer<HostTwin, World<1>, Optimizer<AdamW>, Accumulate<2>, Clip<1>, Schedule<Cosine>>;
  const auto batch = labelled<float>(reference_batch(48, 12, 4, 3, 0));
  const InMemoryDataset<float, std::int32_t> data(batch.inputs, batch.labels);
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error("resume: " + what);
  };
  Captured whole(session);
  const std::string folder =
      "/tmp/lockstep-trainers-" + std::to_string(whole.broadcast(::getpid()));
  if (session.rank() == Rank{0}) std::filesystem::create_directory(folder);
  const auto path = [&](const std::string& name) { return folder + "/" + name + ".safetensors"; };
  const auto run = [&](Captured& job, const auto& after_step) {
    job.optimizer().lr = 0.01;
    for (auto epoch : job.epochs(3)) {
      for (const auto& part : epoch.batches(data, 12 / session.world().value())) {
        job.step(part);
        after_step();
      }
    }
  };
  std::size_t steps = 0;
  run(whole, [&] {
    // In the second epoch, after the first of two micro-batches, which waits for the second, and
    // between two steps.
    if (++steps == 5) whole.save(path("middle"), {.asynchronous = true});
    if (steps == 8) whole.save(path("between"), {.asynchronous = true});
  });
  whole.save(path("end"));
  for (const char* from : {"middle", "between"}) {
    Captured again(session);
    again.resume(path(from));
    run(again, [] {});
    again.save(path("again"));
    if (session.rank() == Rank{0}) {
      require(checkpoints::tensors_of(path("again")) == checkpoints::tensors_of(path("end")),
              std::string("other bits after ") + from);
    }
    again.barrier();
  }
  if (session.rank() == Rank{0}) {
    Session alone = detail::join_alone();
    OnHost host(alone);
    host.load(path("end"));
    host.save(path("host"));
    require(checkpoints::tensors_of(path("host")) == checkpoints::tensors_of(path("end")),
            "other bits on the host");
  }
  whole.barrier();
  Captured back(session);
  back.load(path("host"));
  back.save(path("back"));
  if (session.rank() == Rank{0}) {
    require(checkpoints::tensors_of(path("back")) == checkpoints::tensors_of(path("end")),
            "other bits on the GPU");
    std::filesystem::remove_all(folder);
    std::printf("ok resume, %zu ranks\n", session.world().value());
  }
}

void compare(const std::string& check, const Seen& got, const Seen& want) {
  if (got.size() != want.size() || want.empty()) throw std::runtime_error(check + ": other sizes");
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::abs(got[i] - want[i]) <= 1e-9 * std::max(1.0, std::abs(want[i]))) continue;
    throw std::runtime_error(check + ": number " + std::to_string(i) + " of " +
                             std::to_string(want.size()) + " is " + std::to_string(got[i]) +
                             ", one rank alone has " + std::to_string(want[i]));
  }
}

template <class BackendPolicy>
void run_checks(Session& session) {
  using J = Job<BackendPolicy>;
  const auto& arguments = session.arguments();
  gpu_test::CheckNames names(arguments.size() > 2 ? arguments[2] : "all");
  const auto run = [&](const char* check, auto by_ranks, auto by_one) {
    if (!names.wants(check)) return;
    Session alone = detail::join_alone();
    const Seen want = by_one(alone);
    compare(check, by_ranks(session), want);
    if (session.rank() == Rank{0})
      std::printf("ok %s, %zu ranks, %zu numbers\n", check, session.world().value(), want.size());
  };
  run("train", train_and_evaluate<J>, train_and_evaluate<Alone>);
  run("break", leave_early<J>, leave_early<Alone>);
  run("several", train_several<J>, train_several<Alone>);
#if LOCKSTEP_RUNS_ON_GPU
  run("home", stay_at_home<J>, stay_at_home<Alone>);
  run("zero", train_and_evaluate<Job<BackendPolicy, Sharding<ZeroRedundancy>>>,
      train_and_evaluate<Alone>);
  run("traced", train_traced<BackendPolicy>, train_and_evaluate<Alone>);
  const auto resident = [](const auto& data) { return DeviceResident(data); };
  const auto pinned = [](const auto& data) { return Pinned(data); };
  run("resident", train_from<J>(resident), train_and_evaluate<Alone>);
  run("pinned", train_from<J>(pinned), train_and_evaluate<Alone>);
  if constexpr (!std::is_same_v<typename BackendPolicy::choice, Gloo>) {  // which is not captured
    using Captured = Job<BackendPolicy, CapturedStep>;
    run("resident_captured", train_from<Captured>(resident), train_and_evaluate<Alone>);
    run("pinned_captured", train_from<Captured>(pinned), train_and_evaluate<Alone>);
    if (names.wants("resume")) resume_captured<BackendPolicy>(session);
  }
#endif
  names.require_known();
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const auto wants = [&](const std::string& backend) {
    for (int i = 1; i < argc; ++i)
      if (argv[i] == backend) return true;
    return false;
  };
#if LOCKSTEP_HAS_NCCL
  if (wants("nccl")) return launch(argc, argv, run_checks<Backend<Nccl>>);
#endif
#if LOCKSTEP_HAS_GLOO
  if (wants("gloo")) return launch(argc, argv, run_checks<Backend<Gloo>>);
#endif
  if (wants("shm")) return launch_threads(argc, argv, run_checks<Backend<Shm>>);
  std::puts("usage: trainers --ranks N nccl|gloo|shm [CHECK], of what it was built with");
  return 2;
}

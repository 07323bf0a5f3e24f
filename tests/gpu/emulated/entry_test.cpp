// SPDX-License-Identifier: Apache-2.0
// The edge between a program and its jobs on several GPUs, which the host plays: where models are
// made, what a program's current GPU and thread have to do with its calls (nothing), and batches
// that lie on a GPU.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_entry)

namespace {

using namespace lockstep;
using namespace train;
using thread_ranks::require;

constexpr std::size_t width = 5, classes = 3;
using Split = GpuSplitMlp<double, width, 6, classes>;

int current_gpu() {
  int gpu = -1;
  check_cuda(cudaGetDevice(&gpu), "cudaGetDevice");
  return gpu;
}

/// Counts on a stream of its own. The player rejects the kernel where the stream is another GPU's
/// than the one that runs it.
LOCKSTEP_KERNEL count_up(int* number) { ++*number; }

/// A model that makes a stream and memory when it is constructed.
struct Homed : Split {
  Homed() : Homed(0) {}
  explicit Homed(std::size_t number) : number(number), made_on(current_gpu()), memory(256) {}
  Homed replicate() const { return Homed(number); }

  void forward(auto& step, const auto& batch) {
    count();
    Split::forward(step, batch);
  }
  void predict(auto& step, const auto& batch, auto outputs) {
    count();
    Split::predict(step, batch, outputs);
  }
  void count() {
    detail::launch_kernel<count_up>("count_up", own, 1, 1, reinterpret_cast<int*>(memory.data()));
    own.synchronize();
  }

  std::size_t number;
  int made_on;
  CudaStream own;
  DeviceArena memory;
};

LabelledBatch<double, std::int32_t> batch_of(std::size_t rows, std::size_t number) {
  return labelled<double>(reference_batch(rows, width, classes, number, 0));
}

using Numbers = std::vector<double>;

/// Every parameter, seen through the job's own visit, which must be on the job's GPU.
Numbers numbers_of(auto& job) {
  Numbers all;
  job.for_each_parameter([&](auto, const auto& view) {
    const std::size_t before = all.size();
    all.resize(before + view.size());
    check_cuda(cudaMemcpy(all.data() + before, view.data_handle(), view.size() * sizeof(double),
                          cudaMemcpyDefault),
               "cudaMemcpy");
  });
  return all;
}

/// Runs `main` of a job as a program with these ranks or replicas does.
template <class Job, class... Source, class F>
void run_main(const std::string& many, const F& f, Source... source) {
  std::string words[] = {"program", many, "--progress=none"};
  char* argv[] = {words[0].data(), words[1].data(), words[2].data()};
  BOOST_TEST(launch<Job>(3, argv, source..., f) == 0);
}

using Ranks = Trainer<Homed, Device<Cuda>, Backend<Shm>>;
using Replicas = Trainer<Homed, Device<Cuda>, ParallelStrategy<DP>>;

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_that_are_threads_make_their_models_on_their_own_gpus) {
  const emulated::Machine machine(4);
  const auto check = [](std::size_t number) {
    return [number](Ranks& job) {
      require(job.model().made_on == static_cast<int>(job.rank().value()), "another GPU");
      require(job.model().number == number + (number != 7 ? job.rank().value() : 0), "not it");
      for (std::size_t s = 0; s < 3; ++s) job.step(batch_of(4, s));
    };
  };
  run_main<Ranks>("--ranks=4", [](Ranks& job) {
    require(job.model().made_on == static_cast<int>(job.rank().value()), "another GPU");
    for (std::size_t s = 0; s < 3; ++s) job.step(batch_of(4, s));
    DistributedDataParallel<Homed, Device<Cuda>, Backend<Shm>> ddp(job.communicator());
    require(ddp.model().made_on == job.model().made_on, "a wrapper's model, on another GPU");
    ddp.step(batch_of(4, 0));
  });
  run_main<Ranks>("--ranks=4", check(20),
                  [](Session& session) { return Homed(20 + session.rank().value()); });
  run_main<Ranks>("--ranks=4", check(7), [] { return Homed(7); });
}

BOOST_AUTO_TEST_CASE(replicas_make_their_models_on_their_own_gpus_and_are_visited_there) {
  const emulated::Machine machine(4);
  const auto check = [](auto& dp, const auto& number) {
    check_cuda(cudaSetDevice(3), "cudaSetDevice");
    dp.step(batch_of(9, 1));
    std::size_t i = 0;
    dp.for_each_model([&](Homed& model) {
      require(current_gpu() == static_cast<int>(i), "it is visited on another GPU");
      require(model.made_on == static_cast<int>(i), "it was made on another GPU");
      require(model.number == number(i), "another model");
      model.count();
      ++i;
    });
    require(i == 4 && current_gpu() == 3, "the program's own GPU has changed");
  };
  using Dp = DataParallel<Homed, Device<Cuda>>;
  {
    Dp dp({.replicas = 4});
    check(dp, [](std::size_t) { return 0u; });
  }
  {
    Dp dp({.replicas = 4}, [](std::size_t i) { return Homed(10 + i); });
    check(dp, [](std::size_t i) { return 10 + i; });
  }
  {
    check_cuda(cudaSetDevice(0), "cudaSetDevice");
    Dp dp({.replicas = 4}, Homed(5));
    check(dp, [](std::size_t) { return 5u; });
  }
  run_main<Replicas>(
      "--ranks=4", [&](Replicas& job) { check(job.dp(), [](std::size_t) { return 8u; }); },
      [](Session&) { return Homed(8); });
}

namespace {

/// Everything that a program can ask of a job. `before_call()` comes before each call.
Numbers use(auto& job, auto& wrapper, const std::function<void()>& before_call) {
  const InMemoryDataset<double, std::int32_t> data(batch_of(10, 4).inputs, batch_of(10, 4).labels);
  Numbers seen;
  const auto see = [&](double number) { seen.push_back(number); };
  for (std::size_t s = 0; s < 4; ++s) {
    before_call();
    const auto loss = job.step(batch_of(6, s));
    before_call();
    see(loss);
    before_call();
    see(wrapper.evaluate(batch_of(6, s)));
  }
  before_call();
  for (auto epoch : job.epochs(1)) {
    before_call();
    for (const auto& batch : epoch.batches(data, 4)) {
      before_call();
      job.step(batch);
    }
    before_call();
    see(*epoch.summary().loss);
  }
  before_call();
  see(job.evaluate(data, 4)["loss"]);
  before_call();
  const auto predicted = job.predict(data, 4);
  for (const double value : predicted.values()) see(value);
  before_call();
  for (const double number : numbers_of(job)) see(number);
  before_call();
  job.initialize([](auto& initial) { initial.param("fc1.bias"_p)(0) = 0.5; });
  before_call();
  job.barrier();
  before_call();
  std::optional<DeviceArena> memory;
  {
    [[maybe_unused]] const auto on = job.on_device();
    memory.emplace(8 * sizeof(double));
  }
  if constexpr (!std::remove_reference_t<decltype(job)>::is_one_process) {
    before_call();
    job.all_reduce(std::span(reinterpret_cast<double*>(memory->data()), 8), Sum{});
  }
  before_call();
  see(job.all_reduce(1.5, Sum{}));
  before_call();
  job.step(batch_of(6, 1));
  before_call();
  for (const double number : numbers_of(job)) see(number);
  before_call();
  return seen;
}

/// `f(job, wrapper)` of ranks or replicas.
template <class Job, class F>
void with_job(const F& f) {
  run_main<Job>("--ranks=4", [&](Job& job) {
    if constexpr (Job::is_one_process) {
      f(job, job.dp());
    } else {
      f(job, job.ddp());
    }
  });
}

template <class Job>
void check_other_gpus_and_threads() {
  const emulated::Machine machine(4);
  Numbers want;
  with_job<Job>([&](auto& job, auto& wrapper) {
    const Numbers seen = use(job, wrapper, [] {});
    if (job.rank() == Rank{0}) want = seen;
  });
  const auto compare = [&](auto& job, const Numbers& seen, const std::string& how) {
    if (job.rank() == Rank{0}) require(seen == want, how + " changes the numbers");
  };
  with_job<Job>([&](auto& job, auto& wrapper) {
    int chosen = current_gpu();
    const auto go_on = [&] {
      require(current_gpu() == chosen, "a call has changed the program's current GPU");
      check_cuda(cudaSetDevice(chosen = (chosen + 1) % 4), "cudaSetDevice");
    };
    compare(job, use(job, wrapper, go_on), "another current GPU");
  });
  with_job<Job>([&](auto& job, auto& wrapper) {
    Numbers seen;
    std::exception_ptr thrown;
    std::thread([&] {  // its current GPU is 0
      try {
        seen = use(job, wrapper, [] { require(current_gpu() == 0, "another GPU"); });
      } catch (...) {
        thrown = std::current_exception();
      }
    })
        .join();
    if (thrown) std::rethrow_exception(thrown);
    compare(job, seen, "another thread");
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_are_called_from_any_gpu_and_thread) {
  check_other_gpus_and_threads<Ranks>();
}
BOOST_AUTO_TEST_CASE(replicas_are_called_from_any_gpu_and_thread) {
  check_other_gpus_and_threads<Replicas>();
}

namespace {

LOCKSTEP_KERNEL fill(double* rows, std::size_t count, double value) {
  for (std::size_t i = 0; i < count; ++i) rows[i] = value;
}

/// Takes its time, as a loss of many outputs does, while other GPUs go on.
LOCKSTEP_KERNEL slow_sum(const double* rows, std::size_t count, double* sum) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  *sum = 0;
  for (std::size_t i = 0; i < count; ++i) *sum += rows[i];
}

/// Its outputs are a number of the batch; its losses are kept, one after the other.
struct Summing {
  using Parameters = ParameterList<Parameter<"w", double, 1>>;
  using Output = OutputOf<double>;
  static constexpr std::size_t most = 64;

  Summing() : kept(most * sizeof(double)) {}
  void initialize(auto&) {}
  double* at(std::size_t i) const { return reinterpret_cast<double*>(kept.data()) + i; }

  void predict(auto& step, const std::vector<double>& batch, auto outputs) {
    detail::launch_kernel<fill>("fill", step.stream(), 1, 1, outputs.data_handle(), outputs.size(),
                                batch.front());
  }
  void loss(auto& step, const auto&, auto outputs, auto) {
    detail::launch_kernel<slow_sum>("slow_sum", step.stream(), 1, 1, outputs.data_handle(),
                                    outputs.size(), at(losses++));
    detail::launch_kernel<fill>("fill", step.stream(), 1, 1, step.loss(), std::size_t{1}, 0.0);
  }
  void backward(auto& step, const auto&, auto) { step.ready("w"_p); }
  void forward(auto&, const auto&) {}
  void backward(auto& step, const auto&) { step.ready("w"_p); }

  DeviceArena kept;
  std::size_t losses = 0;
};

}  // namespace

// A fast replica must not write the next batch's outputs over rows that the loss still reads.
BOOST_AUTO_TEST_CASE(the_loss_of_all_outputs_is_taken_before_the_next_ones_are_written) {
  for (const std::size_t root : {0, 1}) {
    const emulated::Machine machine(3);
    DataParallel<Summing, Device<Cuda>> dp({.replicas = 3, .devices = {}, .output_device = root});
    constexpr std::size_t rounds = 8;
    for (std::size_t i = 0; i < rounds; ++i) {
      const std::vector<double> batch(9, static_cast<double>(i));
      if (i % 3 == 2) {
        dp.step(batch);
      } else {
        dp.evaluate(batch);  // nobody reads its loss, so that the host goes on
      }
    }
    dp.synchronize();
    std::size_t number = 0;
    dp.for_each_model([&](Summing& model) {
      if (number++ != root) return;
      std::vector<double> sums(rounds);
      check_cuda(cudaMemcpy(sums.data(), model.at(0), rounds * sizeof(double), cudaMemcpyDefault),
                 "cudaMemcpy");
      for (std::size_t i = 0; i < rounds; ++i)
        BOOST_TEST(sums[i] == 9.0 * static_cast<double>(i), "batch " << i << ": " << sums[i]);
    });
  }
}

namespace {

/// A batch in the memory of one GPU.
struct Uploaded {
  Uploaded(int gpu, const LabelledBatch<double, std::int32_t>& from) {
    check_cuda(cudaSetDevice(gpu), "cudaSetDevice");
    inputs.emplace(from.inputs.size() * sizeof(double));
    labels.emplace(from.labels.size() * sizeof(std::int32_t));
    detail::copy_now(inputs->data(), from.inputs.data(), from.inputs.size() * sizeof(double));
    detail::copy_now(labels->data(), from.labels.data(), from.labels.size() * sizeof(std::int32_t));
    batch.inputs = reinterpret_cast<const double*>(inputs->data());
    batch.labels = reinterpret_cast<const std::int32_t*>(labels->data());
    batch.rows = from.size();
    batch.width = from.width;
  }

  std::optional<DeviceArena> inputs, labels;
  DeviceBatch<double, std::int32_t> batch;
};

/// Reads a pair of views rather than a batch.
struct OfViews : Split {
  using Views =
      std::pair<DeviceView<const double, dynamic, width>, DeviceView<const std::int32_t, dynamic>>;
  static DeviceBatch<double, std::int32_t> unpacked(const Views& views) {
    return {views.first.data_handle(), views.second.data_handle(), nullptr, views.first.extent(0),
            width};
  }
  OfViews replicate() const { return {}; }
  void forward(auto& step, const auto& views) { Split::forward(step, unpacked(views)); }
  void predict(auto& step, const auto& views, auto outputs) {
    Split::predict(step, unpacked(views), outputs);
  }
  void loss(auto& step, const auto& views, auto outputs, auto gradients) {
    Split::loss(step, unpacked(views), outputs, gradients);
  }
  void backward(auto& step, const auto& views) { Split::backward(step, unpacked(views)); }
  void backward(auto& step, const auto& views, auto gradients) {
    Split::backward(step, unpacked(views), gradients);
  }
};

/// Trains from batches in host memory and from the same on `gpu`: the same numbers.
template <class... Ps>
void check_batches_on(int gpu) {
  DpOptions options;
  options.replicas = 4;
  options.output_device = 1;
  DataParallel<Split, Device<Cuda>, Ps...> from_host(options), from_gpu(options);
  DataParallel<OfViews, Device<Cuda>, Ps...> from_views(options);
  std::vector<Uploaded> batches;
  for (std::size_t i = 0; i < 2; ++i) batches.emplace_back(gpu, batch_of(9 - i, i));
  for (std::size_t s = 0; s < 6; ++s) {
    const auto& batch = batches[s % 2].batch;
    const double want = from_host.step(batch_of(batch.rows, s % 2));
    BOOST_TEST(static_cast<double>(from_gpu.step(batch)) == want);
    const OfViews::Views views(
        DeviceView<const double, dynamic, width>(batch.inputs, batch.rows, width),
        DeviceView<const std::int32_t, dynamic>(batch.labels, batch.rows));
    BOOST_TEST(static_cast<double>(from_views.step(views)) == want);
    BOOST_TEST(static_cast<double>(from_gpu.evaluate(batch)) ==
               static_cast<double>(from_host.evaluate(batch_of(batch.rows, s % 2))));
  }
  BOOST_TEST((numbers_of(from_gpu) == numbers_of(from_host)));
}

}  // namespace

// Without peer access a kernel that reads a batch of another GPU is a fault of the emulated
// machine.
BOOST_AUTO_TEST_CASE(a_batch_on_a_gpu_goes_from_there_to_every_replica) {
  const emulated::Machine machine(4);
  emulated::host.may_access = false;
  for (const int gpu : {0, 3}) {
    check_batches_on(gpu);
    check_batches_on<LossOnReplica>(gpu);
  }
  const Uploaded batch(2, batch_of(8, 1));
  DataParallel<Split, Device<Cuda>, LossOnReplica> dp({.replicas = 4});
  emulated::take_tally();
  dp.step(batch.batch);
  // Inputs and labels, for each of the three others.
  BOOST_TEST(emulated::take_tally().of("cudaMemcpyPeerAsync") == 6u);
}

BOOST_AUTO_TEST_CASE(one_replica_needs_no_stream_but_its_own) {
  const emulated::Machine machine(2);
  DataParallel<Split, Device<Cuda>, CapturedStep, LossOnReplica> dp({.replicas = 1});
  for (std::size_t s = 0; s < 4; ++s) dp.step(batch_of(6, 0));
  dp.synchronize();
  emulated::take_tally();
  dp.step(batch_of(6, 0));
  const auto tally = emulated::take_tally();
  BOOST_TEST(tally.of("cudaGraphLaunch") == 1u);
  BOOST_TEST(tally.of("cudaStreamWaitEvent") == 0u);
}

BOOST_AUTO_TEST_SUITE_END()

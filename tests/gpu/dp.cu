// SPDX-License-Identifier: Apache-2.0
// DP on GPUs, whose replicas may share one: dp --replicas N [CHECK]
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu/ddp_checks.cuh"
#include "lockstep/lockstep.cuh"

namespace {

using namespace lockstep;
using namespace train;
using gpu_test::all_parameters;
using gpu_test::close;
using gpu_test::downloaded;
using gpu_test::Floats;
using gpu_test::require;

template <class Model, class... Ps>
using Dp = DataParallel<Model, Device<Cuda>, Ps...>;

/// Every number of a job on the CPU.
std::vector<double> numbers_on_cpu(const auto& job) {
  std::vector<double> all;
  PlainMlp<1, 1, 1>::for_each_parameter(job, [&](const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

void require_numbers(auto& dp, const std::vector<double>& want, const std::string& how) {
  dp.synchronize();
  std::size_t k = 0;
  PlainMlp<1, 1, 1>::for_each_parameter(dp, [&](const auto& view) {
    for (const auto value : downloaded(view)) {
      require(close(static_cast<double>(value), want[k], 1e-9),
              how + ": number " + std::to_string(k) + " is " + std::to_string(value) +
                  ", one device on the whole batch has " + std::to_string(want[k]));
      ++k;
    }
  });
  require(k == want.size(), how + ": how many numbers");
}

/// Random networks and batches, divisible or not and smaller than the number of replicas: the
/// replicas together are the CPU alone.
template <template <class, std::size_t, std::size_t, std::size_t> class Net, std::size_t Micro = 1>
void check_whole(std::size_t replicas, const std::string& how) {
  std::mt19937 random(11);
  const auto pick = [&](std::size_t most) { return random() % most + 1; };
  for (int round = 0; round < 4; ++round) {
    const std::size_t in = pick(40), hidden = pick(50), out = pick(6) + 1, rows = pick(24);
    Net<double, dynamic, dynamic, dynamic> on_gpu;
    PlainMlp<dynamic, dynamic, dynamic> on_cpu;
    on_gpu.in = on_cpu.in = in;
    on_gpu.hidden = on_cpu.hidden = hidden;
    on_gpu.out = on_cpu.out = out;
    Dp<decltype(on_gpu), Optimizer<AdamW>, Clip<0.5>, Accumulate<Micro>> dp({.replicas = replicas},
                                                                            std::move(on_gpu));
    LoopbackCommunicator alone;
    detail::BasicDdp<decltype(on_cpu),
                     CanonicalPolicies<World<1>, Optimizer<AdamW>, Clip<0.5>, Accumulate<Micro>>,
                     LoopbackCommunicator>
        cpu(alone, on_cpu);
    const std::string text = how + ", network " + std::to_string(in) + "-" +
                             std::to_string(hidden) + "-" + std::to_string(out) + ", " +
                             std::to_string(rows) + " rows, round " + std::to_string(round);
    for (std::size_t s = 0; s < 12; ++s) {
      const std::size_t size = s % 4 == 3 ? (rows + 1) / 2 : rows;
      const Samples whole = reference_batch(size, in, out, s % 5, 0);
      const double loss = dp.step(labelled<double>(whole));
      const double want = cpu.step(whole);
      require(close(loss, want, 1e-9), text + ": the loss of step " + std::to_string(s) + " is " +
                                           std::to_string(loss) + ", should be " +
                                           std::to_string(want));
      const double again = dp.evaluate(labelled<double>(whole));
      require(close(again, cpu.evaluate(whole), 1e-9), text + ": evaluation");
    }
    require_numbers(dp, numbers_on_cpu(cpu), text);
  }
}

using Plain = GpuPlainMlp<float, 20, 32, 4>;
using Split = GpuSplitMlp<float, 20, 32, 4>;

/// Trains, and returns the losses and the parameters.
template <class Net, class... Ps>
std::pair<std::vector<double>, std::string> run_job(std::size_t replicas, std::size_t steps,
                                                    std::size_t* graphs = nullptr) {
  Dp<Net, Ps...> dp({.replicas = replicas});
  dp.optimizer().lr = 0.02;
  std::vector<double> losses;
  for (std::size_t s = 0; s < steps; ++s) {
    const std::size_t rows = s % 4 == 3 ? 5 : 12;  // the last of an epoch is smaller
    losses.push_back(dp.step(labelled<float>(reference_batch(rows, 20, 4, s % 2, 0))));
  }
  dp.synchronize();
  if constexpr ((std::is_same_v<Ps, CapturedStep> || ...))
    *graphs = dp.template captured_graphs<Floats>();
  return {losses, all_parameters(dp)};
}

template <class Net, class... Ps>
void check_captured_of(std::size_t replicas, const std::string& how) {
  const auto eager = run_job<Net, Optimizer<AdamW>, Ps...>(replicas, 24);
  require(run_job<Net, Optimizer<AdamW>, Ps...>(replicas, 24) == eager,
          how + ": a second run has other bits");
  std::size_t graphs = 0;
  require(run_job<Net, Optimizer<AdamW>, CapturedStep, Ps...>(replicas, 24, &graphs) == eager,
          how + ": captured steps give other bits");
  require(graphs >= 2, how + ": " + std::to_string(graphs) + " graphs, of two sizes of batch");
}

void check_captured(std::size_t replicas) {
  check_captured_of<Plain>(replicas, "the loss on replicas");
  check_captured_of<Split>(replicas, "the loss of all outputs");
  check_captured_of<Split, LossOnReplica>(replicas, "LossOnReplica");
  check_captured_of<Split, Accumulate<2>, Clip<0.5>>(replicas, "clipped, of two micro-batches");
}

/// Replicas that own shards have the bits of those that own everything.
void check_zero(std::size_t replicas) {
  using ZeRO = Sharding<ZeroRedundancy>;
  require(run_job<Plain, Optimizer<AdamW>, ZeRO>(replicas, 24) ==
              run_job<Plain, Optimizer<AdamW>>(replicas, 24),
          "shards have other bits");
  check_captured_of<Plain, ZeRO>(replicas, "shards");
}

void check_mixed(std::size_t replicas) {
  constexpr std::size_t steps = 24;
  const auto exact = run_job<Plain, Optimizer<SGDMomentum>>(replicas, steps);
  const auto compare = [&](const char* name, const auto& mixed) {
    for (std::size_t s = 0; s < steps; ++s) {
      require(close(mixed.first[s], exact.first[s], s < 6 ? 0.05 : 0.4),
              std::string(name) + ": the loss of step " + std::to_string(s) + " is " +
                  std::to_string(mixed.first[s]) + ", in float " + std::to_string(exact.first[s]));
    }
    require(mixed.second != exact.second, std::string(name) + " has the bits that float has");
  };
  compare("bfloat16",
          run_job<Plain, Optimizer<SGDMomentum>, Precision<Mixed<BFloat16>>>(replicas, steps));
  compare("half, the loss of all outputs",
          run_job<Split, Optimizer<SGDMomentum>, Precision<Mixed<Half>>>(replicas, steps));
  std::size_t graphs = 0;
  compare("half, captured",
          run_job<Split, Optimizer<SGDMomentum>, Precision<Mixed<Half>>, CapturedStep>(
              replicas, steps, &graphs));
}

/// Fails in forward when it is told to.
struct Moody : Plain {
  bool fails = false;
  Moody replicate() const { return {}; }
  void forward(auto& step, const auto& batch) {
    if (fails) throw std::runtime_error("not today");
    Plain::forward(step, batch);
  }
};

/// A model's failure in forward is thrown with its replica, and the job goes on; buffers and unused
/// parameters are as on the CPU.
void check_faults(std::size_t replicas) {
  Dp<Moody> dp({.replicas = replicas}), other({.replicas = replicas});
  const auto batch = labelled<float>(reference_batch(8, 20, 4, 1, 0));
  for (int round = 0; round < 3; ++round) {
    std::size_t i = 0;
    dp.for_each_model([&](Moody& model) { model.fails = i++ != 0; });
    std::string said;
    try {
      dp.step(batch);
    } catch (const Error& error) {
      said = error.what();
    }
    require(said.find("replica 1: not today") != std::string::npos, "it said: " + said);
    dp.for_each_model([](Moody& model) { model.fails = false; });
    dp.step(batch);
    other.step(batch);
  }
  dp.synchronize();
  other.synchronize();
  require(all_parameters(dp) == all_parameters(other), "a failure left something behind");
}

/// The trainer's loop, with data that is uploaded share by share: the same with any number.
void check_trainer(std::size_t replicas) {
  using Job = Trainer<Plain, ParallelStrategy<DP>, Device<Cuda>, CapturedStep, Optimizer<Adam>>;
  std::vector<float> inputs;
  std::vector<std::int32_t> labels;
  const Samples samples = reference_batch(40, 20, 4, 3, 0);
  for (const double x : samples.x) inputs.push_back(static_cast<float>(x));
  for (const std::size_t y : samples.y) labels.push_back(static_cast<std::int32_t>(y));
  const InMemoryDataset<float, std::int32_t> data(inputs, labels);
  const auto train = [&](std::size_t number) {
    Session session = detail::join_alone();
    TrainerOptions options;
    options.replicas = number;
    Job job(session, {}, options);
    std::vector<double> losses;
    for (auto epoch : job.epochs(20)) {
      for (const auto& batch : epoch.batches(data, 16)) job.step(batch);
      losses.push_back(job.evaluate(data, 12)["loss"]);
    }
    return losses;
  };
  const std::vector<double> losses = train(replicas);
  const std::vector<double> alone = train(1);
  require(losses.back() < losses.front(), "it does not learn");
  for (std::size_t i = 0; i < losses.size(); ++i) {
    require(std::abs(losses[i] - alone[i]) < 1e-4,
            "in epoch " + std::to_string(i) + " the loss is " + std::to_string(losses[i]) +
                ", and " + std::to_string(alone[i]) + " with one replica");
  }
}

/// Outputs of all replicas, gathered on the last one's GPU, are those of one replica; so is the
/// training with a loss that is taken there. A job predicts every sample of its data in order.
void check_predictions(std::size_t replicas) {
  DpOptions options;
  options.replicas = replicas;
  options.output_device = replicas - 1;  // where replicas share a GPU, a replica's number
  if (detail::visible_gpus() >= replicas)
    for (std::size_t i = 0; i < replicas; ++i) options.devices.push_back(replicas - 1 - i);
  DpOptions one;
  one.replicas = 1;
  Dp<Split> dp(options), alone(one);
  Dp<Split, LossOnReplica> replica_loss(options);
  for (std::size_t s = 0; s < 6; ++s) {
    const auto batch = labelled<float>(reference_batch(s % 2 == 0 ? 12 : 3, 20, 4, s, 0));
    const auto rows = downloaded(dp.predict(batch));
    require(rows.size() == 4 * batch.size(), "how many outputs");
    require(s != 0 || rows == downloaded(replica_loss.predict(batch)), "LossOnReplica");
    const auto want = downloaded(alone.predict(batch));
    for (std::size_t i = 0; i < want.size(); ++i)
      require(close(rows[i], want[i], 1e-3), "output " + std::to_string(i));
    require(close(dp.step(batch), alone.step(batch), 1e-3), "the loss on the output device");
  }

  using Job = Trainer<Split, ParallelStrategy<DP>, Device<Cuda>, CapturedStep>;
  const Samples samples = reference_batch(11, 20, 4, 3, 0);
  const Floats whole = labelled<float>(samples);
  const InMemoryDataset<float, std::int32_t> data(whole.inputs, whole.labels);
  Session session = detail::join_alone();
  TrainerOptions wanted;
  wanted.replicas = replicas;
  Job job(session, {}, wanted);
  job.fit(data, {.epochs = 3, .batch_size = 4});
  const auto predicted = job.predict(data, 4);
  const auto rows = downloaded(job.dp().predict(whole));
  require(predicted.values().size() == rows.size() && predicted.size() == 11, "how many rows");
  for (std::size_t i = 0; i < rows.size(); ++i)
    require(close(predicted.values()[i], rows[i], 1e-4), "row of number " + std::to_string(i));
}

/// Makes a stream when it is constructed.
struct Homed : Plain {
  explicit Homed(std::size_t number) : number(number) {
    check_cuda(cudaGetDevice(&made_on), "cudaGetDevice");
  }
  void forward(auto& step, const auto& batch) {
    own.synchronize();
    Plain::forward(step, batch);
  }
  std::size_t number;
  int made_on = -1;
  CudaStream own;
};

/// Every replica's model is made, run and visited on its own GPU, and batches may be on any of
/// them; losses of evaluations that nobody reads are taken before the next outputs are written.
void check_homes(std::size_t replicas) {
  Dp<Homed> dp({.replicas = replicas}, [](std::size_t i) { return Homed(i); });
  Dp<Plain> other({.replicas = replicas});
  const auto batch = labelled<float>(reference_batch(11, 20, 4, 1, 0));
  const auto copy = [](const auto& values) {
    DeviceArena memory(values.size() * sizeof(values[0]));
    detail::copy_now(memory.data(), values.data(), memory.bytes());
    return memory;
  };
  const DeviceArena inputs = copy(batch.inputs), labels = copy(batch.labels);
  DeviceBatch<float, std::int32_t> on_gpu;
  on_gpu.inputs = reinterpret_cast<const float*>(inputs.data());
  on_gpu.labels = reinterpret_cast<const std::int32_t*>(labels.data());
  on_gpu.rows = batch.size();
  on_gpu.width = batch.width;
  for (int s = 0; s < 4; ++s)
    require(static_cast<double>(dp.step(on_gpu)) == static_cast<double>(other.step(batch)),
            "a batch on a GPU has another loss");
  std::size_t i = 0;
  dp.for_each_model([&](Homed& model) {
    int current = -1;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    require(model.number == i && model.made_on == current, "a model is not at home");
    ++i;
  });
  require(i == replicas, "how many models");
  dp.synchronize();
  other.synchronize();
  require(all_parameters(dp) == all_parameters(other), "other parameters");

  Dp<Split> split({.replicas = replicas});
  const auto first = labelled<float>(reference_batch(24, 20, 4, 2, 0));
  const double want = split.evaluate(first);
  for (int s = 0; s < 50; ++s) {
    split.evaluate(batch);  // nobody reads it
    require(static_cast<double>(split.evaluate(first)) == want, "evaluations overtake each other");
  }
}

/// Replicas go on from a copy of others, which was taken between two steps, to the same bits.
void check_kept(std::size_t replicas) {
  using Job = Dp<Plain, Optimizer<AdamW>, CapturedStep, Accumulate<2>>;
  const std::string wrong =
      go_on([&] { return std::make_unique<Job>(DpOptions{.replicas = replicas}); },
            [](Job& job, std::size_t s) {
              job.step(labelled<float>(reference_batch(11, 20, 4, s % 2, 0)));
            },
            6, 9);
  require(wrong.empty(), wrong);
}

void run_checks(std::size_t replicas, const std::string& list) {
  gpu_test::CheckNames names(list);
  const auto run = [&](const char* check, auto f) {
    if (!names.wants(check)) return;
    f();
    std::printf("ok %s, %zu replicas\n", check, replicas);
  };
  run("replica", [&] {
    check_whole<GpuPlainMlp>(replicas, "the loss on replicas");
    check_whole<GpuPlainMlp, 2>(replicas, "the loss on replicas, two micro-batches");
  });
  run("output", [&] {
    check_whole<GpuSplitMlp>(replicas, "the loss of all outputs");
    check_whole<GpuSplitMlp, 2>(replicas, "the loss of all outputs, micro-batches");
  });
  run("captured", [&] { check_captured(replicas); });
  run("mixed", [&] { check_mixed(replicas); });
  run("zero", [&] { check_zero(replicas); });
  if (replicas > 1) run("faults", [&] { check_faults(replicas); });
  run("trainer", [&] { check_trainer(replicas); });
  run("predictions", [&] { check_predictions(replicas); });
  run("homes", [&] { check_homes(replicas); });
  run("kept", [&] { check_kept(replicas); });
  names.require_known();
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const auto run = [](Session& session, std::optional<std::size_t> replicas) {
    const auto& arguments = session.arguments();
    run_checks(replicas.value_or(2), arguments.size() > 1 ? arguments[1] : "all");
    return 0;
  };
  return detail::launch_as(detail::RanksAs::replicas, argc, argv, run, dynamic);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What DDP on GPUs must do, whatever its ranks communicate through. Every check is a
/// function of a communicator that throws what is wrong.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/check_names.hpp"
#include "gpu/join_case.cuh"
#include "gpu/plain_mlp.cuh"
#include "gpu/saved.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/lockstep.cuh"
#include "require.hpp"
#include "train/listed.hpp"
#include "train/reference_case.hpp"
#include "train/state.hpp"

namespace gpu_test {

using ::require;

using namespace lockstep;
using namespace train;

template <class View>
auto downloaded(const View& view) {
  std::vector<typename View::value_type> values(view.size());
  check_cuda(cudaMemcpy(values.data(), view.data_handle(),
                        values.size() * sizeof(typename View::value_type), cudaMemcpyDefault),
             "cudaMemcpy");
  return values;
}

/// The views that `visit` goes through, one behind the other, as bytes.
std::string bytes_of_views(const auto& visit) {
  std::string bytes;
  visit([&](const auto& view) {
    const auto values = downloaded(view);
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  });
  return bytes;
}

/// Every parameter.
template <class Ddp>
std::string all_parameters(Ddp& ddp) {
  return bytes_of_views([&](const auto& f) {
    ddp.for_each_parameter([&](std::string_view, const auto& view) { f(view); });
  });
}

/// Every parameter of the network, by the names that it declares.
template <class Ddp>
std::string named_parameters(Ddp& ddp) {
  return bytes_of_views([&](const auto& f) { PlainMlp<1, 1, 1>::for_each_parameter(ddp, f); });
}

/// The same bits on all ranks, or which rank differs.
void require_equal_replicas(auto& comm, auto& ddp, const std::string& how) {
  comm.synchronize();
  const auto all = all_gather_objects(comm, all_parameters(ddp));
  for (std::size_t r = 1; r < all.size(); ++r) {
    require(all[r] == all[0], how + ": parameters of rank " + std::to_string(r) +
                                  " are not the bits that rank 0 has");
  }
}

inline bool close(double a, double b, double tolerance) {
  return std::abs(a - b) <= tolerance * std::max(std::abs(b), 1e-3);
}

/// Has a step the bits of its phases? A division by the number of ranks that the update makes,
/// fused with other arithmetic, is rounded otherwise than one that is made before it.
template <class Comm>
bool rounds_alike(const Comm& comm) {
  return !detail::AveragingBySums<Comm> || std::has_single_bit(comm.world_size().value());
}
template <class Comm>
void require_same_training(const Comm& comm, const std::string& got, const std::string& wanted,
                           const std::string& how) {
  bool same = got == wanted;
  if (!rounds_alike(comm) && got.size() == wanted.size()) {
    std::vector<float> a(got.size() / sizeof(float));
    std::vector<float> b(a.size());
    std::memcpy(a.data(), got.data(), got.size());
    std::memcpy(b.data(), wanted.data(), got.size());
    same = std::equal(a.begin(), a.end(), b.begin(),
                      [](float x, float y) { return close(x, y, 1e-4); });
  }
  require(same, how + " train differently from steps");
}

template <class... Ps, class Comm>
auto make_ddp(Comm& comm, auto model) {
  return detail::BasicDdp<decltype(model), CanonicalPolicies<Device<Cuda>, Ps...>, Comm>(comm,
                                                                                         model);
}
template <class Model, class Comm, class... Ps>
using Ddp = detail::BasicDdp<Model, CanonicalPolicies<Device<Cuda>, Ps...>, Comm>;

/// Can its steps be graphs?
template <class Comm>
concept Capturing = requires(Comm& comm, void (*step)()) { comm.capture(step); };

// ---- PyTorch's figures

template <std::size_t MicroBatches, class... Ps, class Comm>
void train_reference(Comm& comm, const ReferenceCase& c) {
  using Model = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  Ddp<Model, Comm, Optimizer<ReferenceRule>, Accumulate<MicroBatches>,
      Buckets<BucketLimits{600, 1500}>, Ps...>
      ddp(comm, c.model<Model>());
  choose_rule(ddp.optimizer(), c);
  for (std::size_t s = 0; s < c.steps; ++s) {
    double loss[] = {0};
    for (std::size_t m = s * MicroBatches; m < (s + 1) * MicroBatches; ++m)
      loss[0] += ddp.step(labelled<double>(c.samples(m, comm.rank().value()))) / MicroBatches;
    comm.all_reduce(loss, Average{});
    require_loss(c, s, loss[0]);
  }
  comm.synchronize();
  require_parameters(c, ddp, [](const auto& view) { return downloaded(view); });
  if constexpr ((std::is_same_v<Ps, CapturedStep> || ...)) {
    // In fewer steps no batch may have come twice to the same place.
    require(c.steps < 6 || ddp.template captured_graphs<LabelledBatch<double, std::int32_t>>() != 0,
            c.name + ": nothing was captured");
  }
}

/// Every case of ddp.json that has as many ranks; returns how many there are. Where nothing can be
/// run, fewer are compiled.
template <class... Ps>
std::size_t check_parity(auto& comm) {
  constexpr std::size_t most_accumulated = LOCKSTEP_RUNS_ON_GPU ? 4 : 1;
  const nlohmann::json all = reference("ddp.json");
  std::size_t cases = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].at("world") != comm.world_size().value()) continue;
    ++cases;
    const ReferenceCase c = reference_case(i, all[i]);
    with_policies<most_accumulated>(c, [&]<std::size_t MicroBatches, class ClipPolicy>() {
      train_reference<MicroBatches, ClipPolicy, Ps...>(comm, c);
    });
  }
  return cases;
}

// ---- The CPU's job

/// Five steps, of every rank's GPU on its share of `rows` and of `cpu` on the shares of all. Then
/// both have the same parameters.
void step_beside_cpu(auto& comm, auto& ddp, auto& cpu, std::size_t rows, const std::string& how) {
  const std::size_t in = cpu.model().in, out = cpu.model().out;
  for (std::size_t s = 0; s < 5; ++s) {
    Samples whole{in, {}, {}};
    for (std::size_t r = 0; r < comm.world_size().value(); ++r) {
      const Samples share = reference_batch(rows, in, out, s, r);
      whole.x.insert(whole.x.end(), share.x.begin(), share.x.end());
      whole.y.insert(whole.y.end(), share.y.begin(), share.y.end());
      if (r == comm.rank().value()) ddp.step(labelled<double>(share));
    }
    cpu.step(whole);
  }
  comm.synchronize();
  std::vector<std::vector<double>> want;
  PlainMlp<1, 1, 1>::for_each_parameter(cpu, [&](const auto& view) {
    want.emplace_back(view.data_handle(), view.data_handle() + view.size());
  });
  std::size_t p = 0;
  PlainMlp<1, 1, 1>::for_each_parameter(ddp, [&](const auto& view) {
    const auto got = downloaded(view);
    for (std::size_t i = 0; i < got.size(); ++i) {
      require(close(got[i], want[p][i], 1e-9),
              how + ": parameter " + std::to_string(p) + "[" + std::to_string(i) + "] is " +
                  std::to_string(got[i]) + ", the CPU has " + std::to_string(want[p][i]));
    }
    ++p;
  });
}

/// Random networks and batches: W ranks on GPUs over shares, one process on the CPU over the whole.
template <class... Ps>
void check_cpu(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  std::mt19937 random(7);
  const auto pick = [&](std::size_t most) { return random() % most + 1; };
  for (int round = 0; round < 6; ++round) {
    const std::size_t in = pick(40), hidden = pick(50), out = pick(6) + 1, rows = pick(9);
    GpuPlainMlp<double, dynamic, dynamic, dynamic> on_gpu;
    PlainMlp<dynamic, dynamic, dynamic> on_cpu;
    on_gpu.in = on_cpu.in = in;
    on_gpu.hidden = on_cpu.hidden = hidden;
    on_gpu.out = on_cpu.out = out;
    Ddp<decltype(on_gpu), Comm, Optimizer<AdamW>, Clip<0.5>, Ps...> ddp(comm, std::move(on_gpu));
    LoopbackCommunicator alone;
    detail::BasicDdp<decltype(on_cpu), CanonicalPolicies<World<1>, Optimizer<AdamW>, Clip<0.5>>,
                     LoopbackCommunicator>
        cpu(alone, on_cpu);
    const std::string network =
        "network " + std::to_string(in) + "-" + std::to_string(hidden) + "-" + std::to_string(out);
    step_beside_cpu(comm, ddp, cpu, rows, network);
    require_equal_replicas(comm, ddp, "random networks");
  }
}

// ---- Repeats, precision, and what else a job can ask for

using Network = GpuPlainMlp<float, 20, 32, 4>;
using Floats = LabelledBatch<float, std::int32_t>;

/// Trains, and returns the losses and the parameters.
template <class... Ps>
std::pair<std::vector<double>, std::string> run_job(auto& comm, std::size_t steps = 8,
                                                    std::size_t last_rows = 6,
                                                    Network network = {}) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Ps...> ddp(comm, std::move(network));
  ddp.optimizer().lr = 0.02;
  std::vector<double> losses;
  for (std::size_t s = 0; s < steps; ++s) {
    const std::size_t rows = s % 4 == 3 ? last_rows : 6;
    const auto batch = labelled<float>(reference_batch(rows, 20, 4, s % 2, comm.rank().value()));
    losses.push_back(ddp.step(batch));
  }
  require_equal_replicas(comm, ddp, "a job");
  return {losses, all_parameters(ddp)};
}

void check_repeat(auto& comm) {
  const auto first = run_job<Optimizer<AdamW>>(comm, 8, 3);
  require(run_job<Optimizer<AdamW>>(comm, 8, 3) == first, "a second run has other bits");
  if constexpr (Capturing<std::remove_reference_t<decltype(comm)>>) {
    require(run_job<Optimizer<AdamW>, CapturedStep>(comm, 8, 3) == first,
            "captured steps give other bits than steps call by call");
    require(run_job<Optimizer<AdamW>, CapturedStep>(comm, 8, 3) == first,
            "a second run of captured steps has other bits");
  }
}

/// Fewer bits follow the same curve: closely at first, and still downwards after many steps. Not
/// with Adam, which divides a wrong scale out again.
void check_mixed(auto& comm) {
  constexpr std::size_t steps = 40;
  const auto exact = run_job<Optimizer<SGDMomentum>>(comm, steps);
  const auto compare = [&](const char* name, const auto& mixed) {
    for (std::size_t s = 0; s < steps; ++s) {
      const double tolerance = s < 6 ? 0.05 : 0.4;
      require(close(mixed.first[s], exact.first[s], tolerance),
              std::string(name) + ": the loss of step " + std::to_string(s) + " is " +
                  std::to_string(mixed.first[s]) + ", in float " + std::to_string(exact.first[s]));
    }
    // Of all ranks: one rank's own batches may lose what the others' gain.
    double ends[] = {mixed.first.front(), mixed.first.back()};
    comm.all_reduce(ends, Average{});
    require(ends[1] < ends[0], std::string(name) + " does not learn: the mean loss goes from " +
                                   std::to_string(ends[0]) + " to " + std::to_string(ends[1]));
    require(mixed.second != exact.second, std::string(name) + " has the bits that float has");
  };
  compare("bfloat16", run_job<Optimizer<SGDMomentum>, Precision<Mixed<BFloat16>>>(comm, steps));
  compare("bfloat16, reduced in float",
          run_job<Optimizer<SGDMomentum>, Precision<Mixed<BFloat16, float>>>(comm, steps));
  compare(
      "float, reduced in bfloat16",
      run_job<Optimizer<SGDMomentum>, Precision<Mixed<float, BFloat16>>, Clip<1.0>>(comm, steps));
  const auto half = run_job<Optimizer<SGDMomentum>, Precision<Mixed<Half>>>(comm, steps);
  compare("half", half);
  if constexpr (Capturing<std::remove_reference_t<decltype(comm)>>) {
    require(
        run_job<Optimizer<SGDMomentum>, Precision<Mixed<Half>>, CapturedStep>(comm, steps) == half,
        "half: captured steps give other bits");
  }
}

/// A model that waits for the GPU cannot be captured; it trains all the same.
void check_fallback(auto& comm) {
  Network waiting;
  waiting.waits = true;
  const auto plain = run_job<Optimizer<SGD>>(comm, 6);
  require(run_job<Optimizer<SGD>, CapturedStep>(comm, 6, 6, std::move(waiting)) == plain,
          "a step that could not be captured trains differently");
}

/// By hand, in phases; and a loss that is asked for too late.
void check_phases(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const auto plain = run_job<Optimizer<SGDMomentum>>(comm, 4);
  Ddp<Network, Comm, Optimizer<SGDMomentum>> ddp(comm);
  ddp.optimizer().lr = 0.02;
  for (std::size_t s = 0; s < 4; ++s) {
    const auto batch = labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
    const double loss = ddp.forward(batch).backward().reduce().update();
    require(rounds_alike(comm) ? loss == plain.first[s] : close(loss, plain.first[s], 1e-5),
            "the loss of a phase");
  }
  require_equal_replicas(comm, ddp, "phases");
  require_same_training(comm, all_parameters(ddp), plain.second, "phases");
  const auto batch = labelled<float>(reference_batch(6, 20, 4, 0, comm.rank().value()));
  const auto early = ddp.step(batch);
  ddp.step(batch);
  std::string said;
  try {
    static_cast<void>(static_cast<double>(early));
  } catch (const Error& error) {
    said = error.what();
  }
  require(said.find("a later forward pass has overwritten it") != std::string::npos,
          "a stale loss was not rejected: " + said);
}

/// A model without mathematics: the batch says what becomes of gradients and buffer.
template <class T>
LOCKSTEP_KERNEL set_all(T* data, T value, std::size_t count) {
  if (threadIdx.x < count) data[threadIdx.x] = value;
}

struct Entry {
  float gradient = 0;
  bool uses_b = true;
  float mean = 0;
  friend bool operator==(const Entry&, const Entry&) = default;
};

struct Sheet {
  using Parameters = ParameterList<Parameter<"a", float, 7>, Parameter<"b", float, 40>>;
  using Buffers = BufferList<Buffer<"mean", float, 5>>;

  void initialize(auto& initial) {
    for (std::size_t i = 0; i < 40; ++i) initial.param("b"_p)(i) = 1;
  }
  void forward(auto& step, const Entry& entry) {
    check_cuda(cudaMemcpyAsync(&seen_, step.buffer("mean"_p).data_handle(), sizeof seen_,
                               cudaMemcpyDefault, step.stream()),
               "cudaMemcpyAsync");
    fill(step.stream(), step.buffer("mean"_p).data_handle(), entry.mean, 5);
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
    step.synchronize();
  }
  void backward(auto& step, const Entry& entry) {
    fill(step.stream(), step.grad("a"_p).data_handle(), entry.gradient, 7);
    step.ready("a"_p);
    if (!entry.uses_b) return;
    fill(step.stream(), step.grad("b"_p).data_handle(), entry.gradient, 40);
    step.ready("b"_p);
  }
  /// What forward found in the buffer.
  float seen() const { return seen_; }

 private:
  static void fill(cudaStream_t stream, float* data, float value, std::size_t count) {
    detail::launch_kernel<set_all<float>>("set_all", stream, 1, 64, data, value, count);
  }
  float seen_ = -1;
};

/// What nobody used keeps its bits; what one rank used is everybody's. Rank 0's buffers are
/// everybody's before every forward.
template <class... Ps>
void check_unused(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Sheet, Comm, UnusedParameters<Zero>, Optimizer<SGD>, Ps...> ddp(comm);
  ddp.optimizer().lr = 1;
  const auto world = static_cast<float>(comm.world_size().value());
  const auto rank = static_cast<float>(comm.rank().value());
  ddp.step(Entry{1, comm.rank() == Rank{0}, 10 + rank});
  ddp.step(Entry{1, false, 20 + rank});
  require(ddp.model().seen() == 10,
          "the buffer is " + std::to_string(ddp.model().seen()) + ", rank 0 had written 10");
  ddp.step(Entry{1, false, 0});
  require(ddp.model().seen() == 20, "the buffer of the third step");
  comm.synchronize();
  require(downloaded(ddp.param("a"_p)) == std::vector<float>(7, -3), "a is wrong");
  require(downloaded(ddp.param("b"_p)) == std::vector<float>(40, 1 - 1 / world), "b is wrong");
  const Entry entry{1 + rank, true, 0};
  auto averaged = ddp.forward(entry).backward().reduce();
  comm.synchronize();
  require(downloaded(averaged.grad("a"_p)) == std::vector<float>(7, (world + 1) / 2),
          "gradients after reduce are no averages");
  std::move(averaged).update();
}

// ---- Exhausted ranks before others, and groups of ranks

/// Every case of join.json of this world, with numbers that the host or the GPU decides.
std::size_t check_join(auto& comm) {
  std::size_t cases = joining::train_cases_of_world<>(comm);
  if constexpr (LOCKSTEP_RUNS_ON_GPU) cases += joining::train_cases_of_world<Clip<1e9>>(comm);
  return cases;
}

/// The rows and columns of a grid, beside steps of all ranks.
std::size_t check_job_groups(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const std::size_t world = comm.world_size().value();
  if (world % 2 != 0) return 0;
  Ddp<Sheet, Comm, Groups<Grid<dynamic, 2>>> ddp(comm);
  const std::size_t me = comm.rank().value();
  for (int s = 0; s < 2; ++s) {
    ddp.step(Entry{1, true, 0});
    require(ddp.group().all_reduce(me) == me / 2 * 4 + 1, "the sum in the group");
    require(ddp.across().all_reduce(std::size_t{1}) == world / 2, "the size across groups");
  }
  return 1;
}

// ---- Tails of accumulations, and what is not finite

/// Two batches of a step of three, at an epoch's end, are a step of two.
template <class... Ps>
void check_tail(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<AdamW>, Accumulate<3>, Ps...> threes(comm);
  Ddp<Network, Comm, Optimizer<AdamW>, Accumulate<2>, Ps...> twos(comm);
  for (std::size_t s = 0; s < 12; ++s) {
    const auto batch = labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
    const double loss = threes.step(batch);
    require(twos.step(batch) == loss, "the loss of batch " + std::to_string(s));
    if (s % 2 == 1) threes.step_tail();
  }
  require(threes.updates() == 6, "six steps");
  require_equal_replicas(comm, threes, "tails");
  require(all_parameters(threes) == all_parameters(twos), "a tail has other bits");
}

inline Floats spoiled(Floats batch) {
  batch.inputs[1] = NAN;
  return batch;
}

/// A step that is not finite on one rank leaves no trace on any.
template <class... Ps>
void check_skip(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<AdamW>, Anomaly<Skip>, Ps...> good(comm);
  Ddp<Network, Comm, Optimizer<AdamW>, Anomaly<Skip>, Ps...> bad(comm);
  const bool culprit = comm.rank().value() + 1 == comm.world_size().value();
  for (std::size_t s = 0; s < 8; ++s) {
    const auto batch = labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
    good.step(batch);
    if (s == 0 || s == 5) bad.step(culprit ? spoiled(batch) : batch);
    bad.step(batch);
  }
  require_equal_replicas(comm, bad, "skipped steps");
  require(all_parameters(good) == all_parameters(bad), "a skipped step left a trace");
  require(bad.skipped_steps() == 2 && good.skipped_steps() == 0, "two steps were skipped");
}

/// A step that is not finite on one rank ends the job one step later, on all ranks.
template <class... Ps>
void check_anomaly(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<SGD>, Ps...> ddp(comm);
  const bool culprit = comm.rank().value() + 1 == comm.world_size().value();
  const auto batch = labelled<float>(reference_batch(6, 20, 4, 0, comm.rank().value()));
  for (std::size_t s = 0; s < 4; ++s) ddp.step(batch);
  ddp.step(culprit ? spoiled(batch) : batch);
  comm.synchronize();
  std::string said;
  try {
    ddp.step(batch);
  } catch (const std::exception& error) {
    said = error.what();
  }
  require(said.find("step 5: ") != std::string::npos && said.find("finite") != std::string::npos,
          "a step that was not finite: " + said);
}

// ---- What a program asks for: outputs, tensors, whether a step trains

/// Gives its gradient at once, from device memory, and notes whether its steps train.
struct Giver {
  using Parameters = ParameterList<Parameter<"a", float, 7>>;

  void forward(auto& step, const Entry& entry) {
    (step.is_training() ? trained : evaluated) += 1;
    if (!scratch_) scratch_.emplace(7 * sizeof(float));
    detail::launch_kernel<set_all<float>>("set_all", step.stream(), 1, 64, scratch(),
                                          entry.gradient, std::size_t{7});
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
  void backward(auto& step, const Entry&) {
    require(step.is_training(), "a backward pass that does not train");
    step.set_grad("a"_p, DeviceView<const float, 7>(scratch()));
  }

  int trained = 0;
  int evaluated = 0;

 private:
  float* scratch() const { return reinterpret_cast<float*>(scratch_->data()); }
  std::optional<DeviceArena> scratch_;
};

template <class... Ps>
void check_given(auto& comm, const std::string& how) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Giver, Comm, Optimizer<SGDMomentum>, Ps...> ddp(comm);
  ddp.optimizer().lr = 1;
  ddp.optimizer().momentum = 0;
  for (int s = 0; s < 5; ++s) ddp.step(Entry{2, true, 0});
  require(ddp.model().trained != 0 && ddp.model().evaluated == 0, how + ": a step does not train");
  const int before = ddp.model().trained;
  ddp.evaluate(Entry{2, true, 0});
  require(ddp.model().evaluated == 1 && ddp.model().trained == before,
          how + ": an evaluation trains");
  std::size_t tensors = 0;
  ddp.for_each_parameter([&](std::string_view name, auto view) {
    ++tensors;
    require(name == "a" && downloaded(view) == std::vector<float>(7, -10), how + ": parameters");
  });
  ddp.for_each_state([&](std::string_view name, std::string_view state, auto view) {
    ++tensors;
    require(
        name == "a" && state == "momentum_buffer" && downloaded(view) == std::vector<float>(7, 2),
        how + ": states");
  });
  require(tensors == 2, how + ": other tensors");
}

/// The outputs of a prediction are those of the forward pass in parts, which trains the bits that a
/// step does; the loss is that of the outputs.
void check_outputs(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  check_given<>(comm, "set_grad");
  if constexpr (Capturing<Comm>) check_given<CapturedStep>(comm, "set_grad, captured");
  using Split = GpuSplitMlp<float, 20, 32, 4>;
  Ddp<Split, Comm, Optimizer<SGDMomentum>> ddp(comm), other(comm);
  ddp.optimizer().lr = other.optimizer().lr = 0.02;
  for (std::size_t s = 0; s < 6; ++s) {
    const std::size_t rows = s % 2 == 0 ? 6 : 9;  // the memory of outputs grows in between
    const auto batch = labelled<float>(reference_batch(rows, 20, 4, s % 2, comm.rank().value()));
    const auto predicted = downloaded(ddp.predict(batch));
    auto forwarded = ddp.forward(batch);
    const auto outputs = downloaded(forwarded.outputs());
    require(outputs.size() == rows * 4 && outputs == predicted, "outputs of a batch");
    double loss = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (std::size_t k = 0; k < 4; ++k) sum += std::exp(static_cast<double>(outputs[4 * i + k]));
      loss += std::log(sum) - outputs[4 * i + static_cast<std::size_t>(batch.labels[i])];
    }
    const double said = forwarded.loss();
    require(close(said, loss / static_cast<double>(rows), 1e-4), "the loss of other outputs");
    std::move(forwarded).backward().reduce().update();
    const double once_more = other.step(batch);
    require(rounds_alike(comm) ? once_more == said : close(once_more, said, 1e-5),
            "a step has another loss");
  }
  comm.synchronize();
  require_same_training(comm, all_parameters(ddp), all_parameters(other), "parts");

  Ddp<Network, Comm, Optimizer<SGDMomentum>, Precision<Mixed<Half>>> mixed(comm);
  mixed.step(labelled<float>(reference_batch(6, 20, 4, 0, comm.rank().value())));
  std::map<std::string, std::vector<double>> rounded;
  mixed.for_each_parameter([&](std::string_view name, auto view) {
    for (const auto value : downloaded(view))
      rounded[std::string(name)].push_back(static_cast<float>(value));
  });
  std::size_t masters = 0;
  mixed.for_each_state([&](std::string_view name, std::string_view state, auto view) {
    if (state != "master") return;
    ++masters;
    const auto values = downloaded(view);
    for (std::size_t i = 0; i < values.size(); ++i)
      require(close(values[i], rounded.at(std::string(name)).at(i), 2e-3), "a master weight");
  });
  require(masters == 6 && rounded.size() == 6, "other master weights");
}

// ---- Tensors that are listed at run time

/// A model that lists its tensors has the bits of the one that declares them.
template <class... Ps>
void check_listed(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Model = GpuPlainMlp<float, 20, 32, 4>;
  using Listed = ListedIn<DeviceMemory, Model, float>;
  Ddp<Model, Comm, Optimizer<AdamW>, Clip<0.5>, Accumulate<2>, Ps...> declared(comm);
  Ddp<Listed, Comm, Optimizer<AdamW>, Clip<0.5>, Accumulate<2>, Ps...> listed(comm);
  for (std::size_t s = 0; s < 12; ++s) {
    const auto batch = labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
    const double loss = declared.step(batch);
    require(listed.step(batch) == loss, "the loss of step " + std::to_string(s));
  }
  comm.synchronize();
  const ByName<Model, decltype(listed), DeviceMemory> named(listed);
  require(named_parameters(named) == named_parameters(declared), "other bits");
}

// ---- Frozen parameters and parameter groups

/// Random networks with frozen parameters and groups: ranks on GPUs, and one process on the CPU.
template <class... Ps>
void check_sets(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Weights = Named<"*2.weight", "fc3.weight">;
  using OnGpu = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  using OnCpu = PlainMlp<dynamic, dynamic, dynamic>;
  using Still = Frozen<"fc1.weight", "fc2.bias">;
  using Groups = ParameterGroups<Weights, NoDecay<>>;
  std::mt19937 random(11);
  const auto pick = [&](std::size_t most) { return random() % most + 1; };
  const auto set = [](auto& ddp) {
    ddp.optimizer().lr = 0.01;
    ddp.optimizer().weight_decay = 0.2;
    ddp.optimizer(Weights{}).lr = 0.03;
  };
  for (int round = 0; round < 4; ++round) {
    OnGpu on_gpu;
    OnCpu on_cpu;
    on_gpu.in = on_cpu.in = pick(40);
    on_gpu.hidden = on_cpu.hidden = pick(90);
    on_gpu.out = on_cpu.out = pick(6) + 1;
    const std::size_t rows = pick(9);
    Ddp<OnGpu, Comm, Optimizer<AdamW>, Still, Groups, Ps...> ddp(comm, std::move(on_gpu));
    LoopbackCommunicator alone;
    detail::BasicDdp<OnCpu, CanonicalPolicies<World<1>, Optimizer<AdamW>, Still, Groups, Ps...>,
                     LoopbackCommunicator>
        cpu(alone, on_cpu);
    set(ddp);
    set(cpu);
    step_beside_cpu(comm, ddp, cpu, rows, "frozen parameters and groups");
    require_equal_replicas(comm, ddp, "frozen parameters and groups");
  }
}

/// In 16 bits: frozen parameters have no masters and keep their values, and all others train.
template <class... Ps>
void check_mixed_sets(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<AdamW>, Precision<Mixed<Half>>, Frozen<"fc2.*">,
      ParameterGroups<NoDecay<>>, Ps...>
      ddp(comm);
  const auto frozen = downloaded(ddp.param("fc2.weight"_p));
  const auto trained = downloaded(ddp.param("fc3.weight"_p));
  require(static_cast<float>(frozen[1]) != 0, "a frozen parameter was not initialised");
  for (std::size_t s = 0; s < 8; ++s)
    ddp.step(labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value())));
  comm.synchronize();
  const auto same = [](const auto& a, const auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
  };
  require(same(downloaded(ddp.param("fc2.weight"_p)), frozen), "a frozen parameter has changed");
  require(!same(downloaded(ddp.param("fc3.weight"_p)), trained), "nothing was trained");
  require_equal_replicas(comm, ddp, "frozen parameters in 16 bits");
}

// ---- What a job keeps

/// A job that goes on from a copy of another, which was taken between two updates, ends with its
/// bits.
template <class... Ps>
void check_kept(auto& comm, const std::string& how) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Job = Ddp<Network, Comm, Ps...>;
  for (const std::size_t before : {6, 12}) {  // whole steps of 1, 2 and 3 micro-batches
    const std::string wrong =
        go_on([&] { return std::make_unique<Job>(comm); },
              [&](Job& job, std::size_t s) {
                job.step(labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value())));
              },
              before, 7);
    require(wrong.empty(), how + ", after " + std::to_string(before) + ": " + wrong);
  }
}

/// A job with masters is saved while its steps go on and resumed, and goes to the CPU and back.
template <class... Ps>
void check_saved(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Job = Ddp<Network, Comm, Optimizer<AdamW>, Precision<Mixed<BFloat16>>, Accumulate<2>,
                  Frozen<"fc2.*">, Ps...>;
  std::optional<checkpoints::Folder> folder;
  std::string path;
  if (comm.rank() == Rank{0}) path = folder.emplace().path;
  broadcast_object(comm, path, Rank{0});
  checkpoints::check_saved<Job, checkpoints::HostNetwork<20, 32, 4>>(
      comm, path, [&](std::size_t s) {
        return labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
      });
}

/// Runs the checks of a program on all ranks: every one, or those that are named.
template <class Comm>
class NamedChecks {
 public:
  NamedChecks(Comm& comm, const std::string& names) : comm_(comm), names_(names) {}

  bool runs_all() const { return names_.has_all(); }

  /// A check that returns a number says how many cases it has for these ranks. One that is named
  /// and has none fails.
  template <class F>
  void operator()(const char* check, const F& f) {
    if (!names_.wants(check)) return;
    std::size_t cases = 1;
    if constexpr (std::is_same_v<decltype(f()), std::size_t>) {
      cases = f();
    } else {
      f();
    }
    require(cases != 0 || runs_all(), std::string(check) + " has no case of " +
                                          std::to_string(comm_.world_size().value()) + " ranks");
    comm_.barrier();
    if (cases != 0) tell(check);
  }
  /// A check that ends the job, and so is no part of all.
  template <class F>
  void ending(const char* check, const F& f) {
    if (!names_.names(check)) return;
    f();
    tell(check);
  }
  void require_known() const { names_.require_known(); }

 private:
  void tell(const char* check) {
    if (comm_.rank() == Rank{0})
      std::printf("ok %s, %zu ranks\n", check, comm_.world_size().value());
  }

  Comm& comm_;
  CheckNames names_;
};

/// All of them, or those that are named. `Every` is false where nothing can be run and another
/// program has the same checks compiled already.
template <bool Every>
void run_checks(auto& comm, const std::string& name) {
  constexpr bool captures = Capturing<std::remove_reference_t<decltype(comm)>>;
  NamedChecks run(comm, name);
  run("parity", [&] { return check_parity<>(comm); });
  if constexpr (captures) run("parity_captured", [&] { return check_parity<CapturedStep>(comm); });
  if constexpr (Every) {
    run("cpu", [&] { check_cpu<>(comm); });
    run("repeat", [&] { check_repeat(comm); });
    run("mixed", [&] { check_mixed(comm); });
    if constexpr (captures) run("fallback", [&] { check_fallback(comm); });
    run("phases", [&] { check_phases(comm); });
    run("unused", [&] { check_unused<>(comm); });
    run("tail", [&] { check_tail<>(comm); });
    run("skip", [&] { check_skip<>(comm); });
    if constexpr (captures) {
      run("tail_captured", [&] { check_tail<CapturedStep>(comm); });
      run("skip_captured", [&] { check_skip<CapturedStep>(comm); });
    }
    run("join", [&] { return check_join(comm); });
    run("job_groups", [&] { return check_job_groups(comm); });
    run("outputs", [&] { check_outputs(comm); });
    run("listed", [&] { check_listed<>(comm); });
    if constexpr (captures) run("listed_captured", [&] { check_listed<CapturedStep>(comm); });
    run("sets", [&] {
      check_sets<>(comm);
      check_sets<Clip<0.5>>(comm);
      check_sets<UnusedParameters<Zero>>(comm);
    });
    run("kept", [&] {
      check_kept<Optimizer<AdamW>, Clip<0.5>, Accumulate<2>>(comm, "in float");
      check_kept<Optimizer<AdamW>, Precision<Mixed<Half>>, Frozen<"fc2.*">,
                 ParameterGroups<NoDecay<>>>(comm, "with a scaled loss");
    });
    run("saved", [&] { check_saved<>(comm); });
    if constexpr (captures) {
      run("saved_captured", [&] { check_saved<CapturedStep>(comm); });
      run("kept_captured", [&] {
        check_kept<Optimizer<AdamW>, Clip<0.5>, Accumulate<2>, CapturedStep>(comm, "captured");
        check_kept<Optimizer<AdamW>, Precision<Mixed<Half>>, Frozen<"fc2.*">,
                   ParameterGroups<NoDecay<>>, CapturedStep>(comm, "captured, a scaled loss");
        check_kept<Optimizer<SGDMomentum>, Precision<Mixed<BFloat16>>, Accumulate<3>, CapturedStep>(
            comm, "captured, in bfloat16");
      });
    }
    run("sets_mixed", [&] { check_mixed_sets<>(comm); });
    if constexpr (captures) run("sets_captured", [&] { check_mixed_sets<CapturedStep>(comm); });
  }
  if constexpr (Every) {
    run.ending("anomaly", [&] { check_anomaly<>(comm); });
    if constexpr (captures)
      run.ending("anomaly_captured", [&] { check_anomaly<CapturedStep>(comm); });
  }
  run.require_known();
}

}  // namespace gpu_test

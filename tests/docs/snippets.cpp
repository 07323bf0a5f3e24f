// SPDX-License-Identifier: Apache-2.0
// The code blocks of README.md and docs/ that are in no other file. tests/docs/run compiles them;
// tests/docs/check.py compares them with the pages.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fashion_mnist.hpp"
#include "lockstep/detail/data/lmdb.hpp"

#include "lockstep/detail/data/feed.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/trace.hpp"
#include "mlp.hpp"

using namespace lockstep;
using Mlp784 = Mlp<float, 784, 256, 10>;

// clang-format off
namespace change_one_line {

using Mlp = Mlp784;
using GpuMlp = Mlp784;
#define Trainer detail::Composed  // what the compiler knows of a job; it needs neither CUDA nor Gloo
using Ranks = Trainer<Mlp, ParallelStrategy<DDP>, Backend<Shm>>;  // a process for each rank
using Replicas = Trainer<Mlp, ParallelStrategy<DP>>;              // one process, a thread for each
using Gpus = Trainer<GpuMlp, Device<Cuda>, CapturedStep>;         // NCCL, a step is one CUDA graph
using Hosts = Trainer<Mlp, Backend<Hierarchical<Shm, Gloo>>>;     // many machines
#undef Trainer

static_assert(Ranks::fingerprint() != Replicas::fingerprint());
static_assert(Gpus::fingerprint() != Hosts::fingerprint());

}  // namespace change_one_line

namespace hooked {

using Mlp = Mlp784;
#define Trainer detail::Composed
using Halved = Trainer<Mlp, Hooks<CompressTo<BFloat16>>>;                  // 16 bits on the wire
using LowRank = Trainer<Mlp, Hooks<PowerSGD<2>>, Optimizer<SGDMomentum>>;  // narrow matrices
using Seldom = Trainer<Mlp, Hooks<LocalSGD<8>>>;                           // every 8 steps
using Both = Trainer<Mlp, Hooks<PowerSGD<1>, CompressTo<BFloat16>>>;       // from left to right
#undef Trainer
static_assert(LowRank::fingerprint() != Both::fingerprint());
static_assert(Halved::fingerprint() != Seldom::fingerprint());

struct Noise {  // every rank adds noise to its gradients before they are averaged
  static constexpr std::string_view name = "Noise";
  template <class T>
  struct Bucket {
    RandomStream random;
    explicit Bucket(auto& bucket) : random(rank_seed(Seed{bucket.number()}, bucket.rank())) {}
    void begin(std::span<T> gradients, auto& next) {  // the gradients are complete
      for (T& value : gradients) value += static_cast<T>(random.normal(0, 0.01));
      next.begin(gradients);  // what is handed on travels; backward goes on meanwhile
    }
    void finish(std::span<T> gradients, auto& next) { next.finish(gradients); }  // averages
  };
};
using Private = Trainer<Mlp, Hooks<Noise, CompressTo<BFloat16>>>;
using Shared = ShmCommunicator<>;
void use(detail::Pipeline<float, Shared, detail::HookDevice<Cpu>,
                          detail::HookList<Noise, CompressTo<BFloat16>>>& pipeline,
         std::span<float> gradients) {
  pipeline.begin(gradients);
  pipeline.finish(gradients);
}

}  // namespace hooked
namespace feeding {

using Mlp = Mlp784;
#define Trainer detail::Composed
using Fed = Trainer<Mlp, Groups<Grid<dynamic, 4>>, Feed<LeaderOfGroup>>;  // one of four ranks reads
#undef Trainer
static_assert(Fed::fingerprint() != detail::Composed<Mlp, Groups<Grid<dynamic, 4>>>::fingerprint());

void train(auto& job) {
auto train = job.open([&] { return fashion_mnist("train", job.data()); });  // where it is read
for (auto epoch : job.epochs(10))
  for (const auto& batch : epoch.batches(train, 64)) job.step(batch);
}

struct Sentences {
  std::vector<std::vector<std::int32_t>> tokens;  // of any length
  std::vector<std::string> files;
  double temperature = 1;
  friend void pack(auto& archive, Sentences& batch) {
    archive(batch.tokens, batch.files, batch.temperature);
  }
};
void send(ShmCommunicator<>& comm, Sentences& batch) { broadcast_batch(comm, batch, Rank{0}); }

}  // namespace feeding
namespace sharding {

using Mlp = Mlp784;
#define Trainer detail::Composed
using Slices = Trainer<Mlp, Optimizer<AdamW>, Backend<Gloo>, Sharding<ZeroRedundancy>>;
using Grads = Trainer<Mlp, Optimizer<AdamW>, Backend<Gloo>, Sharding<ZeroRedundancy, Gradients>>;
using Fully = Trainer<Mlp, Optimizer<AdamW>, Backend<Gloo>, Sharding<FullyShard>>;
using Traced = Trainer<Mlp, Optimizer<AdamW>, Backend<Gloo>, Observers<Trace>>;
using Blocks = Sharding<FullyShard, Units<"embed", "blocks.*">, GatheredUnits<3>>;
#undef Trainer
static_assert(Slices::fingerprint() != Grads::fingerprint());

}  // namespace sharding

namespace gpu {

using Classifier = Mlp784;
#define Trainer detail::Composed
using Job = Trainer<Classifier, ParallelStrategy<DDP>, Device<Cuda>, CapturedStep,
                    Sampler<Distributed, Padding>, Optimizer<AdamW>>;
#undef Trainer
static_assert(Job::fingerprint() != 0);

}  // namespace gpu

namespace hosts {

using Mlp = Mlp784;
#define Trainer detail::Composed
using Job = Trainer<Mlp, ParallelStrategy<DDP>, Backend<Hierarchical<Shm, Gloo>>, Optimizer<AdamW>>;
#undef Trainer
static_assert(Job::fingerprint() != 0);

}  // namespace hosts

namespace own_loop {

using Linear = Mlp784;

void train(const auto& dataset) {
auto group = init_process_group();
DistributedSampler<> sampler(dataset.size(), group.world_size(), group.rank());
DataLoader loader(dataset, sampler, {.batch_size = 4});
DistributedDataParallel<Linear, Optimizer<AdamW>> ddp(*group);
for (const auto& batch : loader) ddp.forward(batch).backward().reduce().update();
}

}  // namespace own_loop

namespace communicating {

void talk() {
auto group = init_process_group();                   // who we are: from the launcher's environment
auto gradients = group->allocate<float>(1'000'000);  // memory that all ranks of the host see
group->all_reduce(gradients, Average{});             // in place, the same bits on all ranks

auto work = group->all_reduce_async(gradients, Sum{});
// ... compute something else ...
work.wait();

auto row = join_groups(*group, Grid<dynamic, 2>{group.world_size()});  // my group of two neighbours
auto some = new_group(*group, {Rank{4}, Rank{1}});  // as std::optional: empty where not a member
row.barrier();
if (some) some->barrier();
}

void say_numbers(ProcessGroup<>& group, double loss, bool done, float rate, float best,
                 const std::vector<float>& episode) {
const double mean = group->all_reduce(loss, Average{});        // one number, on all ranks
const double on_root = group->reduce(loss, Rank{0}, Average{}); // on rank 0; elsewhere the rank's own
const bool any = group->all_reduce(done, Max{});               // is it so on any rank? Min: on all
const float first = group->broadcast(rate, Rank{0});           // rank 0's
const std::vector<float> rates = group->all_gather(rate);      // every rank's
const auto rewards = group->all_gather_variable(episode);      // as many as each rank has
for (const float reward : rewards.of(Rank{0})) best = std::max(best, reward);
std::printf("%g %g %d %g %zu %g\n", mean, on_root, any, first, rates.size(), best);
}

void in_a_job(auto& job, double own_reward, std::vector<float> table, int steps,
              const std::vector<float>& observations) {
const double reward = job.all_reduce(own_reward, Average{});   // on CPUs and GPUs
const double total = job.reduce(own_reward);                   // the sum, on rank 0
job.broadcast(table);                                          // rank 0's, in place
const auto lengths = job.all_gather(steps);                    // a number of every rank
const auto rollouts = job.all_gather_variable(observations);   // different numbers on every rank
auto pair = new_group(job.communicator(), {Rank{0}, Rank{1}}); // everything else
std::printf("%g %g %zu %zu %d\n", reward, total, lengths.size(), rollouts.total(), pair.has_value());
}

void divide(ShmCommunicator<6>& six) {
auto three = join_groups(six, Grid<6, 3>{});  // the compiler knows its world of 3
static_assert(std::is_same_v<decltype(three), ShmCommunicator<3>>);
}

}  // namespace communicating

namespace training {

using Model = Mlp784;

using Job = Trainer<Model, ParallelStrategy<DDP>, Backend<Shm>, Sampler<Distributed, Padding>,
                    Optimizer<AdamW>, Schedule<Cosine>, World<4>>;

int run(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    job.optimizer().lr = 2e-3;
    for (auto epoch : job.epochs(8)) {
      for (const auto& batch : epoch.batches(train, 32)) job.step(batch);
      const Scores scores = job.evaluate(test, 500);
      job.on_rank0([&](auto log) {
        log.print("accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
      });
    }
  });
}

void fit(Job& job, const auto& train, const auto& test) {
double best = 0;
job.fit(train, test, {.epochs = 20, .batch_size = 32, .test_batch_size = 500},
        [&](auto& epoch, const Scores& scores) {
          const bool better = scores["accuracy"] > best;
          if (better) best = scores["accuracy"];
          return better || epoch.number() < 3;  // false ends the training
        });
}

void look(Job& job, const auto& test) {
const auto rows = job.predict(test, 500);  // each sample once, in order; rank 0 has them all
job.on_rank0([&](auto log) {
  for (std::size_t i = 0; i < rows.size(); ++i)
    log.print("sample " + std::to_string(i) + ": " + fixed_text(rows[i][0], 3));
});
job.for_each_parameter([](std::string_view name, auto view) {
  std::printf("%s has %zu elements\n", std::string(name).c_str(), view.size());
});
job.for_each_state([](std::string_view parameter, std::string_view state, auto view) {
  std::printf("%s of %s: %g\n", std::string(state).c_str(), std::string(parameter).c_str(), view(0));
});
}

}  // namespace training

namespace sets {

using Model = Mlp784;

using Head = Named<"fc3.*">;
using Tuning = Trainer<Model, Optimizer<AdamW>, ParameterGroups<NoDecay<>, Head>>;

void choose_rates(Tuning& job) {
  job.optimizer().lr = 2e-3;  // of all parameters, and of sets until they get numbers of their own
  job.optimizer(Head{}).lr = 2e-2;
}

struct Scale {  // y = (base + offset) x, squared error
  using Parameters = ParameterList<Parameter<"base", float>, Parameter<"offset", float>>;
  float error = 0;

  float forward(auto& step, const auto& batch) {
    const float slope = step.param("base"_p)() + step.param("offset"_p)();
    error = slope * batch.inputs[0] - batch.labels[0];
    return error * error;
  }
  void backward(auto& step, const auto& batch) {
    write(step, "offset"_p, 2 * error * batch.inputs[0]);
    write(step, "base"_p, 2 * error * batch.inputs[0]);
  }
  static void write(auto& step, auto key, float gradient) {
    if constexpr (trains<decltype(step)>(key)) {  // in Trainer<Scale, Frozen<"base">> not the base
      step.grad(key)() = gradient;
      step.ready(key);
    }
  }
};

void train_one_of_two(const auto& batch) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Scale, World<1>, Frozen<"base">> tuned(nobody);
  DistributedDataParallel<Scale, World<1>> whole(nobody);
  tuned.step(batch);
  whole.step(batch);
}
template void train_one_of_two(const LabelledBatch<float, float>&);

}  // namespace sets

namespace one_process {

using Classifier = Mlp784;
using Job = Trainer<Classifier, ParallelStrategy<DP>, Sampler<Distributed, Padding>,
                    Optimizer<AdamW>>;

void by_hand(auto& loader) {
DataParallel<Classifier, Optimizer<AdamW>> dp({.replicas = 4});  // by default all devices
dp.optimizer().lr = 2e-3;
for (const auto& batch : loader) dp.step(batch);
}

void predict(auto& loader) {
DataParallel<Classifier> dp({.devices = {0, 2}, .output_device = 2});
for (const auto& batch : loader) {
  const auto rows = dp.predict(batch);  // of the whole batch, in order
  std::printf("%g\n", rows(0, 0));
}
}

void shares(Job& job) {
job.dp().for_each_model([](auto& model) { static_cast<void>(model); });
}

}  // namespace one_process

namespace launching {

int run(int argc, char** argv) {
return launch(argc, argv, [](Session& session) {
  std::printf("rank %zu of %zu\n", session.rank().value(), session.world().value());
});
}

void process_groups(Session& session) {
ProcessGroup group(session);
if (group.rank() == Rank{0}) std::printf("%zu GPUs\n", device_count());
group->barrier();                                                   // all collectives
auto pair = new_group<Backend<Shm>>(group, {Rank{0}, Rank{1}});     // a backend of its own
if (pair) pair->barrier();                                          // empty where not a member
destroy_process_group(std::move(group));                            // or at the end of its scope
}

struct Net : Mlp784 {
  explicit Net(float scale) : scale(scale) {}
  float scale;
};

int with_a_model(int argc, char** argv) {
using Job = Trainer<Net>;
const auto train = [](Job& job) { job.barrier(); };
launch<Job>(argc, argv, Net(0.5), train);                          // a model that was constructed
launch<Job>(argc, argv, [](Session&) { return Net(0.5); }, train);  // or one made on each rank
return 0;
}

void inside_a_program(std::size_t n) {
const auto f = [](const Membership& me, Store& store) { store.set("done", me.job); };
spawn<4>(f);                 // four threads
spawn<4>(AsProcesses{}, f);  // four forked processes
spawn(AsThreads{}, n, f);    // a number known at run time
Session session = join("tcp://host0:29500", Rank{0}, WorldSize{2});  // or env://, file:///path
}

}  // namespace launching

namespace checkpoints_of_jobs {

using Job = training::Job;
using Linear = Mlp784;
using Ddp = DistributedDataParallel<Linear, Optimizer<AdamW>>;

void tune(Job& job) {
const LoadReport report = job.load_parameters(
    "resnet.safetensors", {.strict = false, .rename = [](std::string_view name) {
      return std::string(name.starts_with("fc.") ? "" : name);  // an empty name leaves it out
    }});
for (const std::string& name : report.missing) std::printf("%s is new\n", name.c_str());
}

void by_hand(Ddp& ddp, auto& sampler, auto& loader) {
RandomStream noise(rank_seed(Seed{0}, sampler.rank()));
const StateValues mine{{"noise", noise}};
Checkpoints checkpoints(ddp, {.folder = "run", .every_steps = 1000, .resume = true});
const auto from = checkpoints.resume(ddp, {.values = mine});  // nothing in a new folder
if (from && from->position) loader.resume(*from->position);
for (std::uint64_t epoch = from ? from->epoch : 0; epoch < 10; ++epoch) {
  sampler.set_epoch(Epoch{epoch});
  for (const auto& batch : loader) {
    ddp.step(batch);
    checkpoints.step(ddp, [&] {  // called when there is something to save
      return SaveOptions{.epoch = epoch, .position = loader.state(), .values = mine};
    });
  }
  checkpoints.end_epoch(ddp, SaveOptions{.epoch = epoch + 1, .values = mine}, epoch == 9);
}
checkpoints.finish(ddp);
}

void parts(Ddp& ddp, auto& loader, const auto& batch, std::uint64_t epoch, double best) {
save(ddp, "model.safetensors", {.epoch = epoch, .best = best, .position = loader.state()});
load(ddp, "model.safetensors");                         // parameters, buffers, optimizer
const Resumed from = resume(ddp, "model.safetensors");  // and where the loop goes on
if (from.position) loader.resume(*from.position);

Saver saver;  // keeps its memory and its thread for the next save
saver.save(ddp, "model.safetensors", {.asynchronous = true});
ddp.step(batch);    // while the file is being written
saver.finish(ddp);  // throws what went wrong

save(ddp, "whole.safetensors", {.consolidated = true});
}

}  // namespace checkpoints_of_jobs

namespace uneven {

using Model = Mlp784;
using Linear = Mlp784;

using Job = Trainer<Model, UnevenInputs<Join>, Sampler<Distributed, Exact>>;

void train(Job& job, const auto& own_files) {  // each rank may have data of its own
  for (auto epoch : job.epochs(8)) {
    for (const auto& batch : epoch.batches(own_files, 32)) job.step(batch);
    // here all ranks are exhausted, and have the same parameters
  }
}

void by_hand(auto& group, auto& loader) {
DistributedDataParallel<Linear, UnevenInputs<Join, DivideByLive>> ddp(*group);
auto joined = ddp.join();
for (const auto& batch : loader) ddp.step(batch);
joined.finish();  // throws what goes wrong, which a destructor cannot
}

}  // namespace uneven

namespace groups_of_jobs {

using Model = Mlp784;

using Job = Trainer<Model, Groups<Grid<8, 4>>, World<8>>;  // or Groups<Grid<dynamic, 4>>

double mean_of_my_four(Job& job, double own) {
  own = job.across().broadcast(own, Rank{0});     // of the ranks with my place in their groups
  return job.group().all_reduce(own, Average{});  // of my group, whose size the compiler knows
}

}  // namespace groups_of_jobs

namespace listing {

using Batch = LabelledBatch<float, float>;

struct Foreign {
  using Elements = ElementList<float>;
  void tensors(TensorList& list) const {  // in forward order; the same list while it is trained
    for (const auto& [name, rows, columns] : layers)
      list.parameter(name, element_kind<float>(), {rows, columns});
    list.buffer("mean", element_kind<float>(), {8});
  }
  float forward(auto& step, const Batch&) {  // step.param(0): the elements of the first parameter
    return step.param(0)(0);
  }
  void backward(auto& step, const Batch&) {
    step.grad(0)(0) = 1;
    step.ready(0);
  }
  std::vector<std::tuple<std::string, std::size_t, std::size_t>> layers = {{"weight", 8, 8}};
};

using Job = Trainer<Foreign>;

}  // namespace listing

namespace sub_graphs {

struct Adapted {  // y = (base + adapter) x or y = base x, squared error
  using Parameters = ParameterList<Parameter<"base", float>, Parameter<"adapter", float>>;
  float error = 0;

  float forward(auto& step, const auto& batch) {
    float slope = step.param("base"_p)();
    if (step.uses("adapter"_p)) slope += step.param("adapter"_p)();
    error = slope * batch.inputs[0] - batch.labels[0];
    return error * error;
  }
  void backward(auto& step, const auto& batch) {
    if (step.uses("adapter"_p)) step.set_grad("adapter"_p, 2 * error * batch.inputs[0]);
    step.set_grad("base"_p, 2 * error * batch.inputs[0]);
  }
};

using Sets = Subgraphs<Subgraph<"plain", "base">, Subgraph<"with_adapter", "base", "adapter">>;
using Job = Trainer<Adapted, Optimizer<AdamW>, UnusedParameters<Sets>>;

void train(Job& job, const auto& batches, const std::string& kind) {
  for (const auto& batch : batches) job.step<"with_adapter"_s>(batch);
  for (const auto& batch : batches) job.step(job.subgraph(kind), batch);  // chosen at run time
  for (const auto& batch : batches) job.step(batch);                      // the whole model
}
template void train(Job&, const std::vector<LabelledBatch<float, float>>&, const std::string&);

}  // namespace sub_graphs

namespace norms {

struct Normalised {  // y = relu(batch norm of x), squared error
  using Norm1 = BatchNorm<"bn1", 16>;
  using Parameters = ParameterList<Norm1>;  // bn1.weight, bn1.bias
  using Buffers = BufferList<Norm1>;        // bn1.running_mean, .running_var, .num_batches_tracked
  using Rows = HostView<float, dynamic, 16>;

  Norm1 norm1;  // {{.eps = 1e-5, .momentum = 0.1}}
  std::vector<float> x, y;

  float forward(auto& step, const auto& batch) {
    x.assign(batch.inputs.begin(), batch.inputs.end());
    y.resize(x.size());
    norm1.forward_relu(step, Rows(x.data(), batch.size()), Rows(y.data(), batch.size()));
    float loss = 0;
    for (const float value : y) loss += value * value / (2 * static_cast<float>(batch.size()));
    return loss;
  }
  void backward(auto& step, const auto& batch) {
    for (float& value : y) value /= static_cast<float>(batch.size());  // dy
    const Rows dy(y.data(), batch.size());
    norm1.backward_relu(step, Rows(x.data(), batch.size()), dy, dy);  // dx, where dy was
  }
};

using AllRanks = Trainer<Normalised, Backend<Shm>, World<2>, Norms<Synced>>;

#define Trainer detail::Composed
using Own = Trainer<Normalised>;                 // statistics of each rank
using All = Trainer<Normalised, Norms<Synced>>;  // of all ranks
using Host = Trainer<Normalised, Groups<Grid<16, 8>>, Norms<Synced, WithinGroup>>;  // of eight each
#undef Trainer
static_assert(Own::fingerprint() != All::fingerprint());
static_assert(All::fingerprint() != Host::fingerprint());

}  // namespace norms

namespace drawing {

struct Noisy {  // y = w2 dropout(w1 x) + noise, squared error; a batch is one point here
  static constexpr bool draws = true;  // its layers draw random numbers
  using Parameters = ParameterList<Parameter<"w1", float, 64>, Parameter<"w2", float, 64>>;
  Dropout<"drop1"> drop{0.2};
  std::vector<float> hidden = std::vector<float>(64), gradient = hidden;
  float error = 0;

  float forward(auto& step, const auto& batch) {
    const HostView<float, 64> h(hidden.data());
    for (std::size_t i = 0; i < 64; ++i) h(i) = step.param("w1"_p)(i) * batch.inputs[0];
    drop.forward(step, h, h);  // in place, or to another view; in an evaluation it copies
    error = step.is_training() ? 0.1f * step.random("noise"_p).uniform(0) : 0;  // your own layer
    for (std::size_t i = 0; i < 64; ++i) error += step.param("w2"_p)(i) * h(i);
    error -= batch.labels[0];
    return error * error;
  }
  void backward(auto& step, const auto& batch) {
    const HostView<float, 64> d(gradient.data());
    for (std::size_t i = 0; i < 64; ++i) d(i) = 2 * error * step.param("w2"_p)(i);
    drop.backward(step, d, d);  // drops what forward dropped: it is drawn again, not kept
    for (std::size_t i = 0; i < 64; ++i) {
      step.grad("w2"_p)(i) = 2 * error * hidden[i];
      step.grad("w1"_p)(i) = d(i) * batch.inputs[0];
    }
    step.ready("w2"_p);
    step.ready("w1"_p);
  }
};

void train(DistributedDataParallel<Noisy, World<1>>& ddp) {
  const LabelledBatch<float, float> batch;
  ddp.step(batch);
  ddp.evaluate(batch);
}

}  // namespace drawing

// clang-format on

namespace lmdb_sets {

void labelled() {
  write_lmdb("train.lmdb", fashion_mnist("train"));                    // any source of samples
  const auto train = lmdb_dataset<float, std::int32_t>("train.lmdb");  // the types it holds
  std::printf("%zu\n", train.size());
}

struct Photo {
  std::string pixels;
};
using Image = OwnedSample<float, std::int32_t>;
struct Photos {
  using sample_type = Photo;
  std::size_t size() const;
  void read(std::size_t index, Photo& out) const;
};
void augment(const Photo& photo, Image& out, RandomStream& random);

void encode(const Photo& photo, std::vector<std::byte>& out);  // appends to an empty vector
void decode(std::span<const std::byte> record, Photo& out);    // reuses the memory of `out`

void write_and_read(const Photos& photos) {
  write_lmdb("photos.lmdb", photos, encode);
  const auto set = lmdb_dataset<Photo>("photos.lmdb", decode) | map<Image>(augment) | padded(0.f);
  std::printf("%zu\n", set.size());
}

}  // namespace lmdb_sets

int main(int argc, char** argv) {
  const InMemoryDataset<float, int> none({}, {});
  own_loop::train(none);
  communicating::talk();
  DistributedSampler<> sampler(0, WorldSize{1}, Rank{0});
  DataLoader loader(none, sampler, {.batch_size = 1});
  one_process::by_hand(loader);
  one_process::predict(loader);
  launching::inside_a_program(2);
  launch(argc, argv, launching::process_groups);
  ProcessGroup<> group(join());
  checkpoints_of_jobs::Ddp ddp(*group);
  checkpoints_of_jobs::by_hand(ddp, sampler, loader);
  checkpoints_of_jobs::parts(ddp, loader, LabelledBatch<float, int>(), 0, 0);
  communicating::say_numbers(group, 1, true, 1, 1, {});
  launch<listing::Job>(argc, argv,
                       [](listing::Job& job) { communicating::in_a_job(job, 1, {}, 1, {}); });
  launch<listing::Job>(argc, argv, [](listing::Job& job) { job.step(listing::Batch{}); });
  launch<one_process::Job>(argc, argv, one_process::shares);
  launch<training::Job>(argc, argv, [&](training::Job& job) {
    training::fit(job, none, none);
    training::look(job, none);
  });
  launch<training::Job>(argc, argv, checkpoints_of_jobs::tune);
  launch<uneven::Job>(argc, argv, [&](uneven::Job& job) { uneven::train(job, none); });
  uneven::by_hand(group, loader);
  launch<groups_of_jobs::Job>(
      argc, argv, [](groups_of_jobs::Job& job) { groups_of_jobs::mean_of_my_four(job, 1); });
  launching::with_a_model(argc, argv);
  launch<norms::AllRanks>(argc, argv,
                          [](norms::AllRanks& job) { job.step(LabelledBatch<float, int>()); });
  return training::run(argc, argv) + launching::run(argc, argv);
}

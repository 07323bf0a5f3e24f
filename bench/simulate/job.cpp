// SPDX-License-Identifier: Apache-2.0
// Calls and steps of `Backend<Mpi>`, measured or simulated: `./x simulate` compiles this file with
// Open MPI, for hosts of namespaces, and with SimGrid's MPI. Rank 0 prints lines of JSON.
//
//   job call WAY REPEATS KIND:BYTES[:ROUNDS]...
//                                 seconds of calls: median and minimum over repeats
//   job step WAY PLAN SECONDS STEPS
//                                 seconds of a step of a job that computes for so long
//   job plan PLAN                 its buckets, and when each is ready (1: backward's end)
//   job count WORLD KIND BYTES    what one rank of so many sends and allocates (simulated only)
//
// WAY: flat, islands (hierarchical, of 8 ranks); of steps flat, zero, powersgd. KIND: all_reduce,
// reduce_scatter, all_gather. PLAN: mlp, resnet50, gpt2. ROUNDS: see smpi/mpi.h.
#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/mpi.hpp"

#include <malloc.h>
#include <cstdio>
#include <cstdlib>
#include <string>

using namespace lockstep;

namespace {

#if LOCKSTEP_SIMULATED  // `./x simulate` defines it for SimGrid's MPI
void compute(double seconds) { simulated::compute(seconds); }

/// Large memory is the same for all simulated ranks, so that a thousand of them fit: nobody looks
/// at what is in it. What this rank has allocated is counted.
class Memory {
 public:
  static void* allocate(std::size_t bytes, std::align_val_t alignment = std::align_val_t{16}) {
    const auto step = static_cast<std::size_t>(alignment);
    void* const made = bytes >= large ? allocate_shared(bytes)
                                      : std::aligned_alloc(step, (bytes + step - 1) / step * step);
    if (made == nullptr) throw std::bad_alloc();
    live += size_of(made);
    most = std::max(most, live);
    return made;
  }
  static void free(void* memory) {
    if (memory == nullptr) return;
    live -= size_of(memory);
    if (Block* const block = find(memory)) {
      smpi_shared_free(block->begin);
      *block = {};
    } else {
      std::free(memory);
    }
  }

  static inline std::size_t live = 0;
  static inline std::size_t most = 0;

 private:
  struct Block {
    void* begin;
    std::size_t bytes;
  };
  static constexpr std::size_t large = 128 << 10;

  static void* allocate_shared(std::size_t bytes) {
    Block* const block = find(nullptr);
    if (block == nullptr) return nullptr;
    *block = {SMPI_SHARED_MALLOC(bytes), bytes};
    return block->begin;
  }
  static Block* find(const void* begin) {
    for (Block& block : blocks)
      if (block.begin == begin) return &block;
    return nullptr;
  }
  static std::size_t size_of(void* memory) {
    const Block* const block = find(memory);
    return block != nullptr ? block->bytes : ::malloc_usable_size(memory);
  }

  static inline Block blocks[256]{};
};
#else
void compute(double seconds) {
  for (const double end = MPI_Wtime() + seconds; MPI_Wtime() < end;) {
  }
}
#endif

// Plans.

/// A parameter, in forward order; `work` is its share of backward's arithmetic, in any unit.
struct Layer {
  std::string name;
  std::size_t rows;
  std::size_t columns;
  double work;
};

std::vector<Layer> mlp() {
  std::vector<Layer> all;
  const std::size_t widths[] = {784, 256, 256, 10};
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string name = "fc" + std::to_string(i + 1);
    const auto size = static_cast<double>(widths[i] * widths[i + 1]);
    all.push_back({name + ".weight", widths[i + 1], widths[i], size});
    all.push_back({name + ".bias", 1, widths[i + 1], 0});
  }
  return all;
}

/// 25.6 million parameters, in 161 tensors; the arithmetic of a convolution grows with its image.
std::vector<Layer> resnet50() {
  std::vector<Layer> all;
  const auto convolution = [&](const std::string& name, std::size_t out, std::size_t in,
                               std::size_t kernel, std::size_t side) {
    const std::size_t columns = in * kernel * kernel;
    all.push_back(
        {name + ".weight", out, columns, static_cast<double>(out * columns * side * side)});
    all.push_back({name + ".norm.weight", 1, out, 0});
    all.push_back({name + ".norm.bias", 1, out, 0});
  };
  convolution("conv1", 64, 3, 7, 112);
  const std::size_t blocks[] = {3, 4, 6, 3};
  std::size_t in = 64;
  for (std::size_t stage = 0; stage < 4; ++stage) {
    const std::size_t width = std::size_t{64} << stage;
    const std::size_t side = std::size_t{56} >> stage;
    for (std::size_t block = 0; block < blocks[stage]; ++block) {
      const std::string name =
          "layer" + std::to_string(stage + 1) + "." + std::to_string(block) + ".";
      convolution(name + "conv1", width, in, 1, block == 0 && stage != 0 ? 2 * side : side);
      convolution(name + "conv2", width, width, 3, side);
      convolution(name + "conv3", 4 * width, width, 1, side);
      if (block == 0) convolution(name + "downsample", 4 * width, in, 1, side);
      in = 4 * width;
    }
  }
  all.push_back({"fc.weight", 1000, 2048, 1000 * 2048});
  all.push_back({"fc.bias", 1, 1000, 0});
  return all;
}

/// 124 million parameters. The embedding is the head's weight too: its gradient comes last, and the
/// head's arithmetic first.
std::vector<Layer> gpt2() {
  constexpr std::size_t width = 768;
  constexpr std::size_t words = 50257;
  std::vector<Layer> all = {{"wte", words, width, 0}, {"wpe", 1024, width, 0}};
  const auto linear = [&](const std::string& name, std::size_t in, std::size_t out) {
    all.push_back({name + ".weight", in, out, static_cast<double>(in * out)});
    all.push_back({name + ".bias", 1, out, 0});
  };
  const auto norm = [&](const std::string& name, double work) {
    all.push_back({name + ".weight", 1, width, work});
    all.push_back({name + ".bias", 1, width, 0});
  };
  for (std::size_t block = 0; block < 12; ++block) {
    const std::string name = "h." + std::to_string(block) + ".";
    norm(name + "ln_1", 0);
    linear(name + "attn.c_attn", width, 3 * width);
    linear(name + "attn.c_proj", width, width);
    norm(name + "ln_2", 0);
    linear(name + "mlp.c_fc", width, 4 * width);
    linear(name + "mlp.c_proj", 4 * width, width);
  }
  norm("ln_f", static_cast<double>(words * width));
  return all;
}

std::vector<Layer> layers_of(const std::string& plan) {
  if (plan == "mlp") return mlp();
  if (plan == "resnet50") return resnet50();
  if (plan == "gpt2") return gpt2();
  throw std::invalid_argument("no plan " + plan);
}

struct Batch {
  std::size_t size() const { return 1; }
};

/// A model that computes nothing for as long as another would: a third of it in forward.
struct Planned {
  using Elements = ElementList<float>;
  std::vector<Layer> layers;
  double seconds = 0;

  void tensors(TensorList& list) const {
    for (const Layer& layer : layers)
      list.parameter(layer.name, element_kind<float>(), {layer.rows, layer.columns});
  }
  double work() const {
    double sum = 0;
    for (const Layer& layer : layers) sum += layer.work;
    return sum;
  }
  float forward(auto& step, const Batch&) {
    compute(seconds / 3);
    return step.param(0)(0);
  }
  void backward(auto& step, const Batch&) {
    const double of_work = seconds * 2 / 3 / work();
    for (std::size_t i = layers.size(); i-- != 0;) {
      compute(layers[i].work * of_work);
      step.ready(i);
    }
  }
};

// Ranks.

using Flat = MpiCommunicator<dynamic, Callers>;
using Islands = HierarchicalCommunicator<Flat, Flat>;
constexpr std::size_t island = 8;

Membership own_membership() {
  int rank = 0;
  int world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  Membership member{Rank{static_cast<std::size_t>(rank)},
                    WorldSize{static_cast<std::size_t>(world)}};
  member.timeout = std::chrono::hours(10);  // of the clock on the wall, which a simulation ignores
  return member;
}

/// The stages of `Hierarchical<Shm, Mpi>`, with MPI inside of an island too.
Islands make_islands(const Membership& member) {
  std::vector<std::size_t> host(member.world.value());
  for (std::size_t w = 0; w < host.size(); ++w) host[w] = w / island;
  detail::Hosts hosts(host);
  Flat flat(member, MPI_COMM_WORLD, "flat");
  Flat between = join_groups(flat, Groups<World<dynamic>>(member.world, hosts.columns()));
  std::vector<std::vector<std::size_t>> rows;
  for (std::size_t h = 0; h < hosts.count(); ++h) rows.push_back(hosts.ranks(h));
  Flat inside = join_groups(flat, Groups<World<dynamic>>(member.world, rows));
  using Stages = detail::HierarchyStages<Flat, Flat>;
  return Islands(std::make_unique<Stages>(std::move(hosts), std::move(inside), std::move(between),
                                          std::move(flat)));
}

/// Prints what rank 0 sees of so many calls or steps, in seconds.
template <class F>
void measure(const char* name, const std::string& what, std::size_t repeats, auto& comm,
             const F& once) {
  std::vector<double> times;
  for (std::size_t i = 0; i < repeats; ++i) {
    comm.barrier();
    const double begin = MPI_Wtime();
    once();
    times.push_back(MPI_Wtime() - begin);
  }
  std::ranges::sort(times);
  if (comm.rank() != Rank{0}) return;
  std::printf("{\"%s\": \"%s\", \"world\": %zu, \"median\": %.9g, \"least\": %.9g}\n", name,
              what.c_str(), comm.world_size().value(), times[times.size() / 2], times.front());
  std::fflush(stdout);
}

/// Makes a call of so many bytes in all, as a bucket of that size has it.
void make_call(auto& comm, const std::string& kind, std::span<float> data) {
  const std::size_t piece = data.size() / comm.world_size().value();
  const std::span<float> own = data.subspan(comm.rank().value() * piece, piece);
  const std::span<float> all = data.first(piece * comm.world_size().value());
  if (kind == "all_reduce") comm.all_reduce(data, Average{});
  if (kind == "reduce_scatter") comm.reduce_scatter(all, own, Average{});
  if (kind == "all_gather") comm.all_gather(own, all);
}

void measure_calls(auto& comm, std::size_t repeats, std::span<const std::string> calls) {
  for (const std::string& call : calls) {
    const std::size_t colon = call.find(':');
    std::size_t read = 0;
    const std::string rest = call.substr(colon + 1);
    const std::size_t count = std::stoul(rest, &read) / sizeof(float);
    const auto memory = std::make_unique_for_overwrite<float[]>(count);
    const std::span<float> data(memory.get(), count);
#if LOCKSTEP_SIMULATED
    simulated::rounds = read < rest.size() ? std::stoul(rest.substr(read + 1)) : 0;
#else
    std::ranges::fill(data, 1.0F);
#endif
    measure("call", call, repeats, comm, [&] { make_call(comm, call.substr(0, colon), data); });
  }
}

template <class... Policies>
void measure_steps(Flat& comm, const std::string& plan, double seconds, std::size_t steps) {
  DistributedDataParallel<Planned, Backend<Mpi>, Progress<Callers>, Optimizer<SGD>, Anomaly<Ignore>,
                          Policies...>
      ddp(comm, Planned{layers_of(plan), seconds});
  for (int i = 0; i < 2; ++i) ddp.step(Batch{});  // PowerSGD<1> compresses after these
  measure("plan", plan, steps, comm, [&] { ddp.step(Batch{}); });
}

// What needs no other rank.

void print_plan(const std::string& name) {
  const Planned model{layers_of(name), 1};
  TensorList list = detail::list_tensors(model);
  const auto plan = detail::make_bucket_plan<dynamic>(list.of(detail::TensorRole::parameter).infos,
                                                      BucketLimits{});
  std::vector<double> ready(model.layers.size());
  double sum = 0;
  for (std::size_t i = ready.size(); i-- != 0;) ready[i] = (sum += model.layers[i].work);
  // What PowerSGD<1> sends of a bucket in its two rounds, as in `PowerSGD::Bucket::make_plan`.
  std::vector<std::size_t> first(plan.bucket_count);
  std::vector<std::size_t> second(plan.bucket_count);
  for (std::size_t i = 0; i < ready.size(); ++i) {
    const Layer& layer = model.layers[i];
    const std::size_t b = plan.placements[i].bucket;
    const bool shrinks = 2 * (layer.rows + layer.columns) < layer.rows * layer.columns;
    first[b] += sizeof(float) * (shrinks ? layer.rows : layer.rows * layer.columns);
    if (shrinks) second[b] += sizeof(float) * layer.columns;
  }
  std::printf("{\"plan\": \"%s\", \"buckets\": [", name.c_str());
  for (std::size_t b = 0; b < plan.bucket_count; ++b) {
    const auto& bucket = plan.bucket_table[b];
    std::printf("%s{\"bytes\": %zu, \"ready\": %.6f, \"powersgd\": [%zu, %zu]}", b == 0 ? "" : ", ",
                bucket.bytes, ready[bucket.completed_by] / sum, first[b], second[b]);
  }
  std::printf("]}\n");
}

#if LOCKSTEP_SIMULATED
/// Prints what a rank of so many sends in a call, and the memory of a communicator and of a call.
void print_count(const std::string& world, const std::string& kind, std::size_t bytes) {
  simulated::emulated_world = std::stoul(world);
  const std::size_t before = Memory::live;
  Flat comm(own_membership(), MPI_COMM_WORLD);
  const std::size_t kept = Memory::live - before;
  const auto memory = std::make_unique_for_overwrite<float[]>(bytes / sizeof(float));
  simulated::hellos = simulated::data = {};
  const std::size_t own = Memory::live;
  Memory::most = own;
  make_call(comm, kind, std::span(memory.get(), bytes / sizeof(float)));
  std::printf(
      "{\"world\": %s, \"call\": \"%s:%zu\", \"hellos\": %zu, \"hello_bytes\": %zu, "
      "\"messages\": %zu, \"bytes\": %zu, \"kept\": %zu, \"most\": %zu}\n",
      world.c_str(), kind.c_str(), bytes, simulated::hellos.messages, simulated::hellos.bytes,
      simulated::data.messages, simulated::data.bytes, kept, Memory::most - own);
}
#endif

}  // namespace

#if LOCKSTEP_SIMULATED
void* operator new(std::size_t bytes) { return Memory::allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Memory::allocate(bytes, alignment);
}
void operator delete(void* memory) noexcept { Memory::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { Memory::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Memory::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { Memory::free(memory); }
#endif

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 2) return 2;
  MPI_Init(&argc, &argv);
#if LOCKSTEP_SIMULATED
  if (std::getenv("LOCKSTEP_ISLANDS") != nullptr) simulated::ranks_of_host = island;
#endif
  if (words[0] == "plan") {
    print_plan(words[1]);
#if LOCKSTEP_SIMULATED
  } else if (words[0] == "count") {
    print_count(words[1], words[2], std::stoul(words[3]));
#endif
  } else if (words[0] == "call") {
    const std::span calls = std::span(words).subspan(3);
    if (words[1] == "islands") {
      Islands comm = make_islands(own_membership());
      measure_calls(comm, std::stoul(words[2]), calls);
    } else {
      Flat comm(own_membership(), MPI_COMM_WORLD);
      measure_calls(comm, std::stoul(words[2]), calls);
    }
  } else {
    Flat comm(own_membership(), MPI_COMM_WORLD);
    const double seconds = std::stod(words[3]);
    const std::size_t steps = std::stoul(words[4]);
    constexpr PowerSgdOptions at_once{.start = 2};
    if (words[1] == "flat") measure_steps<>(comm, words[2], seconds, steps);
    if (words[1] == "zero") measure_steps<Sharding<ZeroRedundancy>>(comm, words[2], seconds, steps);
    if (words[1] == "powersgd")
      measure_steps<Hooks<PowerSGD<1, at_once>>>(comm, words[2], seconds, steps);
  }
  MPI_Finalize();
}

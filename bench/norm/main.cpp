// SPDX-License-Identifier: Apache-2.0
// Norms on CPUs. One core: batch norm and layer norm, forward and backward, against the bandwidth
// of memcpy and against PyTorch's; with ReLU and residual in the same pass and in passes of their
// own. Two ranks: a step with statistics of both, against one with statistics of each, and against
// what users of PyTorch write, whose SyncBatchNorm is for GPUs only.
//
//   bench_norm [rounds]        3: PyTorch and lockstep take turns, round by round
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "comparison_table.hpp"
#include "load.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/lockstep.hpp"
#include "measure.hpp"

namespace {

using namespace bench;
using namespace lockstep;

constexpr std::chrono::seconds time_limit{900};
constexpr std::size_t ranks = 2;

/// A batch norm and its activations, which are not part of the batch.
template <class Layer>
struct OneNorm {
  using Parameters = ParameterList<Layer>;
  static constexpr bool has_buffers = requires { typename Layer::Buffers; };
  using Buffers = std::conditional_t<has_buffers, BufferList<Layer>, BufferList<>>;

  explicit OneNorm(const std::vector<std::size_t>& shape)
      : features(shape.back()),
        x(random(shape, 1)),
        dy(random(shape, 2)),
        residual(random(shape, 3)) {
    extents = {shape[0], 1, 1, 1};
    std::copy(shape.begin(), shape.end(), extents.begin());
    if (shape.size() > 2) features = shape[1];
    y.resize(x.size());
    dx.resize(x.size());
    dresidual.resize(x.size());
  }
  void shapes(auto& shape) const { Layer::shapes(shape, features); }

  float forward(auto& step, int) {
    with_views([&](auto view) { layer.forward(step, view(std::as_const(x)), view(y)); });
    return 0;
  }
  void backward(auto& step, int) {
    with_views([&](auto view) {
      layer.backward(step, view(std::as_const(x)), view(std::as_const(dy)), view(dx));
    });
  }

  /// Calls `f(view)`, where `view(values)` is a view of as many axes as the case has.
  void with_views(const auto& f) {
    if (extents[2] == 1) {
      f([&](auto& values) { return view_of<dynamic, dynamic>(values); });
    } else {
      f([&](auto& values) { return view_of<dynamic, dynamic, dynamic, dynamic>(values); });
    }
  }

  std::size_t features;
  std::array<std::size_t, 4> extents{};
  std::vector<float> x, dy, residual, y, dx, dresidual;
  Layer layer;

 private:
  template <std::size_t... E>
  auto view_of(auto& values) const {
    using T = std::remove_pointer_t<decltype(values.data())>;
    if constexpr (sizeof...(E) == 2) {
      return HostView<T, E...>(values.data(), extents[0], extents[1]);
    } else {
      return HostView<T, E...>(values.data(), extents[0], extents[1], extents[2], extents[3]);
    }
  }
  static std::vector<float> random(const std::vector<std::size_t>& shape, std::uint64_t seed) {
    std::size_t size = 1;
    for (const std::size_t extent : shape) size *= extent;
    RandomStream stream(Seed{seed});
    std::vector<float> values(size);
    for (float& value : values) value = static_cast<float>(stream.normal());
    return values;
  }
};

using Batch = OneNorm<BatchNorm<"bn", dynamic>>;
using Rows = OneNorm<LayerNorm<"ln", dynamic>>;

/// A layer alone, with the step of one process and nothing around it.
template <class Model>
class Alone {
 public:
  explicit Alone(const std::vector<std::size_t>& shape) : model(shape) {
    step.for_each_parameter([&](auto name, const auto& view) {
      std::fill_n(const_cast<float*>(view.data_handle()), view.size(),
                  name.ends_with("weight") ? 1.f : 0.f);
    });
  }

  void copy() { std::memcpy(model.y.data(), model.x.data(), model.x.size() * sizeof(float)); }
  void forward() { model.forward(step, 0); }
  void both() {
    model.forward(step, 0);
    model.backward(step, 0);
  }

  // With a ReLU, in one pass and in two.

  void relu() {
    with_tensors([&](auto x, auto dy, auto, auto y, auto dx, auto) {
      model.layer.forward_relu(step, x, y);
      model.layer.backward_relu(step, x, dy, dx);
    });
  }
  void relu_apart() {
    forward();
    activate(model.y.data(), model.y.size());
    go_back();
  }

  // With a residual and a ReLU.

  void add_relu() {
    with_tensors([&](auto x, auto dy, auto residual, auto y, auto dx, auto dresidual) {
      model.layer.forward_add_relu(step, x, residual, y);
      model.layer.backward_add_relu(step, x, y, dy, dx, dresidual);
    });
  }
  void add_relu_apart() {
    forward();
    add(model.residual.data(), model.y.data(), model.y.size());
    activate(model.y.data(), model.y.size());
    go_back();
  }

 private:
  void with_tensors(const auto& f) {
    model.with_views([&](auto view) {
      f(view(std::as_const(model.x)), view(std::as_const(model.dy)),
        view(std::as_const(model.residual)), view(model.y), view(model.dx), view(model.dresidual));
    });
  }
  // Loops that compilers turn into vector instructions.

  static void activate(float* y, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) y[i] = y[i] > 0 ? y[i] : 0;
  }
  static void add(const float* __restrict residual, float* __restrict y, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) y[i] += residual[i];
  }
  static void mask(const float* __restrict y, const float* __restrict dy, float* __restrict d,
                   std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      const float value = dy[i];
      d[i] = y[i] > 0 ? value : 0;
    }
  }
  void go_back() {
    mask(model.y.data(), model.dy.data(), model.dresidual.data(), model.y.size());
    model.with_views([&](auto view) {
      model.layer.backward(step, view(std::as_const(model.x)), view(std::as_const(model.dresidual)),
                           view(model.dx));
    });
  }

  Model model;
  HostArena parameters{detail::Layout<Model>(model).plan().bytes};
  HostArena gradients{parameters.bytes()};
  HostArena buffers{detail::BufferLayout<Model>(model).plan().bytes};
  detail::BareStep<Model> step{model, {parameters.data(), gradients.data(), buffers.data()}};
};

/// Everyone's rounds, by name.
class Results {
 public:
  void add(const std::string& name, Times times) {
    if (!times.known) return;
    auto& [medians, minima] = rounds_[name];
    medians.push_back(times.median);
    minima.push_back(times.minimum);
  }
  Times operator()(const std::string& name) const {
    const auto found = rounds_.find(name);
    if (found == rounds_.end()) return {};
    return {true, median(found->second.first), summary(found->second.second).minimum};
  }

 private:
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> rounds_;
};

constexpr std::size_t most_ways = 8;

struct Common {
  Track track;
  Times times[most_ways];
};

/// Runs contestants on ranks of one process each; `make(rank)` gives a rank's.
void race(std::size_t world, Clock::time_point deadline, const std::vector<std::string>& names,
          Results& results, const auto& make) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  run_ranks(world, deadline, [&](std::size_t rank) {
    Stand stand(common.track, rank, world);
    make(rank, [&](const std::vector<Contestant>& contestants) {
      const auto times = stand.race(contestants, 0);
      for (std::size_t w = 0; rank == 0 && w < times.size(); ++w)
        common.times[w] = summary(times[w]);
    });
  });
  for (std::size_t w = 0; w < names.size(); ++w) results.add(names[w], common.times[w]);
}

Contestant contestant(const std::string& name, auto f) {
  return {name, {}, [f](std::size_t, std::size_t iterations) {
            for (std::size_t i = 0; i < iterations; ++i) f();
          }};
}

void race_batch_norm(const NormCase& c, Clock::time_point deadline, Results& results) {
  std::vector<std::string> names;
  for (const char* const way :
       {"copy", "forward", "both", "relu", "relu apart", "add_relu", "add_relu apart"})
    names.push_back(c.text + " " + way);
  race(1, deadline, names, results, [&](std::size_t, const auto& run) {
    Alone<Batch> one(c.extents());
    run({contestant("copy", [&] { one.copy(); }), contestant("forward", [&] { one.forward(); }),
         contestant("both", [&] { one.both(); }), contestant("relu", [&] { one.relu(); }),
         contestant("relu apart", [&] { one.relu_apart(); }),
         contestant("add_relu", [&] { one.add_relu(); }),
         contestant("add_relu apart", [&] { one.add_relu_apart(); })});
  });
}

void race_layer_norm(const NormCase& c, Clock::time_point deadline, Results& results) {
  const std::vector<std::string> names{c.text + " copy", c.text + " forward", c.text + " both"};
  race(1, deadline, names, results, [&](std::size_t, const auto& run) {
    Alone<Rows> one(c.extents());
    run({contestant("copy", [&] { one.copy(); }), contestant("forward", [&] { one.forward(); }),
         contestant("both", [&] { one.both(); })});
  });
}

/// A step of two ranks: forward, backward, averages of the gradients, update.
void race_ranks(const std::string& shape, Clock::time_point deadline, Results& results) {
  const auto file = lockstep::detail::shm::Engine::make_file(WorldSize{ranks});
  const std::string address = lockstep::detail::shm::Engine::address(file);
  const NormCase c{"batch:" + shape + ":float32"};
  race(ranks, deadline, {shape + " synced", shape + " local"}, results,
       [&](std::size_t rank, const auto& run) {
         ShmCommunicator<ranks> comm(Rank{rank}, WorldSize{ranks},
                                     lockstep::detail::shm::Engine::open(address),
                                     std::chrono::minutes(1));
         DistributedDataParallel<Batch, World<ranks>, Norms<Synced>> synced(comm,
                                                                            Batch(c.extents()));
         DistributedDataParallel<Batch, World<ranks>, Norms<Local>> local(comm, Batch(c.extents()));
         run({contestant("synced", [&] { synced.step(0); }),
              contestant("local", [&] { local.step(0); })});
       });
}

void print_batch_norm(const NormCase& c, const Results& results, const TorchNorms& torch,
                      ComparisonTable& table) {
  const auto own = [&](const char* way) { return results(c.text + " " + way); };
  const std::string what = "batch norm " + c.words();
  // Forward reads x twice and writes y; backward reads x and dy twice and writes dx.
  table.row(what + ": forward, share of memcpy's bandwidth", own("forward"),
            of_copy(own("copy"), 1.5), 0);
  table.row("same, forward and backward", own("both"), of_copy(own("copy"), 4), 0);
  table.row("same, against PyTorch: forward", own("forward"),
            torch(c.text + " plain forward eager"), 0);
  table.row("same, forward and backward", own("both"), torch(c.text + " plain both eager"), 0);
  table.row("same, with ReLU", own("relu"), torch(c.text + " relu both eager"), 0);
  table.row("same, with residual and ReLU", own("add_relu"), torch(c.text + " add_relu both eager"),
            0);
  table.row(what + ": ReLU in one pass against passes of its own", own("relu"), own("relu apart"),
            0);
  table.row("same, residual and ReLU", own("add_relu"), own("add_relu apart"), 0);
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::stoi(argv[1]) : 3;
  const Clock::time_point deadline = Clock::now() + time_limit;
  const OthersLoad others;
  const std::vector<NormCase> batch_norms{
      {"batch:32x64x28x28:float32"}, {"batch:32x256x14x14:float32"}, {"batch:8192x256:float32"}};
  const std::vector<NormCase> layer_norms{{"layer:4096x768:float32"}};
  std::vector<NormCase> all = batch_norms;
  all.insert(all.end(), layer_norms.begin(), layer_norms.end());
  const std::vector<std::string> shapes{"8x16x8x8", "32x64x14x14", "32x64x28x28"};
  TorchNorms torch;
  Results results;
  for (int round = 0; round < rounds; ++round) {
    torch.ask("cpu", all);
    torch.ask_ranks("cpu", shapes);
    for (const NormCase& c : batch_norms) race_batch_norm(c, deadline, results);
    for (const NormCase& c : layer_norms) race_layer_norm(c, deadline, results);
    for (const std::string& shape : shapes) race_ranks(shape, deadline, results);
  }
  std::printf(
      "norms in training, one thread a rank, %zu cores; microseconds, median of %d rounds\n\n",
      cores(), rounds);
  ComparisonTable table;
  for (const NormCase& c : batch_norms) print_batch_norm(c, results, torch, table);
  for (const NormCase& c : layer_norms) {
    const std::string what = "layer norm " + c.words();
    table.row(what + ": forward, share of memcpy's bandwidth", results(c.text + " forward"),
              results(c.text + " copy"), 0);
    table.row("same, against PyTorch: forward", results(c.text + " forward"),
              torch(c.text + " plain forward eager"), 0);
    table.row("same, forward and backward", results(c.text + " both"),
              torch(c.text + " plain both eager"), 0);
  }
  for (const std::string& shape : shapes) {
    const std::string what = "a step on 2 ranks, batch norm " + shape + " each";
    const Times synced = results(shape + " synced");
    table.row(what + ": Norms<Synced> over Norms<Local>", synced, results(shape + " local"), 0,
              true);
    table.row("same, Norms<Synced> against PyTorch's all-reduces over Gloo", synced,
              torch("cpu " + shape + " synced"), 0);
    table.row("same, Norms<Local> against PyTorch's BatchNorm in DDP", results(shape + " local"),
              torch("cpu " + shape + " local"), 0);
  }
  table.write("norm");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench norm: %s\n", error.what());
  return 1;
}

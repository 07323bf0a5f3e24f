// SPDX-License-Identifier: Apache-2.0
// A step with AdamW of a stack of 12 equal blocks on ranks that are threads and share one GPU, and
// what it takes of the GPU's memory: Replicated, ZeRO with gradients, FullyShard, and PyTorch's DDP
// and fully_shard (FSDP2). Of FullyShard also which share of its gathers the compute stream does
// not wait for. With one rank PyTorch is an equal peer; its two ranks are processes, which take
// turns on one GPU and have NCCL's sockets between them.
//
//   bench_fully_sharded_gpu [ROWS [TYPE]]    ROWS of a rank's batch: 1024; float, bfloat16 or both
#include <array>
#include <cub/device/device_reduce.cuh>
#include <cuda/std/functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comparison_table.hpp"
#include "device_array.cuh"
#include "device_memory.cuh"
#include "load.hpp"
#include "matmul.cuh"
#include "measure.hpp"
#include "thread_ranks.cuh"
#include "timing.cuh"
#include "torch_lines.hpp"

namespace bench {

using namespace lockstep;

constexpr std::size_t blocks = 12, width = 4096;
std::size_t rows = 1024;  // of a rank

template <class T>
LOCKSTEP_KERNEL fill_kernel(T* values, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const unsigned bits = static_cast<unsigned>(i) * 2654435761u;
  values[i] = static_cast<T>(static_cast<float>(bits >> 8) / (1 << 23) - 1.f);
}
/// to = a + b
template <class T>
LOCKSTEP_KERNEL add_kernel(const T* a, const T* b, T* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<T>(static_cast<float>(a[i]) + static_cast<float>(b[i]));
}
/// to = d where the unit was active, else 0
template <class T>
LOCKSTEP_KERNEL gate_kernel(const T* active, const T* d, T* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<float>(active[i]) > 0 ? d[i] : static_cast<T>(0.f);
}
/// to = x / count, the gradient of the loss
template <class T>
LOCKSTEP_KERNEL scale_kernel(const T* x, T* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<T>(static_cast<float>(x[i]) / static_cast<float>(count));
}
constexpr unsigned block_size = 256;
inline unsigned grid(std::size_t count) {
  return static_cast<unsigned>((count + block_size - 1) / block_size);
}

struct HalfMeanSquare {
  double count;
  template <class T>
  __device__ double operator()(T x) const {
    const double value = static_cast<float>(x);
    return value * value / (2 * count);
  }
};

/// x := x + relu(W x), 12 times; the loss is the mean of x * x / 2. fsdp.py has the same. Computes
/// in T, the type in which the step hands parameters out.
template <class T>
class Stack {
  using Block = ParameterList<Parameter<"weight", float, width, width>>;

 public:
  using Parameters = ParameterList<Repeat<"blocks", blocks, Block>>;

  void initialize(auto& initial) {
    std::uint32_t state = 1;
    initial.for_each_parameter([&](auto, auto weight) {
      for (std::size_t i = 0; i != weight.size(); ++i) {
        state = state * 1664525u + 1013904223u;
        weight.data_handle()[i] = (static_cast<float>(state >> 8) / (1 << 23) - 1.f) / 64;
      }
    });
  }

  /// A captured step is replayed for an equal batch.
  struct Batch {
    const T* rows;
    bool operator==(const Batch&) const = default;
  };

  void forward(auto& step, Batch batch) {
    const cudaStream_t stream = step.stream();
    const T* in = batch.rows;
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      x_[B] = in;
      T* const active = relu_ + B * count_;
      T* const out = outputs_ + B * count_;
      forward_(stream, in, step.param("blocks"_p / at<B> / "weight"_p).data_handle(), active);
      step.done("blocks"_p / at<B>);
      add_kernel<T><<<grid(count_), block_size, 0, stream>>>(in, active, out, count_);
      check_launch("add");
      in = out;
    });
    x_[blocks] = in;
    std::size_t bytes = scratch_bytes;
    check_cuda(cub::DeviceReduce::TransformReduce(
                   scratch_, bytes, in, step.loss(), static_cast<int>(count_), cuda::std::plus<>{},
                   HalfMeanSquare{static_cast<double>(count_)}, 0.0, stream),
               "cub::DeviceReduce::TransformReduce");
  }
  void backward(auto& step, Batch) {
    const cudaStream_t stream = step.stream();
    scale_kernel<T><<<grid(count_), block_size, 0, stream>>>(x_[blocks], dx_, count_);
    check_launch("scale");
    each([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      constexpr std::size_t b = blocks - 1 - B;
      constexpr auto weight = "blocks"_p / at<b> / "weight"_p;
      gate_kernel<T>
          <<<grid(count_), block_size, 0, stream>>>(relu_ + b * count_, dx_, gated_, count_);
      check_launch("gate");
      by_inputs_(stream, gated_, step.param(weight).data_handle(), by_input_);
      step.done("blocks"_p / at<b>);
      by_weights_(stream, gated_, x_[b], step.grad(weight).data_handle());
      step.ready(weight);
      add_kernel<T><<<grid(count_), block_size, 0, stream>>>(dx_, by_input_, dx_, count_);
      check_launch("add");
    });
  }

 private:
  static constexpr std::size_t scratch_bytes = 1 << 20;

  static void each(const auto& f) {
    [&]<std::size_t... B>(std::index_sequence<B...>) {
      (f(std::integral_constant<std::size_t, B>{}), ...);
    }(std::make_index_sequence<blocks>{});
  }

  const std::size_t count_ = rows * width;
  CublasLt cublas_;
  Matmul<T> forward_{
      cublas_, rows, width, width, Stored::plain, Stored::transposed, CUBLASLT_EPILOGUE_RELU};
  Matmul<T> by_inputs_{cublas_, rows, width, width, Stored::plain, Stored::plain};
  Matmul<T> by_weights_{cublas_, width, width, rows, Stored::transposed, Stored::plain};
  DeviceArray<T> relu_{blocks * count_}, outputs_{blocks * count_};
  DeviceArray<T> dx_{count_}, gated_{count_}, by_input_{count_};
  DeviceArray<char> scratch_{scratch_bytes};
  std::array<const T*, blocks + 1> x_{};
};

/// How long the compute stream of the rank that is this thread waits for units, and how often.
struct UnitWaits : Observer<UnitWaits> {
  struct Wait {
    Mark begin, end;
  };
  struct Record {
    cudaStream_t stream;
    std::vector<std::unique_ptr<Wait>> waits;
  };
  static Record*& of_thread() {
    static thread_local Record* record = nullptr;
    return record;
  }

  class Span {
   public:
    explicit Span(const SpanName& name) {
      Record* const record = of_thread();
      if (record == nullptr || std::string_view(name.name) != "wait for unit") return;
      wait_ = record->waits.emplace_back(std::make_unique<Wait>()).get();
      stream_ = record->stream;
      wait_->begin.record(stream_);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() {
      if (wait_ != nullptr) wait_->end.record(stream_);
    }

   private:
    Wait* wait_ = nullptr;
    cudaStream_t stream_ = nullptr;
  };
};

/// What is known of a way to train when it has run.
struct Seen {
  std::string name;
  Times step{};
  double kept = 0;      // bytes of parameters, gradients and states, as the job says
  double used = 0;      // bytes of the GPU's memory for each rank, activations included
  double expected = 0;  // of `kept`, by the formula
  double hidden = -1;   // share of gathers that no compute stream waited for
};

template <std::size_t Ranks>
using CommOf = std::conditional_t<Ranks == 1, CudaLoopbackCommunicator, ThreadCommunicator<Ranks>>;

/// The ways of one rank; what is seen of them is rank 0's to write.
template <class T, std::size_t Ranks>
class Ways {
  using Comm = CommOf<Ranks>;

 public:
  Ways(Comm& comm, std::vector<Seen>& seen) : comm_(comm), seen_(seen) {
    fill_kernel<<<grid(rows * width), block_size, 0, comm.gpu().stream()>>>(rows_ + 0,
                                                                            rows * width);
    check_launch("fill");
  }

  /// `gathered`, `scattered`: units of parameters and of gradients that a rank holds, if not all.
  template <class... Policies>
  void add(const std::string& name, std::size_t gathered, std::size_t scattered, bool divides) {
    constexpr bool mixed = !std::is_same_v<T, float>;
    using Declared =
        std::conditional_t<mixed, Precision<Mixed<BFloat16, float>>, Precision<AsDeclared>>;
    using Job = DistributedDataParallel<Stack<T>, Device<Cuda>, Backend<Shm>, World<Ranks>,
                                        Optimizer<AdamW>, Buckets<BucketLimits{1, 1}>, Declared,
                                        Observers<UnitWaits>, Policies...>;
    const double before = settled_memory();
    auto job = std::make_shared<Job>(comm_);
    job->optimizer().lr = 1e-6;
    for (int i = 0; i < 5; ++i) job->step(batch_);
    const double after = settled_memory();
    if (comm_.rank() == Rank{0}) {
      Seen way{name};
      way.kept =
          static_cast<double>(job->parameter_bytes() + job->gradient_bytes() + job->state_bytes());
      way.used = (after - before) / Ranks;
      if (Ranks == 1) gathered = scattered = 0;  // a rank alone has no rings
      const double unit = width * width;
      const double shards = divides ? Ranks : 1;
      const double units = blocks / shards;  // of which this rank has its part
      // AdamW's two states; with 16-bit parameters their masters, too.
      const double states = units * unit * 4 * (mixed ? 3 : 2);
      const double parameters =
          (gathered == 0 ? blocks : units + static_cast<double>(gathered)) * unit * sizeof(T);
      // Several ranks reduce in float, of which a rank keeps its part; what the model writes is T.
      const double sums = Ranks == 1 ? sizeof(T) : 4;
      const double written = mixed && Ranks > 1 ? sizeof(T) : 0;
      const double gradients =
          (scattered == 0 ? blocks * (sums + written)
                          : units * sums + static_cast<double>(scattered) * (sums + written)) *
          unit;
      way.expected = parameters + gradients + states;
      seen_.push_back(way);
    }
    const double hidden = hidden_share(*job);
    if (comm_.rank() == Rank{0}) seen_.back().hidden = hidden;
    comm_.barrier();
    steps_.push_back([this, job](int count) {
      for (int i = 0; i < count; ++i) job->step(batch_);
    });
  }

  void race() {
    const std::vector<Times> times = bench::race(comm_, steps_, 5);
    if (comm_.rank() != Rank{0}) return;
    for (std::size_t w = 0; w != times.size(); ++w) seen_[w].step = times[w];
  }

 private:
  double settled_memory() {
    settle(comm_);
    const double used = used_bytes();
    comm_.barrier();
    return used;
  }

  /// Ten steps' waits for units against as many gathers alone, which nothing hides.
  double hidden_share(auto& job) {
    UnitWaits::Record record{comm_.gpu().stream(), {}};
    settle(comm_);
    UnitWaits::of_thread() = &record;
    for (int i = 0; i < 10; ++i) job.step(batch_);
    UnitWaits::of_thread() = nullptr;
    settle(comm_);
    if (record.waits.empty()) return -1;
    double waited = 0;
    for (const auto& wait : record.waits) waited += wait->end.microseconds_since(wait->begin);
    const std::size_t part = width * width / Ranks;
    const DeviceArray<T> memory(part + width * width);
    const std::span<const T> own(memory + 0, part);
    const std::span<T> whole(memory + part, width * width);
    Mark begin, end;
    for (int i = 0; i < 3; ++i) comm_.all_gather(own, whole);
    settle(comm_);
    begin.record(comm_.gpu().stream());
    for (std::size_t i = 0; i != record.waits.size(); ++i) comm_.all_gather(own, whole);
    end.record(comm_.gpu().stream());
    settle(comm_);
    return 1 - waited / end.microseconds_since(begin);
  }

  Comm& comm_;
  std::vector<Seen>& seen_;
  const DeviceArray<T> rows_{rows * width};
  const typename Stack<T>::Batch batch_{rows_};
  std::vector<std::function<void(int)>> steps_;
};

template <class T, std::size_t Ranks>
std::vector<Seen> measure() {
  std::vector<Seen> seen;
  const auto run = [&](CommOf<Ranks>& comm) {
    using Blocks = Units<"blocks.*">;
    Ways<T, Ranks> ways(comm, seen);
    ways.template add<Sharding<Replicated>>("Replicated", 0, 0, false);
    ways.template add<Sharding<ZeroRedundancy, Gradients>>("ZeroRedundancy, Gradients", 0, 3, true);
    ways.template add<Sharding<FullyShard, Blocks>>("FullyShard", 3, 3, true);
    ways.template add<Sharding<FullyShard, Blocks>, CapturedStep>("FullyShard, graph", 3, 3, true);
    ways.template add<Sharding<FullyShard, Blocks, ReshardAfterForward<false>>>(
        "FullyShard, kept until the update", blocks, 3, true);
    ways.template add<Sharding<FullyShard, Blocks, GatheredUnits<5>>>("FullyShard, five units", 5,
                                                                      3, true);
    ways.race();
  };
  if constexpr (Ranks == 1) {
    CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
    run(comm);
  } else {
    on_ranks<Ranks>(run);
  }
  return seen;
}

struct Peer {
  Times step{};
  double bytes = 0;
};
/// Each way in processes of its own, or what one leaves behind would count as another's memory.
std::map<std::string, Peer> torch_steps(std::size_t ranks, const std::string& type) {
  std::map<std::string, Peer> peers;
  for (const std::string way : {"ddp", "fully", "kept"})
    each_torch_line("torchrun --standalone --nproc-per-node " + std::to_string(ranks) +
                        " " LOCKSTEP_SOURCE_DIR "/bench/fully_sharded/fsdp.py " + way + " " +
                        std::to_string(rows) + " " + std::to_string(width) + " " + type +
                        " 2>/dev/null",
                    150, "fsdp", [&](const nlohmann::json& read) {
                      peers[way] = {{true, read["median"], read["minimum"]}, read["bytes"]};
                    });
  return peers;
}

template <class T, std::size_t Ranks>
void compare(ComparisonTable& table, std::vector<Seen>& all, const std::string& type) {
  const std::string where = std::to_string(Ranks) + (Ranks == 1 ? " rank, " : " ranks, ") + type;
  std::vector<Seen> seen = measure<T, Ranks>();
  std::map<std::string, Peer> peers = torch_steps(Ranks, type);
  const Seen& replicated = seen.front();
  for (std::size_t w = 1; w != seen.size(); ++w)
    table.row(where + ": " + seen[w].name + " against Replicated", seen[w].step, replicated.step,
              w == 2 || w == 3 ? 1.05 : 0, true);
  for (const auto& [way, own] : {std::pair("ddp", 0), {"fully", 2}, {"kept", 4}})
    table.row(where + ": " + seen[own].name + " against PyTorch, " + way, seen[own].step,
              peers[way].step, way == std::string("fully") ? 1 : 0);
  for (Seen& way : seen) {
    way.name = where + ": " + way.name;
    all.push_back(std::move(way));
  }
  for (const auto& [way, peer] : peers)
    if (peer.bytes > 0) all.push_back({where + ": PyTorch, " + way, {}, 0, peer.bytes});
}

}  // namespace bench

int main(int argc, char** argv) try {
  using namespace bench;
  if (argc > 1) rows = std::stoul(argv[1]);
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench fully_sharded: there is no GPU here\n");
    return 1;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const OthersLoad others;
  std::printf(
      "a step with AdamW of %zu blocks of %zu x %zu, %zu rows a rank, on ranks that are threads "
      "and "
      "share one GPU; microseconds\n\n",
      blocks, width, width, rows);
  ComparisonTable table;
  std::vector<Seen> all;
  const std::string_view type = argc > 2 ? argv[2] : "";
  if (type != "bfloat16") {
    compare<float, 1>(table, all, "float");
    compare<float, 2>(table, all, "float");
  }
  if (type != "float") {
    compare<BFloat16, 1>(table, all, "bfloat16");
    compare<BFloat16, 2>(table, all, "bfloat16");
  }
  std::printf(
      "\n| | MiB of parameters, gradients and states | by the formula | ratio | GPU memory of a "
      "rank, MiB | gathers hidden |\n|---|---|---|---|---|---|\n");
  for (const Seen& way : all) {
    constexpr double mebi = 1 << 20;
    std::printf("| %s | ", way.name.c_str());
    if (way.kept > 0)
      std::printf("%.1f | %.1f | %.4f", way.kept / mebi, way.expected / mebi,
                  way.kept / way.expected);
    else
      std::printf("| | ");
    std::printf(" | %.1f | ", way.used / mebi);
    if (way.hidden >= 0) std::printf("%.3f", way.hidden);
    std::printf(" |\n");
    table.add({{"measure", way.name + ", memory"},
               {"bytes", way.kept},
               {"expected", way.expected},
               {"used", way.used},
               {"hidden", way.hidden}});
  }
  table.write("fully_sharded_gpu_" + std::to_string(rows));
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench fully_sharded: %s\n", error.what());
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// What NCCL's communicator does among real ranks: LOCKSTEP_SHARE_GPUS=1 nccl_ranks --ranks N CASE
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "data/fed.hpp"
#include "large.cuh"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/nccl/communicator.cuh"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/trainer/process_group.hpp"
#include "lockstep/nccl.cuh"
#include "rank_cases.cuh"

namespace {

using namespace lockstep;
using namespace exercise;
using namespace std::chrono_literals;
using exercise::Buffer;  // not the declaration of a model
using Comm = NcclCommunicator<>;

/// Goes on until the communicator fails, as a job would that waits for its step.
void keep_waiting(Comm& comm, std::chrono::seconds limit) {
  for (const Clock::time_point begin = Clock::now(); Clock::now() - begin < limit;) {
    comm.synchronize();
    std::this_thread::sleep_for(5ms);
  }
}

Comm make(Session& session, const std::string& name = "world") {
  return {session.membership(), session.store(), name};
}

void collectives(Session& session) {
  Comm comm = make(session);
  every_type(comm);
#if LOCKSTEP_RUNS_ON_GPU
  nan_wins<double>(comm);
  nan_wins<Half>(comm);
  nan_wins<BFloat16>(comm);
#endif
  nan_wins<float>(comm);
  for (const bool on_host : {false, true}) {
    reductions<float>(comm, 0, on_host, Sum{});
    reductions<float>(comm, 0, on_host, Max{});
    movements<float>(comm, 0, on_host);
  }
  constexpr std::size_t large = (3 << 20) + 5;  // several pieces where elements are gathered
  reductions<float>(comm, large, false, Average{});
  reductions<float>(comm, large, false, Max{});
  reductions<std::int16_t>(comm, large, false, Sum{});
  movements<float>(comm, large, false);
  reductions<float>(comm, large, true, Sum{});
  movements<float>(comm, large, true);  // host data in several parts

  const auto arena = comm.allocate<float>(1000);
  for (float v : downloaded(comm, arena)) require(v == 0, "allocated memory is not zeroed");
  enqueue_add_one(comm.gpu().stream(), arena);
  comm.all_reduce(arena, Sum{});
  comm.broadcast(arena.first(10), Rank{0});
  for (float v : downloaded(comm, arena))
    require(v == static_cast<float>(comm.world_size().value()), "a sum in arena memory is wrong");

  // A sum of such halves is beyond their range; their average is not. An average of bfloat16 is
  // rounded once, whatever the number of ranks is.
  Buffer<Comm, Half> halves(comm, 1001, false);
  halves.fill([](std::size_t) { return Half(60000.0F); });
  comm.all_reduce(halves.span(), Average{});
  halves.expect("an average of large halves", [](std::size_t) { return Half(60000.0F); });
  const float third = 1.0F / 3;
  Buffer<Comm, BFloat16> bits(comm, 1001, false);
  bits.fill([&](std::size_t i) { return value<BFloat16>(comm.rank().value(), i); });
  comm.all_reduce(bits.span(), PreMultipliedSum<float>(third));
  bits.expect("a third of a sum", [&](std::size_t i) {
    return BFloat16(third *
                    static_cast<float>(reduced<BFloat16>(Sum{}, comm.world_size().value(), i)));
  });
  reductions<BFloat16>(comm, 1001, false, Average{});

  // Arguments that cannot be right fail at once, and nothing else does.
  require_words(failure_of([&] { comm.broadcast(arena, Rank{99}); }).first, {"root 99"});
  require_words(failure_of([&] { comm.all_gather(arena, arena.first(3)); }).first,
                {"sizes do not fit"});
  comm.barrier();
}

/// The sum of ranks, through whichever communicator.
void expect_sum(Comm& comm, float mine, float wanted, const std::string& what) {
  Buffer<Comm, float> data(comm, 100, false);
  data.fill([&](std::size_t) { return mine; });
  comm.all_reduce(data.span(), Sum{});
  data.expect(what, [&](std::size_t) { return wanted; });
}

void groups(Session& session) {
  Comm comm = make(session);
  const std::size_t world = comm.world_size().value();
  const auto me = static_cast<float>(comm.rank().value());
  const auto total = static_cast<float>(world * (world - 1) / 2);

  std::vector<Rank> backwards;
  std::vector<Rank> even;
  float even_total = 0;
  for (std::size_t w = 0; w < world; ++w) {
    backwards.insert(backwards.begin(), Rank{w});
    if (w % 2 == 0) even.push_back(Rank{w});
    if (w % 2 == 0) even_total += static_cast<float>(w);
  }
  auto reversed = new_group(comm, backwards);
  require(reversed.has_value(), "all are in the reversed group");
  require(reversed->rank().value() == world - 1 - comm.rank().value(), "the order is the list's");
  require(&reversed->gpu() == &comm.gpu(), "a group shares its parent's GPU");
  expect_sum(*reversed, me, total, "a reversed group");
  std::vector<float> told{me};
  reversed->broadcast(told, Rank{0});
  require(told[0] == static_cast<float>(world - 1), "rank 0 of the group is the last of the world");

  auto evens = new_group(comm, even);
  require(evens.has_value() == (comm.rank().value() % 2 == 0), "who is in the group of even ranks");
  if (evens) expect_sum(*evens, me, even_total, "a group of even ranks");
  expect_sum(comm, me, total, "the world after splits");

  require_words(failure_of([&] { new_group(comm, {}); }).first, {"the list is empty"});
  require_words(failure_of([&] { new_group(comm, {Rank{0}, Rank{0}}); }).first, {"listed twice"});
  require_words(failure_of([&] { new_group(comm, {Rank{77}}); }).first, {"outside the world"});
  using Rows = Grid<dynamic, dynamic>;
  require_words(failure_of([&] { join_groups(comm, Rows{WorldSize{6}, 3}); }).first,
                {"give them the same world"});

  const std::size_t row = world % 2 == 0 ? 2 : 1;
  Comm rows = join_groups(comm, Rows{comm.world_size(), row});
  const auto first = static_cast<float>(comm.rank().value() / row * row);
  expect_sum(rows, me, row == 2 ? 2 * first + 1 : first, "a row of a grid");
  Comm columns = join_groups(comm, Transposed<Rows>{Rows{comm.world_size(), row}});
  require(columns.world_size().value() == world / row, "the size of a column");
  std::vector<float> leader{me};
  columns.broadcast(leader, Rank{0});
  require(leader[0] == static_cast<float>(comm.rank().value() % row), "the leader of a column");
  comm.barrier();
}

void objects(Session& session) {
  Comm comm = make(session);
  const std::string own = "rank " + std::string(comm.rank().value() + 1, '*');
  const auto all = all_gather_objects(comm, own);
  for (std::size_t w = 0; w < all.size(); ++w)
    require(all[w] == "rank " + std::string(w + 1, '*'), "all_gather_objects: " + all[w]);
  std::string told = comm.rank() == Rank{0} ? "the word" : "";
  broadcast_object(comm, told, Rank{0});
  require(told == "the word", "broadcast_object: " + told);
  std::vector<std::string> parts;
  for (std::size_t w = 0; w < comm.world_size().value(); ++w) parts.push_back(std::to_string(w));
  const Rank last{comm.world_size().value() - 1};
  require(scatter_objects(comm, parts, last) == std::to_string(comm.rank().value()),
          "scatter_objects");
  const bool here = comm.rank() == last;
  require(gather_objects(comm, own, last).size() == (here ? comm.world_size().value() : 0),
          "gather_objects");
  numbers_and_pieces(comm);
}

/// A process group through NCCL, and one through Gloo's kind of memory beside it: the host's.
/// Ranks feed each other on a stream of their own, while their GPUs add numbers.
void feed(Session& session) {
  Comm comm = make(session);
  Comm line = make(session, "feed");
  const auto sums = comm.allocate<float>(1 << 20);
  for (int i = 0; i < 100; ++i) comm.all_reduce(sums, Sum{});
  const std::size_t sizes[] = {7, 29};
  fed::check<DistributedSampler<Masked, TorchShuffle>>(
      line, sizes, [&] { return detail::OnGpu(line.gpu().index()); });
  comm.barrier();
}

void process_groups(Session& session) {
  ProcessGroup<Backend<Nccl>> group(session);
  require(is_initialized() && device_count() > 0, "there is a group, and a GPU");
  const auto data = group->allocate<float>(100);
  group->all_reduce(data, Sum{});
  single_numbers(*group);
  std::vector<Rank> all;
  for (std::size_t w = group.world_size().value(); w-- > 0;) all.emplace_back(w);
  auto beside = new_group<Backend<Shm>>(group, all);
  require(beside && beside->rank().value() == group.world_size().value() - 1 - group.rank().value(),
          "the place in a group of its own backend");
  require(beside->all_reduce(std::size_t{1}) == group.world_size().value(), "its sum");
  auto again = new_group<Backend<Nccl>>(group, all);
  require(again->all_reduce(1.f) == static_cast<float>(all.size()), "NCCL once more");
  group->barrier();
}

void async(Session& session) {
  Comm comm = make(session);
  const double kept = sums_of_a_busy_stream(comm, 10'000, 1s);
  require(kept < 0.8, "the host was blocked for " + std::to_string(kept) + " s");
  // More than the ring holds: the host waits for the oldest, and nothing is lost.
  const auto data = comm.allocate<float>(1);
  for (std::size_t i = 0; i < Comm::most_in_flight + 20; ++i) {
    auto work = comm.all_reduce_async(data, Max{});
    work.wait();
  }
  comm.barrier();
}

void compute_for_long(Session& session) {
  Comm comm = make(session);
  patience(comm);
}

void capture(Session& session) {
  Comm comm = make(session);
  constexpr std::size_t n = 5000;
  const std::size_t world = comm.world_size().value();
  const auto mean = static_cast<float>(world - 1) / 2;
  Buffer<Comm, float> x(comm, n, false);
  Buffer<Comm, float> y(comm, n, false);
  x.fill([&](std::size_t) { return static_cast<float>(comm.rank().value()); });
  y.fill([&](std::size_t) { return static_cast<float>(comm.rank().value()); });
  const auto step = [&] {
    enqueue_add_one(comm.gpu().stream(), x.span());
    auto work = comm.all_reduce_async(x.span(), Average{});
    enqueue_add_one(comm.gpu().stream(), y.span());
    work.wait();
    comm.all_reduce(y.span(), Max{});
  };
  step();
  detail::StepGraph graph = comm.capture(step);
  require(static_cast<bool>(graph), "the step was not captured: " + graph.reason());
  x.expect("capturing runs nothing", [&](std::size_t) { return mean + 1; });
  for (int i = 0; i < 100; ++i) comm.replay(graph);
  const auto top = static_cast<float>(world - 1);
  x.expect("100 replays, average", [&](std::size_t) { return mean + 101; });
  y.expect("100 replays, max", [&](std::size_t) { return top + 101; });
  step();  // and eager steps go on
  comm.replay(graph);
  x.expect("steps and replays", [&](std::size_t) { return mean + 103; });

  // A rank that fails to capture takes the graph from all.
  const detail::StepGraph rejected = comm.capture([&] {
    step();
    if (comm.rank().value() == world - 1) throw std::runtime_error("no way");
  });
  require(!rejected && contains(rejected.reason(), "no way") &&
              contains(rejected.reason(), "rank " + std::to_string(world - 1)),
          "the reason: " + rejected.reason());
  const detail::StepGraph waits = comm.capture([&] {
    step();
    static_cast<void>(cudaStreamSynchronize(comm.gpu().stream()));
    comm.all_reduce(x.span(), Average{});
  });
  require(!waits && !waits.reason().empty(), "a step that waits on the host was captured");
  const detail::StepGraph nothing = comm.capture([] {});
  require(!nothing && contains(nothing.reason(), "nothing to do"), "reason: " + nothing.reason());
  if (comm.rank() == Rank{0})
    std::printf("  reasons: %s | %s | %s\n", rejected.reason().c_str(), waits.reason().c_str(),
                nothing.reason().c_str());
  x.expect("failed captures run nothing", [&](std::size_t) { return mean + 103; });
  comm.replay(graph);
  x.expect("a replay after failed captures", [&](std::size_t) { return mean + 104; });
  comm.barrier();
}

/// One disagreement: rank 1 calls `differently`, the others `usually`; all must hear of both.
void disagree(Session& session, const std::string& name, const std::function<void(Comm&)>& usually,
              const std::function<void(Comm&)>& differently, const std::string& rank0_called,
              const std::string& rank1_called) {
  {
    Comm comm = make(session, "mismatch " + name);
    comm.barrier();
    comm.set_timeout(30s);
    const auto [error, seconds] = failure_of([&] {
      (session.rank() == Rank{1} ? differently : usually)(comm);
      keep_waiting(comm, 60s);
    });
    if (session.rank() < Rank{2}) print_failure(error, seconds);
    require_words(error, {"rank 0 called " + rank0_called, "rank 1 called " + rank1_called});
    // It is not the time limit that ends it; beside other programs on the GPU all else is slow.
    require(seconds < 25, "it took " + std::to_string(seconds) + " s");
    // The fault stays.
    require_words(failure_of([&] { comm.barrier(); }).first, {"ranks disagree"});
  }
  session.store().barrier("after " + name, session.rank(), session.world());
}

void mismatch(Session& session) {
  require(session.world() > WorldSize{1}, "a disagreement takes two");
  const auto floats = [](Comm& comm, std::size_t count) { return comm.allocate<float>(count); };
  disagree(
      session, "count", [&](Comm& comm) { comm.all_reduce(floats(comm, 100), Sum{}); },
      [&](Comm& comm) { comm.all_reduce(floats(comm, 101), Sum{}); },
      "all_reduce(sum of 100 float)", "all_reduce(sum of 101 float)");
  disagree(
      session, "operation", [&](Comm& comm) { comm.all_reduce(floats(comm, 100), Sum{}); },
      [&](Comm& comm) { comm.all_reduce(floats(comm, 100), Average{}); },
      "all_reduce(sum of 100 float)", "all_reduce(average of 100 float)");
  disagree(
      session, "kind", [&](Comm& comm) { comm.all_reduce(floats(comm, 100), Sum{}); },
      [&](Comm& comm) { comm.broadcast(floats(comm, 100), Rank{0}); },
      "all_reduce(sum of 100 float)", "broadcast(100 float, root 0)");
  std::vector<double> host(7);
  disagree(
      session, "host", [&](Comm& comm) { comm.all_reduce(host, Sum{}); },
      [&](Comm& comm) { comm.barrier(); }, "all_reduce(sum of 7 double)", "barrier()");
}

void kill_one(Session& session) {
  Comm comm = make(session);
  killed(comm, 1000);
}

void stuck(Session& session) {
  require(session.world() > WorldSize{1}, "waiting in vain takes two");
  Comm comm = make(session);
  comm.barrier();
  comm.set_timeout(3s);
  const auto data = comm.allocate<float>(100);
  const auto [error, seconds] = failure_of([&] {
    if (comm.rank() != Rank{1}) comm.all_reduce(data);
    keep_waiting(comm, 20s);
  });
  print_failure(error, seconds);
  require(seconds > 2.5 && seconds < 15, "it took " + std::to_string(seconds) + " s");
  if (comm.rank() == Rank{1}) {
    require(error.is_consequence(), "rank 1 is told: " + std::string(error.text()));
    require_words(error, {"failed", "all_reduce(sum of 100 float)"});
  } else {
    require_words(error, {"all_reduce(sum of 100 float)", "rank 1 is in no call"});
  }
}

void abort(Session& session) {
  require(session.world() > WorldSize{1}, "giving up takes two");
  Comm comm = make(session);
  const auto data = comm.allocate<float>(100);
  comm.all_reduce(data);
  comm.barrier();
  const auto [error, seconds] = failure_of([&] {
    if (comm.rank() == Rank{1}) {
      std::this_thread::sleep_for(300ms);
      comm.abort("the disk is full");
    }
    comm.all_reduce(data);
    keep_waiting(comm, 20s);
  });
  print_failure(error, seconds);
  require_words(error, {"the disk is full"});
  require(error.is_consequence() == (comm.rank() != Rank{1}), "who is the cause");
  require(seconds < 15, "it took " + std::to_string(seconds) + " s");
}

/// A rank that an exception drives out tells the others.
void thrown(Session& session) {
  require(session.world() > WorldSize{1}, "noticing takes two");
  const auto run = [&] {
    Comm comm = make(session);
    const auto data = comm.allocate<float>(100);
    comm.barrier();
    if (comm.rank() == Rank{1}) throw Error("the loader", "no more data", "get some", comm.rank());
    comm.all_reduce(data);
    keep_waiting(comm, 20s);
  };
  const auto [error, seconds] = failure_of(run);
  print_failure(error, seconds);
  if (session.rank() == Rank{1}) {
    require_words(error, {"no more data"});
  } else {
    require_words(error, {"rank 1 failed", "it ended with an exception"});
  }
  require(seconds < 15, "it took " + std::to_string(seconds) + " s");
}

/// More elements than an `int` counts, and more bytes than an `unsigned` does.
void large_data(Session& session) {
  Comm comm = make(session);
  const std::size_t world = comm.world_size().value();
  const auto data = comm.allocate<BFloat16>(large::count);
  large::write(data.data(), data.size(), large::Pattern{static_cast<int>(comm.rank().value())});
  comm.all_reduce(data, Max{});
  comm.synchronize();
  std::string wrong =
      large::difference(data.data(), data.size(), large::Pattern{static_cast<int>(world) - 1});
  require(wrong.empty(), "largest: " + wrong);
  large::write(data.data(), data.size(), large::Pattern{static_cast<int>(comm.rank().value())});
  comm.broadcast(data, Rank{world - 1});
  comm.synchronize();
  wrong = large::difference(data.data(), data.size(), large::Pattern{static_cast<int>(world) - 1});
  require(wrong.empty(), "broadcast: " + wrong);
}

/// More ranks than GPUs by mistake: every rank names the first two that have one GPU.
void fewer_gpus(Session& session) {
  const auto [error, seconds] = failure_of([&] { make(session); });
  print_failure(error, seconds);
  const std::string second = std::to_string(detail::visible_gpus());
  require_words(error,
                {"ranks 0 and " + second + " have the same GPU, GPU-", "LOCKSTEP_SHARE_GPUS=1"});
}

/// Ranks that may share a GPU and do are on hosts of their own for NCCL; others pretend nothing,
/// however few GPUs each of them sees.
void pretend(Session& session) {
  Comm comm = make(session);
  comm.barrier();
  const std::string own = detail::gpu_name(comm.gpu());
  bool is_shared = false;
  const auto all = session.store().gather("names of GPUs", session.rank(), session.world(), own);
  for (std::size_t w = 0; w < all.size(); ++w)
    is_shared = is_shared || (w != session.rank().value() && all[w] == own);
  const char* const host = std::getenv("NCCL_HOSTID");
  require((host != nullptr) == is_shared,
          is_shared ? "NCCL was not told of another host" : "NCCL was told of another host");
}

const Cases cases = {{"collectives", collectives},
                     {"groups", groups},
                     {"objects", objects},
                     {"feed", feed},
                     {"process_groups", process_groups},
                     {"async", async},
                     {"patience", compute_for_long},
                     {"capture", capture},
                     {"large", large_data},
                     {"mismatch", mismatch},
                     {"killed", kill_one},
                     {"stuck", stuck},
                     {"abort", abort},
                     {"thrown", thrown},
                     {"fewer_gpus", fewer_gpus},
                     {"pretend", pretend}};

}  // namespace

int main(int argc, char** argv) { return main_of(argc, argv, cases); }

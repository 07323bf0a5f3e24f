// SPDX-License-Identifier: Apache-2.0
// What Gloo does for GPUs among real ranks: LOCKSTEP_SHARE_GPUS=1 gloo_ranks --ranks N CASE
// Cases that begin with hosts_ play two hosts, with shared memory inside each.
#include <stdlib.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/gloo.hpp"
#include "lockstep/detail/comm/staged.cuh"
#include "lockstep/detail/topology/grid.hpp"
#include "rank_cases.cuh"

namespace {

using namespace lockstep;
using namespace exercise;
using namespace std::chrono_literals;

struct Flat {
  static auto make(Session& session, const std::string& name = "world") {
    return make_staged_communicator(session.membership(), session.store(), name,
                                    make_gloo_communicator<>);
  }
};

struct OnHosts {
  static auto make(Session& session, const std::string& name = "world") {
    const std::size_t half = (session.world().value() + 1) / 2;
    ::setenv("LOCKSTEP_HOST", std::to_string(session.rank().value() / half).c_str(), 1);
    return make_staged_communicator(session.membership(), session.store(), name,
                                    make_hierarchical_communicator);
  }
};

/// Elements of a call that has one piece at most.
template <class T>
constexpr std::size_t whole(std::size_t in_rows = 1, std::size_t out_rows = 0) {
  return detail::staged::Transfer<T>{0, in_rows, out_rows, nullptr, nullptr}.width();
}

template <class How>
void collectives(Session& session) {
  auto comm = How::make(session);
  every_type(comm);
#if LOCKSTEP_RUNS_ON_GPU
  nan_wins<Half>(comm);
#endif
  nan_wins<float>(comm);
  for (const bool on_host : {false, true}) {
    reductions<float>(comm, 0, on_host, Sum{});
    movements<float>(comm, 0, on_host);
  }
  const auto arena = comm.template allocate<float>(1000);
  for (float v : downloaded(comm, arena)) require(v == 0, "allocated memory is not zeroed");
  require_words(failure_of([&] { comm.broadcast(arena, Rank{99}); }).first, {"root 99"});
  comm.barrier();
}

/// Around the ends of pieces, of calls with one row and with one for each rank.
template <class How>
void pieces(Session& session) {
  auto comm = How::make(session);
  const std::size_t world = comm.world_size().value();
  for (const std::size_t n : {whole<float>() - 1, whole<float>(), whole<float>() + 1,
                              2 * whole<float>(), 6 * whole<float>() + 77}) {
    reductions<float>(comm, n, false, Average{});
  }
  for (const std::size_t n : {whole<float>(1, world), whole<float>(world, world) + 1})
    movements<float>(comm, n, false);
  reductions<float>(comm, 2 * whole<float>() + 1, true, Sum{});
}

template <class How>
void async(Session& session) {
  auto comm = How::make(session);
  const double kept = sums_of_a_busy_stream(comm, 2 * whole<float>() + 5, 1s);
  require(kept < 0.8, "the host was blocked for " + std::to_string(kept) + " s");
  comm.barrier();
}

template <class How>
void compute_for_long(Session& session) {
  auto comm = How::make(session);
  patience(comm);
}

void groups(Session& session) {
  auto comm = Flat::make(session);
  const std::size_t row = comm.world_size().value() % 2 == 0 ? 2 : 1;
  auto rows = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), row});
  require(rows.world_size() == WorldSize{row} && &rows.gpu() == &comm.gpu(), "a row");
  reductions<float>(rows, 1001, false, Sum{});
  auto first = new_group(comm, {Rank{0}});
  require(first.has_value() == (comm.rank() == Rank{0}), "who is in a group of rank 0");
  if (first) reductions<float>(*first, 1001, false, Sum{});
  comm.barrier();
}

template <class How>
void disagree(Session& session, std::size_t count, const std::string& remark) {
  const auto call = [&](std::size_t n) {
    return "all_reduce(sum of " + std::to_string(n) + " float" + remark + ")";
  };
  auto comm = How::make(session, "mismatch of " + std::to_string(count));
  const auto data = comm.template allocate<float>(count + 1);
  const auto [error, seconds] =
      failure_of([&] { comm.all_reduce(data.first(count + comm.rank().value() % 2)); });
  if (session.rank() < Rank{2}) print_failure(error, seconds);
  require_words(error, {"rank 0 called " + call(count), "rank 1 called " + call(count + 1)});
  for (float v : downloaded(comm, data)) require(v == 0, "a buffer was written");
}

template <class How>
void mismatch(Session& session) {
  disagree<How>(session, 100, "");
  disagree<How>(session, 3 * whole<float>(), ", memory of its own");
}

template <class How>
void kill_one(Session& session) {
  auto comm = How::make(session);
  killed(comm, whole<float>() + 1000);
}

template <class How>
void stuck(Session& session) {
  auto comm = How::make(session);
  const auto data = comm.template allocate<float>(100);
  comm.all_reduce(data);
  comm.barrier();
  comm.set_timeout(3s);
  if (comm.rank() == Rank{1}) {
    std::this_thread::sleep_for(10s);  // longer than the others wait, even on a busy GPU
    return;
  }
  const auto [error, seconds] = failure_of([&] { comm.all_reduce_async(data).wait(); });
  print_failure(error, seconds);
  require(seconds > 2.5 && seconds < 9, "it took " + std::to_string(seconds) + " s");
  require_words(error, {"all_reduce(sum of 100 float)", "rank 1"});
}

template <class How>
void abort(Session& session) {
  auto comm = How::make(session);
  const auto data = comm.template allocate<float>(100);
  comm.barrier();
  const auto [error, seconds] = failure_of([&] {
    if (comm.rank() == Rank{1}) comm.abort("the disk is full");
    comm.all_reduce(data);
  });
  print_failure(error, seconds);
  if (comm.rank() != Rank{1}) require_words(error, {"the disk is full"});
}

const Cases cases = {{"collectives", collectives<Flat>},
                     {"pieces", pieces<Flat>},
                     {"async", async<Flat>},
                     {"patience", compute_for_long<Flat>},
                     {"groups", groups},
                     {"mismatch", mismatch<Flat>},
                     {"killed", kill_one<Flat>},
                     {"stuck", stuck<Flat>},
                     {"abort", abort<Flat>},
                     {"hosts_collectives", collectives<OnHosts>},
                     {"hosts_pieces", pieces<OnHosts>},
                     {"hosts_async", async<OnHosts>},
                     {"hosts_mismatch", mismatch<OnHosts>},
                     {"hosts_killed", kill_one<OnHosts>},
                     {"hosts_abort", abort<OnHosts>}};

}  // namespace

int main(int argc, char** argv) { return main_of(argc, argv, cases); }

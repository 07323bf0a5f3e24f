// SPDX-License-Identifier: Apache-2.0
// A system that has no thread left: every place that starts threads says so in words, and nothing
// waits for those that were started before.
#include "lockstep/detail/core/thread.hpp"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "failing_threads.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/comm/call/fault_channel.hpp"
#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/store/server.hpp"
#include "lockstep/detail/strategy/replica_workers.hpp"

BOOST_FIXTURE_TEST_SUITE(threads_that_cannot_start, Watchdog)

namespace {

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;

/// Calls `use()` where no thread can be started, then where one can, and so on until none is
/// rejected. Every time but the last it throws an error that names the thread and the remedy.
/// Returns how many threads `use()` starts.
template <class Use>
int expect_words_at_every_limit(const std::string& words, Use use) {
  for (int more = 0;; ++more) {
    const ThreadLimit limit(more);
    const std::string said = error_of(use);
    if (!limit.was_met()) {
      BOOST_TEST(said == "");
      return more;
    }
    BOOST_TEST(said.find(words + " cannot be started: ") != std::string::npos,
               "with " << more << " threads it says: '" << said << "'");
    BOOST_TEST(said.find("ulimit -u") != std::string::npos, said);
  }
}

struct Number {
  std::size_t value = 0;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_loaders_worker_that_cannot_start_is_an_error_and_the_others_end) {
  struct Increments {
    void fill(Number& number) const { ++number.value; }
  };
  const auto load = [&] {
    const Increments increments;
    PrefetchQueue<Number, const Increments> queue(8, 4, increments);
    queue.request([](Number& number) { number.value = 41; });
    queue.publish();
    BOOST_TEST(queue.take().value == 42u);
  };
  BOOST_TEST(expect_words_at_every_limit("a worker of a data loader", load) == 4);
}

BOOST_AUTO_TEST_CASE(a_queue_of_calls_forgets_the_call_whose_thread_cannot_start) {
  struct Owner {
    TaskQueue& queue() { return calls; }
    void give_up() {}
    TaskQueue calls{call_thread};
  };
  std::atomic<int> made = 0;
  const auto call = [&] { ++made; };
  using Call = PendingInQueue<Owner, decltype(call)>;
  Owner owner;
  {
    const ThreadLimit limit(0);
    for (int i = 0; i != 2; ++i) {
      std::optional<Call> first;
      expect_error([&] { first.emplace(owner, call); }, "the thread that makes asynchronous calls",
                   "ulimit -u");
      owner.calls.drain();
    }
  }
  Call second(owner, call);
  Call third(owner, call);
  third.wait();
  second.wait();
  BOOST_TEST(made == 2);
}

BOOST_AUTO_TEST_CASE(a_checkpoints_thread_that_cannot_start_is_an_error_and_the_next_save_works) {
  BackgroundWriter writer(Rank{0});
  bool wrote = false;
  const auto save = [&] { writer.start([&] { wrote = true; }); };
  BOOST_TEST(expect_words_at_every_limit("the thread that writes a checkpoint", save) == 1);
  writer.wait();
  BOOST_TEST(wrote);
}

BOOST_AUTO_TEST_CASE(a_replicas_thread_that_cannot_start_is_an_error_and_the_others_end) {
  const auto step = [] {
    ReplicaWorkers workers(4);
    std::atomic<int> runs = 0;
    workers.run([&](std::size_t) { ++runs; });
    BOOST_TEST(runs == 4);
  };
  BOOST_TEST(expect_words_at_every_limit("the thread of a replica", step) == 3);
}

BOOST_AUTO_TEST_CASE(a_helper_thread_that_cannot_start_is_an_error) {
  const auto reduce = [] {
    ShmCommunicator<dynamic, HelperThread> comm(Rank{0}, WorldSize{1},
                                                shm::Engine::make_file(WorldSize{1}), 5s);
    float value[] = {3};
    comm.all_reduce(value, Sum{});
  };
  BOOST_TEST(expect_words_at_every_limit("the helper thread of Progress<HelperThread>", reduce) ==
             1);
}

BOOST_AUTO_TEST_CASE(a_store_whose_thread_cannot_start_is_an_error) {
  const auto serve = [] { const StoreServer server("secret"); };
  BOOST_TEST(expect_words_at_every_limit("the thread of the job's store", serve) == 1);
}

BOOST_AUTO_TEST_CASE(ranks_whose_thread_cannot_start_free_those_that_were_started) {
  const auto meet = [](const Membership& member, Store& store) {
    store.barrier("all", member.rank, member.world, 20s);
  };
  const auto spawned = [&] { spawn(AsThreads{}, 4, meet); };
  for (int more : {1, 2, 4}) {  // the first thread is the store's
    const ThreadLimit limit(more);
    expect_error(spawned, "the thread of a rank cannot be started", "ulimit -u",
                 text({"rank ", more - 1}));
    BOOST_TEST(limit.was_met());
  }
  spawned();
}

BOOST_AUTO_TEST_CASE(shared_work_is_done_by_the_threads_that_there_are) {
  for (int more = 0; more != 4; ++more) {
    const ThreadLimit limit(more);
    std::vector<std::atomic<int>> done(50);
    share_work(done.size(), [&](std::size_t i) { ++done[i]; });
    for (const auto& times : done) BOOST_TEST(times == 1);
  }
}

BOOST_AUTO_TEST_SUITE_END()

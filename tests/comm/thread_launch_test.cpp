// SPDX-License-Identifier: Apache-2.0
// A program whose ranks are threads: they are ranks of one job, and end together.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "failing_threads.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "participants.hpp"

using namespace participants;

namespace {

/// What a program printed on stderr, and its exit status.
struct Result {
  int status = -1;
  std::string words;
};

/// `launch_threads` with these arguments, in a process of its own.
template <class F>
Result launched(std::vector<std::string> arguments, F f, std::size_t default_ranks = dynamic) {
  std::fflush(nullptr);
  int ends[2];
  BOOST_REQUIRE(::pipe(ends) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(20);
    ::dup2(ends[1], 2);
    ::close(ends[0]);
    arguments.insert(arguments.begin(), "program");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    const int status = launch_threads(static_cast<int>(argv.size()), argv.data(), f, default_ranks);
    ::_exit(status);
  }
  ::close(ends[1]);
  Result result;
  char words[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], words, sizeof words)) > 0;) {
    result.words.append(words, static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

void expect_words(const Result& result, const std::string& words) {
  BOOST_TEST(result.words.find(words) != std::string::npos, "it said: " << result.words);
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(thread_launch, Watchdog)

BOOST_AUTO_TEST_CASE(threads_are_ranks_of_one_job) {
  for (std::size_t ranks : {1, 2, 4, 8}) {
    std::atomic<std::size_t> sum = 0;
    std::mutex mutex;
    std::set<std::string> jobs;
    std::string program = "trainer";
    std::string option = "--ranks";
    std::string number = std::to_string(ranks);
    std::string rest = "--epochs";
    char* argv[] = {program.data(), option.data(), number.data(), rest.data()};
    const int status = launch_threads(4, argv, [&](Session& session) {
      detail::check(session.arguments() == std::vector<std::string>{"trainer", "--epochs"},
                    "hand them on");
      session.store().barrier("all", session.rank(), session.world());
      const Membership& member = session.membership();
      detail::check(member.local_rank == member.rank.value(), "be alone on the host");
      sum += member.rank.value() + 10 * member.local_world;
      const std::lock_guard lock(mutex);
      jobs.insert(member.job);
    });
    BOOST_TEST(status == 0);
    BOOST_TEST(sum == ranks * (ranks - 1) / 2 + 10 * ranks * ranks);
    BOOST_TEST(jobs.size() == 1u);
  }
}

BOOST_AUTO_TEST_CASE(the_number_of_ranks_is_the_options_or_the_programs_or_one) {
  const auto world = [](Session& session) {
    return static_cast<int>(session.rank() == Rank{0} ? session.world().value() : 0);
  };
  BOOST_TEST(launched({}, world).status == 1);
  BOOST_TEST(launched({}, world, 3).status == 3);
  BOOST_TEST(launched({"--ranks=5"}, world, 3).status == 5);
}

BOOST_AUTO_TEST_CASE(the_first_failure_is_reported_and_frees_the_others) {
  const Result in_store = launched({"--ranks", "4"}, [](Session& session) {
    if (session.rank() == Rank{2}) throw std::runtime_error("no data");
    session.store().barrier("never", session.rank(), session.world());
  });
  BOOST_TEST(in_store.status == 1);
  BOOST_TEST(in_store.words.starts_with("lockstep: rank 2: no data\n"), in_store.words);

  const auto rendezvous = std::make_shared<Rendezvous>(WorldSize{4});
  const Result in_call = launched({"--ranks", "4"}, [&](Session& session) {
    RankHandle handle(rendezvous, session.rank(), session.membership().timeout);
    if (session.rank() == Rank{1}) throw Error("step", "the loss is NaN", "look at the data");
    handle.rendezvous(Call{}, CallArguments{}, [](auto) {});
  });
  BOOST_TEST(in_call.status == 1);
  BOOST_TEST(
      in_call.words.starts_with("lockstep: rank 1, step: the loss is NaN; look at the data\n"),
      in_call.words);
  expect_words(in_call, "ranks 0, 2, 3 failed because of that, in barrier()");
}

BOOST_AUTO_TEST_CASE(a_rank_whose_thread_cannot_start_frees_those_that_were_started) {
  const auto exchange = [](Session& session) {
    session.store().barrier("all", session.rank(), session.world(), 15s);
    return 0;
  };
  for (int more : {1, 2, 4}) {  // the first thread is the store's
    const ThreadLimit limit(more);
    const Result result = launched({"--ranks", "4"}, exchange);
    BOOST_TEST(result.status == 1);
    expect_words(result, text({"lockstep: rank ", more - 1, ", starting a thread: the thread of a ",
                               "rank cannot be started: "}));
    expect_words(result, "ulimit -u");
  }
}

BOOST_AUTO_TEST_CASE(what_is_thrown_need_not_be_an_exception_of_the_library) {
  const Result result = launched({"--ranks", "2"}, [](Session& session) {
    if (session.rank() == Rank{1}) throw 42;
  });
  BOOST_TEST(result.status == 1);
  expect_words(result, "lockstep: rank 1: an exception that is no std::exception");
}

BOOST_AUTO_TEST_CASE(ranks_that_somebody_else_started_are_told_how_to_start_this_job) {
  ::setenv("RANK", "1", 1);
  ::setenv("WORLD_SIZE", "4", 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", "29500", 1);
  const Result result = launched({}, [](Session&) {});
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  BOOST_TEST(result.status == 1);
  expect_words(result,
               "rank 1, launch: the environment started this process as one of 4 ranks, and the "
               "ranks of this job are threads of one process; start it once, with --ranks 4");
  expect_words(launched({"--ranks=2", "--nodes=2"}, [](Session&) {}),
               "--nodes is given, and --ranks starts ranks on this host only");
}

BOOST_AUTO_TEST_CASE(options_that_are_wrong_are_errors) {
  const Result result = launched({"--ranks", "none"}, [](Session&) {});
  BOOST_TEST(result.status == 1);
  expect_words(result, "--ranks");
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/launch/rendezvous.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/launch/join.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;
using lockstep::detail::Descriptor;
using lockstep::detail::join_at;
using lockstep::detail::listen_on;
using lockstep::detail::local_port;
using lockstep::detail::RankPlacement;
using lockstep::detail::RendezvousFile;
using lockstep::detail::StoreServer;
using lockstep::detail::try_listen;
using namespace std::chrono_literals;

namespace {

/// Runs `f(rank)` in `ranks` processes; their exit statuses. What they throw is status 1.
template <class F>
std::vector<int> processes(std::size_t ranks, F f) {
  std::cout.flush();
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (std::size_t r = 0; r < ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(20);
      int status = 1;
      try {
        status = f(Rank{r});
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(status);
    }
    pids.push_back(pid);
  }
  std::vector<int> statuses;
  for (pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return statuses;
}

std::uint16_t free_port() {
  int error = 0;
  return local_port(try_listen("127.0.0.1", 0, error).get());
}

/// Meets, and checks what a rank must know afterwards.
int meet(const std::string& method, Rank rank, std::size_t world) {
  Session session = join(method, rank, WorldSize{world}, 10000ms);
  const Membership& m = session.membership();
  if (m.rank != rank || m.world != WorldSize{world}) return 2;
  if (m.local_rank != rank.value() || m.local_world != world) return 3;
  if (m.job.size() != 32 || session.store().compare_set("job", "", m.job) != m.job) return 4;
  return session.store().add("sum", static_cast<std::int64_t>(rank.value())) >= 0 ? 0 : 5;
}

struct Folder : Watchdog, TemporaryFolder {
  std::string file() const { return *this / "meet"; }
};

const std::vector<int> all_well(4, 0);

}  // namespace

BOOST_FIXTURE_TEST_SUITE(rendezvous, Folder)

BOOST_AUTO_TEST_CASE(processes_meet_by_tcp) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  BOOST_TEST((processes(4, [&](Rank rank) { return meet(method, rank, 4); }) == all_well));
  // The same port again, at once.
  BOOST_TEST((processes(4, [&](Rank rank) { return meet(method, rank, 4); }) == all_well));
}

BOOST_AUTO_TEST_CASE(a_process_joins_again_at_one_place_and_at_others) {
  const std::string both = "tcp://127.0.0.1:" + std::to_string(free_port());
  const std::string all = "tcp://127.0.0.1:" + std::to_string(free_port());
  const auto statuses = processes(4, [&](Rank rank) {
    int status = 0;
    for (int i = 0; i < 3 && rank < Rank{2}; ++i) status |= meet(both, rank, 2);
    for (int i = 0; i < 3; ++i) status |= meet(all, rank, 4);  // two ranks have joined before
    for (int i = 0; i < 3; ++i) {
      status |= meet("file://" + file() + std::to_string(i), rank, 4);
    }
    return status;
  });
  BOOST_TEST((statuses == all_well));
}

BOOST_AUTO_TEST_CASE(processes_meet_by_file_which_is_private_and_removed) {
  const std::string method = "file://" + file();
  BOOST_TEST((processes(4, [&](Rank rank) { return meet(method, rank, 4); }) == all_well));
  BOOST_TEST(std::filesystem::is_empty(path));
  const RendezvousFile written(file(), "127.0.0.1", 1, "s");
  struct stat status{};
  ::stat(file().c_str(), &status);
  BOOST_TEST((status.st_mode & 0777) == 0600u);
}

BOOST_AUTO_TEST_CASE(a_file_that_an_earlier_job_left_does_not_confuse) {
  std::ofstream(file()) << "lockstep rendezvous 1\n127.0.0.1\n" << free_port() << "\nold\n";
  const std::string method = "file://" + file();
  const auto statuses = processes(4, [&](Rank rank) {
    if (rank == Rank{0}) std::this_thread::sleep_for(200ms);
    return meet(method, rank, 4);
  });
  BOOST_TEST((statuses == all_well));
}

BOOST_AUTO_TEST_CASE(files_of_a_running_job_or_of_others_are_rejected) {
  StoreServer running("s");
  {
    const RendezvousFile theirs(file(), "127.0.0.1", running.port(), "s");
    expect_error([&] { join("file://" + file(), Rank{0}, WorldSize{1}, 1000ms); },
                 "in use by another job");
  }
  std::ofstream(file()) << "dear diary\n";
  expect_error([&] { join("file://" + file(), Rank{0}, WorldSize{1}, 1000ms); },
               "not a file of lockstep's");
  BOOST_TEST(std::filesystem::file_size(file()) == 11u);
  expect_error([] { join("file:///no/such/folder/x", Rank{0}, WorldSize{1}, 1000ms); },
               "cannot write", "No such file");
}

BOOST_AUTO_TEST_CASE(ranks_that_do_not_come_are_named) {
  const std::string method = "tcp://127.0.0.1:" + std::to_string(free_port());
  const auto statuses = processes(2, [&](Rank rank) {
    try {
      join(method, rank, WorldSize{4}, 700ms);
    } catch (const Error& error) {
      return error.problem().starts_with("ranks 2, 3 did not come") ? 0 : 2;
    }
    return 3;
  });
  BOOST_TEST((statuses[0] == 0 || statuses[1] == 0));  // the other may find the host gone
  expect_error([&] { join("file://" + file(), Rank{1}, WorldSize{2}, 200ms); }, "rank 1, join",
               "rank 0 did not open a store through " + file(), "0.2 s");
  expect_error([&] { join(method, Rank{1}, WorldSize{2}, 200ms); }, "rank 1", "refused", "0.2 s");
}

BOOST_AUTO_TEST_CASE(two_processes_with_one_number_and_worlds_that_differ_are_errors) {
  RankPlacement place;
  StoreServer server("s");
  place.launcher = "the test";
  place.world = WorldSize{1};
  place.ports = {server.port()};
  place.secret = "s";
  place.hosted = true;
  const Session first = join_at(place, 1000ms);
  expect_error([&] { join_at(place, 1000ms); }, "rank 0", "another process has joined as rank 0");
  place.world = WorldSize{2};
  expect_error([&] { join_at(place, 1000ms); }, "a world of 2, another one of 1");
}

BOOST_AUTO_TEST_CASE(a_port_in_use_is_an_error_and_derived_ports_are_passed_over) {
  // Some other program's, which takes connections and says nothing.
  const Descriptor other = listen_on("127.0.0.1", 0);
  const std::uint16_t taken = local_port(other.get());
  const std::string method = "tcp://127.0.0.1:" + std::to_string(taken);
  expect_error([&] { join(method, Rank{0}, WorldSize{1}, 1000ms); }, "rank 0", "in use");
  const std::uint16_t free = free_port();
  const auto statuses = processes(4, [&](Rank rank) {
    RankPlacement place;
    place.launcher = "the test";
    place.rank = rank;
    place.world = WorldSize{4};
    place.ports = {taken, free};
    place.secret = "s";
    return join_at(place, 10000ms).membership().port == free ? 0 : 2;
  });
  BOOST_TEST((statuses == all_well));
}

BOOST_AUTO_TEST_CASE(init_methods_that_are_none_are_errors) {
  expect_error([] { join("mpi://", Rank{0}, WorldSize{1}); }, "'mpi://'", "env://");
  expect_error([] { join("tcp://host", Rank{0}, WorldSize{1}); }, "host:port");
  expect_error([] { join("file://relative", Rank{0}, WorldSize{1}); }, "names no file");
  expect_error([] { join("tcp://127.0.0.1:1", Rank{2}, WorldSize{2}); }, "rank 2 of a world of 2");
}

BOOST_AUTO_TEST_CASE(alone_is_a_world_of_one) {
  Session session = detail::join_alone();
  BOOST_TEST(session.world().value() == 1u);
  BOOST_TEST(session.membership().local_world == 1u);
  BOOST_TEST(session.store().add("n", 1) == 1);
}

BOOST_AUTO_TEST_SUITE_END()

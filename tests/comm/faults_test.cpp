// SPDX-License-Identifier: Apache-2.0
// Wrong calls, exceptions and a lack of memory are noticed by all ranks, named, and before any
// buffer is written.
#include <sched.h>
#include <sys/mount.h>

#include <boost/test/unit_test.hpp>
#include <csignal>
#include <string>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/core/error.hpp"
#include "mismatch.hpp"
#include "repeat.hpp"
#include "skipped.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_faults)

namespace {

/// Ranks as processes and as threads, by turns.
void repeat(auto f) {
  for (int i = 0; i < repetitions(2, 20); ++i) {
    f(As::processes);
    f(As::threads);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_that_name_both) {
  repeat([](As as) {
    expect_mismatches<SharedMemory>(as);
    expect_mismatch<SharedMemory>(
        as,
        [](auto& comm, auto arena, bool odd) {
          std::vector<float> own(4000, 1.f);
          if (odd) {
            comm.all_reduce(own);
          } else {
            comm.all_reduce(arena);
          }
        },
        "all_reduce(sum of 4000 float)", "all_reduce(sum of 4000 float, memory of its own)");
  });
}

BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_reaches_the_others) {
  repeat([](As as) {
    const Ends ends = run(as, 3, [](Shared& comm) {
      if (comm.rank() == Rank{0}) throw std::runtime_error("out of luck");
      comm.barrier();
    });
    BOOST_TEST(ends[0] == "out of luck");
    expect_words(ends, 0, {"barrier(): rank 0 failed: it ended with an exception"});
  });
}

BOOST_AUTO_TEST_CASE(a_rank_that_stops_on_request_tells_the_others_of_no_failure) {
  repeat([](As as) {
    const Ends ends = run(as, 3, [](Shared& comm) {
      comm.barrier();
      if (comm.rank() == Rank{0}) throw Stopped(SIGTERM, "file");
      comm.barrier();
    });
    BOOST_TEST(ends[0].starts_with("lockstep: stopped on request (SIGTERM)"));
    expect_words(ends, 0, {"barrier(): rank 0 closed its communicator without this call"});
  });
}

BOOST_AUTO_TEST_CASE(a_rank_that_skips_a_collective_is_named) {
  repeat([](As as) {
    const Ends ends = run(as, 2, [](Shared& comm) {
      if (comm.rank() == Rank{0}) comm.barrier();
    });
    expect_words(ends, 1, {"barrier(): rank 1 closed its communicator without this call"});
  });
}

BOOST_AUTO_TEST_CASE(messages_of_different_counts_are_an_error) {
  repeat([](As as) {
    const Ends ends = run(as, 2, [](Shared& comm) {
      std::vector<float> data(comm.rank() == Rank{0} ? 5 : 6);
      if (comm.rank() == Rank{0}) comm.send(data, Rank{1});
      if (comm.rank() == Rank{1}) comm.receive(data, Rank{0});
    });
    expect_words(ends, 0, {"receive(6 float, from rank 0): rank 0 sends send(5 float, to rank 1)"});
  });
}

BOOST_AUTO_TEST_CASE(wrong_arguments_are_errors_here_and_now) {
  expect_words(run(As::threads, 2,
                   [](Shared& comm) {
                     std::vector<float> data(4);
                     comm.broadcast(data, Rank{2});
                   }),
               nobody, {"root 2 is not in the world"});
  expect_words(run(As::threads, 2,
                   [](Shared& comm) {
                     std::vector<float> in(4);
                     std::vector<float> out(7);
                     comm.all_gather(in, out);
                   }),
               nobody, {"7 elements where 8 are needed"});
  expect_words(run(As::threads, 2,
                   [](Shared& comm) {
                     std::vector<float> in(7);
                     std::vector<float> out(7);
                     comm.all_to_all(in, out);
                   }),
               nobody, {"7 elements do not divide among 2 ranks"});
}

BOOST_AUTO_TEST_CASE(
    an_exception_that_passes_a_call_under_way_comes_out_and_ends_the_communicator) {
  repeat([](As as) {
    const Ends ends = run(as, 2, [](Shared& comm) {
      auto arena = comm.allocate<float>(4000);
      if (comm.rank() == Rank{1}) return;  // its peer is gone before the call can be over
      try {
        auto work = comm.all_reduce_async(arena);
        throw std::runtime_error("the program's own");
      } catch (const std::runtime_error& error) {
        require(error.what() == std::string("the program's own"), "another exception came out");
      }
      comm.barrier();  // throws the fault that the handle left behind
    });
    BOOST_TEST(ends[1].empty());
    expect_words(ends, 1, {"this rank gave it up: it ended with an exception"});
  });
}

BOOST_AUTO_TEST_CASE(a_call_that_fails_at_its_handles_end_is_thrown_by_the_next_call) {
  repeat([](As as) {
    const Ends ends = run(as, 2, [](Shared& comm) {
      auto arena = comm.allocate<float>(4000);
      if (comm.rank() == Rank{1}) return;
      {
        const auto work = comm.all_reduce_async(arena);
      }
      comm.barrier();
    });
    expect_words(ends, 1, {"all_reduce(sum of 4000 float): rank 1 closed its communicator"});
  });
}

BOOST_AUTO_TEST_CASE(too_little_memory_is_an_error_with_the_size_that_is_needed) {
  repeat([](As as) {
    const Ends ends = run(as, 2, [](Shared& comm) { comm.allocate<float>(1ull << 44); });
    expect_words(ends, nobody, {"134217728 MiB more are needed"});
  });
}

BOOST_AUTO_TEST_CASE(a_tiny_dev_shm_does_not_matter) {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0) {
      _exit(77);
    }
    const Ends ends = run_processes(2, 20s, [](Shared& comm) {
      auto arena = comm.allocate<float>(8_MiB / sizeof(float));
      std::fill(arena.begin(), arena.end(), 1.f);
      comm.all_reduce(arena);
      require(arena.back() == 2.f, "the sum is wrong");
    });
    _exit(ends[0].empty() && ends[1].empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    say_skipped("a small /dev/shm (no mount namespace can be made here)");
    return;
  }
  BOOST_TEST(status == 0);
}

BOOST_AUTO_TEST_SUITE_END()

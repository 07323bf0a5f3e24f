// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What other ranks are told of one that fails, stops, gives up or skips a call, by every
/// backend over a network.

#include "exercise.hpp"
#include "lockstep/detail/core/error.hpp"

namespace ranks {

template <class Rendezvous>
void expect_groups_that_differ_to_be_named() {
  expect_words(run_processes<Rendezvous>(3, 20s,
                                         [](auto& comm) {
                                           const std::size_t other = comm.rank() == Rank{1} ? 2 : 1;
                                           new_group(comm, {Rank{0}, Rank{other}});
                                         }),
               nobody, {"ranks disagree", "new_group(2 ranks)"});
}

template <class Rendezvous>
void expect_an_exception_to_reach_others() {
  const Ends ends = run_processes<Rendezvous>(3, 20s, [](auto& comm) {
    if (comm.rank() == Rank{0}) throw std::runtime_error("out of luck");
    comm.barrier();
  });
  BOOST_TEST(ends[0] == "out of luck");
  expect_words(ends, 0, {"barrier(): rank 0 failed: it ended with an exception"});
}

template <class Rendezvous>
void expect_a_stop_to_be_no_failure() {
  const Ends ends = run_processes<Rendezvous>(3, 20s, [](auto& comm) {
    comm.barrier();
    if (comm.rank() == Rank{0}) throw Stopped(0, "file");
    comm.barrier();
  });
  BOOST_TEST(ends[0].starts_with("lockstep: stopped on request"));
  expect_words(ends, 0, {"barrier(): rank 0 closed its communicator without this call"});
}

template <class Rendezvous>
void expect_an_abort_to_be_told() {
  const Ends ends = run_processes<Rendezvous>(3, 20s, [](auto& comm) {
    if (comm.rank() == Rank{1}) {
      comm.abort("the loss is not a number");
      comm.barrier();
    }
    std::vector<float> data(1000);
    comm.all_reduce(data);
  });
  expect_words(ends, 1, {"(sum of 1000 float): rank 1 failed: the loss is not a number"});
  BOOST_TEST(ends[1].find("gave it up: the loss is not a number") != std::string::npos, ends[1]);
}

template <class Rendezvous>
void expect_a_skipped_call_to_be_named() {
  const Ends ends = run_processes<Rendezvous>(2, 20s, [](auto& comm) {
    if (comm.rank() == Rank{0}) comm.barrier();
  });
  expect_words(ends, 1, {"barrier(): rank 1 closed its communicator without this call"});
}

}  // namespace ranks

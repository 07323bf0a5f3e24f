// SPDX-License-Identifier: Apache-2.0
// Gloo for GPUs, without a GPU: ranks are processes, and what the library asks of CUDA is emulated.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/gloo_ranks.hpp"
#include "comm/mismatch.hpp"
#include "comm/repeat.hpp"
#include "gpu/emulated/staged.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/gloo.hpp"

using namespace ranks;

using StagedGloo = StagedCommunicator<GlooCommunicator<>>;
static_assert(ArenaAllocating<StagedGloo> && AsyncReducing<StagedGloo> && Splitting<StagedGloo>);
using StagedHierarchy =
    StagedCommunicator<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>>;
static_assert(ArenaAllocating<StagedHierarchy> && AsyncReducing<StagedHierarchy> &&
              Splitting<StagedHierarchy>);

BOOST_AUTO_TEST_SUITE(gpu_staged)

namespace {

using FlatRanks = Staged<Sockets>;
using HostedRanks = Staged<EmulatedHosts>;

template <class Rendezvous>
void expect_mismatch_of_pieces() {
  const std::size_t count = 2 * whole<float>();
  const Ends ends = run_staged<Rendezvous>(2, [&](auto& comm) {
    const auto data = comm.template allocate<float>(count + 1);
    std::fill(data.begin(), data.end(), 1.f);
    try {
      comm.all_reduce(data.first(count + comm.rank().value()));
    } catch (const Error&) {
      comm.synchronize();
      for (float x : data) require(x == 1.f, "a buffer was written");
      throw;
    }
  });
  const auto call = [](std::size_t n) {
    return "all_reduce(sum of " + std::to_string(n) + " float, memory of its own)";
  };
  expect_words(ends, nobody, {"rank 0 called " + call(count), "rank 1 called " + call(count + 1)});
}

template <class Rendezvous>
void expect_named_death() {
  Chance chance;
  for (int i = 0; i < repetitions(3, 30); ++i) {
    const Rank victim{chance(4)};
    const int last = static_cast<int>(chance(8));
    const Ends ends = run_staged<Rendezvous>(
        4,
        [&](auto& comm) {
          const auto data = comm.template allocate<float>(whole<float>() + 100);
          for (int k = 0;; ++k) {
            auto work = comm.all_reduce_async(data);
            if (comm.rank() == victim && k == last) raise(SIGKILL);
            work.wait();
          }
        },
        10min);
    for (std::size_t r = 0; r < 4; ++r) {
      if (Rank{r} == victim) continue;
      BOOST_TEST(tells_of_death(ends[r]), "rank " << r << ": " << ends[r]);
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_type_and_operation_is_exact_through_gloo) {
  every_type<FlatRanks>();
}
BOOST_AUTO_TEST_CASE(every_collective_type_and_operation_is_exact_through_a_hierarchy) {
  every_type<HostedRanks>();
}
BOOST_AUTO_TEST_CASE(calls_of_several_pieces_are_exact) {
  pieces<FlatRanks>(2, 3 * whole<double>());
  pieces<FlatRanks>(3, whole<double>());
  pieces<HostedRanks>(4, whole<double>() + 1);
}
BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way) {
  expect_all_fine(run_staged<FlatRanks>(2, [](auto& comm) { in_flight(comm); }));
  expect_all_fine(run_staged<HostedRanks>(4, [](auto& comm) { in_flight(comm); }));
}

// Neither what the compute stream is still writing may be read, nor a piece be overwritten that is
// on its way up.
BOOST_AUTO_TEST_CASE(the_gpu_may_be_slower_than_the_network) {
  expect_all_fine(run_staged<FlatRanks>(2, [](auto& comm) {
    emulated::upload_milliseconds = 100;
    const std::size_t n = 5 * whole<double>() + 1;
    const auto data = comm.template allocate<double>(n);
    std::vector<double> mine(n);
    for (std::size_t i = 0; i < n; ++i)
      mine[i] = static_cast<double>((comm.rank().value() + 1) * i);
    check_cuda(cudaMemcpyAsync(data.data(), mine.data(), data.size_bytes(), cudaMemcpyHostToDevice,
                               comm.gpu().stream()),
               "cudaMemcpyAsync");
    comm.all_reduce(data);
    comm.broadcast(data, Rank{1});
    comm.synchronize();
    for (std::size_t i = 0; i < n; ++i)
      if (data[i] != static_cast<double>(3 * i)) require(false, "element " + std::to_string(i));
  }));
}

// The rank's thread has got its result, which is on its way to the GPU.
BOOST_AUTO_TEST_CASE(leaving_a_call_by_an_exception_waits_for_copies_under_way) {
  expect_all_fine(run_staged<FlatRanks>(2, [](auto& comm) {
    emulated::upload_milliseconds = 300;
    const auto data = comm.template allocate<float>(100);
    try {
      auto work = comm.all_reduce_async(data);
      std::this_thread::sleep_for(100ms);
      throw std::runtime_error("out of luck");
    } catch (const std::runtime_error&) {
      std::fill(data.begin(), data.end(), 7.0F);  // the memory is the program's again
    }
    std::this_thread::sleep_for(400ms);
    require(std::count(data.begin(), data.end(), 7.0F) == 100, "it is written to afterwards");
  }));
}

BOOST_AUTO_TEST_CASE(groups_share_their_parents_gpu) {
  expect_all_fine(run_staged<FlatRanks>(6, [](auto& comm) {
    groups_of_six(comm);
    auto row = join_groups(comm, Grid<6, 3>{});
    require(&row.gpu() == &comm.gpu(), "another GPU");
    exercise::reductions<float>(row, whole<float>() + 1, false, Sum{});
  }));
}
BOOST_AUTO_TEST_CASE(single_numbers_and_pieces_of_different_lengths_are_gathered) {
  expect_all_fine(run_staged<FlatRanks>(3, [](auto& comm) {
    exercise::numbers_and_pieces(comm);
    numbers_and_pieces(comm);
  }));
  expect_all_fine(run_staged<HostedRanks>(4, [](auto& comm) {
    exercise::numbers_and_pieces(comm);
    auto group = new_group(comm, {Rank{3}, Rank{0}, Rank{1}});
    if (group) exercise::every_operation<float>(*group, true);
  }));
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run_staged<FlatRanks>(4, [](auto& comm) { strings_of_four(comm); }));
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_that_name_both) {
  expect_mismatches<FlatRanks>(As::processes);
  expect_mismatch_of_pieces<FlatRanks>();
  expect_mismatch_of_pieces<HostedRanks>();
}

// What cannot be right fails at once, and nothing else does.
BOOST_AUTO_TEST_CASE(wrong_arguments_fail_where_they_are_given) {
  expect_all_fine(run_staged<FlatRanks>(2, [](auto& comm) {
    const auto data = comm.template allocate<float>(10);
    std::vector<float> host(20);
    const auto expect = [](auto call, const std::string& words) {
      try {
        call();
      } catch (const Error& error) {
        require(std::string(error.text()).find(words) != std::string::npos, error.text());
        return;
      }
      throw std::runtime_error("no error with the words " + words);
    };
    expect([&] { comm.broadcast(data, Rank{2}); }, "root 2 is not in the world");
    expect([&] { comm.all_gather(data, data); }, "sizes do not fit");
    expect([&] { comm.all_gather(data, host); }, "in is device memory and out is host memory");
    expect([&] { comm.send(data, comm.rank()); }, "is not another rank of this world");
    comm.all_reduce(data);
    comm.barrier();
  }));
}

BOOST_AUTO_TEST_CASE(a_killed_rank_fails_all_others_long_before_the_time_limit) {
  expect_named_death<FlatRanks>();
  expect_named_death<HostedRanks>();
}

BOOST_AUTO_TEST_CASE(a_rank_that_does_not_come_is_named_at_the_time_limit) {
  const Ends ends = run_staged<FlatRanks>(3, [](auto& comm) {
    const auto data = comm.template allocate<float>(whole<float>() + 1);
    comm.barrier();
    comm.set_timeout(700ms);
    if (comm.rank() == Rank{1}) {
      std::this_thread::sleep_for(2s);
      return;
    }
    auto work = comm.all_reduce_async(data);
    work.wait();
  });
  expect_words(ends, 1, {"all_reduce(sum of", "waited 700 ms for rank 1"});
}

BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_reaches_the_others) {
  const auto run = [](auto& comm) {
    const auto data = comm.template allocate<float>(whole<float>() + 1);
    auto work = comm.all_reduce_async(data);
    if (comm.rank() == Rank{1}) throw std::runtime_error("out of luck");
    work.wait();
    comm.all_reduce(data);
  };
  for (const Ends& ends : {run_staged<FlatRanks>(2, run), run_staged<HostedRanks>(4, run)}) {
    BOOST_TEST(ends[1] == "out of luck");
    expect_words(ends, 1, {"failed", "it ended with an exception"});
  }
}

BOOST_AUTO_TEST_CASE(what_a_rank_gives_up_for_is_told_to_all) {
  const auto run = [](auto& comm) {
    const auto data = comm.template allocate<float>(100);
    if (comm.rank() == Rank{1}) {
      comm.abort("the disk is full");
      return;
    }
    comm.all_reduce_async(data).wait();
  };
  expect_words(run_staged<FlatRanks>(2, run), 1, {"the disk is full"});
  expect_words(run_staged<HostedRanks>(4, run), 1, {"the disk is full"});
}

BOOST_AUTO_TEST_SUITE_END()

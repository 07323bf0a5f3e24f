// SPDX-License-Identifier: Apache-2.0
// Shared memory inside hosts and Gloo between them, on hosts that are emulated by one machine.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "exercise.hpp"
#include "gloo_ranks.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/gloo.hpp"
#include "lockstep/detail/comm/hierarchical/two_levels.hpp"
#include "mismatch.hpp"
#include "repeat.hpp"

using namespace ranks;

static_assert(ArenaAllocating<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>> &&
              AsyncReducing<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>> &&
              Splitting<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>>);

BOOST_AUTO_TEST_SUITE(comm_hierarchical)

namespace {

using Hierarchy = HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>;

Ends run_hosts(std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  return run_processes<EmulatedHosts>(world, timeout, f);
}

/// Two ranks on the first host, and the rest on the second.
class UnevenHosts : public EmulatedHosts {
 public:
  using EmulatedHosts::EmulatedHosts;
  auto join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    return join_on(rank.value() < 2 ? 0 : 1, rank, world, timeout);
  }
};

/// Hosts by turns: 0 2 | 1 3.
class DealtHosts : public EmulatedHosts {
 public:
  using EmulatedHosts::EmulatedHosts;
  auto join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    return join_on(rank.value() % 2, rank, world, timeout);
  }
};

/// All-reduces alone: everything else is Gloo's, and tested as such.
template <class T>
void all_reduce_with_every_operation(Hierarchy& comm, std::size_t n) {
  in_all_memory<T>(comm, n, [&](std::span<T> data, std::span<T>) {
    each_operation<T>([&](auto op) { all_reductions(comm, data, op); });
  });
}

/// No communicator joins all ranks: everything goes through the two of each.
using Levels = TwoLevels<ShmCommunicator<>, GlooCommunicator<>>;
using Columns = HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>, Levels>;

class ColumnsOfTwo : public Sockets {
 public:
  using Sockets::Sockets;
  Columns join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const std::size_t places = world.value() % 2 == 0 ? 2 : 1;
    const std::size_t host = rank.value() / places;
    const std::size_t position = rank.value() % places;
    const Membership column = membership(Rank{host}, WorldSize{world.value() / places}, timeout);
    const Membership local = membership(Rank{position}, WorldSize{places}, timeout);
    Store store(column.host, column.port, column.secret, 20s);
    auto between = make_gloo_communicator(column, store, "column " + std::to_string(position));
    auto inside = make_shm_communicator(local, store, "host " + std::to_string(host));
    std::vector<std::string> hosts;
    for (std::size_t r = 0; r < world.value(); ++r) hosts.push_back(std::to_string(r / places));
    return Columns(std::make_unique<HierarchyStages<ShmCommunicator<>, GlooCommunicator<>, Levels>>(
        Hosts(hosts), std::move(inside), std::move(between)));
  }
};

template <std::size_t... I>
void every_type(Hierarchy& comm, std::size_t n, std::index_sequence<I...>) {
  (all_reduce_with_every_operation<std::tuple_element_t<I + 1, detail::ElementTypes>>(comm, n),
   ...);
}

/// All but messages, which not all ranks can exchange.
template <class T>
void collectives_of_columns(Columns& comm, std::size_t n) {
  in_all_memory<T>(comm, n, [&](std::span<T> data, std::span<T> pieces) {
    each_operation<T>([&](auto op) { reductions(comm, data, pieces, op); });
    movements(comm, data, pieces, false);
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(hosts_are_numbered_by_their_first_ranks) {
  const Hosts hosts(std::vector<std::string>{"b", "a", "b", "a"});
  BOOST_TEST(hosts.count() == 2u);
  BOOST_TEST(hosts.host(Rank{0}) == 0u);
  BOOST_TEST(hosts.host(Rank{3}) == 1u);
  BOOST_TEST(hosts.local_rank(Rank{2}) == 1u);
  BOOST_TEST((hosts.columns() == std::vector<std::vector<std::size_t>>{{0, 1}, {2, 3}}));
}

BOOST_AUTO_TEST_CASE(errors_of_a_level_have_the_jobs_numbers_of_ranks) {
  const detail::Hosts hosts(std::vector<int>{0, 0, 1, 1, 2, 2});
  BOOST_TEST(hosts.text_inside(Rank{3}, "waited 9 ms for ranks 0, 1; look") ==
             "on the host, waited 9 ms for ranks 2, 3; look");
  BOOST_TEST(hosts.text_between(Rank{1}, "ranks disagree: rank 0 called a and rank 2 called b") ==
             "between the hosts, ranks disagree: rank 1 called a and rank 5 called b");
  // Whom that rank waits for can only be seen on its host.
  BOOST_TEST(hosts.text_between(Rank{0}, "all_reduce: waited 9 ms for rank 2") ==
             "between the hosts, all_reduce: waited 9 ms for rank 4 (which may wait for rank 5 of "
             "its host)");
  BOOST_TEST(hosts.text_between(Rank{0}, "rank 1 failed: rank 3 is lost, and so is its rank") ==
             "between the hosts, rank 2 failed: rank 3 is lost, and so is its rank");
}

BOOST_AUTO_TEST_CASE(every_all_reduce_of_any_type_operation_and_odd_size_is_exact) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) {
    for (const std::size_t n : {0, 1, 6, 7})
      every_type(comm, n, std::make_index_sequence<detail::element_kinds - 1>{});
  }));
}

BOOST_AUTO_TEST_CASE(sizes_beyond_a_message_are_exact) {
  for (const std::size_t world : {1, 2, 3, 4}) {
    expect_all_fine(run_hosts(world, [](Hierarchy& comm) {
      every_operation<float>(comm, 4096);
      every_operation<std::int64_t>(comm, 513);
    }));
  }
  expect_all_fine(run_processes<DealtHosts>(
      4, 20s, [](Hierarchy& comm) { every_operation<float>(comm, 40'000); }));
}

/// An operation of a program's own, which inherits everything but the end.
struct HalfSum : Sum {
  static constexpr std::string_view name = "half sum";
  template <Element T>
  constexpr T finish(auto sum, std::size_t) const {
    return static_cast<T>(sum / 2);
  }
};
static_assert(detail::FinishedAsCombined<Sum, float> && detail::FinishedAsCombined<Max, int> &&
              !detail::FinishedAsCombined<Sum, BFloat16> &&
              !detail::FinishedAsCombined<Average, float> &&
              !detail::FinishedAsCombined<HalfSum, float>);

BOOST_AUTO_TEST_CASE(an_operation_that_inherits_from_another_ends_as_it_says) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) {
    std::vector<float> data(40'000, 1.f);
    comm.all_reduce(data, HalfSum{});
    for (const float x : data) require(x == 2.f, "the sum is not halved");
  }));
}

BOOST_AUTO_TEST_CASE(all_reduces_of_several_parts_are_exact) {
  const auto each_sum = []<class T>(Hierarchy& comm, std::type_identity<T>) {
    const std::span<T> data = comm.allocate<T>(40_MiB / sizeof(float) + 7);
    all_reductions(comm, data, Sum{});
    all_reductions(comm, data, Average{});
  };
  expect_all_fine(run_hosts(
      4,
      [&](Hierarchy& comm) {
        each_sum(comm, std::type_identity<float>{});
        each_sum(comm, std::type_identity<BFloat16>{});
      },
      60s));
}

BOOST_AUTO_TEST_CASE(every_collective_is_exact_where_no_communicator_joins_all_ranks) {
  for (const std::size_t world : {1, 2, 4, 6}) {
    expect_all_fine(run_processes<ColumnsOfTwo>(world, 20s, [](Columns& comm) {
      for (const std::size_t n : {0, 1, 7, 4096}) collectives_of_columns<float>(comm, n);
      collectives_of_columns<BFloat16>(comm, 2049);
      comm.barrier();
    }));
  }
  expect_all_fine(
      run_processes<ColumnsOfTwo>(4, 20s, [](Columns& comm) { strings_of_four(comm); }));
}

// Rank 0's host and rank 3's position: nobody joins the two.
BOOST_AUTO_TEST_CASE(messages_need_a_communicator_that_joins_the_two) {
  expect_all_fine(run_processes<ColumnsOfTwo>(4, 20s, [](Columns& comm) {
    std::vector<float> data{static_cast<float>(comm.rank().value())};
    const std::size_t me = comm.rank().value();
    for (const std::size_t step : {1, 2}) {
      const Rank peer{me ^ step};
      std::vector<float> got(1);
      if (me < peer.value()) comm.send(data, peer);
      comm.receive(got, peer);
      if (me > peer.value()) comm.send(data, peer);
      require(got[0] == static_cast<float>(peer.value()), "another rank's message");
    }
    try {
      comm.send(data, Rank{me ^ 3});
    } catch (const Error& error) {
      require(std::string(error.text()).find("has another local rank there") != std::string::npos,
              error.text());
      return;
    }
    throw std::runtime_error("sent to a rank that nothing joins");
  }));
}

BOOST_AUTO_TEST_CASE(sums_of_halves_are_rounded_once) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) {
    std::vector<Half> data(9, Half(comm.rank() == Rank{0} ? 2048.f : 1.f));
    comm.all_reduce(data);
    for (Half x : data) require(static_cast<float>(x) == 2052.f, "digits were lost");
  }));
}

// Values whose sum depends on the order: close to the flat sum, and the same bits everywhere.
BOOST_AUTO_TEST_CASE(sums_are_the_same_bits_on_all_ranks_and_close_to_the_flat_ones) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) {
    for (const std::size_t n : {100, 100'003}) {
      std::vector<double> data(n);
      for (std::size_t i = 0; i < n; ++i)
        data[i] = std::sin(static_cast<double>(i * 4 + comm.rank().value()));
      std::vector<double> every(n * 4);
      comm.all_gather(data, every);
      comm.all_reduce(data);
      std::vector<double> all(n * 4);
      comm.all_gather(data, all);
      require_same_of_all(all, data);
      for (std::size_t i = 0; i < n; ++i) {
        const double flat = every[i] + every[n + i] + every[2 * n + i] + every[3 * n + i];
        require(std::abs(flat - data[i]) < 1e-14, "the sum is wrong");
      }
    }
  }));
}

BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way_and_be_awaited_in_any_order) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) {
    several_under_way(comm, 10);
    many_under_way(comm);
  }));
}

BOOST_AUTO_TEST_CASE(strings_travel_whole) {
  expect_all_fine(run_hosts(4, [](Hierarchy& comm) { strings_of_four(comm); }));
}

BOOST_AUTO_TEST_CASE(single_numbers_truths_and_pieces_of_different_lengths_are_gathered) {
  for (const std::size_t world : {1, 3, 4}) {
    expect_all_fine(run_hosts(world, [](Hierarchy& comm) { numbers_and_pieces(comm); }));
  }
  for (const std::size_t world : {2, 4, 6}) {
    expect_all_fine(
        run_processes<ColumnsOfTwo>(world, 20s, [](Columns& comm) { numbers_and_pieces(comm); }));
  }
}

// Groups on one host, on even and uneven hosts, with ranks of a host apart by number, and of
// groups.
BOOST_AUTO_TEST_CASE(groups_of_a_hierarchy_are_hierarchies) {
  const auto use_groups = [](auto& comm) {
    groups_of_six(comm);
    using Members = std::vector<Rank>;
    for (const Members& members :
         {Members{Rank{0}, Rank{1}, Rank{2}, Rank{3}}, Members{Rank{0}, Rank{2}, Rank{1}, Rank{3}},
          Members{Rank{5}, Rank{0}, Rank{1}}, Members{Rank{3}}}) {
      auto group = new_group(comm, members);
      if (!group) continue;
      every_operation<float>(*group, 7);
      every_operation<std::int64_t>(*group, 513);
      several_under_way(*group, 2);
      numbers_and_pieces(*group);
      auto pair = join_groups(*group, Grid<dynamic, 1>{group->world_size()});
      require(pair.all_reduce(1) == 1, "a group of a group");
    }
    comm.barrier();
  };
  expect_all_fine(run_hosts(6, [&](Hierarchy& comm) { use_groups(comm); }));
  expect_all_fine(run_processes<ColumnsOfTwo>(6, 20s, [&](Columns& comm) {
    auto group = new_group(comm, {Rank{0}, Rank{1}, Rank{2}, Rank{3}});
    if (group) collectives_of_columns<float>(*group, 7);
    groups_of_six(comm);
    auto apart = new_group(comm, {Rank{0}, Rank{2}, Rank{1}, Rank{5}});
    if (apart) {
      collectives_of_columns<float>(*apart, 7);
      std::vector<float> data(5);
      std::vector<float> pieces(20);
      movements(*apart, std::span(data), std::span(pieces));  // now there are messages between all
    }
    comm.barrier();
  }));
}

BOOST_AUTO_TEST_CASE(hosts_with_different_numbers_of_ranks_are_an_error) {
  expect_words(run_processes<UnevenHosts>(3, 20s, [](Hierarchy&) {}), nobody,
               {"the host of rank 0 has 2 ranks and the host of rank 2 has 1"});
}

// Both ranks of a host differ from those of the other: only the network can tell. 7 and 8 elements
// are pieces of the same size on hosts of two ranks.
BOOST_AUTO_TEST_CASE(calls_that_differ_between_hosts_are_errors_everywhere) {
  for (const auto& [here, there] : {std::pair(7, 8), std::pair(8, 10), std::pair(7, 9)}) {
    const Ends ends = run_hosts(4, [&](Hierarchy& comm) {
      std::vector<float> data(static_cast<std::size_t>(comm.rank().value() < 2 ? here : there),
                              1.f);
      try {
        comm.all_reduce(data);
      } catch (const Error&) {
        for (float x : data) require(x == 1.f, "a buffer was written");
        throw;
      }
    });
    expect_words(ends, nobody,
                 {"rank 0 called all_reduce(sum of " + std::to_string(here) + " float)",
                  "rank 2 called all_reduce(sum of " + std::to_string(there) + " float)"});
  }
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_that_name_both) {
  expect_mismatches<EmulatedHosts>(As::processes);
}

BOOST_AUTO_TEST_CASE(a_killed_rank_fails_all_others_long_before_the_time_limit) {
  Chance chance;
  for (int i = 0; i < repetitions(4, 40); ++i) {
    const Rank victim{chance(4)};
    const int last = static_cast<int>(chance(20));
    const Ends ends = run_hosts(
        4,
        [&](Hierarchy& comm) {
          auto data = comm.allocate<float>(i % 2 == 0 ? 100'000 : 3'000'000);
          for (int k = 0;; ++k) {
            if (comm.rank() == victim && k == last) raise(SIGKILL);
            comm.all_reduce(data);
          }
        },
        10min);
    for (std::size_t r = 0; r < 4; ++r) {
      if (Rank{r} == victim) continue;
      BOOST_TEST(tells_of_death(ends[r]), "rank " << r << ": " << ends[r]);
    }
  }
}

BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_reaches_the_others) {
  const Ends ends = run_hosts(4, [](Hierarchy& comm) {
    if (comm.rank() == Rank{2}) throw std::runtime_error("out of luck");
    std::vector<float> data(1000);
    comm.all_reduce(data);
  });
  BOOST_TEST(ends[2] == "out of luck");
  expect_words(ends, 2, {"failed", "it ended with an exception"});
}

BOOST_AUTO_TEST_SUITE_END()

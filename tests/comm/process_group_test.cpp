// SPDX-License-Identifier: Apache-2.0
// From spawned ranks through the store to a communicator.
#include "lockstep/detail/trainer/process_group.hpp"

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/topology/grid.hpp"

using namespace lockstep;
using lockstep::detail::text;
using namespace std::chrono_literals;

BOOST_AUTO_TEST_SUITE(comm_process_group)

namespace {

void sum_of_ranks(const Membership& member, Store& store) {
  auto comm = make_shm_communicator(member, store);
  std::vector<std::int64_t> data(3000, static_cast<std::int64_t>(member.rank.value()));
  comm.all_reduce(data);
  const auto world = static_cast<std::int64_t>(member.world.value());
  for (std::int64_t x : data) detail::check(x == world * (world - 1) / 2, "the sum is wrong");
}

}  // namespace

BOOST_AUTO_TEST_CASE(spawned_ranks_meet_in_shared_memory) {
  for (const std::size_t world : {1, 2, 4}) {
    BOOST_CHECK_NO_THROW(spawn(AsThreads{}, world, sum_of_ranks, 20s));
    BOOST_CHECK_NO_THROW(spawn(AsProcesses{}, world, sum_of_ranks, 20s));
  }
}

BOOST_AUTO_TEST_CASE(init_process_group_joins_through_a_file) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("lockstep-" + std::to_string(getpid()));
  BOOST_CHECK_NO_THROW(spawn<3>(AsProcesses{}, [&](const Membership& member, Store&) {
    auto group = init_process_group("file://" + path, member.rank, member.world, 20s);
    std::vector<float> data(10, 1.f);
    group->all_reduce(data, Average{});
    detail::check(data[9] == 1.f && group.world_size() == WorldSize{3}, "the average is wrong");
    group->monitored_barrier(10s);
  }));
  BOOST_TEST(!std::filesystem::exists(path));
}

// The second begins when the first has ended by its scope, the third when the second was destroyed.
BOOST_AUTO_TEST_CASE(a_process_group_may_be_made_again) {
  BOOST_TEST(!is_initialized());
  const std::string path =
      std::filesystem::temp_directory_path() / ("lockstep-again-" + std::to_string(getpid()));
  BOOST_CHECK_NO_THROW(spawn<2>(AsProcesses{}, [&](const Membership& member, Store& store) {
    const auto join_group = [&](int round) {
      return init_process_group<Backend<Shm>>(text({"file://", path, round}), member.rank,
                                              member.world, 20s);
    };
    {
      auto first = join_group(1);
      detail::check(is_initialized(), "there is a group");
      detail::check(first->all_reduce(1) == 2, "the first sum is wrong");
    }
    detail::check(!is_initialized(), "the group has ended with its scope");
    auto second = join_group(2);
    detail::check(second->all_reduce(2) == 4, "the second sum is wrong");
    destroy_process_group(std::move(second));
    detail::check(!is_initialized(), "the group was destroyed");
    Session session(member, Store(member.host, member.port, member.secret, member.timeout));
    ProcessGroup third(session);
    ProcessGroup<World<2>> beside(session);
    detail::check(third->all_reduce(3) == 6 && beside->all_reduce(4) == 8, "the others are wrong");
    store.barrier("all have ended", member.rank, member.world, 20s);
  }));
}

BOOST_AUTO_TEST_CASE(a_group_may_have_a_backend_of_its_own) {
  const auto rank_function = [](const Membership& member, Store&) {
    Session session(member, Store(member.host, member.port, member.secret, member.timeout));
    ProcessGroup group(session);
    for (int round = 0; round < 3; ++round) {
      auto some = new_group<Backend<Shm>>(group, {Rank{2}, Rank{0}});
      detail::check(some.has_value() == (group.rank() != Rank{1}), "who is a member");
      if (some) {
        detail::check(some->rank() == Rank{group.rank() == Rank{2} ? 0u : 1u}, "the listed order");
        detail::check(some->all_reduce(round) == 2 * round, "the sum is wrong");
      }
      auto divided = new_group(group, {Rank{1}, Rank{2}});
      if (divided) detail::check(divided->all_reduce(1) == 2, "the sum of a part is wrong");
    }
    group->barrier();
  };
  BOOST_CHECK_NO_THROW(spawn<3>(AsProcesses{}, rank_function));
  BOOST_CHECK_NO_THROW(spawn<3>(AsThreads{}, rank_function));
  BOOST_CHECK_EXCEPTION(
      spawn<2>(AsProcesses{},
               [](const Membership& member, Store&) {
                 Session session(member,
                                 Store(member.host, member.port, member.secret, member.timeout));
                 ProcessGroup group(session);
                 new_group<Backend<Shm>>(group, {Rank{0}, Rank{3}});
               }),
      Error, [](const Error& error) {
        return std::string(error.what()).find("a rank is outside the world") != std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(whoever_uses_a_group_of_others_is_told) {
  const auto use = [](auto group) {
    detail::check(group.has_value() == static_cast<bool>(group) && !group, "it is a member");
    const std::string words = "rank 1, using a group: this rank is not a member of it";
    const auto is_told = [&](const auto& f) {
      detail::check(error_of(f).find(words) != std::string::npos, "not told");
    };
    is_told([&] { static_cast<void>(group->all_reduce(1)); });
    is_told([&] { (*group).barrier(); });
    is_told([&] { group.value().broadcast(std::vector<float>(3), Rank{0}); });
    is_told([&] { static_cast<void>(std::as_const(group)->rank()); });
    is_told([&] { auto taken = *std::move(group); });
  };
  BOOST_CHECK_NO_THROW(spawn<2>(AsProcesses{}, [&](const Membership& member, Store&) {
    Session session(member, Store(member.host, member.port, member.secret, member.timeout));
    ProcessGroup group(session);
    auto own = new_group<Backend<Shm>>(group, {Rank{0}});
    auto divided = new_group(group, {Rank{0}});
    auto pair = join_groups(*group, Grid<dynamic, 2>{group.world_size()});
    auto again = new_group(pair, {Rank{0}});
    if (group.rank() == Rank{1}) {
      use(std::move(own));
      use(std::move(divided));
      use(std::move(again));
    }
    group->barrier();
  }));
}

BOOST_AUTO_TEST_CASE(a_program_without_cuda_has_no_gpu) { BOOST_TEST(device_count() == 0u); }

BOOST_AUTO_TEST_CASE(a_program_for_another_world_says_so) {
  BOOST_CHECK_EXCEPTION(
      spawn<2>(AsThreads{}, [](const Membership& member,
                               Store& store) { make_shm_communicator<3>(member, store); }),
      Error, [](const Error& error) {
        return std::string(error.what()).find("for 3 ranks and the job has 2") != std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(a_rank_that_throws_ends_the_others_and_is_named) {
  for (int i = 0; i < 3; ++i) {
    BOOST_CHECK_EXCEPTION(spawn<3>(AsProcesses{},
                                   [](const Membership& member, Store& store) {
                                     auto comm = make_shm_communicator(member, store);
                                     if (member.rank == Rank{1})
                                       throw std::runtime_error("out of luck");
                                     comm.barrier();
                                   }),
                          Error, [](const Error& error) {
                            return std::string(error.what()).find("out of luck") !=
                                       std::string::npos ||
                                   std::string(error.what()).find("rank 1") != std::string::npos;
                          });
  }
}

BOOST_AUTO_TEST_CASE(a_helper_thread_works_while_the_rank_is_away) {
  const auto rank_function = [](const Membership& member, Store& store) {
    auto comm = make_shm_communicator<dynamic, HelperThread>(member, store);
    auto data = comm.template allocate<float>(100000);
    for (int i = 0; i < 5; ++i) {
      std::fill(data.begin(), data.end(), 1.f);
      auto work = comm.all_reduce_async(data);
      const std::string key = "round " + std::to_string(i);
      // Rank 0 does not touch the communicator until rank 1 has its result, which needs rank 0's
      // share.
      if (member.rank == Rank{0}) store.get(key, 20s);
      work.wait();
      if (member.rank == Rank{1}) store.set(key, "done");
      detail::check(data[99999] == 2.f, "the sum is wrong");
      comm.barrier();
    }
  };
  BOOST_CHECK_NO_THROW(spawn<2>(AsThreads{}, rank_function));
  BOOST_CHECK_NO_THROW(spawn<2>(AsProcesses{}, rank_function));
}

BOOST_AUTO_TEST_CASE(a_world_of_one_needs_no_memory_and_no_time) {
  LoopbackCommunicator comm;
  std::vector<float> data{1, 2};
  std::vector<float> out(2);
  comm.all_reduce(data, Average{});
  comm.all_gather(data, out);
  BOOST_TEST((out == std::vector<float>{1, 2}));
  comm.all_reduce(data, PreMultipliedSum<float>{0.5f});
  BOOST_TEST((data == std::vector<float>{0.5f, 1}));
  comm.reduce_scatter(out, data);
  BOOST_TEST((data == out));
  BOOST_TEST(comm.all_reduce_async(data).test());
  BOOST_TEST(comm.allocate<double>(7).size() == 7u);
}

BOOST_AUTO_TEST_SUITE_END()

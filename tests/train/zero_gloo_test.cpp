// SPDX-License-Identifier: Apache-2.0
// Sharding<ZeroRedundancy> through sockets: PyTorch's figures, Replicated's numbers, and every
// policy beside it.
#include <boost/test/unit_test.hpp>
#include <cmath>

#include "comm/gloo_ranks.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/gloo.hpp"
#include "train/checkpoint_files.hpp"
#include "train/closeness.hpp"
#include "train/sheet.hpp"
#include "train/zero.hpp"

BOOST_AUTO_TEST_SUITE(zero_through_sockets)

namespace {

using namespace zero;
using ranks::EmulatedHosts;
using ranks::Sockets;
using Hosts = Backend<Hierarchical<Shm, Gloo>>;

/// All that changes an update, at once.
template <class Sharing>
using Busy =
    DistributedDataParallel<train::Sheet<float, double, float>, Backend<Gloo>, Optimizer<AdamW>,
                            Sharing, Buckets<BucketLimits{0, 0}>, UnusedParameters<Zero>,
                            Anomaly<Skip>, Clip<0.5>, ParameterGroups<Named<"b">>, Accumulate<2>>;

}  // namespace

BOOST_AUTO_TEST_CASE(states_are_scattered_as_pytorch_trains) {
  check_every_case(run_case<Sockets, AnyCase<States, Backend<Gloo>>>);
}
BOOST_AUTO_TEST_CASE(gradients_are_scattered_as_pytorch_trains) {
  check_every_case(run_case<Sockets, AnyCase<Gradients, Backend<Gloo>>>);
}
BOOST_AUTO_TEST_CASE(hosts_scatter_states_as_pytorch_trains) {
  check_every_case(run_case<EmulatedHosts, AnyCase<States, Hosts>>);
}

BOOST_AUTO_TEST_CASE(scattered_states_give_the_numbers_of_replicas) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(3, 40); ++i) {
    const Case c(chance);
    const Numbers copies =
        train_ranks<Sockets, Plain<Sharding<Replicated>, Backend<Gloo>>>(c, "copies");
    train::require_close(
        train_ranks<Sockets, Plain<Sharding<ZeroRedundancy>, Backend<Gloo>>>(c, "states"), copies,
        c.text());
  }
}

namespace {

/// What rank r gives in micro-batch m: some parameters unused, one step not finite.
train::Entry busy_entry(std::size_t m, std::size_t rank) {
  const auto x = static_cast<double>(m + 1);
  const auto r = static_cast<double>(rank);
  train::Entry entry{.gradient = {0.5 * x - r, 0.25 * r + 0.125 * x, r - 0.375 * x}};
  if (m / 2 == 1) entry.used = {true, false, rank == 1};
  if (m == 5 && rank == 0) entry.gradient[1] = std::nan("");
  return entry;
}

template <class Job>
Numbers train_busily(std::size_t world) {
  const ranks::Common<std::array<double, 113>> result;
  const Ends ends = ranks::run_processes<Sockets>(world, std::chrono::seconds(20), [&](auto& comm) {
    Job ddp(comm);
    ddp.optimizer().lr = 0.05;
    ddp.optimizer(Named<"b">{}).lr = 0.02;
    for (std::size_t m = 0; m < 10; ++m) ddp.step(busy_entry(m, comm.rank().value()));
    require(ddp.skipped_steps() == 1, "one step is not finite");
    const Numbers all = numbers_of(ddp);
    if (comm.rank() == Rank{0}) std::ranges::copy(all, result->begin());
  });
  for (const std::string& end : ends) BOOST_TEST(end == "", world << " ranks: " << end);
  return {result->begin(), result->end()};
}

}  // namespace

BOOST_AUTO_TEST_CASE(all_policies_of_an_update_work_on_slices) {
  for (const std::size_t world : {1, 2, 3}) {
    const auto copies = train_busily<Busy<Sharding<Replicated>>>(world);
    const auto states = train_busily<Busy<Sharding<ZeroRedundancy>>>(world);
    const auto units = train_busily<Busy<Sharding<FullyShard>>>(world);
    for (std::size_t i = 0; i < 113; ++i) {
      BOOST_TEST(std::abs(states[i] - copies[i]) <= 1e-6, world << " ranks, " << i);
      BOOST_TEST(units[i] == states[i], world << " ranks, fully sharded, " << i);
    }
  }
}

// Slices inside of groups, which are replicas of each other. A norm is that of all slices.
BOOST_AUTO_TEST_CASE(groups_divide_states_among_their_ranks) {
  using Job = AnyCase<States, Backend<Gloo>, Groups<Grid<dynamic, 2>>>;
  check_every_case([](const ReferenceCase& c) {
    return c.world % 2 == 0 ? run_case<Sockets, Job>(c) : Ends(c.world);
  });
  const checkpoints::Folder folder;
  ranks::Chance chance;
  for (const std::size_t world : {2, 4}) {
    Case c(chance);
    c.world = world;
    ReferenceClip::Norm::value = 0.05;
    train::require_close(train_ranks<Sockets, Job>(c, "groups"),
                         train_ranks<Sockets, AnyCase<States, Backend<Gloo>>>(c, "without groups"),
                         c.text());
    const std::string path = folder / (std::to_string(world) + ".safetensors");
    const Ends ends =
        ranks::run_processes<Sockets>(world, std::chrono::seconds(20), [&](auto& comm) {
          Job ddp(comm, c.network());
          // Numbers of the rules that have one name are one number in a file.
          ddp.optimizer().choose<AdamW>().weight_decay = 0;
          const auto step = [&](std::size_t s) {
            ddp.optimizer().lr = 0.05;
            ddp.step(reference_batch(c.rows, c.in, c.out, c.salt + s, comm.rank().value()));
            ddp.step_tail();
          };
          step(0);
          // Two ranks have all states, whatever the world is.
          std::uint64_t sum[] = {ddp.state_bytes()};
          ddp.group().all_reduce(sum);
          const std::size_t all =
              2 * sizeof(double) * ((c.in + c.hidden + c.out) * c.hidden + 2 * c.hidden + c.out);
          require(sum[0] >= all && sum[0] <= all + 6 * 8 * arena_alignment, "states of a group");
          save(ddp, path);
          step(1);
          const Numbers went_on = numbers_of(ddp);
          load(ddp, path);
          step(1);
          require(numbers_of(ddp) == went_on, "what was saved goes on to the same bits");
        });
    for (const std::string& end : ends) BOOST_TEST(end == "", world << " ranks: " << end);
    // The other group has nothing to save, nor the second rank where the first one's slice is all
    // of a small network.
    BOOST_TEST(detail::CheckpointReader(path).shards().size() <= 1u);
  }
}

BOOST_AUTO_TEST_SUITE_END()

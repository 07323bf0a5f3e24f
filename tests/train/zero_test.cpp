// SPDX-License-Identifier: Apache-2.0
// Sharding<ZeroRedundancy> on processes that share memory: PyTorch's figures, the bits of
// Replicated, memory, and checkpoints.
#include "train/zero.hpp"

#include <boost/test/unit_test.hpp>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "train/checkpoint_files.hpp"

BOOST_AUTO_TEST_SUITE(zero_redundancy)

namespace {

using namespace zero;
using Rendezvous = ranks::SharedMemory;
using ByStates = Plain<Sharding<ZeroRedundancy>>;
using ByGradients = Plain<Sharding<ZeroRedundancy, Gradients>>;
using Copies = Plain<Sharding<Replicated>>;

/// Asks for the gradient of the last bucket first.
struct Eager : Network {
  void backward(auto& step, const Samples& batch) {
    static_cast<void>(step.grad("fc1.weight"_p));
    Network::backward(step, batch);
  }
};

/// Bytes of AdamW's states where all parameters have them.
std::size_t state_bytes_of_all(const Case& c) {
  return 2 * sizeof(double) * ((c.in + c.hidden + c.out) * c.hidden + 2 * c.hidden + c.out);
}

}  // namespace

BOOST_AUTO_TEST_CASE(shared_states_train_as_in_pytorch) {
  check_every_case(run_case<Rendezvous, AnyCase<States>>);
}
BOOST_AUTO_TEST_CASE(scattered_gradients_train_as_in_pytorch) {
  check_every_case(run_case<Rendezvous, AnyCase<Gradients>>);
}

BOOST_AUTO_TEST_CASE(all_ways_give_the_bits_of_replicas) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 60); ++i) {
    const Case c(chance);
    const Numbers copies = train_ranks<Rendezvous, Copies>(c, "replicated");
    BOOST_TEST((train_ranks<Rendezvous, ByStates>(c, "states") == copies), c.text() << ": states");
    BOOST_TEST((train_ranks<Rendezvous, ByGradients>(c, "gradients") == copies),
               c.text() << ": gradients");
  }
}

BOOST_AUTO_TEST_CASE(a_rank_keeps_its_share_of_states_and_gradients) {
  ranks::Chance chance;
  Case c(chance);
  c.in = 40;
  c.hidden = 30;
  for (const std::size_t world : {1, 2, 3, 4}) {
    const Ends ends =
        ranks::run_processes<Rendezvous>(world, std::chrono::seconds(20), [&](auto& comm) {
          const std::size_t all = state_bytes_of_all(c);
          // A bucket has a unit for each of two states, and pads its parameters.
          constexpr std::size_t buckets = 6;
          const std::size_t spare = buckets * 4 * arena_alignment;
          const auto share = [&](std::size_t bytes) {
            return bytes <= all / world + spare && bytes + spare >= all / world;
          };
          const ByStates states(comm, c.network());
          require(share(states.state_bytes()), "states");
          const ByGradients gradients(comm, c.network());
          require(share(gradients.state_bytes()), "states beside gradients");
          const Copies copies(comm, c.network());
          require(copies.state_bytes() >= all, "all states");
        });
    for (const std::string& end : ends) BOOST_TEST(end == "", world << " ranks: " << end);
  }
}

BOOST_AUTO_TEST_CASE(asking_for_gradients_out_of_order_is_rejected_by_name) {
  ranks::Chance chance;
  Case c(chance);
  c.in = c.hidden = c.out = 20;
  const Ends ends = ranks::run_processes<Rendezvous>(2, std::chrono::seconds(20), [&](auto& comm) {
    Eager eager;
    static_cast<Network&>(eager) = c.network();
    DistributedDataParallel<Eager, Buckets<BucketLimits{0, 0}>, Sharding<ZeroRedundancy, Gradients>>
        ddp(comm, eager);
    ddp.step(reference_batch(2, 20, 20, 1, comm.rank().value()));
  });
  for (const std::string& end : ends)
    BOOST_TEST(end.find("the gradient of fc1.weight was asked for before") != std::string::npos,
               end);
}

BOOST_AUTO_TEST_CASE(checkpoints_go_from_any_way_and_world_to_any_other) {
  const checkpoints::Folder folder;
  ranks::Chance chance;
  Case c(chance);
  const auto batch = [&](std::size_t s, std::size_t rank) {
    return reference_batch(c.rows, c.in, c.out, c.salt + s, rank);
  };
  const auto run = [&](std::size_t world, const auto& f) {
    const Ends ends = ranks::run_processes<Rendezvous>(world, std::chrono::seconds(20), f);
    for (const std::string& end : ends) BOOST_TEST(end == "", world << " ranks: " << end);
  };
  // Each way trains two steps and saves, in shards and in one file.
  const auto save_as = [&]<class Job>(const std::string& name, std::size_t world) {
    run(world, [&](auto& comm) {
      Job ddp(comm, c.network());
      for (std::size_t s = 0; s < 2; ++s) ddp.step(batch(s, comm.rank().value() % 2));
      save(ddp, folder / (name + ".safetensors"));
      save(ddp, folder / (name + "-whole.safetensors"), {.consolidated = true});
    });
    const auto parts = checkpoints::tensors_of(folder / (name + ".safetensors"));
    BOOST_TEST((checkpoints::tensors_of(folder / (name + "-whole.safetensors")) == parts), name);
    BOOST_TEST(detail::CheckpointReader(folder / (name + "-whole.safetensors")).shards().empty());
    return parts;
  };
  const auto copies = save_as.operator()<Copies>("copies", 2);
  BOOST_TEST((save_as.operator()<ByStates>("states", 2) == copies));
  BOOST_TEST((save_as.operator()<ByGradients>("gradients", 2) == copies));
  // Two files for each, one of them with a shard.
  BOOST_TEST(folder.files().size() == 3u * 2 + 2u);
  // All of them go on to the same bits at another world.
  const auto go_on = [&]<class Job>(const std::string& name, std::size_t world) {
    run(world, [&](auto& comm) {
      Job ddp(comm, c.network());
      load(ddp, folder / (name + ".safetensors"));
      ddp.step(batch(7, comm.rank().value() % 2));
      require(ddp.updates() == 3, "updates");
      save(ddp, folder / "after.safetensors", {.consolidated = true});
    });
    return checkpoints::tensors_of(folder / "after.safetensors");
  };
  for (const std::size_t world : {1, 3, 4}) {
    const auto want = go_on.operator()<Copies>("copies", world);
    for (const std::string from : {"states-whole", "gradients"}) {
      BOOST_TEST((go_on.operator()<ByStates>(from, world) == want), from << ", " << world);
      BOOST_TEST((go_on.operator()<ByGradients>(from, world) == want), from << ", " << world);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

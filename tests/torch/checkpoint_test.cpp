// SPDX-License-Identifier: Apache-2.0
// Checkpoints of jobs whose module has tied parameters: written by shares, by a thread, for other
// ranks, with parameters alone.
#include <ATen/ATen.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/torch/state_dict.hpp"
#include "temporary_folder.hpp"
#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_checkpoint)

namespace {

using namespace torch_tests;
using Plain = DistributedDataParallel<Model, Optimizer<AdamW>>;
using Sharded = DistributedDataParallel<Model, Optimizer<AdamW>, Sharding<ZeroRedundancy>>;

/// Parameters and buffers of two names each.
std::shared_ptr<Net> tied_net() {
  const auto net = make_net("tied");
  net->register_buffer("same", net->register_buffer("shift", at::ones({3})));
  return net;
}

/// All ranks have the same samples, so that every number of ranks trains the same bits.
void train(auto& ddp, std::size_t first, std::size_t end) {
  ddp.optimizer().lr = 0.01;
  for (std::size_t s = first; s != end; ++s) ddp.step(batch_of("tied", s, 0));
  ddp.for_each_parameter([](auto&&...) {});  // they have arrived
}

std::vector<float> values_in(const std::string& state_dict) {
  const auto net = tied_net();
  load_state_dict(*net, state_dict);
  return values_of(*net);
}

/// Goes on from a checkpoint to step 6, and has then the bits of a job that was never ended.
template <class Job>
void expect_resumed(std::size_t world, const std::string& from, const std::string& straight) {
  all_well(world, [&](Shared& comm) {
    const auto net = tied_net();
    Job job(comm, Model(net));
    train(job, 8, 9);  // on its way elsewhere
    resume(job, from);
    train(job, 3, 6);
    require(values_of(*net) == values_in(straight), "other bits than without an end");
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_job_goes_on_with_other_ranks_and_other_shares_of_the_states) {
  const TemporaryFolder folder;
  const std::string straight = folder / "straight";
  all_well(1, [&](Shared& comm) {
    const auto net = tied_net();
    Plain job(comm, Model(net));
    train(job, 0, 6);
    save_state_dict(*net, straight);
  });
  const std::string shares = folder / "shares";
  all_well(4, [&](Shared& comm) {
    Sharded job(comm, Model(tied_net()));
    Saver saver;
    train(job, 0, 3);
    saver.save(job, shares, {.asynchronous = true});
    train(job, 3, 6);  // while the file is written
    saver.finish(job);
  });
  const lockstep::detail::CheckpointReader file(shares);
  BOOST_TEST(file.find("weight") != nullptr);
  BOOST_TEST(file.find("first.weight") != nullptr);
  BOOST_TEST((file.find("shift") != nullptr && file.find("same") != nullptr));
  BOOST_TEST(values_in(shares) != values_in(straight));
  expect_resumed<Plain>(1, shares, straight);
  expect_resumed<Plain>(2, shares, straight);
  expect_resumed<Sharded>(2, shares, straight);
  expect_resumed<Sharded>(4, shares, straight);
}

BOOST_AUTO_TEST_CASE(parameters_alone_travel_between_jobs_of_other_shares) {
  const TemporaryFolder folder;
  const std::string path = folder / "parameters";
  all_well(2, [&](Shared& comm) {
    Sharded job(comm, Model(tied_net()));
    train(job, 0, 3);
    save(job, path, {.parameters_only = true});
  });
  const lockstep::detail::CheckpointReader file(path);
  BOOST_TEST(file.tensors().size() ==
             7u);  // four parameters and a buffer, two of which have two names
  const std::vector<float> saved = values_in(path);
  // A new optimizer begins at these values, whoever has its states.
  const auto train_from = [&]<class Job>(std::type_identity<Job>, std::size_t world,
                                         const std::string& to) {
    all_well(world, [&](Shared& comm) {
      const auto net = tied_net();
      const at::Tensor tied = net->named_parameters()["weight"];
      Job job(comm, Model(net));
      job.evaluate(batch_of("tied", 0, 0));  // the module has the job's values from here on
      load_parameters(job, path);
      require(values_of(*net) == saved, "other values than in the file");
      train(job, 3, 5);
      require(tied.is_same(net->named_parameters()["first.weight"]), "names are no longer tied");
      if (comm.rank() == Rank{0}) save_state_dict(*net, to);
    });
  };
  train_from(std::type_identity<Plain>{}, 1, folder / "alone");
  train_from(std::type_identity<Sharded>{}, 4, folder / "four");
  BOOST_TEST(values_in(folder / "four") == values_in(folder / "alone"));
  BOOST_TEST(values_in(folder / "four") != saved);
}

BOOST_AUTO_TEST_SUITE_END()

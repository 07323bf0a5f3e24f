// SPDX-License-Identifier: Apache-2.0
// Checkpoints of wrapped models on real processes: a job that was saved and resumed has the bits of
// one that was not, in any shape; and what is rejected.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"
#include "train/checkpoint_case.hpp"

BOOST_AUTO_TEST_SUITE(checkpoints_of_jobs)

namespace {

using namespace checkpoints;

// ---- A job that was stopped has the bits of one that was not

template <bool First>
auto& either(auto& first, auto& second) {
  if constexpr (First) {
    return first;
  } else {
    return second;
  }
}

/// Trains some batches, with a save after `stop` of them, and once more from there: in a new job
/// whose values and numbers are others, and which is between the micro-batches of a step.
template <class Job, std::size_t MicroBatches = 1, bool Alone = false>
void exact_case(std::size_t world, const auto& configure, const auto& entry) {
  const Folder folder;
  for (const std::size_t stop : {2 * MicroBatches, 3 * MicroBatches, 4 * MicroBatches}) {
    all_well(world, [&](Shared& shared) {
      LoopbackCommunicator nobody;
      auto& comm = either<Alone>(nobody, shared);
      const std::string path = folder / ("stop-" + std::to_string(stop) + ".safetensors");
      const std::size_t me = comm.rank().value();
      constexpr std::size_t batches = 6 * MicroBatches + 1;
      std::vector<std::uint64_t> bits;
      {
        Job job(comm);
        configure(job);
        for (std::size_t s = 0; s < batches; ++s) {
          job.step(entry(me, s));
          if (s + 1 == stop) save(job, path, {.epoch = 5, .best = 0.75});
          if (MicroBatches != 1 && s == stop)
            require_words(message_of([&] { save(job, path); }),
                          "save: the job is between the micro-batches of a step");
          bits.push_back(bits_of(job));
        }
      }
      Job job(comm);
      job.set_epoch(1);
      if constexpr (requires { job.schedule().steps; }) job.schedule().steps = 9;
      job.step(entry(me, 40));
      const Resumed resumed = resume(job, path);
      require(resumed.epoch == 5 && resumed.best == 0.75 && resumed.step == job.updates() &&
                  resumed.world == comm.world_size() && resumed.path == path &&
                  resumed.notes.empty(),
              "where it goes on");
      require(bits_of(job) == bits[stop - 1], "the bits that were saved");
      for (std::size_t s = stop; s < batches; ++s) {
        job.step(entry(me, s));
        require(bits_of(job) == bits[s], "the bits after batch " + std::to_string(s) +
                                             ", saved after " + std::to_string(stop));
      }
    });
  }
}

const auto adam = [](auto& job) {
  job.optimizer().lr = 0.03;
  job.optimizer().weight_decay = 0.1;
};

using HeadGroup = Named<"c">;

}  // namespace

BOOST_AUTO_TEST_CASE(shared_adamw_with_clip_and_cosine_goes_on_with_the_same_bits) {
  for (const std::size_t world : {1, 2, 4}) {
    exact_case<DistributedDataParallel<Ledger, Optimizer<AdamW>, Clip<0.5>, Schedule<Cosine>>>(
        world,
        [](auto& job) {
          adam(job);
          job.schedule().steps = 6;
          job.schedule().warmup = 2;
        },
        entry_of);
  }
}

BOOST_AUTO_TEST_CASE(replicated_momentum_goes_on_with_its_own_buffers) {
  for (const std::size_t world : {1, 2, 4}) {
    exact_case<OwnBuffers, 3>(
        world,
        [](auto& job) {
          job.optimizer().lr = 0.05;
          job.optimizer().momentum = 0.8;
          job.schedule().factor = 0.5;
          job.schedule().updates = 1;
        },
        entry_of);
  }
}

BOOST_AUTO_TEST_CASE(groups_unused_parameters_and_skipped_steps_go_on_with_the_same_bits) {
  for (const std::size_t world : {1, 2, 4}) {
    exact_case<DistributedDataParallel<Ledger, Optimizer<AdamW>, UnusedParameters<Zero>,
                                       Anomaly<Skip>, ParameterGroups<HeadGroup>, Accumulate<2>>,
               2>(
        world,
        [](auto& job) {
          adam(job);
          job.optimizer(HeadGroup{}).lr = 0.2;
        },
        [](std::size_t rank, std::size_t step) {
          Entry entry = entry_of(rank, step);
          entry.used = {true, step % 4 < 2 || rank == 1, step % 3 != 0};
          if (step == 1 && rank == 0) entry.gradient[0] = NAN;
          return entry;
        });
  }
}

BOOST_AUTO_TEST_CASE(plain_sgd_in_a_world_that_the_compiler_knows_to_be_of_one) {
  exact_case<DistributedDataParallel<Ledger, World<1>>, 1, true>(
      1, [](auto& job) { job.optimizer().lr = 0.125; }, entry_of);
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Files that an earlier version has written (tests/checkpoint/earlier) are read with the same bits,
// in the world that saved them and in others. LOCKSTEP_WRITE=FOLDER writes such files instead:
// compile this file with the headers and tests of the version that is to write them.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/observe/scores.hpp"
#include "train/checkpoint_case.hpp"

BOOST_AUTO_TEST_SUITE(checkpoints_of_earlier_versions)

namespace {

using namespace checkpoints;

using Small = Buckets<BucketLimits{100, 200}>;
using Zero = DistributedDataParallel<Ledger, Sharding<ZeroRedundancy>, Optimizer<AdamW>, Small>;
using Counted = DistributedDataParallel<Ledger, Optimizer<AdamW>, UnusedParameters<lockstep::Zero>,
                                        Anomaly<Skip>, ParameterGroups<Named<"c">>>;
using Local = DistributedDataParallel<Ledger, Hooks<LocalSGD<3, 1>>, Small, Optimizer<SGDMomentum>>;

/// The program's values, all kinds of them.
struct Values {
  double reward = 0;
  std::int32_t count = 0;
  bool is_done = false;
  std::string words;
  std::vector<float> history;
  RandomStream noise{Seed{0}};

  static Values of(std::size_t rank) {
    RandomStream noise(Seed{rank + 3});
    noise.normal();
    return {0.1 + static_cast<double>(rank),
            -7,
            true,
            "of rank\n" + std::to_string(rank),
            {0.5f, -1.25f},
            noise};
  }
  StateValues kept() {
    return {{"reward", reward}, {"count", count},     {"is_done", is_done},
            {"words", words},   {"history", history}, {"noise", noise}};
  }
  bool operator==(const Values& other) const {
    return reward == other.reward && count == other.count && is_done == other.is_done &&
           words == other.words && history == other.history && noise.seed() == other.noise.seed() &&
           noise.position() == other.noise.position();
  }
};

SamplerState position_of() {
  SamplerState state;
  state.samples = 100;
  state.world = WorldSize{2};
  state.seed = Seed{5};
  state.rule = 1;
  state.epoch = Epoch{4};
  state.position = 12;
  return state;
}

const char* written_to() { return std::getenv("LOCKSTEP_WRITE"); }

template <class Job>
void check(const std::string& name, std::size_t world, std::size_t batches, bool has_own = false) {
  if (const char* const folder = written_to()) {
    return all_well(world, [&](Shared& comm) {
      const std::size_t me = comm.rank().value();
      Job job(comm);
      job.optimizer().lr = 0.03;
      job.set_epoch(1);
      for (std::size_t s = 0; s != batches; ++s) job.step(entry_of(me, s));
      Values values = Values::of(me);
      double shared = 0.75;
      save(job, std::string(folder) + "/" + name,
           {.epoch = 4,
            .best = 0.5,
            .position = position_of(),
            .scores = Scores({{"accuracy", 0.25, 8}}),
            .values = values.kept(),
            .common = {{"shared", shared}}});
    });
  }
  const std::string path = LOCKSTEP_SOURCE_DIR "/tests/checkpoint/earlier/" + name;
  const Folder folder;
  for (const std::size_t other : {world, std::size_t{1}, std::size_t{3}}) {
    const std::string again = folder / std::to_string(other);
    all_well(other, [&](Shared& comm) {
      const std::size_t me = comm.rank().value();
      Job job(comm);
      job.set_epoch(2);
      for (std::size_t s = 30; s != 30 + batches; ++s) job.step(entry_of(me, s));
      Values values;
      double shared = 0;
      const Resumed resumed =
          resume(job, path, {.values = values.kept(), .common = {{"shared", shared}}});
      require(resumed.epoch == 4 && resumed.best == 0.5 && resumed.world == WorldSize{world} &&
                  resumed.position == position_of() && resumed.scores["accuracy"] == 0.25,
              "where it goes on");
      require(job.optimizer().lr == 0.03 && job.updates() == resumed.step, "numbers and counts");
      require(me >= world || values == Values::of(me), "values");
      require(shared == 0.75, "a common value");
      save(job, again, {.epoch = 4, .values = values.kept(), .common = {{"shared", shared}}});
    });
    if (other == world) {
      BOOST_TEST((tensors_of(again) == tensors_of(path)), name << ": other bits");
    } else if (!has_own) {  // what ranks have for themselves is another one's there
      const auto first = tensors_of(path);
      for (const auto& [tensor, bytes] : tensors_of(again)) {
        const bool own = tensor.starts_with("lockstep/") && !tensor.starts_with("lockstep/state/");
        if (!own) BOOST_TEST((first.at(tensor) == bytes), name << ": other bits in " << tensor);
      }
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(slices_of_shared_parameters) { check<SharedAdam>("shared", 2, 6); }
BOOST_AUTO_TEST_CASE(slices_of_zero) { check<Zero>("zero", 2, 3); }
BOOST_AUTO_TEST_CASE(buffers_of_every_rank) { check<OwnBuffers>("buffers", 2, 6); }
BOOST_AUTO_TEST_CASE(counts_of_single_parameters) { check<Counted>("counted", 1, 3); }
BOOST_AUTO_TEST_CASE(parameters_of_every_rank) { check<Local>("local", 2, 4, true); }

BOOST_AUTO_TEST_SUITE_END()

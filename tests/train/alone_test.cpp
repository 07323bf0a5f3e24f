// SPDX-License-Identifier: Apache-2.0
// A world of one, known to the compiler or not; and a thread that helps.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(alone_and_helped)

namespace {

using namespace train;
using Network = PlainMlp<7, 9, 4>;

std::vector<double> parameters_of(const auto& ddp) {
  std::vector<double> all;
  Network::for_each_parameter(ddp, [&](const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

std::vector<double> train_some(auto& ddp, std::size_t rank) {
  ddp.optimizer().lr = 0.05;
  for (std::size_t s = 0; s < 6; ++s) {
    ddp.set_epoch(15 * s);  // for a schedule that counts epochs
    ddp.step(reference_batch(5, 7, 4, s, rank));
  }
  return parameters_of(ddp);
}

template <class... Ps>
void alone_case(bool bitwise) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Network, World<1>, Ps...> known(nobody);
  const std::vector<double> want = train_some(known, 0);
  all_well(1, [&](Shared& comm) {
    DistributedDataParallel<Network, Ps...> ddp(comm);
    const std::vector<double> have = train_some(ddp, 0);
    for (std::size_t i = 0; i < want.size(); ++i) {
      require(bitwise ? have[i] == want[i] : std::abs(have[i] - want[i]) < 1e-12,
              "parameter " + std::to_string(i));
    }
  });
}

/// What two ranks with this way to progress end with.
template <class Who>
std::vector<double> two_ranks(As as) {
  const ranks::Common<double[512]> result;
  using Helped = DistributedDataParallel<Network, Progress<Who>, Sharding<Replicated>,
                                         Optimizer<Adam>, Buckets<BucketLimits{0, 0}>>;
  const Ends ends = ranks::run(as, 2, [&](Shared& shared) {
    auto comm = join_again<Who>(shared);
    Helped ddp(comm);
    const std::vector<double> all = train_some(ddp, comm.rank().value());
    if (comm.rank() == Rank{0}) std::memcpy(&*result, all.data(), all.size() * sizeof(double));
  });
  for (const std::string& end : ends) BOOST_TEST(end == "");
  return {&(*result)[0], &(*result)[0] + 512};
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_world_of_one_trains_the_same_whether_the_compiler_knows_or_not) {
  alone_case<Optimizer<AdamW>>(true);
  alone_case<Optimizer<SGDNesterov>, Accumulate<3>, Clip<0.1>>(true);
  alone_case<UnusedParameters<Zero>, Schedule<StepDecay>>(true);
}

BOOST_AUTO_TEST_CASE(phases_of_a_world_of_one_are_its_step) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Network, World<1>, Clip<0.1>> stepping(nobody), phased(nobody);
  for (std::size_t s = 0; s < 4; ++s) {
    const Samples batch = reference_batch(5, 7, 4, s, 0);
    const double loss = stepping.step(batch);
    BOOST_TEST(phased.evaluate(batch) == loss);
    BOOST_TEST(phased.forward(batch).backward().reduce().update() == loss);
  }
  BOOST_TEST((parameters_of(stepping) == parameters_of(phased)));
}

BOOST_AUTO_TEST_CASE(a_helper_thread_changes_nothing) {
  const std::vector<double> want = two_ranks<Callers>(As::processes);
  BOOST_TEST(want[0] != 0);
  BOOST_TEST((two_ranks<HelperThread>(As::processes) == want));
  BOOST_TEST((two_ranks<HelperThread>(As::threads) == want));
}

BOOST_AUTO_TEST_SUITE_END()

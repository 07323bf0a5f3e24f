// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, on every path of a step: what the thread sanitizer looks at.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <vector>

#include "data/fed.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(training_threads)

namespace {

using namespace train;

/// A sheet with a buffer, so that there is something to broadcast.
struct Net : Sheet<float, double, float> {
  using Buffers = BufferList<Buffer<"seen", std::int64_t, 1>>;
  double forward(auto& step, const Entry& entry) {
    step.buffer("seen"_p)(0) += 1;
    double sum = entry.loss;
    each(step, [&](const auto& view) { sum += static_cast<double>(view(0)); });
    return sum;
  }
};

/// Parameters are read and written in every way there is; all ranks must see the same.
void train_on(auto& comm, auto& ddp, std::size_t micro_batches) {
  const auto same = [&](const std::string& when) {
    const double mine[] = {value(ddp, 0, 5), value(ddp, 1, 69), value(ddp, 2, 2)};
    std::vector<double> all(3 * comm.world_size().value());
    comm.all_gather(mine, all);
    for (std::size_t i = 0; i < all.size(); ++i)
      require(all[i] == mine[i % 3], "ranks differ " + when);
  };
  const Entry entry{.gradient = {1 + static_cast<double>(comm.rank().value()), 0.5, 0.25}};
  // Often: the sanitizer does not see every race the first time.
  for (std::size_t s = 0; s < 40; ++s) {
    for (std::size_t m = 0; m < micro_batches; ++m) ddp.step(entry);
    same("after step");
    ddp.evaluate(entry);
    for (std::size_t m = 0; m + 1 < micro_batches; ++m) ddp.no_sync().forward(entry).backward();
    ddp.forward(entry).backward().reduce().update();
    ddp.evaluate(entry);
    same("after the phases");
    ddp.evaluate(entry);
    ddp.initialize([](auto& initial) { initial.fill_by_default(); });
    require(value(ddp, 1, 3) == 0, "written anew");
    ddp.evaluate(entry);
  }
}

template <std::size_t Micro, class... Ps>
void threads_case() {
  all_well(
      3,
      [](Shared& comm) {
        DistributedDataParallel<Net, Optimizer<Adam>, Accumulate<Micro>, Ps...> ddp(comm);
        train_on(comm, ddp, Micro);
      },
      As::threads);
}

}  // namespace

BOOST_AUTO_TEST_CASE(shared_parameters) { threads_case<1>(); }

BOOST_AUTO_TEST_CASE(shared_parameters_with_clipping_and_accumulation) {
  threads_case<2, Clip<1.0>>();
}

BOOST_AUTO_TEST_CASE(replicated_with_unused_parameters) {
  threads_case<1, Sharding<Replicated>, Buckets<BucketLimits{0, 0}>, UnusedParameters<Zero>>();
}

BOOST_AUTO_TEST_CASE(replicated_with_a_helper) {
  all_well(
      2,
      [](Shared& shared) {
        auto comm = join_again<HelperThread>(shared);
        DistributedDataParallel<Net, Optimizer<Adam>, Progress<HelperThread>, Sharding<Replicated>,
                                Buckets<BucketLimits{0, 0}>>
            ddp(comm);
        train_on(comm, ddp, 1);
      },
      As::threads);
}

// Each rank has its own thread, one that feeds, and where it reads one that loads.
BOOST_AUTO_TEST_CASE(ranks_that_feed_each_other) {
  all_well(
      4,
      [](Shared& comm) { fed::check<DistributedSampler<Masked, TorchShuffle>>(comm, {{7, 29}}); },
      As::threads);
}

BOOST_AUTO_TEST_SUITE_END()

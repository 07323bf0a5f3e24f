// SPDX-License-Identifier: Apache-2.0
// The snippets of docs/data.md.
#include <boost/test/unit_test.hpp>
#include <cstdint>

#include "lockstep/data/fashion_mnist.hpp"
#include "lockstep/data/loader.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_example)

BOOST_AUTO_TEST_CASE(the_documented_loop_runs_and_resumes) {
  std::size_t images = 0;
  // clang-format off
const auto train = fashion_mnist("train");  // or a type of your own: size(), batch_type, load()
DistributedSampler<> sampler(train.size(), WorldSize{4}, Rank{0});
DataLoader loader(train, sampler, {.batch_size = 64});
for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
  sampler.set_epoch(Epoch{epoch});
  for (const auto& batch : loader) images += batch.size();  // batch.row(i), batch.labels[i]
}
  // clang-format on
  BOOST_TEST(images == 2 * sampler.size());

  images = 0;
  SamplerState checkpoint;
  for (const auto& batch : loader) {
    images += batch.size();
    checkpoint = loader.state();
    if (images > 1000) break;
  }
  DistributedSampler<> later(train.size(), WorldSize{4}, Rank{0});
  DataLoader later_loader(train, later, {.batch_size = 64});
  // clang-format off
later_loader.resume(checkpoint);
for (std::uint64_t epoch = later.epoch().value(); epoch < 2; ++epoch) {
  later.set_epoch(Epoch{epoch});  // the resumed epoch: changes nothing
  for (const auto& batch : later_loader) images += batch.size();
}
  // clang-format on
  BOOST_TEST(images == later.size());
}

BOOST_AUTO_TEST_SUITE_END()

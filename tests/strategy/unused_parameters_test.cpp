// SPDX-License-Identifier: Apache-2.0
// Parameters without a gradient: forbidden, or zero as PyTorch's find_unused_parameters has it.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>

#include "optim/plain.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(unused_parameters)

namespace {

using namespace train;
using Net = Sheet<>;

Entry entry_of(std::size_t rank, std::size_t step) {
  const auto r = static_cast<double>(rank);
  const auto s = static_cast<double>(step);
  return {.gradient = {0.1 + 0.3 * r + 0.05 * s, 0.2 - 0.1 * r * s, -0.4 + 0.2 * r + 0.1 * s}};
}

/// Step by step, who uses what: nobody uses a in steps 1 and 2, only rank 1 uses b in step 2.
bool uses(std::size_t rank, std::size_t step, std::size_t p) {
  if (p == 0) return step != 1 && step != 2;
  if (p == 1) return step != 2 || rank == 1;
  return step % 2 == 0 || rank == 0;
}

Entry partial(std::size_t rank, std::size_t step) {
  Entry entry = entry_of(rank, step);
  for (std::size_t p = 0; p < 3; ++p) entry.used[p] = uses(rank, step, p);
  return entry;
}

/// PyTorch's rule by hand: a parameter that any rank used since the last update is updated with the
/// average, in which those that did not use it count as zero; the rest, states included, stay.
template <class Rule>
void expect_step(PlainSheet<Rule>& plain, std::size_t world, std::size_t first,
                 std::size_t micro_batches) {
  for (std::size_t p = 0; p < 3; ++p) {
    double sum = 0;
    bool used = false;
    for (std::size_t s = first; s < first + micro_batches; ++s) {
      for (std::size_t r = 0; r < world; ++r) {
        if (!uses(r, s, p)) continue;
        used = true;
        sum += entry_of(r, s).gradient[p];
      }
    }
    if (used) plain.update(p, sum / static_cast<double>(world * micro_batches));
  }
}

template <class Rule, std::size_t Micro, class... Ps>
void zero_case(auto plain_rule) {
  for (const std::size_t world : {1u, 2u, 3u}) {
    all_well(world, [&](Shared& comm) {
      DistributedDataParallel<Net, UnusedParameters<Zero>, Optimizer<Rule>, Accumulate<Micro>,
                              Ps...>
          ddp(comm);
      ddp.optimizer().lr = 0.05;
      ddp.optimizer().weight_decay = 0.1;
      PlainSheet plain(plain_rule);
      for (std::size_t s = 0; s < 6; ++s) {
        ddp.step(partial(comm.rank().value(), s));
        if ((s + 1) % Micro != 0) continue;
        expect_step(plain, world, s + 1 - Micro, Micro);
        compare(ddp, plain, "step " + std::to_string(s), 1e-9);
      }
    });
  }
}

Ends forbidden(std::size_t world, std::size_t culprit, auto... policies) {
  return ranks::run(As::processes, world, [&](Shared& comm) {
    DistributedDataParallel<Net, decltype(policies)...> ddp(comm);
    ddp.step(entry_of(comm.rank().value(), 0));
    Entry entry = entry_of(comm.rank().value(), 1);
    if (comm.rank() == Rank{culprit}) entry.used = {false, true, false};
    ddp.step(entry);
    ddp.step(entry_of(comm.rank().value(), 2));
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_forbidden_one_is_named_on_every_rank) {
  const auto check = [](const Ends& ends, std::size_t culprit) {
    all_say(ends, "no gradient came for a, c");
    for (std::size_t r = 0; r < ends.size(); ++r) {
      const std::string mine = "lockstep: rank " + std::to_string(r) + ", ";
      BOOST_TEST(ends[r].starts_with(mine), ends[r]);
      const std::string words = "rank " + std::to_string(culprit) + " failed: ";
      BOOST_TEST((ends[r].find(words) != std::string::npos) == (r != culprit), ends[r]);
    }
  };
  check(forbidden(1, 0), 0);
  check(forbidden(2, 1), 1);
  check(forbidden(3, 0), 0);
  check(forbidden(3, 2, Sharding<Replicated>{}, Buckets<BucketLimits{0, 0}>{}), 2);
}

BOOST_AUTO_TEST_CASE(momentum_of_unused_parameters_stays) {
  const plain::Sgd rule{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1};
  zero_case<SGDMomentum, 1>(rule);
  zero_case<SGDMomentum, 1, Sharding<Replicated>, Buckets<BucketLimits{0, 0}>>(rule);
}

BOOST_AUTO_TEST_CASE(adam_counts_the_steps_of_each_parameter) {
  const plain::Adam rule{.lr = 0.05, .weight_decay = 0.1};
  zero_case<Adam, 1>(rule);
}

BOOST_AUTO_TEST_CASE(use_in_any_micro_batch_is_use) {
  const plain::Adam rule{.lr = 0.05, .weight_decay = 0.1};
  zero_case<Adam, 2>(rule);
  zero_case<Adam, 2, Sharding<Replicated>>(rule);
}

BOOST_AUTO_TEST_SUITE_END()

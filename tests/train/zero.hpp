// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the tests of `Sharding<ZeroRedundancy>` share: jobs that train every case of ddp.json
/// with one type, and random cases against `Replicated`.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "comm/repeat.hpp"
#include "train/parity.hpp"

namespace zero {

using namespace parity;
using ranks::require;

/// Steps of up to four micro-batches, all optimizers, clipped or by an infinite norm: one type.
/// Each parameter has a bucket of its own, so that buckets take the memory of others, padding
/// included.
template <class What, class... Ps>
using AnyCase =
    DistributedDataParallel<Network, Optimizer<ReferenceRule>, Accumulate<4>, ReferenceClip,
                            Buckets<BucketLimits{0, 0}>, Sharding<ZeroRedundancy, What>, Ps...>;

template <class Rendezvous, class Job>
Ends run_case(const ReferenceCase& c) {
  if (c.accumulate > 4) c.fail("these jobs have up to four micro-batches");
  ReferenceClip::Norm::value = c.clips ? c.clip : std::numeric_limits<double>::infinity();
  return train_on_processes<Rendezvous>(c, [&](auto& comm) {
    Job ddp(comm, c.model<Network>());
    choose_rule(ddp.optimizer(), c);
    require_pytorchs(comm, ddp, c, [&](std::size_t s) {
      double loss = 0;
      for (std::size_t m = s * c.accumulate; m < (s + 1) * c.accumulate; ++m)
        loss += ddp.step(c.samples(m, comm.rank().value())) / static_cast<double>(c.accumulate);
      ddp.step_tail();
      return loss;
    });
  });
}

/// A plain step, whose buckets travel during backward.
template <class Sharing, class... Ps>
using Plain = DistributedDataParallel<Network, Optimizer<AdamW>, SmallBuckets, Sharing, Ps...>;

struct Case {
  std::size_t world = 1;
  std::size_t in = 1, hidden = 1, out = 1, rows = 1, salt = 0;

  explicit Case(ranks::Chance& chance)
      : world(1 + chance(4)),
        in(1 + chance(40)),
        hidden(1 + chance(40)),
        out(2 + chance(20)),
        rows(1 + chance(5)),
        salt(chance(1000)) {}

  Network network() const {
    Network network;
    network.in = in;
    network.hidden = hidden;
    network.out = out;
    return network;
  }
  std::string text() const {
    std::ostringstream text;
    text << world << " ranks, " << in << "-" << hidden << "-" << out << ", " << rows
         << " rows, salt " << salt;
    return text.str();
  }
};

using Numbers = std::vector<double>;

Numbers numbers_of(const auto& ddp) {
  Numbers all;
  ddp.for_each_parameter([&](auto, const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

/// The parameters after some steps, which are the same bits on all ranks.
template <class Rendezvous, class Job>
Numbers train_ranks(const Case& c, const std::string& how) {
  struct Result {
    std::size_t count;
    std::array<double, 6000> values;
  };
  const ranks::Common<Result> result;
  const Ends ends =
      ranks::run_processes<Rendezvous>(c.world, std::chrono::seconds(20), [&](auto& comm) {
        Job ddp(comm, c.network());
        ddp.optimizer().lr = 0.05;
        for (std::size_t u = 0; u < 4; ++u)
          ddp.step(reference_batch(c.rows, c.in, c.out, c.salt + u, comm.rank().value()));
        const Numbers mine = numbers_of(ddp);
        Numbers all(mine.size() * c.world);
        comm.all_gather(mine, all);
        for (std::size_t i = 0; i < all.size(); ++i)
          require(all[i] == mine[i % mine.size()], "ranks have different parameters");
        if (comm.rank() == Rank{0}) {
          result->count = mine.size();
          std::copy(mine.begin(), mine.end(), result->values.begin());
        }
      });
  for (std::size_t r = 0; r < c.world; ++r)
    BOOST_TEST(ends[r] == "", how << ", " << c.text() << ": rank " << r << ": " << ends[r]);
  return {result->values.begin(),
          result->values.begin() + static_cast<std::ptrdiff_t>(result->count)};
}

}  // namespace zero

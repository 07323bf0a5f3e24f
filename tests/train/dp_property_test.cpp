// SPDX-License-Identifier: Apache-2.0
// For random shapes, replicas and batches: replicas over shares of a batch train like one device
// over all of it, whatever the shares, and like the ranks of DDP.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "comm/repeat.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/closeness.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_FIXTURE_TEST_SUITE(dp_properties, Watchdog)

namespace {

using namespace train;
using Network = PlainMlp<dynamic, dynamic, dynamic>;
using Split = SplitMlp<dynamic, dynamic, dynamic>;

struct Case {
  std::size_t replicas = 1;
  std::size_t in = 1, hidden = 1, out = 1;
  std::size_t rows = 1;  // of a whole batch
  std::size_t salt = 0;

  template <class Model = Network>
  Model network() const {
    return network_of<Model>(in, hidden, out);
  }
  /// Sometimes a smaller one, as the last of an epoch is.
  Samples batch(std::size_t step) const {
    const std::size_t size = step % 3 == 2 ? (rows + 1) / 2 : rows;
    return reference_batch(size, in, out, salt + step, 0);
  }
  std::string text() const {
    std::ostringstream words;
    words << replicas << " replicas, " << in << "-" << hidden << "-" << out << ", " << rows
          << " rows, salt " << salt;
    return words.str();
  }
};

Case random_case(ranks::Chance& chance, std::size_t replicas) {
  Case c;
  c.replicas = replicas;
  c.in = 1 + chance(30);
  c.hidden = 1 + chance(30);
  c.out = 2 + chance(12);
  c.rows = 1 + chance(13);  // fewer than replicas, or no multiple of them, more often than not
  c.salt = chance(1000);
  return c;
}

std::vector<double> numbers_of(const auto& trained) {
  std::vector<double> all;
  Network::for_each_parameter(trained, [&](const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> numbers;
  friend bool operator==(const Trained&, const Trained&) = default;
};

constexpr std::size_t steps = 6;

Trained train_some(const Case& c, auto& job) {
  job.optimizer().lr = 0.05;
  Trained result;
  for (std::size_t s = 0; s < steps; ++s) {
    const Samples batch = c.batch(s);
    result.losses.push_back(job.step(batch));
    result.losses.push_back(job.evaluate(batch));
  }
  result.numbers = numbers_of(job);
  return result;
}

template <class... Ps>
Trained on_one_device(const Case& c) {
  LoopbackCommunicator alone;
  DistributedDataParallel<Network, World<1>, Ps...> one(alone, c.network());
  return train_some(c, one);
}

template <class Model, class... Ps>
Trained train_replicas(const Case& c) {
  DataParallel<Model, Ps...> dp({.replicas = c.replicas}, c.network<Model>());
  return train_some(c, dp);
}
template <class... Ps>
Trained on_replicas(const Case& c) {
  return train_replicas<Network, Ps...>(c);
}

using train::require_close;
void require_close(const Trained& have, const Trained& want, const std::string& what) {
  require_close(have.losses, want.losses, what + ", losses");
  require_close(have.numbers, want.numbers, what + ", parameters");
}

template <class... Ps>
void check_properties(const Case& c) {
  using Pieces = Buckets<BucketLimits{200, 3000}>;
  const Trained one = on_one_device<Ps...>(c);
  const Trained shared = on_replicas<Ps...>(c);
  require_close(shared, one, c.text() + ": shared parameters");
  BOOST_TEST((on_replicas<Ps...>(c) == shared), c.text() << ": runs differ");
  require_close(on_replicas<Sharding<Replicated>, Pieces, Ps...>(c), one,
                c.text() + ": replicated parameters");
  require_close(train_replicas<Split, Ps...>(c), one, c.text() + ": the loss of all outputs");
  require_close(train_replicas<Split, Sharding<Replicated>, Ps...>(c), one,
                c.text() + ": the loss of all outputs, replicated parameters");
  BOOST_TEST((train_replicas<Split, LossOnReplica, Ps...>(c) == shared),
             c.text() << ": the loss on each replica");
}

}  // namespace

BOOST_AUTO_TEST_CASE(replicas_train_like_one_device_with_momentum) {
  ranks::Chance chance;
  for (int round = 0; round < ranks::repetitions(2, 20); ++round)
    for (const std::size_t replicas : {1, 2, 3, 4})
      check_properties<Optimizer<SGDMomentum>>(random_case(chance, replicas));
}

BOOST_AUTO_TEST_CASE(replicas_train_like_one_device_with_adamw_clipping_and_accumulation) {
  ranks::Chance chance;
  for (int round = 0; round < ranks::repetitions(2, 20); ++round)
    for (const std::size_t replicas : {2, 3, 4})
      check_properties<Optimizer<AdamW>, Accumulate<2>, Clip<0.3>>(random_case(chance, replicas));
}

BOOST_AUTO_TEST_CASE(any_batch_may_be_smaller_than_the_number_of_replicas) {
  for (std::size_t rows = 1; rows < 10; ++rows) {
    const Case c{.replicas = 4, .in = 3, .hidden = 4, .out = 3, .rows = rows, .salt = rows};
    require_close(on_replicas<>(c), on_one_device<>(c), c.text());
  }
}

BOOST_AUTO_TEST_CASE(the_loss_of_all_outputs_is_taken_once_by_the_first_replica) {
  Case c{.replicas = 3, .in = 4, .hidden = 5, .out = 3, .rows = 7, .salt = 1};
  DataParallel<Split> dp({.replicas = 3}, c.network<Split>());
  for (std::size_t s = 0; s < 4; ++s) dp.step(c.batch(s));
  std::vector<std::size_t> losses, samples;
  dp.for_each_model([&](const Split& model) {
    losses.push_back(model.losses);
    samples.push_back(model.samples);
  });
  BOOST_TEST((losses == std::vector<std::size_t>{4, 0, 0}));
  BOOST_TEST(samples[0] == 7u + 7 + 4 + 7);
}

BOOST_AUTO_TEST_CASE(replicas_have_the_bits_of_ddps_ranks_at_the_same_global_batch) {
  ranks::Chance chance;
  for (const std::size_t replicas : {2, 4}) {
    Case c = random_case(chance, replicas);
    c.rows *= 2 * replicas;  // every batch is a multiple
    const Trained dp = on_replicas<Optimizer<Adam>>(c);
    std::vector<double> ddp;
    all_well(
        replicas,
        [&](Shared& comm) {
          DistributedDataParallel<Network, Optimizer<Adam>> job(comm, c.network());
          job.optimizer().lr = 0.05;
          Samples share;
          for (std::size_t s = 0; s < steps; ++s) {
            const Samples batch = c.batch(s);
            const std::size_t count = batch.size() / replicas;
            batch.slice(comm.rank().value() * count, count, share);
            job.step(share);
          }
          if (comm.rank() == Rank{0}) ddp = numbers_of(job);
          comm.barrier();
        },
        As::threads);
    BOOST_TEST((ddp == dp.numbers), c.text());
  }
}

BOOST_AUTO_TEST_SUITE_END()

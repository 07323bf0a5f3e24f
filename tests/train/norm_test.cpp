// SPDX-License-Identifier: Apache-2.0
// Networks with batch norms, trained by ranks that share statistics: PyTorch's figures, other
// policies beside Norms<Synced>, and checkpoints that fit PyTorch's modules.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/repeat.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "skipped.hpp"
#include "train/checkpoint_files.hpp"
#include "train/norm_mlp.hpp"
#include "train/python.hpp"

BOOST_AUTO_TEST_SUITE(norms_of_jobs)

namespace {

using namespace train;
using ranks::As;
using ranks::Ends;
using ranks::require;
using ranks::Shared;
using Rendezvous = ranks::SharedMemory;

/// Parameters in common memory, and replicas whose buckets travel while norms communicate: a bucket
/// is as small as a parameter. The latter takes one micro-batch a step or two.
using Synced1 = DistributedDataParallel<NormMlp, Optimizer<SGDMomentum>, Norms<Synced>>;
using Synced2 =
    DistributedDataParallel<NormMlp, Optimizer<SGDMomentum>, Norms<Synced>, Sharding<Replicated>,
                            Buckets<BucketLimits{0, 0}>, Accumulate<2>>;
using Alone = DistributedDataParallel<NormMlp, Optimizer<SGDMomentum>>;
using Grouped = DistributedDataParallel<NormMlp, Optimizer<SGDMomentum>, Norms<Synced, WithinGroup>,
                                        Groups<Grid<dynamic, 2>>>;

void require_well(const Ends& ends, const std::string& what) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r] == "", what << ", rank " << r << " of " << ends.size() << ": " << ends[r]);
}

/// All numbers of a job: parameters, then buffers.
std::vector<double> numbers_of(const auto& ddp) {
  std::vector<double> all;
  const auto add = [&](auto, const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  };
  ddp.for_each_parameter(add);
  ddp.for_each_buffer(add);
  return all;
}

/// A random network, and so many rows a micro-batch as all ranks have together.
struct Shape {
  std::size_t in, hidden, out, rows, salt;

  explicit Shape(ranks::Chance& chance)
      : in(1 + chance(20)),
        hidden(1 + chance(20)),
        out(2 + chance(5)),
        rows(12 * (1 + chance(2))),
        salt(chance(1000)) {}

  NormMlp network() const {
    NormMlp network;
    network.in = in;
    network.hidden = hidden;
    network.out = out;
    return network;
  }
  Samples part(std::size_t micro, std::size_t rank, std::size_t world) const {
    Samples whole = reference_batch(rows, in, out, salt + micro, 0);
    Samples mine;
    whole.slice(rank * (rows / world), rows / world, mine);
    return mine;
  }
  std::string text() const {
    return std::to_string(in) + "-" + std::to_string(hidden) + "-" + std::to_string(out) + ", " +
           std::to_string(rows) + " rows, salt " + std::to_string(salt);
  }
};

/// All ranks must have the same bits. Where each has statistics of its own, that is true of
/// parameters.
template <class Job>
void require_agreement(Shared& comm, const std::vector<double>& mine, std::size_t parameters) {
  const std::size_t common = std::is_same_v<Job, Alone> ? parameters : mine.size();
  std::vector<double> all(mine.size() * comm.world_size().value());
  comm.all_gather(mine, all);
  for (std::size_t i = 0; i < all.size(); ++i)
    require(i % mine.size() >= common || all[i] == mine[i % mine.size()], "ranks differ");
}

/// Rank 0's numbers after so many micro-batches.
template <class Job>
std::vector<double> train_ranks(const Shape& shape, std::size_t world, std::size_t micro_batches) {
  struct Result {
    std::size_t count;
    std::array<double, 2000> values;
  };
  const ranks::Common<Result> result;
  const auto train = [&](Shared& comm) {
    Job ddp(comm, shape.network());
    ddp.optimizer().lr = 0.1;
    for (std::size_t m = 0; m < micro_batches; ++m)
      ddp.step(shape.part(m, comm.rank().value(), world));
    const std::vector<double> mine = numbers_of(ddp);
    require_agreement<Job>(comm, mine, mine.size() - 2 * shape.hidden - 1);
    require(mine.size() <= result->values.size(), "too many numbers");
    if (comm.rank() != Rank{0}) return;
    result->count = mine.size();
    std::ranges::copy(mine, result->values.begin());
  };
  require_well(ranks::run(As::processes, world, train), shape.text());
  return {result->values.begin(),
          result->values.begin() + static_cast<std::ptrdiff_t>(result->count)};
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  BOOST_TEST_REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(a[i] - b[i]) / std::max(std::abs(b[i]), 1e-2));
  return most;
}

}  // namespace

BOOST_AUTO_TEST_CASE(shared_parameters_train_as_in_pytorch) {
  check_every_norm_case<Rendezvous, Synced1>();
  check_every_norm_case<Rendezvous, Synced1>(4, As::threads);
}
BOOST_AUTO_TEST_CASE(replicas_with_small_buckets_train_as_in_pytorch) {
  check_every_norm_case<Rendezvous, Synced2>();
}

// The whole batch on one process, whose replicas share it.
BOOST_AUTO_TEST_CASE(replicas_of_one_process_train_as_in_pytorch) {
  for (const NormCase& c : norm_cases()) {
    for (const std::size_t replicas : {1, 2, 3}) {
      DataParallel<NormMlp, Optimizer<SGDMomentum>, Norms<Synced>, LossOnReplica> dp(
          {.replicas = replicas}, c.model<NormMlp>());
      BOOST_CHECK_NO_THROW(train_norm_case(dp, c, {0, 1}, [](double loss) { return loss; }));
    }
  }
}

// Two groups of two ranks that have the same batches are, each for itself, the two ranks of a case.
BOOST_AUTO_TEST_CASE(groups_that_have_statistics_of_their_own_train_as_in_pytorch) {
  for (const NormCase& c : norm_cases()) {
    if (!c.divides_among(2)) continue;
    for (const std::size_t world : {2, 4}) {
      require_well(ranks::run(As::processes, world,
                              [&](Shared& comm) {
                                train_norm_case_on<Grouped>(comm, c, {comm.rank().value() % 2, 2});
                              }),
                   c.name);
    }
  }
}

// What a group sees of a first step is what one rank would see that had all its rows.
BOOST_AUTO_TEST_CASE(statistics_of_a_group_are_those_of_its_rows) {
  ranks::Chance chance;
  const Shape shape(chance);
  require_well(ranks::run(As::processes, 4,
                          [&](Shared& comm) {
                            const std::size_t group = comm.rank().value() / 2;
                            Grouped ddp(comm, shape.network());
                            double loss = ddp.step(shape.part(group, comm.rank().value() % 2, 2));
                            loss = ddp.group().all_reduce(loss, Average{});
                            LoopbackCommunicator self;
                            DistributedDataParallel<NormMlp, World<1>> one(self, shape.network());
                            const double want = one.step(shape.part(group, 0, 1));
                            require(std::abs(loss - want) <= 1e-12,
                                    "the loss of a group is another one");
                          }),
               shape.text());
}

BOOST_AUTO_TEST_CASE(ranks_that_accumulate_train_like_one_that_has_all_rows) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(3, 30); ++i) {
    const Shape shape(chance);
    const std::vector<double> one = train_ranks<Synced2>(shape, 1, 6);
    for (const std::size_t world : {2, 3, 4}) {
      const double off = distance(train_ranks<Synced2>(shape, world, 6), one);
      BOOST_TEST(off <= 1e-9, shape.text() << ", " << world << " ranks: off by " << off);
    }
    BOOST_TEST(distance(train_ranks<Synced1>(shape, 2, 6), one) > 1e-6,
               "six steps are not three of two micro-batches");
  }
}

// The same model with Norms<Local>: as in PyTorch without SyncBatchNorm, W ranks train otherwise.
BOOST_AUTO_TEST_CASE(local_statistics_train_otherwise) {
  ranks::Chance chance;
  const Shape shape(chance);
  const std::vector<double> local = train_ranks<Alone>(shape, 1, 4);
  BOOST_TEST(distance(train_ranks<Synced1>(shape, 1, 4), local) == 0, "alone, a norm is plain");
  BOOST_TEST(distance(train_ranks<Synced1>(shape, 2, 4), local) <= 1e-9);
  BOOST_TEST(distance(train_ranks<Alone>(shape, 2, 4), local) > 1e-4, shape.text());
}

// Half of a case on its own ranks, the other half on twice as many, or on one.
BOOST_AUTO_TEST_CASE(a_checkpoint_goes_on_in_another_world) {
  const checkpoints::Folder folder;
  const std::string path = folder / "half.safetensors";
  const NormCase c = norm_cases().front();
  const auto train = [&](Shared& comm, std::size_t first, std::size_t last) {
    Synced1 ddp(comm, c.model<NormMlp>());
    ddp.optimizer().lr = c.lr;
    ddp.optimizer().momentum = c.momentum;
    if (first != 0) load(ddp, path);
    for (std::size_t s = first; s < last; ++s)
      ddp.step(c.samples(s, comm.rank().value(), comm.world_size().value()));
    if (last == c.steps) {
      require_trained(c, ddp);
    } else {
      save(ddp, path);
    }
  };
  const std::size_t half = c.steps / 2;
  const std::size_t then = c.divides_among(2 * c.world) ? 2 * c.world : 1;
  require_well(ranks::run(As::processes, c.world, [&](Shared& comm) { train(comm, 0, half); }),
               c.name);
  require_well(ranks::run(As::processes, then, [&](Shared& comm) { train(comm, half, c.steps); }),
               c.name);
}

// nn.BatchNorm1d and nn.BatchNorm2d take what is saved, and jobs take what PyTorch saves.
BOOST_AUTO_TEST_CASE(checkpoints_fit_the_modules_of_pytorch) {
  const checkpoints::Folder folder;
  const NormCase c = norm_cases().front();
  const std::string saved = folder / "ours.safetensors";
  const std::string theirs = folder / "theirs.safetensors";
  const auto on_ranks = [&](const auto& f) {
    require_well(ranks::run(As::processes, c.world,
                            [&](Shared& comm) {
                              Synced1 ddp(comm, c.model<NormMlp>());
                              f(comm, ddp);
                            }),
                 c.name);
  };
  on_ranks([&](Shared& comm, Synced1& ddp) {
    ddp.optimizer().lr = c.lr;
    ddp.optimizer().momentum = c.momentum;
    for (std::size_t s = 0; s < c.steps; ++s) ddp.step(c.samples(s, comm.rank().value(), c.world));
    save(ddp, saved);
  });
  const auto tensors = checkpoints::tensors_of(saved);
  for (const char* const name :
       {"bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"})
    BOOST_TEST(tensors.contains(name), name << " is not in the file");
  const std::string count = tensors.at("bn1.num_batches_tracked");
  BOOST_TEST(count.starts_with("[]"), "PyTorch's count has no extents");
  BOOST_TEST(count.size() == 2 + sizeof(std::int64_t));

  const std::string python = python_with_torch();
  if (python.empty()) {
    say_skipped("PyTorch's BatchNorm (there is no PyTorch here)");
    return;
  }
  const char* const given = std::getenv("LOCKSTEP_REFERENCE");
  const std::string figures = given != nullptr ? given : LOCKSTEP_SOURCE_DIR "/tests/reference";
  const std::string outputs = folder / "outputs";
  if (!ask_torch(python, "norm_peer.py",
                 "'" + figures + "/syncbn_train.json' " + saved + " " + theirs + " " + outputs,
                 folder / "peer"))
    return;
  std::ifstream in(outputs);
  std::vector<double> want;
  for (std::string number; in >> number;) want.push_back(std::stod(number));
  on_ranks([&](Shared&, Synced1& ddp) {
    load_parameters(ddp, theirs);
    const auto have = ddp.predict(c.evaluated());
    require_numbers(c, {have.data_handle(), have.data_handle() + have.size()}, want,
                    "an output of what PyTorch has trained");
  });
}

BOOST_AUTO_TEST_SUITE_END()

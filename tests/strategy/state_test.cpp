// SPDX-License-Identifier: Apache-2.0
// What jobs keep: all pieces of one, copied into another that was made anew, make it go on to the
// same bits.
#include <array>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/listed.hpp"
#include "train/sheet.hpp"
#include "train/state.hpp"

BOOST_AUTO_TEST_SUITE(job_state)

namespace {

using namespace train;
using detail::StateEntry;
using detail::StateRole;
using detail::StateUse;

/// A sample, and which parameters it uses.
struct Row {
  double x = 0;
  std::array<bool, 4> used{true, true, true, true};
};
struct Rows {
  std::vector<Row> all;
  std::size_t size() const { return all.size(); }
  Rows slice(std::size_t first, std::size_t count) const {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return {{begin, begin + static_cast<std::ptrdiff_t>(count)}};
  }
};

/// Gradients and losses depend on all that the model keeps.
struct Ledger {
  using Parameters = ParameterList<Parameter<"a", float, 5, 8>, Parameter<"b", double, 70>,
                                   Parameter<"c", Half, 9>, Parameter<"d", float, 5>>;
  using Buffers = BufferList<Buffer<"mean", float, 3>, Buffer<"batches", std::int64_t, 1>>;

  void initialize(auto& initial) const {
    each([&](auto key, std::size_t p) {
      const auto view = initial.param(key);
      for (std::size_t i = 0; i < view.size(); ++i) set(view.data_handle()[i], start(p, i));
    });
  }
  double forward(auto& step, const Rows& rows) {
    const auto mean = step.buffer("mean"_p);
    double loss = 0;
    for (const Row& row : rows.all) {
      mean(1) = 0.5f * mean(1) + static_cast<float>(row.x);
      for (std::size_t i = 0; i < 5; ++i)
        loss += row.x * (step.param("a"_p)(i, i) + step.param("d"_p)(i));
    }
    step.buffer("batches"_p)(0) += 1;
    return loss + mean(1);
  }
  void backward(auto& step, const Rows& rows) {
    each([&](auto key, std::size_t p) {
      double x = 0;
      bool used = false;
      for (const Row& row : rows.all) {
        x += row.used[p] ? row.x / static_cast<double>(rows.size()) : 0;
        used = used || row.used[p];
      }
      if (!used) return;
      if_trained(step, key, [&](auto& trained) {
        const auto gradient = trained.grad(key);
        const auto parameter = trained.param(key);
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          const auto now = as_number(parameter.data_handle()[i]);
          set(gradient.data_handle()[i], slope(x, i) + 0.125 * now);
        }
        trained.ready(key);
      });
    });
  }

 private:
  static void each(const auto& f) {
    f("d"_p, std::size_t{3});
    f("c"_p, std::size_t{2});
    f("b"_p, std::size_t{1});
    f("a"_p, std::size_t{0});
  }
  template <class T>
  static double as_number(T value) {
    return static_cast<detail::Accumulator<T>>(value);
  }
  template <class T>
  static void set(T& to, double value) {
    to = static_cast<T>(static_cast<detail::Accumulator<T>>(value));
  }
};

/// The tensors of a job, or of all its ranks together.
struct Stored {
  struct Tensor {
    detail::TensorInfo whole;
    std::string bytes;
    std::vector<int> times;  // that an element came
    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  std::mutex mutex;
  std::map<std::string, Tensor> tensors;
  detail::ReplicaProgress progress;

  static std::string name_of(const StateEntry& piece, bool local_buffers) {
    std::string name = std::to_string(static_cast<int>(piece.role)) + "/" + std::string(piece.name);
    if (piece.role == StateRole::state) name += "/" + std::string(piece.state);
    if (piece.role == StateRole::buffer && local_buffers) name += "/" + std::to_string(piece.rank);
    return name;
  }
};

/// What a job's part of a test is: its ranks, and the policies that matter here.
struct Plan {
  std::size_t ranks = 1;
  bool local_buffers = false;
  bool skips_unused = false;
  bool skips_anomalies = false;
  bool frozen = false;
  std::size_t states = 0;
  std::size_t micro_batches = 1;
};

void save(auto& job, Stored& to, const Plan& plan) {
  std::vector<StateEntry> pieces;
  job.list_state(StateUse::saving, pieces);
  const auto memory = job.make_state_memory(bytes_of(pieces));
  const std::vector<detail::StateCopy> copies = copies_to(memory.data(), pieces);
  job.copy_out(copies);
  job.await_copies();
  const std::scoped_lock lock(to.mutex);
  to.progress = job.progress();
  for (const detail::StateCopy& copy : copies) {
    const StateEntry& piece = copy.piece;
    auto& tensor = to.tensors[Stored::name_of(piece, plan.local_buffers)];
    if (tensor.times.empty()) {
      tensor.whole = piece.whole;
      tensor.times.resize(piece.whole.count());
      tensor.bytes.resize(piece.whole.bytes());
    }
    require(tensor.whole == piece.whole, "pieces of one tensor agree on it");
    require(piece.first + piece.count <= piece.whole.count(), "a piece lies in its tensor");
    const std::size_t size = detail::element_size(piece.whole.element);
    std::memcpy(tensor.bytes.data() + piece.first * size, copy.to, piece.file_bytes());
    for (std::size_t i = 0; i < piece.count; ++i) ++tensor.times[piece.first + i];
  }
}

/// In windows, as a reader of files does.
void load(auto& job, const Stored& from, const Plan& plan) {
  job.set_progress(from.progress);
  std::vector<StateEntry> pieces;
  job.list_state(StateUse::loading, pieces);
  for (const StateEntry& piece : pieces) {
    if (piece.shared && piece.rank != 0) continue;
    const auto found = from.tensors.find(Stored::name_of(piece, plan.local_buffers));
    require(found != from.tensors.end(), "missing: " + std::string(piece.name));
    require(found->second.whole == piece.whole, "another tensor: " + found->first);
    const std::size_t size = detail::element_size(piece.whole.element);
    for (std::size_t at = 0; at < piece.count; at += 7) {
      const StateEntry part = piece.part(at, std::min<std::size_t>(7, piece.count - at));
      job.copy_in(
          part, reinterpret_cast<const std::byte*>(found->second.bytes.data()) + part.first * size);
    }
  }
}

/// Every tensor is there, once.
void require_whole(const Stored& all, const Plan& plan) {
  std::map<int, std::size_t> count;
  for (const auto& [name, tensor] : all.tensors) {
    ++count[name[0] - '0'];
    for (const int times : tensor.times)
      require(times == 1, name + ": an element came " + std::to_string(times) + " times");
  }
  const std::size_t trained = plan.frozen ? 3 : 4;
  require(count[0] == 4, "all parameters, frozen ones too");
  require(count[1] == (plan.local_buffers ? 2 * plan.ranks : 2), "all buffers");
  require(count[2] == trained * (plan.states + (plan.skips_unused ? 1 : 0)), "all states");
  const detail::TensorInfo& c = all.tensors.at("0/c").whole;
  require(c.element == ElementKind::f16 && c.rank == 1, "a parameter's type is that declared");
}

void require_equal(const Stored& a, const Stored& b, const std::string& when) {
  require(text_of(a.progress) == text_of(b.progress),
          when + ": " + text_of(a.progress) + " and " + text_of(b.progress));
  require(a.tensors.size() == b.tensors.size(), when + ": other tensors");
  for (const auto& [name, tensor] : a.tensors)
    require(b.tensors.at(name) == tensor, when + ": other bits in " + name);
}

/// Random batches of a rank, from a seed that all have.
class Batches {
 public:
  Batches(std::size_t seed, std::size_t rank, const Plan& plan, bool spoils)
      : random_(seed * 31 + rank), plan_(plan), spoils_(spoils) {}

  Rows next(std::size_t rows = 1) {
    Rows batch;
    for (std::size_t i = 0; i < rows; ++i) {
      Row row{0.25 * static_cast<double>(random_() % 9) - 1};
      if (spoils_ && random_() % 4 == 0) row.x = std::numeric_limits<double>::infinity();
      for (bool& used : row.used) used = !plan_.skips_unused || random_() % 3 != 0;
      batch.all.push_back(row);
    }
    return batch;
  }

 private:
  std::mt19937 random_;
  Plan plan_;
  bool spoils_;
};

/// `step(job)` trains a micro-batch. Two jobs, made in turn: the second goes on from the first.
void compare(const Plan& plan, std::size_t seed, std::size_t rank, const auto& barrier,
             Stored (&stores)[3], const auto& make, const auto& step, const auto& prepare) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const bool ends_with_tail = random() % 3 == 0;
  const std::size_t before = random() % 4 * plan.micro_batches;
  auto first = make();
  prepare(*first, 1);
  Batches batches(seed, rank, plan, plan.skips_anomalies);
  for (std::size_t s = 0; s < before; ++s) step(*first, batches);
  save(*first, stores[0], plan);
  barrier();
  if (rank == 0) require_whole(stores[0], plan);

  auto second = make();
  prepare(*second, 2);
  Batches others(seed + 100, rank, plan, false);
  for (std::size_t s = 0; s < random() % 5; ++s) step(*second, others);
  second->optimizer().lr = 0.5;
  second->set_epoch(9);
  second->begin_schedule(5);
  barrier();  // before rank 0 writes what all share
  load(*second, stores[0], plan);
  barrier();
  for (auto* job : {&*first, &*second}) {
    Batches same(seed + 200, rank, plan, plan.skips_anomalies);
    for (std::size_t s = 0; s < 7; ++s) step(*job, same);
    if (ends_with_tail) job->step_tail();
    save(*job, stores[job == &*first ? 1 : 2], plan);
    barrier();
  }
  if (rank != 0) return;
  require_equal(stores[1], stores[2], "seed " + std::to_string(seed));
  require(stores[0].tensors.at("0/a") != stores[1].tensors.at("0/a"), "nothing was trained");
}

template <class Model, class... Ps>
void ranks_case(Plan plan, const auto& prepare) {
  for (const std::size_t world : {1u, 2u, 3u}) {
    plan.ranks = world;
    for (std::size_t seed = 1; seed <= 4; ++seed) {
      Stored stores[3];
      all_well(
          world,
          [&](Shared& comm) {
            using Job = DistributedDataParallel<Model, Ps...>;
            compare(
                plan, seed, comm.rank().value(), [&] { comm.barrier(); }, stores,
                [&] { return std::make_unique<Job>(comm); },
                [](Job& job, Batches& batches) { job.step(batches.next()); }, prepare);
          },
          As::threads);
    }
  }
}

const auto as_it_is = [](auto&, unsigned) {};

template <class... Ps>
void replicas_case(Plan plan) {
  for (const std::size_t replicas : {1u, 2u, 3u}) {
    plan.ranks = replicas;
    for (std::size_t seed = 1; seed <= 4; ++seed) {
      Stored stores[3];
      using Job = DataParallel<Ledger, Ps...>;
      compare(
          plan, seed, 0, [] {}, stores,
          [&] { return std::make_unique<Job>(DpOptions{.replicas = replicas}); },
          [](Job& job, Batches& batches) { job.step(batches.next(4)); }, as_it_is);
    }
  }
}

using ListedLedger = ListedModel<Ledger, float, double, Half, std::int64_t>;

}  // namespace

BOOST_AUTO_TEST_CASE(of_shared_parameters_with_groups_and_a_schedule) {
  ranks_case<Ledger, Optimizer<AdamW>, ParameterGroups<NoDecay<"c">, Named<"b">>, Accumulate<3>,
             UnusedParameters<Zero>, Hooks<SkipZeroGradients>, Frozen<"d">, Schedule<Cosine>>(
      {.skips_unused = true, .frozen = true, .states = 2, .micro_batches = 3},
      [](auto& job, unsigned other) {
        job.optimizer().lr = 0.01;
        if (other == 1) job.optimizer(Named<"b">{}).lr = 0.02;
        if (other == 2) job.optimizer(NoDecay<"c">{}).lr = 0.03;  // followed group 0
        job.schedule() = {.warmup = 2, .steps = 9 * other, .last = 0.1 * other};
        job.begin_schedule(1);
      });
}

BOOST_AUTO_TEST_CASE(of_replicated_parameters_with_skipped_updates_and_own_buffers) {
  ranks_case<Ledger, Optimizer<SGDMomentum>, Sharding<Replicated>, Buffers<Local>, Clip<0.5>,
             Anomaly<Skip>, Schedule<StepDecay>, Buckets<BucketLimits{64, 256}>>(
      {.local_buffers = true, .skips_anomalies = true, .states = 1}, [](auto& job, unsigned other) {
        job.schedule().epochs = 2 * other;
        job.set_epoch(3);
      });
}

BOOST_AUTO_TEST_CASE(of_models_that_list_their_tensors) {
  ranks_case<ListedLedger, Optimizer<Adam>, Accumulate<2>, Frozen<"d">>(
      {.frozen = true, .states = 2, .micro_batches = 2}, as_it_is);
}

BOOST_AUTO_TEST_CASE(of_a_world_of_one) {
  for (std::size_t seed = 1; seed <= 4; ++seed) {
    Stored stores[3];
    LoopbackCommunicator alone;
    using Job = detail::BasicDdp<Ledger, CanonicalPolicies<World<1>, Optimizer<AdamW>>,
                                 LoopbackCommunicator>;
    compare(
        {.states = 2}, seed, 0, [] {}, stores, [&] { return std::make_unique<Job>(alone); },
        [](Job& job, Batches& batches) { job.step(batches.next()); }, as_it_is);
  }
}

BOOST_AUTO_TEST_CASE(of_replicas_in_one_process) {
  replicas_case<Optimizer<AdamW>, Accumulate<3>>({.states = 2, .micro_batches = 3});
  replicas_case<Optimizer<SGDMomentum>, Accumulate<2>, Sharding<Replicated>>(
      {.states = 1, .micro_batches = 2});
}

BOOST_AUTO_TEST_SUITE_END()

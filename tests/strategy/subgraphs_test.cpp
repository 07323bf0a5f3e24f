// SPDX-License-Identifier: Apache-2.0
// Declared sets of parameters and gradients of zero: for random choices against optimizers that are
// written out, and the words for choices that do not fit.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "comm/repeat.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "optim/plain.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(subgraphs)

namespace {

using namespace train;
using Pieces = Buckets<BucketLimits{0, 0}>;
using Skip = Hooks<SkipZeroGradients>;
using Front = Subgraph<"front", "a", "b">;
using Back = Subgraph<"back", "c">;
using Mix = Subgraph<"mix", "b*", "c">;
using Union = UnusedParameters<Subgraphs<Front, Back, Mix>>;
using Same = UnusedParameters<Subgraphs<SameOnAllRanks, Front, Back, Mix>>;
using OfB = Named<"b">;
// It is no stage of a reduction: ranks share parameters as without it.
static_assert(
    std::is_same_v<detail::Pick<axes::Sharding, CanonicalPolicies<Skip>>::choice, HostShared>);

constexpr std::array<std::array<bool, 3>, 4> members{
    {{true, true, true}, {true, true, false}, {false, false, true}, {false, true, true}}};
const std::array<std::string, 4> names{"", "front", "back", "mix"};
constexpr std::size_t micro_batches = 2;
constexpr std::size_t updates = 5;
constexpr double max_norm = 2;

/// A random training, of which every rank knows all.
struct Course {
  std::uint64_t seed = 0;
  std::size_t world = 1;
  bool same = false;   // all ranks use one set
  bool zeros = false;  // some gradients are zero

  std::size_t pick(std::size_t below, std::size_t what, std::size_t r, std::size_t s) const {
    detail::Hash hash;
    hash.number(seed).number(what).number(r).number(s);
    return (hash.value() >> 20) % below;
  }
  std::size_t set(std::size_t r, std::size_t s) const { return pick(4, 0, same ? 0 : r, s); }
  Entry entry(std::size_t r, std::size_t s) const {
    Entry entry{.used = members[set(r, s)]};
    const std::size_t u = s / micro_batches;
    for (std::size_t p = 0; p < 3; ++p) {
      const bool is_zero = zeros && pick(3, 10 + p, 0, u) == 0;
      entry.gradient[p] = is_zero ? 0 : 0.1 * static_cast<double>(1 + pick(30, 20 + p, r, s));
    }
    constexpr std::array<std::size_t, 5> many{0, 2, 30, 45, 69};
    if (zeros) entry.zeros = many[pick(many.size(), 30, 0, u)];
    return entry;
  }
};

/// What an update must do: parameters that no rank used keep their values and states and, where
/// `skips`, so do those whose average is zero.
void expect_update(PlainSheet<plain::Adam>& plain, const Course& course, std::size_t update,
                   bool skips, bool clips) {
  std::array<double, 3> mean{};
  std::array<bool, 3> used{};
  const std::size_t zeros = course.entry(0, update * micro_batches).zeros;
  for (std::size_t s = update * micro_batches; s < (update + 1) * micro_batches; ++s) {
    for (std::size_t r = 0; r < course.world; ++r) {
      const Entry entry = course.entry(r, s);
      for (std::size_t p = 0; p < 3; ++p) {
        if (!entry.used[p]) continue;
        used[p] = true;
        mean[p] += entry.gradient[p] / static_cast<double>(course.world * micro_batches);
      }
    }
  }
  double squares = 0;
  for (std::size_t p = 0; p < 3; ++p) {
    if (skips && (mean[p] == 0 || zeros >= sheet_sizes[p])) used[p] = false;
    for (std::size_t i = zeros; i < sheet_sizes[p]; ++i) squares += std::pow(slope(mean[p], i), 2);
  }
  const double factor = clips ? std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6)) : 1;
  for (std::size_t p = 0; p < 3; ++p) {
    if (used[p]) plain.update(p, factor * mean[p], zeros);
  }
}

constexpr plain::Adam adam(double lr) {
  return {.lr = lr, .weight_decay = 0.25, .decoupled = true};
}
constexpr std::size_t numbers = 40 + 70 + 3;
using Result = std::array<double, numbers>;

/// Trains a course on processes and compares after every update. Returns rank 0's parameters.
template <class... Ps>
Result train_course(const Course& course, bool skips, As as = As::processes) {
  using Policies = CanonicalPolicies<Ps...>;
  constexpr bool clips = detail::Pick<axes::Clip, Policies>::clips;
  constexpr bool has_groups = detail::Pick<axes::ParameterGroups, Policies>::count > 1;
  constexpr bool chooses =
      !std::is_same_v<typename detail::Pick<axes::UnusedParameters, Policies>::choice, Zero>;
  const ranks::Common<Result> result;
  all_well(
      course.world,
      [&](Shared& comm) {
        DistributedDataParallel<Sheet<>, Optimizer<AdamW>, Accumulate<micro_batches>, Ps...> ddp(
            comm);
        ddp.optimizer().lr = 0.05;
        ddp.optimizer().weight_decay = 0.25;
        PlainSheet plain(adam(0.05));
        if constexpr (has_groups) {
          ddp.optimizer(OfB{}).lr = 0.01;
          plain.rules[1].fill(adam(0.01));
        }
        for (std::size_t s = 0; s < updates * micro_batches; ++s) {
          const std::size_t r = comm.rank().value();
          const Entry entry = course.entry(r, s);
          if constexpr (chooses) {
            const std::string& name = names[course.set(r, s)];
            if (name.empty()) {
              ddp.step(entry);
            } else {
              ddp.step(ddp.subgraph(name), entry);
            }
            require(ddp.model().subgraph == name, "the model saw another sub-graph than " + name);
          } else {
            ddp.step(entry);
          }
          if ((s + 1) % micro_batches != 0) continue;
          const std::size_t update = s / micro_batches;
          expect_update(plain, course, update, skips, clips);
          compare(ddp, plain, "update " + std::to_string(update), 1e-9);
        }
        if (comm.rank() != Rank{0}) return;
        std::size_t at = 0;
        Sheet<>::each(ddp, [&](const auto& view) {
          for (std::size_t i = 0; i < view.size(); ++i) (*result)[at++] = view(i);
        });
      },
      as);
  return *result;
}

void for_random_courses(bool same, bool zeros, const auto& check) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 60); ++i) {
    // Every world from 1 to 4 comes about.
    const Course course{chance(1u << 30), 1 + static_cast<std::size_t>(i) % 4, same, zeros};
    BOOST_TEST_CONTEXT("seed " << course.seed << ", world " << course.world) { check(course); }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_parameter_is_updated_when_a_rank_uses_it) {
  for_random_courses(false, false, [](const Course& course) {
    using More = Clip<2.0>;
    using Groups = ParameterGroups<OfB>;
    const Result sets =
        train_course<Union, Sharding<Replicated>, Pieces, More, Groups>(course, false);
    const Result zeros =
        train_course<UnusedParameters<Zero>, Sharding<Replicated>, Pieces, More, Groups>(course,
                                                                                         false);
    BOOST_TEST((sets == zeros), "other bits than with UnusedParameters<Zero>");
  });
}

BOOST_AUTO_TEST_CASE(gradients_of_zero_leave_parameters_of_sub_graphs_alone) {
  for_random_courses(false, true,
                     [](const Course& course) { train_course<Union, Skip>(course, true); });
}

BOOST_AUTO_TEST_CASE(ranks_that_agree_on_a_sub_graph_train_alike) {
  for_random_courses(true, true, [](const Course& course) {
    train_course<Same, Skip, Clip<2.0>, ParameterGroups<OfB>>(
        course, true, course.seed % 2 == 0 ? As::threads : As::processes);
    train_course<Same, Skip, Sharding<Replicated>, Pieces>(course, true);
  });
}

BOOST_AUTO_TEST_CASE(ranks_that_own_parts_of_the_parameters_agree_on_what_is_used) {
  for_random_courses(false, true, [](const Course& course) {
    train_course<Union, Skip, Sharding<ZeroRedundancy>, UnevenInputs<Join>>(course, true);
  });
  for_random_courses(true, true, [](const Course& course) {
    train_course<Same, Skip, Sharding<ZeroRedundancy, Gradients>>(course, true);
  });
}

namespace {

template <class... Ps>
using Ddp = DistributedDataParallel<Sheet<>, Optimizer<AdamW>, Accumulate<micro_batches>, Ps...>;
using Replicas = Ddp<Same, Skip, Sharding<Replicated>, Pieces>;
using Sharing = Ddp<Same, Skip, Clip<2.0>, ParameterGroups<OfB>>;

Entry of_set(std::size_t set, std::size_t s) {
  Entry entry = Course{}.entry(0, s);
  entry.used = members[set];
  return entry;
}

template <class Wrapper>
Ends end_with(std::size_t world, const auto& f) {
  return ranks::run(As::processes, world, [&](Shared& comm) {
    Wrapper ddp(comm);
    f(ddp, comm.rank().value());
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(hand_written_steps_and_keys_choose_sub_graphs_too) {
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [&](Shared& comm) {
      Replicas by_steps(comm);
      Replicas by_hand(comm);
      for (std::size_t u = 0; u < 3; ++u) {
        const Entry first = of_set(1, 2 * u);
        const Entry second = of_set(2, 2 * u + 1);
        by_steps.step<"front"_s>(first);
        by_steps.step("back"_s, second);
        by_hand.no_sync().forward<"front"_s>(first).backward();
        auto averaged = by_hand.forward<"back"_s>(second).backward().reduce();
        require(averaged.loss() == second.loss, "another loss");
        std::move(averaged).update();
        compare(
            by_hand, [&](std::size_t p, std::size_t i) { return value(by_steps, p, i); },
            "update " + std::to_string(u), 0);
      }
      by_steps.evaluate<"mix"_s>(of_set(3, 0));
      require(by_steps.model().subgraph == "mix", "evaluated another sub-graph");
      by_steps.evaluate(of_set(0, 0));
      require(by_steps.model().subgraph.empty(), "did not evaluate the whole model");
    });
  }
}

BOOST_AUTO_TEST_CASE(a_gradient_outside_of_the_set_or_missing_in_it_is_named) {
  const auto outside = [](auto& ddp, std::size_t rank) {
    ddp.template step<"front"_s>(of_set(1, 0));
    ddp.template step<"front"_s>(of_set(rank == 1 ? 0 : 1, 0));
  };
  const std::string out =
      "the gradient of c was written or marked ready, and sub-graph front does "
      "not contain it";
  all_say(end_with<Replicas>(2, outside), out);
  const auto missing = [](auto& ddp, std::size_t rank) {
    Entry entry = of_set(1, 0);
    if (rank == 1) entry.used[1] = false;
    ddp.template step<"front"_s>(entry);
    ddp.template step<"front"_s>(entry);
  };
  all_say(end_with<Replicas>(2, missing), "no gradient came for b of sub-graph front");
  all_say(end_with<Sharing>(2, missing), "no gradient came for b of sub-graph front");
  const auto unknown = [](auto& ddp, std::size_t) { ddp.subgraph("fron"); };
  all_say(end_with<Replicas>(1, unknown), "the job declares no sub-graph fron");
  all_say(end_with<Replicas>(1, unknown), "choose one of: front, back, mix");
}

BOOST_AUTO_TEST_CASE(ranks_that_must_agree_and_do_not_say_so) {
  const auto differ = [](auto& ddp, std::size_t rank) {
    ddp.template step<"front"_s>(of_set(1, 0));
    if (rank == 2) {
      ddp.template step<"back"_s>(of_set(2, 0));
    } else {
      ddp.template step<"front"_s>(of_set(1, 0));
    }
  };
  for (const Ends& ends : {end_with<Replicas>(3, differ), end_with<Sharing>(3, differ)}) {
    all_say(ends, "step of sub-graph 1 (its ");
    all_say(ends, "step of sub-graph 1 and sub-graph 2 (its ");
  }
}

namespace {

/// What the ranks of a job keep, by name.
struct Kept {
  std::mutex mutex;
  std::map<std::string, std::string> pieces;
  detail::ReplicaProgress progress;

  static std::string key(const detail::StateEntry& piece) {
    return std::to_string(static_cast<int>(piece.role)) + std::string(piece.name) +
           std::string(piece.state) + "/" + std::to_string(piece.first);
  }
  void save(auto& job) {
    const std::scoped_lock lock(mutex);
    progress = job.progress();
    std::vector<detail::StateEntry> entries;
    job.list_state(detail::StateUse::saving, entries);
    for (const detail::StateEntry& entry : entries)
      pieces[key(entry)].assign(reinterpret_cast<const char*>(entry.data), entry.file_bytes());
  }
  void load(auto& job) const {
    job.set_progress(progress);
    std::vector<detail::StateEntry> entries;
    job.list_state(detail::StateUse::loading, entries);
    for (const detail::StateEntry& entry : entries) {
      const auto found = pieces.find(key(entry));
      if (found != pieces.end())
        job.copy_in(entry, reinterpret_cast<const std::byte*>(found->second.data()));
    }
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_job_goes_on_after_updates_of_different_sub_graphs) {
  for (const std::size_t world : {1u, 2u, 3u}) {
    Kept kept;
    const auto check = [&]<class Job>(std::type_identity<Job>, Shared& comm) {
      Job first(comm);
      Job second(comm);
      const std::size_t sets[] = {1, 2, 0, 2, 1, 3, 3, 1};
      const auto train = [&](Job& job, std::size_t s) {
        const Entry entry = of_set(sets[s], s);
        if (sets[s] == 0) {
          job.step(entry);
        } else {
          job.step(job.subgraph(names[sets[s]]), entry);
        }
      };
      for (std::size_t s = 0; s < 4; ++s) train(first, s);
      train(second, 3);  // in the middle of an update, which is forgotten
      kept.save(first);
      comm.barrier();
      kept.load(second);
      comm.barrier();
      for (std::size_t s = 4; s < 8; ++s) {
        train(first, s);
        train(second, s);
      }
      compare(
          second, [&](std::size_t p, std::size_t i) { return value(first, p, i); }, "resumed", 0);
    };
    all_well(world, [&](Shared& comm) { check(std::type_identity<Sharing>{}, comm); }, As::threads);
    kept.pieces.clear();
    all_well(
        world, [&](Shared& comm) { check(std::type_identity<Replicas>{}, comm); }, As::threads);
  }
}

BOOST_AUTO_TEST_CASE(steps_of_jobs_without_sub_graphs_use_the_whole_model) {
  using Step = detail::BareStep<Sheet<>>;
  static_assert(uses<Step>("a"_p) && Step::subgraph() == SubgraphChoice{});
  static_assert(!(Step::subgraph() == "front"_s));
  using List = detail::SubgraphsIn<Union::choice>;
  using FrontStep = detail::SubgraphStep<Step, List, 1>;
  static_assert(uses<FrontStep>("b"_p) && !uses<FrontStep>("c"_p));
  static_assert(FrontStep::subgraph() == "front"_s && FrontStep::subgraph() != "mix"_s);
  static_assert(FrontStep::subgraph().name() == "front");
}

BOOST_AUTO_TEST_SUITE_END()

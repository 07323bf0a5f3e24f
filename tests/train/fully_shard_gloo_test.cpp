// SPDX-License-Identifier: Apache-2.0
// Sharding<FullyShard> through sockets: PyTorch's figures, the bits of ZeRO where the same sums are
// scattered, random models in random units, checkpoints, and faults inside of a gather.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/gloo_ranks.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/gloo.hpp"
#include "train/checkpoint_files.hpp"
#include "train/closeness.hpp"
#include "train/filter_case.hpp"
#include "train/zero.hpp"

BOOST_AUTO_TEST_SUITE(fully_sharded_through_sockets)

namespace {

using namespace zero;
using ranks::EmulatedHosts;
using ranks::Sockets;

/// A unit for each parameter.
template <class Where, class... Ps>
using AnyCaseThrough =
    DistributedDataParallel<Network, Optimizer<ReferenceRule>, Accumulate<4>, ReferenceClip,
                            Buckets<BucketLimits{0, 0}>, Where, Sharding<FullyShard>, Ps...>;

/// Units of random tensors, whose gradients depend on all values that the steps show.
struct Chain {
  struct Tensor {
    std::size_t unit = 0, size = 1;
    bool is_double = false, is_frozen = false;
  };
  using Elements = ElementList<double, float>;

  std::vector<Tensor> all;
  static constexpr int throws = -1, dies = -2, stalls = -3;  // batches

  static constexpr std::size_t none = 100;
  std::size_t again = none;  // forward asks once more for this tensor, at its end
  bool says_done = false;

  Chain() = default;
  explicit Chain(ranks::Chance& chance)
      : again(chance(2) == 0 ? none : chance(7)), says_done(chance(2) == 1) {
    const std::size_t tensors = 7 + chance(12);
    const std::size_t doubles = chance(2) == 0 ? 0 : chance(tensors);
    std::size_t unit = 0;
    for (std::size_t p = 0; p != tensors; ++p, unit += chance(2))
      all.push_back({unit, 1 + chance(chance(4) == 0 ? 3 : 90), p < doubles, chance(8) == 0});
    all.back().is_frozen = false;
  }

  /// Is each unit asked for once in a pass? A rank without a batch can then take part.
  bool asks_in_order() const { return again == none && !says_done; }

  void tensors(TensorList& list) const {
    for (std::size_t p = 0; p != all.size(); ++p) {
      const std::string name = "u" + std::to_string(all[p].unit) + ".w" + std::to_string(p);
      const auto element = all[p].is_double ? ElementKind::f64 : ElementKind::f32;
      if (all[p].is_frozen) {
        list.frozen_parameter(name, element, {all[p].size});
      } else {
        list.parameter(name, element, {all[p].size});
      }
    }
  }
  void initialize(auto& initial) const {
    for (std::size_t p = 0; p != all.size(); ++p)
      with(p, [&](auto key) {
        const auto view = initial.param(key);
        for (std::size_t i = 0; i != all[p].size; ++i)
          view(i) = static_cast<std::decay_t<decltype(view(i))>>(0.125 * double(p) + double(i % 7));
      });
  }
  double forward(auto& step, const int& batch) {
    double sum = 0;
    const auto ask = [&](std::size_t p) {
      with(p, [&](auto key) {
        const auto view = step.param(key);
        for (std::size_t i = 0; i != all[p].size; ++i) sum += double(view(i)) / double(p + 1);
      });
    };
    for (std::size_t p = 0; p != all.size(); ++p) {
      ask(p);
      if (batch == throws) throw std::runtime_error("forward ran out of luck");
      if (batch == dies) std::_Exit(3);
      if (batch == stalls) std::this_thread::sleep_for(std::chrono::seconds(4));
      if (says_done && (p + 1 == all.size() || all[p + 1].unit != all[p].unit)) step.done(p);
    }
    if (again != none) ask(again);
    loss = sum + batch;
    return sum + batch;
  }
  void backward(auto& step, const int& batch) const {
    for (std::size_t p = all.size(); p-- != 0;) {
      if (!step.trains(p)) continue;
      with(p, [&](auto key) {
        const auto values = step.param(key);
        const auto gradient = step.grad(key);
        for (std::size_t i = 0; i != all[p].size; ++i)
          gradient(i) = static_cast<std::decay_t<decltype(gradient(i))>>(
              0.01 * double(values(i)) + 1e-4 * loss + 0.1 * batch * double(i % 5));
        step.ready(p);
      });
    }
  }
  double loss = 0;

 private:
  void with(std::size_t p, const auto& f) const {
    if (all[p].is_double) {
      f(Listed<double>{p});
    } else {
      f(Listed<float>{p});
    }
  }
};

template <class... Ps>
using ChainJob = DistributedDataParallel<Chain, Optimizer<AdamW>, Buckets<BucketLimits{300, 900}>,
                                         Backend<Gloo>, Ps...>;
using Scattered = ChainJob<Sharding<ZeroRedundancy, Gradients>>;
using Fully = ChainJob<Sharding<FullyShard>>;
using Kept = ChainJob<Sharding<FullyShard, GatheredUnits<4>, ReshardAfterForward<false>>>;
using Named2 = ChainJob<Sharding<FullyShard, Units<"u1", "u*">, GatheredUnits<2>>>;

/// Counts the gathers that this process has waited for.
struct Gathers : Observer<Gathers> {
  static inline std::size_t count = 0;

  struct Span {
    explicit Span(const SpanName& name) { count += std::string_view(name.name) == "wait for unit"; }
  };
};
using Counted = ChainJob<Sharding<FullyShard, Units<"u*">>, Observers<Gathers>>;

/// Losses, those of evaluations and all parameters, of some steps on `world` ranks. The last rank
/// evaluates fewer batches than the others.
template <class Job>
Numbers train_chain(const Chain& chain, std::size_t world, const std::string& how) {
  struct Result {
    std::size_t count;
    std::array<double, 4000> values;
  };
  const ranks::Common<Result> result;
  const Ends ends = ranks::run_processes<Sockets>(world, std::chrono::seconds(20), [&](auto& comm) {
    Job ddp(comm, chain);
    ddp.optimizer().lr = 0.05;
    Numbers mine;
    const int me = static_cast<int>(comm.rank().value());
    for (int s = 0; s < 3; ++s) {
      mine.push_back(ddp.step(s + me));
      const bool has_batch = !chain.asks_in_order() || comm.rank().value() + 1 != world;
      if (has_batch) mine.push_back(ddp.evaluate(s));
      if constexpr (requires { ddp.evaluate_nothing(); })
        if (!has_batch) ddp.evaluate_nothing();
    }
    const Numbers all = numbers_of(ddp);
    mine.insert(mine.end(), all.begin(), all.end());
    if (comm.rank() == Rank{0}) {
      result->count = mine.size();
      std::copy(mine.begin(), mine.end(), result->values.begin());
    }
  });
  for (const std::string& end : ends) BOOST_TEST(end == "", how << ", " << world << ": " << end);
  return {result->values.begin(),
          result->values.begin() + static_cast<std::ptrdiff_t>(result->count)};
}

}  // namespace

BOOST_AUTO_TEST_CASE(parameters_are_sharded_as_pytorch_trains) {
  check_every_case(run_case<Sockets, AnyCaseThrough<Backend<Gloo>>>);
}
BOOST_AUTO_TEST_CASE(hosts_gather_units_as_pytorch_trains) {
  check_every_case(run_case<EmulatedHosts, AnyCaseThrough<Backend<Hierarchical<Shm, Gloo>>>>);
}

// With two ranks in each group: gathered inside, and gradients summed across.
BOOST_AUTO_TEST_CASE(groups_share_units_as_pytorch_trains) {
  check_every_case([](const ReferenceCase& c) {
    return c.world % 2 == 0
               ? run_case<Sockets, AnyCaseThrough<Backend<Gloo>, Groups<Grid<dynamic, 2>>>>(c)
               : Ends(c.world);
  });
}

// A parameter whose gradient is zero on all ranks, of which each has seen a slice, is left out.
BOOST_AUTO_TEST_CASE(gradients_of_zero_are_skipped_as_pytorch_skips_missing_ones) {
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("zero_filter.json")) {
    const FilterCase c = train::filter_case(cases++, figures);
    if (!c.filtered) continue;
    const ReferenceCase& wanted = c.reference;
    const Ends ends = train_on_processes<Sockets>(wanted, [&](auto& comm) {
      DistributedDataParallel<Network, Optimizer<ReferenceRule>, Backend<Gloo>,
                              Hooks<SkipZeroGradients>, Sharding<FullyShard>, SmallBuckets>
          ddp(comm, wanted.model<Network>());
      choose_rule(ddp.optimizer(), wanted);
      for (std::size_t s = 0; s < wanted.steps; ++s) {
        ddp.model().leaves_out_fc2 = c.leaves_out_fc2(s);
        ddp.step(wanted.samples(s, comm.rank().value()));
      }
      require_parameters(wanted, ddp, [](const auto& view) {
        return std::vector<double>(view.data_handle(), view.data_handle() + view.size());
      });
    });
    for (const std::string& end : ends) BOOST_TEST(end == "", wanted.name << ": " << end);
  }
}

BOOST_AUTO_TEST_CASE(random_models_in_random_units_train_as_with_zero) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(6, 80); ++i) {
    Chain chain(chance);
    const std::size_t world = 1 + chance(4);
    const std::string text = std::to_string(chain.all.size()) + " tensors";
    const Numbers want = train_chain<Scattered>(chain, world, "ZeRO");
    BOOST_TEST((train_chain<Fully>(chain, world, "fully") == want), text);
    BOOST_TEST((train_chain<Kept>(chain, world, "kept") == want), text);
    train::require_close(train_chain<Named2>(chain, world, "units"), want, text);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_keeps_its_slices_and_a_ring) {
  Chain chain;
  for (std::size_t p = 0; p != 12; ++p) chain.all.push_back({p, 10000, false, false});
  const Ends ends = ranks::run_processes<Sockets>(4, std::chrono::seconds(20), [&](auto& comm) {
    const Fully ddp(comm, chain);
    // 12 units of 40,000 bytes: three slices of four are others', and a ring of three.
    require(ddp.parameter_bytes() < 12 * 10000 + 3 * 40000 + 16 * 1024, "parameters");
    require(ddp.state_bytes() < 2 * 12 * 10000 + 16 * 1024, "states");
    const Scattered copies(comm, chain);
    require(copies.parameter_bytes() >= 12 * 40000, "copies of all");
  });
  for (const std::string& end : ends) BOOST_TEST(end == "", end);
}

// Backward begins with forward's last units, which are still there.
BOOST_AUTO_TEST_CASE(a_step_gathers_what_is_not_in_the_ring) {
  for (const bool says_done : {false, true}) {
    Chain chain;
    for (std::size_t p = 0; p != 12; ++p) chain.all.push_back({p, 100, false, false});
    chain.says_done = says_done;
    const Ends ends = ranks::run_processes<Sockets>(2, std::chrono::seconds(20), [&](auto& comm) {
      Counted ddp(comm, chain);
      ddp.step(0);
      Gathers::count = 0;
      ddp.step(1);
      require(Gathers::count == 12 + (12 - 3),
              std::to_string(Gathers::count) + " gathers of 12 units");
    });
    for (const std::string& end : ends) BOOST_TEST(end == "", says_done << ": " << end);
  }
}

BOOST_AUTO_TEST_CASE(checkpoints_go_to_any_other_way_and_world) {
  const checkpoints::Folder folder;
  ranks::Chance chance;
  const Chain chain(chance);
  const auto run = [&]<class Job>(std::size_t world, const std::string& from,
                                  const std::string& to) {
    const Ends ends =
        ranks::run_processes<Sockets>(world, std::chrono::seconds(20), [&](auto& comm) {
          Job ddp(comm, chain);
          if (!from.empty()) load(ddp, folder / from);
          for (int s = 0; s < 2; ++s) ddp.step(s);
          save(ddp, folder / to);
          save(ddp, folder / ("whole-" + to), {.consolidated = true});
        });
    for (const std::string& end : ends) BOOST_TEST(end == "", to << ": " << end);
    const auto parts = checkpoints::tensors_of(folder / to);
    BOOST_TEST((checkpoints::tensors_of(folder / ("whole-" + to)) == parts), to);
    BOOST_TEST(detail::CheckpointReader(folder / ("whole-" + to)).shards().empty());
    return parts;
  };
  const auto want = run.operator()<Scattered>(2, "", "zero");
  BOOST_TEST((run.operator()<Fully>(2, "", "fully") == want));
  for (const std::size_t world : {1, 3}) {
    const auto on = run.operator()<Scattered>(world, "fully", "from-fully");
    BOOST_TEST((run.operator()<Fully>(world, "zero", "from-zero") == on), world);
    BOOST_TEST((run.operator()<Kept>(world, "whole-fully", "from-whole") == on), world);
  }
}

// What a rank does while others wait for its part of a unit is in all errors.
BOOST_AUTO_TEST_CASE(a_fault_inside_of_a_gather_is_named) {
  Chain chain;
  for (std::size_t p = 0; p != 8; ++p) chain.all.push_back({p, 1000, false, false});
  for (const int trouble : {Chain::throws, Chain::dies, Chain::stalls}) {
    const std::chrono::milliseconds timeout(trouble == Chain::stalls ? 1500 : 20000);
    const Ends ends = ranks::run_processes<Sockets>(3, timeout, [&](auto& comm) {
      Fully ddp(comm, chain);
      ddp.step(0);
      ddp.step(comm.rank() == Rank{1} ? trouble : 0);
    });
    for (const std::size_t r : {0, 2}) {
      BOOST_TEST(ends[r].find("rank 1") != std::string::npos, r << ": " << ends[r]);
      if (trouble == Chain::throws)
        BOOST_TEST(ends[r].find("ran out of luck") != std::string::npos, ends[r]);
    }
  }
}

// A tensor whose gather other ranks do not make: no rank uses another unit's values for it.
BOOST_AUTO_TEST_CASE(ranks_that_ask_for_different_units_again_disagree) {
  Chain chain;
  for (std::size_t p = 0; p != 8; ++p) chain.all.push_back({p, 1000, false, false});
  const Ends ends = ranks::run_processes<Sockets>(2, std::chrono::seconds(20), [&](auto& comm) {
    Chain own = chain;
    own.again = comm.rank().value();
    Named2 ddp(comm, own);
    ddp.step(0);
  });
  for (const std::string& end : ends)
    BOOST_TEST(end.find("param of unit 7") != std::string::npos, end);
}

BOOST_AUTO_TEST_SUITE_END()

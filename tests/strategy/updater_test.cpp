// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/strategy/updater.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/strategy/host_execution.hpp"
#include "lockstep/detail/strategy/replica_traits.hpp"
#include "lockstep/detail/trainer/axes.hpp"
#include "optim/plain.hpp"
#include "strategy/recording_communicator.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(updater)

using namespace lockstep::detail;
using recording::Calls;

namespace {

/// Buckets are c, b, a; runs are c, then b, then a: no two neighbours have one type.
struct Net {
  using Parameters = ParameterList<Parameter<"a", double, 40>, Parameter<"b", float, 70>,
                                   Parameter<"c", double, 3>>;
};
constexpr std::array<std::size_t, 3> sizes{40, 70, 3};

double start(std::size_t p, std::size_t i) {
  return 1 + static_cast<double>(p) + 0.125 * static_cast<double>(i);
}
/// The recording communicator's reductions add 100; gradients are what that leaves.
double gradient(std::size_t p, std::size_t i) {
  return 0.25 * static_cast<double>(p + 1) - 0.03125 * static_cast<double>(i);
}

/// Gradients as an updater asks for them, which fail when an updater touches what it must not.
template <class Traits, class Comm>
struct Source {
  using Usage = typename Traits::Usage;
  Comm& comm;
  std::byte* arena;
  std::size_t buckets;
  Usage usage{1, 1, 1};
  std::vector<bool> averaged = std::vector<bool>(buckets, false);

  template <class T>
  std::span<T> own(std::size_t offset, std::size_t bytes) {
    return detail::elements_at<T>(arena, offset, bytes);
  }
  template <class T>
  std::span<T> averages(std::size_t offset, std::size_t bytes) {
    return detail::elements_at<T>(arena, offset, bytes);
  }
  void wait(std::size_t bucket) {
    if (averaged[bucket]) return;
    comm.calls.push_back("bucket " + std::to_string(bucket));
    averaged[bucket] = true;
  }
  void reduce() {
    for (std::size_t b = 0; b != buckets; ++b) wait(b);
  }
  Source& features() { return *this; }
  const Usage& agree_on_usage(Source&) {
    comm.calls.push_back("usage");
    return usage;
  }
};

/// Parameters and gradients of a job, which several ranks' updaters may have in common.
template <class... Ps>
struct Arrays {
  using Traits = ReplicaTraits<Net, CanonicalPolicies<Buckets<BucketLimits{0, 0}>, Ps...>>;
  using Comm = recording::Communicator<>;
  using Execution = DeviceExecution<Cpu, Traits, Comm>;
  using Updating = Updater<Traits, Comm, Execution>;

  typename Traits::layout where;
  HostArena parameters{where.plan().bytes};
  HostArena gradients{where.plan().bytes};

  explicit Arrays(double offset = 0) {
    each(parameters, start);
    each(gradients, [&](std::size_t p, std::size_t i) { return gradient(p, i) + offset; });
  }

  auto source(Comm& comm) {
    return Source<Traits, Comm>{comm, gradients.data(), where.plan().bucket_count};
  }

  void each(const HostArena& arena, auto number) {
    for (std::size_t p = 0; p != 3; ++p) {
      const detail::Placement& place = where.plan().placements[p];
      Traits::with_element(where.infos()[p].element, [&]<class T>(std::type_identity<T>) {
        const auto values = detail::elements_at<T>(arena.data(), place.offset, place.bytes);
        for (std::size_t i = 0; i != values.size(); ++i) values[i] = static_cast<T>(number(p, i));
      });
    }
  }

  /// Every parameter is what `rule` made of it in `updates(p)` updates by `scale` times its
  /// gradient.
  void check(auto rule, auto updates, double scale = 1) const {
    for (std::size_t p = 0; p != 3; ++p) {
      const detail::Placement& place = where.plan().placements[p];
      Traits::with_element(where.infos()[p].element, [&]<class T>(std::type_identity<T>) {
        const auto values = detail::elements_at<T>(parameters.data(), place.offset, place.bytes);
        for (std::size_t i = 0; i != sizes[p]; ++i) {
          const double within = std::is_same_v<T, float> ? 3e-5 : 1e-12;
          double want = start(p, i);
          auto plain = rule;
          for (std::size_t n = 0; n != static_cast<std::size_t>(updates(p)); ++n)
            plain.update(want, scale * gradient(p, i));
          BOOST_TEST_REQUIRE(
              std::abs(static_cast<double>(values[i]) - want) <= within * std::abs(want),
              "parameter " << p << "[" << i << "] is " << values[i] << " and should be " << want);
        }
      });
    }
  }
};

constexpr auto twice = [](std::size_t) { return 2; };
constexpr plain::Adam adam{.lr = 0.25, .weight_decay = 0.125, .decoupled = true};

void set_adam(auto& updater) {
  updater.options().lr = adam.lr;
  updater.options().weight_decay = adam.weight_decay;
}

/// The norm of all gradients.
double norm() {
  double squares = 0;
  for (std::size_t p = 0; p != 3; ++p)
    for (std::size_t i = 0; i != sizes[p]; ++i) squares += gradient(p, i) * gradient(p, i);
  return std::sqrt(squares);
}

}  // namespace

BOOST_AUTO_TEST_CASE(replicated_parameters_are_updated_bucket_by_bucket_as_they_land) {
  Arrays<Sharding<Replicated>, Optimizer<AdamW>> arrays;
  decltype(arrays)::Comm comm;
  decltype(arrays)::Execution execution(comm);
  decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
  set_adam(updater);
  for (int n = 0; n != 2; ++n) {
    auto source = arrays.source(comm);
    updater.begin();
    updater.reduce_and_update(source);
  }
  BOOST_TEST((comm.calls ==
              Calls{"bucket 0", "bucket 1", "bucket 2", "bucket 0", "bucket 1", "bucket 2"}));
  BOOST_TEST(updater.steps() == 2u);
  arrays.check(adam, twice);
}

BOOST_AUTO_TEST_CASE(averages_are_not_reduced_again) {
  Arrays<Sharding<Replicated>, Optimizer<AdamW>> arrays;
  decltype(arrays)::Comm comm;
  decltype(arrays)::Execution execution(comm);
  decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
  set_adam(updater);
  for (int n = 0; n != 2; ++n) {
    auto source = arrays.source(comm);
    source.averaged = {true, true, true};
    updater.begin();
    updater.update_averaged(source);
  }
  BOOST_TEST(comm.calls.empty());
  arrays.check(adam, twice);
}

BOOST_AUTO_TEST_CASE(each_rank_reduces_and_updates_its_slice_of_every_run) {
  Arrays<Optimizer<AdamW>> arrays(-100);
  using Comm = decltype(arrays)::Comm;
  constexpr std::size_t world = 3;
  for (std::size_t rank = 0; rank != world; ++rank) {
    Comm comm(rank, world);
    decltype(arrays)::Execution execution(comm);
    decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
    set_adam(updater);
    for (int n = 0; n != 2; ++n) {
      auto source = arrays.source(comm);
      updater.begin();
      updater.reduce_and_update(source);
      BOOST_TEST(
          (source.averaged == std::vector<bool>(3, false)));  // no whole averages were needed
    }
    BOOST_TEST((comm.calls == Calls{"slice -99", "slice -99", "slice -99", "slice -99", "slice -99",
                                    "slice -99"}));
  }
  arrays.check(adam, twice);
}

BOOST_AUTO_TEST_CASE(slices_of_averages_are_updated_and_all_ranks_meet_after_it) {
  Arrays<Optimizer<AdamW>> arrays;
  using Comm = decltype(arrays)::Comm;
  for (std::size_t rank = 0; rank != 3; ++rank) {
    Comm comm(rank, 3);
    decltype(arrays)::Execution execution(comm);
    decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
    set_adam(updater);
    for (int n = 0; n != 2; ++n) {
      auto source = arrays.source(comm);
      updater.begin();
      updater.update_averaged(source);
    }
    BOOST_TEST((comm.calls == Calls{"barrier", "barrier"}));
  }
  arrays.check(adam, twice);
}

namespace {

/// SGD's update of replicated parameters, by gradients that come out `scale` times as large.
/// Returns the calls of the communicator.
template <class... Ps>
Calls check_scaled(double scale, const auto& update) {
  constexpr plain::Sgd sgd{.lr = 0.5};
  Arrays<Sharding<Replicated>, Ps...> arrays;
  typename decltype(arrays)::Comm comm;
  typename decltype(arrays)::Execution execution(comm);
  typename decltype(arrays)::Updating updater(comm, execution, arrays.where,
                                              arrays.parameters.data());
  updater.options().lr = sgd.lr;
  auto source = arrays.source(comm);
  updater.begin();
  update(updater, source);
  arrays.check(sgd, [](std::size_t) { return 1; }, scale);
  return comm.calls;
}

}  // namespace

BOOST_AUTO_TEST_CASE(gradients_are_clipped_by_the_norm_of_all_of_them) {
  const auto update = [](auto& updater, auto& source) { updater.reduce_and_update(source); };
  const Calls calls = check_scaled<Clip<0.5>>(0.5 / (norm() + 1e-6), update);
  BOOST_TEST((calls == Calls{"bucket 0", "bucket 1", "bucket 2"}));
  check_scaled<Clip<1e6>>(1, [](auto& updater, auto& source) { updater.update_averaged(source); });
  // Sums over micro-batches are divided, and so is their norm.
  check_scaled<Accumulate<4>>(0.25, update);
  check_scaled<Accumulate<4>, Clip<0.5>>(0.25 * 0.5 / (norm() / 4 + 1e-6), update);
}

/// Ranks play one after the other here, and a slice's norm is completed by a reduction that adds
/// 100: what is checked is who is asked for what, and that the slice alone has changed.
BOOST_AUTO_TEST_CASE(clipped_slices_are_reduced_in_place_before_the_norm_is_known) {
  Arrays<Clip<1e9>> arrays(-100);
  using Comm = decltype(arrays)::Comm;
  Comm comm(1, 3);
  decltype(arrays)::Execution execution(comm);
  decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
  auto source = arrays.source(comm);
  updater.begin();
  updater.reduce_and_update(source);
  BOOST_TEST(comm.calls.size() == 5u);
  BOOST_TEST(comm.calls[0] == "slice -99");
  BOOST_TEST(comm.calls[3].starts_with("reduce "));
  BOOST_TEST(comm.calls[4] == "barrier");
  const detail::Placement& place = arrays.where.plan().placements[0];
  const auto own = source.own<double>(place.offset, place.bytes);
  const auto values =
      detail::elements_at<double>(arrays.parameters.data(), place.offset, place.bytes);
  const auto [begin, end] = comm.slice<double>(arrays.where.plan().buckets()[2].count());
  BOOST_TEST_REQUIRE((begin < 40 && end > begin));
  BOOST_TEST(own[0] == gradient(0, 0) - 100);
  BOOST_TEST(std::abs(own[begin] - gradient(0, begin)) < 1e-12);
  BOOST_TEST(values[begin - 1] == start(0, begin - 1));
  BOOST_TEST(values[begin] != start(0, begin));
}

BOOST_AUTO_TEST_CASE(parameters_that_nobody_used_stay_and_others_count_their_own_updates) {
  Arrays<Sharding<Replicated>, Optimizer<AdamW>, UnusedParameters<Zero>> arrays;
  decltype(arrays)::Comm comm;
  decltype(arrays)::Execution execution(comm);
  decltype(arrays)::Updating updater(comm, execution, arrays.where, arrays.parameters.data());
  set_adam(updater);
  for (int n = 0; n != 4; ++n) {
    auto source = arrays.source(comm);
    source.usage = {std::uint8_t(n % 2), 0, 1};
    updater.begin();
    updater.reduce_and_update(source);
  }
  BOOST_TEST(comm.calls[0] == "usage");
  arrays.check(adam, [](std::size_t p) { return p == 0 ? 2 : p == 1 ? 0 : 4; });
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/strategy/gradients.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/strategy/host_execution.hpp"
#include "lockstep/detail/trainer/axes.hpp"
#include "strategy/recording_communicator.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(gradient_buckets)

using namespace lockstep::detail;
using recording::Calls;

namespace {

/// With a bucket for each, buckets are d, c, b, a.
struct Net {
  using Parameters = ParameterList<Parameter<"a", float, 5>, Parameter<"b", float, 70>,
                                   Parameter<"c", float, 3>, Parameter<"d", float, 9>>;
};
using Pieces = Buckets<BucketLimits{0, 0}>;

/// The buckets of a job, and a backward pass over them: the gradient of parameter p is filled with
/// one number, which is also what its reduction is called by.
template <std::size_t MostUnderWay, class... Ps>
struct Pass {
  using Traits = ReplicaTraits<Net, CanonicalPolicies<Sharding<Replicated>, Pieces, Ps...>>;
  using Comm = recording::Communicator<MostUnderWay>;
  using Execution = DeviceExecution<Cpu, Traits, Comm>;
  using T = ElementOf<Traits::parameter_types::of(ElementKind::f32)>;

  Comm comm;
  Execution execution{comm};
  typename Traits::layout where;
  GradientBuckets<Traits, Comm, Execution> buckets{comm, execution, where};
  bool adds = false;

  void begin(bool synchronizes, bool adds_up = false) {
    adds = adds_up;
    if (adds) buckets.second_arena();
    buckets.begin_backward(synchronizes ? Sync::yes : Sync::no, adds);
  }
  template <class Key>
  void give(Key key, float value) {
    const detail::Placement& place =
        where.plan().placements[NamedTensor<Net, detail::TensorRole::parameter, Key>::index];
    for (T& gradient : detail::elements_at<T>(adds ? buckets.second_arena() : buckets.arena(),
                                              place.offset, place.bytes))
      gradient = static_cast<T>(value);
    buckets.ready(key);
  }
  /// The first and the last element of a parameter's gradient.
  template <class Key>
  std::vector<float> ends(Key) const {
    const detail::Placement& place =
        where.plan().placements[NamedTensor<Net, detail::TensorRole::parameter, Key>::index];
    const auto all = buckets.template averages<T>(place.offset, place.bytes);
    return {static_cast<float>(all.front()), static_cast<float>(all.back())};
  }
};

using Numbers = std::vector<float>;

}  // namespace

BOOST_AUTO_TEST_CASE(a_bucket_starts_with_its_last_gradient) {
  Pass<8> pass;
  pass.begin(true);
  pass.give("d"_p, 4);
  BOOST_TEST((pass.comm.calls == Calls{"start 4"}));
  pass.give("c"_p, 3);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3"}));
  pass.give("b"_p, 2);
  pass.give("a"_p, 1);
  pass.buckets.end_backward();
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3", "start 2", "start 1"}));
  pass.buckets.reduce();
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3", "start 2", "start 1", "wait 4",
                                       "wait 3", "wait 2", "wait 1"}));
  BOOST_TEST((pass.ends("b"_p) == Numbers{102, 102}));
  pass.buckets.reduce();  // nothing is under way any more
  BOOST_TEST(pass.comm.calls.size() == 8u);
}

BOOST_AUTO_TEST_CASE(buckets_start_in_order_whatever_the_order_of_gradients) {
  Pass<8> pass;
  pass.begin(true);
  pass.give("a"_p, 1);
  pass.give("c"_p, 3);
  pass.give("b"_p, 2);
  BOOST_TEST(pass.comm.calls.empty());
  pass.give("d"_p, 4);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3", "start 2", "start 1"}));
  pass.buckets.end_backward();
}

BOOST_AUTO_TEST_CASE(no_more_are_under_way_than_the_communicator_allows) {
  Pass<2> pass;
  pass.begin(true);
  pass.give("d"_p, 4);
  pass.give("c"_p, 3);
  pass.give("b"_p, 2);
  pass.give("a"_p, 1);
  BOOST_TEST(
      (pass.comm.calls == Calls{"start 4", "start 3", "wait 4", "start 2", "wait 3", "start 1"}));
  pass.buckets.end_backward();
  pass.buckets.reduce();
  BOOST_TEST((pass.ends("d"_p) == Numbers{104, 104}));
  BOOST_TEST((pass.ends("a"_p) == Numbers{101, 101}));
}

BOOST_AUTO_TEST_CASE(a_pass_that_does_not_synchronize_starts_nothing_and_the_next_adds_to_it) {
  Pass<8> pass;
  pass.begin(false);
  for (const float value : {1.f}) {
    pass.give("d"_p, 4 * value);
    pass.give("c"_p, 3 * value);
    pass.give("b"_p, 2 * value);
    pass.give("a"_p, value);
  }
  pass.buckets.end_backward();
  BOOST_TEST(pass.comm.calls.empty());
  BOOST_TEST((pass.ends("d"_p) == Numbers{4, 4}));

  pass.begin(true, true);
  pass.give("d"_p, 40);
  BOOST_TEST((pass.ends("d"_p) == Numbers{44, 44}));
  BOOST_TEST((pass.comm.calls == Calls{"start 44"}));
  pass.give("c"_p, 30);
  pass.give("b"_p, 20);
  pass.give("a"_p, 10);
  pass.buckets.end_backward();
  BOOST_TEST((pass.comm.calls == Calls{"start 44", "start 33", "start 22", "start 11"}));
}

BOOST_AUTO_TEST_CASE(buckets_of_a_sub_graph_wait_for_its_parameters_alone) {
  using Set = Subgraph<"bd", "b", "d">;
  Pass<8, UnusedParameters<Subgraphs<Set>>> pass;
  pass.begin(false);  // the whole model
  pass.give("d"_p, 4);
  pass.give("c"_p, 3);
  pass.give("b"_p, 2);
  pass.give("a"_p, 1);
  pass.buckets.end_backward();
  pass.buckets.features().after_update();
  pass.buckets.features().choose_subgraph(1);
  pass.begin(true);
  BOOST_TEST((pass.ends("c"_p) == Numbers{0, 0}));
  pass.give("d"_p, 4);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 0"}));  // other ranks may use c
  pass.give("b"_p, 2);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 0", "start 2", "start 0"}));
  pass.buckets.end_backward();
  BOOST_TEST(pass.buckets.features().used()[1] != 0);
  BOOST_TEST(pass.buckets.features().used()[2] == 0);
}

BOOST_AUTO_TEST_CASE(buckets_that_no_rank_uses_do_not_travel) {
  Pass<8, UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"bd", "b", "d">, Subgraph<"c", "c">>>>
      pass;
  pass.buckets.features().choose_subgraph(2);
  pass.begin(false);
  pass.give("c"_p, 3);
  pass.buckets.end_backward();
  pass.buckets.features().choose_subgraph(1);
  pass.begin(true, true);  // with what the micro-batch before has brought
  pass.give("b"_p, 2);
  BOOST_TEST(pass.comm.calls.empty());
  pass.give("d"_p, 4);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3", "start 2"}));
  pass.buckets.end_backward();
  pass.buckets.reduce();
  BOOST_TEST(
      (pass.comm.calls == Calls{"start 4", "start 3", "start 2", "wait 4", "wait 3", "wait 2"}));
  pass.buckets.features().after_update();
  pass.begin(true);
  pass.give("b"_p, 2);
  BOOST_CHECK_EXCEPTION(pass.buckets.end_backward(), Error, [](const Error& error) {
    return error.problem() == "no gradient came for d of sub-graph bd";
  });
}

BOOST_AUTO_TEST_CASE(a_missing_gradient_is_an_error_that_names_it) {
  Pass<8> pass;
  pass.begin(true);
  pass.give("d"_p, 4);
  pass.give("b"_p, 2);
  BOOST_CHECK_EXCEPTION(pass.buckets.end_backward(), Error, [](const Error& error) {
    return error.problem() == "no gradient came for a, c";
  });
}

BOOST_AUTO_TEST_CASE(gradients_travel_in_another_type_and_are_cast_before_they_start) {
  Pass<8, Precision<Mixed<BFloat16, float>>> pass;
  static_assert(std::is_same_v<decltype(pass)::T, BFloat16>);
  pass.begin(true);
  pass.give("d"_p, 4);
  pass.give("c"_p, 3);
  BOOST_TEST((pass.comm.calls == Calls{"start 4", "start 3"}));
  pass.give("b"_p, 2);
  pass.give("a"_p, 1);
  pass.buckets.end_backward();
  pass.buckets.reduce();
  BOOST_TEST((pass.ends("d"_p) == Numbers{104, 104}));
  const detail::Placement& place = pass.where.plan().placements[3];
  const auto own = pass.buckets.own<BFloat16>(place.offset, place.bytes);
  BOOST_TEST(static_cast<float>(own[8]) == 4);  // the model's own stay as they were
}

BOOST_AUTO_TEST_CASE(unused_parameters_are_zero_and_who_used_what_is_agreed_on) {
  Pass<8, UnusedParameters<Zero>> pass;
  pass.begin(false);
  pass.give("d"_p, 4);
  pass.give("b"_p, 2);
  pass.buckets.end_backward();
  BOOST_TEST((pass.ends("c"_p) == Numbers{0, 0}));

  pass.begin(true, true);
  pass.give("d"_p, 40);
  pass.give("a"_p, 10);
  BOOST_TEST((pass.comm.calls == Calls{"start 44"}));
  pass.buckets.end_backward();  // the rest counts as zero, and keeps what is added up
  BOOST_TEST((pass.comm.calls == Calls{"start 44", "start 0", "start 2", "start 10"}));
  const auto used = pass.buckets.features().agree_on_usage(pass.buckets);
  BOOST_TEST((pass.comm.calls == Calls{"start 44", "start 0", "start 2", "start 10", "wait 44",
                                       "wait 0", "wait 2", "wait 10", "max 1"}));
  BOOST_TEST((used == std::array<std::uint8_t, 4>{1, 1, 0, 1}));
  pass.buckets.features().after_update();
  BOOST_TEST(
      (pass.buckets.features().agree_on_usage(pass.buckets) == std::array<std::uint8_t, 4>{}));
}

BOOST_AUTO_TEST_CASE(a_pass_without_samples_is_zero_and_starts_everything) {
  Pass<8> pass;
  pass.begin(false);
  pass.give("d"_p, 4);  // of an earlier pass
  pass.buckets.pass_without_samples(Sync::yes, false);
  BOOST_TEST((pass.comm.calls == Calls{"start 0", "start 0", "start 0", "start 0"}));
  BOOST_TEST((pass.ends("d"_p) == Numbers{0, 0}));

  Pass<8> adding;
  adding.begin(false);
  adding.give("d"_p, 4);
  adding.give("c"_p, 3);
  adding.give("b"_p, 2);
  adding.give("a"_p, 1);
  adding.buckets.pass_without_samples(Sync::yes, true);
  BOOST_TEST((adding.comm.calls == Calls{"start 4", "start 3", "start 2", "start 1"}));
}

BOOST_AUTO_TEST_CASE(weighed_gradients_are_scaled_before_they_are_added_and_reduced) {
  Pass<8, ParallelStrategy<DP>> pass;
  pass.buckets.weigh(0.5);
  pass.begin(false);
  pass.give("d"_p, 4);
  BOOST_TEST((pass.ends("d"_p) == Numbers{2, 2}));
  pass.buckets.weigh(2);
  pass.begin(true, true);
  pass.give("d"_p, 10);
  BOOST_TEST((pass.comm.calls == Calls{"start 22"}));
}

BOOST_AUTO_TEST_CASE(where_parameters_are_shared_nothing_starts_before_it_is_asked_for) {
  using Traits = ReplicaTraits<Net, CanonicalPolicies<Pieces>>;
  using Comm = recording::Communicator<>;
  using Execution = DeviceExecution<Cpu, Traits, Comm>;
  Comm comm;
  Execution execution(comm);
  const Traits::layout where;
  GradientBuckets<Traits, Comm, Execution> buckets(comm, execution, where);
  buckets.pass_without_samples(Sync::yes, false);
  BOOST_TEST(comm.calls.empty());
  buckets.reduce();
  BOOST_TEST((comm.calls == Calls(4, "reduce 0")));
}

BOOST_AUTO_TEST_CASE(reductions_that_are_forgotten_are_not_waited_for) {
  Pass<8> pass;
  pass.begin(true);
  pass.give("d"_p, 4);
  pass.buckets.reductions().forget();
  pass.buckets.reduce();
  BOOST_TEST((pass.comm.calls == Calls{"start 4"}));
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/strategy/ddp.hpp"

#include <boost/test/unit_test.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "strategy/recording_communicator.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(step_phases)

using namespace lockstep::detail;
using recording::Calls;

namespace {

/// Writes down what it is asked to do, and fails where it is told to.
struct FakeReplica {
  struct traits {
    static constexpr bool alone = false;
    static constexpr bool has_job_groups = false;
  };
  using Loss = double;
  using subgraphs = NoSubgraphs;
  static void choose_subgraph(std::size_t) {}
  static void draw_anew() {}
  template <class>
  static constexpr bool keeps_outputs() {
    return false;
  }

  recording::Communicator<> comm;
  std::string fails;
  double copied = 0;

  auto& communicator() { return comm; }
  static int on_device() { return 0; }
  const double& to_device(const int& batch) {
    do_or_fail("place");
    copied = batch + 0.5;
    return copied;
  }
  double forward(const double& batch, Sync sync) {
    do_or_fail(sync == Sync::yes ? "forward" : "forward alone");
    return 10 * batch;
  }
  void backward(const double& batch, Sync sync) {
    do_or_fail((sync == Sync::yes ? "backward " : "backward alone ") +
               std::to_string(static_cast<int>(10 * batch)));
  }
  void reduce() { do_or_fail("reduce"); }
  void begin_update() { do_or_fail("begin"); }
  void update() { do_or_fail("update"); }
  void reduce_and_update() { do_or_fail("reduce_and_update"); }
  int grad(int key) const { return 7 * key; }

 private:
  void do_or_fail(const std::string& what) {
    comm.calls.push_back(what);
    if (!fails.empty() && what.starts_with(fails)) throw std::runtime_error(fails + " broke");
  }
};

using Forward = ForwardCalls<FakeReplica, Sync::yes>;

}  // namespace

BOOST_AUTO_TEST_CASE(phases_run_the_parts_of_a_replica_in_order_and_carry_the_loss) {
  FakeReplica replica;
  const int batch = 4;
  auto forwarded = Forward(replica).forward(batch);
  BOOST_TEST(forwarded.loss() == 45);
  auto backwarded = std::move(forwarded).backward();
  BOOST_TEST(backwarded.loss() == 45);
  auto averaged = std::move(backwarded).reduce();
  BOOST_TEST(averaged.loss() == 45);
  BOOST_TEST(averaged.grad(3) == 21);
  BOOST_TEST(std::move(averaged).update() == 45);
  BOOST_TEST((replica.comm.calls == Calls{"place", "forward", "backward 45", "reduce", "update"}));
}

BOOST_AUTO_TEST_CASE(the_last_two_phases_can_be_one) {
  FakeReplica replica;
  const int batch = 4;
  BOOST_TEST(Forward(replica).forward(batch).backward().reduce_and_update() == 45);
  BOOST_TEST((replica.comm.calls ==
              Calls{"place", "forward", "backward 45", "begin", "reduce_and_update"}));
}

BOOST_AUTO_TEST_CASE(without_synchronization_nothing_follows_backward) {
  FakeReplica replica;
  ForwardCalls<FakeReplica, Sync::no> local(replica);
  const int batch = 1;
  auto forwarded = local.forward(batch);
  static_assert(std::is_same_v<decltype(std::move(forwarded).backward()), double>);
  BOOST_TEST(std::move(forwarded).backward() == 15);
  BOOST_TEST((replica.comm.calls == Calls{"place", "forward alone", "backward alone 15"}));
}

BOOST_AUTO_TEST_CASE(a_phase_that_fails_tells_all_ranks_and_throws) {
  const int batch = 4;
  for (const std::string phase : {"forward", "backward", "reduce", "update"}) {
    FakeReplica replica;
    replica.fails = phase;
    BOOST_CHECK_THROW(Forward(replica).forward(batch).backward().reduce().update(),
                      std::runtime_error);
    BOOST_TEST(replica.comm.calls.back() == "abort " + phase + " broke");
  }
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Captured steps with a communicator that plays capturing: a graph is a list of what was enqueued.
#include "lockstep/detail/strategy/step_graphs.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/strategy/ddp.hpp"
#include "strategy/recording_communicator.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(step_graphs)

using namespace lockstep::detail;
using recording::Calls;

namespace {

struct Graph {
  std::string why_not;
  explicit operator bool() const { return why_not.empty(); }
  const std::string& reason() const { return why_not; }
};

/// `others_do` is what the other rank is about to do, where ranks capture together.
template <bool Jointly>
class Capturing : public recording::Communicator<> {
 public:
  static constexpr bool captures_jointly = Jointly;
  using recording::Communicator<>::Communicator;
  std::string why_not;
  bool agrees = true;

  void synchronize() {}
  template <class F>
  Graph capture(F&& f) {
    calls.push_back("capture");
    std::forward<F>(f)();
    return {why_not};
  }
  void replay(const Graph&) { calls.push_back("replay"); }
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    out[0] = in[0];
    out[1] = agrees ? in[0] : in[0] + 1;
  }
};
static_assert(CapturingCommunicator<Capturing<false>> && !JointlyCapturing<Capturing<false>>);
static_assert(JointlyCapturing<Capturing<true>>);
static_assert(!CapturingCommunicator<recording::Communicator<>>);

/// What `CapturedSteps` needs of a replica.
template <bool Jointly>
struct FakeReplica {
  using communicator_type = Capturing<Jointly>;
  using Loss = std::size_t;
  static constexpr std::size_t micro_batches_of_step = 2;

  communicator_type comm{0, 2};
  std::size_t added = 0;
  std::size_t added_before = 0;
  std::size_t forwards = 0;
  std::size_t subgraph = 0;
  std::size_t draws = 0;

  communicator_type& communicator() { return comm; }
  struct Nothing {};
  Nothing& model() { return nothing; }
  Nothing nothing;
  std::size_t micro_batches() const { return added; }
  bool completes_step() const { return added + 1 == micro_batches_of_step; }
  void begin_update() { comm.calls.push_back("begin"); }
  std::size_t run_micro_batch(int batch) {
    comm.calls.push_back("run " + std::to_string(batch));
    note_replay();
    return forwards;
  }
  static constexpr std::uint64_t begin_graph() { return 0; }
  void note_replay() {
    added = completes_step() ? 0 : added + 1;
    ++forwards;
  }
  void before_capture() { added_before = added; }
  void undo_capture() {
    comm.calls.push_back("undo");
    added = added_before;
  }
  void choose_subgraph(std::size_t set) { subgraph = set; }
  void draw_anew() { ++draws; }
  static int in_step() { return 0; }
  void note_subgraph() {}
  std::uint64_t graph_variant() const { return subgraph; }
  FakeReplica& execution() { return *this; }
  std::size_t latest_loss() const { return forwards; }

  Calls take_calls() { return std::exchange(comm.calls, {}); }
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_micro_batch_runs_by_calls_then_is_captured_then_is_replayed) {
  FakeReplica<false> replica;
  CapturedSteps steps;
  const auto step = [&](int batch) {
    run_step(replica, steps, batch);
    return replica.take_calls();
  };
  // The first and the last micro-batch of a step are two graphs: the update comes with the last.
  BOOST_TEST((step(5) == Calls{"run 5"}));
  BOOST_TEST((step(5) == Calls{"begin", "run 5"}));
  BOOST_TEST((step(5) == Calls{"capture", "run 5", "replay"}));
  BOOST_TEST((step(5) == Calls{"begin", "capture", "run 5", "replay"}));
  BOOST_TEST((step(5) == Calls{"replay"}));
  BOOST_TEST((step(5) == Calls{"begin", "replay"}));
  BOOST_TEST((step(6) == Calls{"run 6"}));
  BOOST_TEST((step(5) == Calls{"begin", "replay"}));
  BOOST_TEST((steps.graphs<FakeReplica<false>, int>()) == 2u);
  BOOST_TEST(replica.forwards == 8u);  // replays count
  BOOST_TEST(replica.draws == 8u);     // and so do they here: a replay draws other numbers
}

BOOST_AUTO_TEST_CASE(a_variant_is_a_graph_of_its_own) {
  FakeReplica<false> replica;
  StepGraphs<Capturing<false>, int, FakeReplica<false>::Nothing> graphs;
  const auto run = [&](std::uint64_t variant) {
    graphs.run(
        replica.comm, replica.model(), 5, {false, true, variant},
        [&] { replica.comm.calls.push_back("run"); }, [&] { replica.comm.calls.push_back("note"); },
        [] {});
    return replica.take_calls();
  };
  BOOST_TEST((run(1) == Calls{"run"}));
  BOOST_TEST((run(2) == Calls{"run"}));
  BOOST_TEST((run(1) == Calls{"capture", "run", "replay"}));
  BOOST_TEST((run(1) == Calls{"replay", "note"}));
  BOOST_TEST((run(2) == Calls{"capture", "run", "replay"}));
}

BOOST_AUTO_TEST_CASE(a_sub_graph_is_a_graph_of_its_own) {
  FakeReplica<false> replica;
  CapturedSteps steps;
  const auto step = [&](std::size_t subgraph) {
    for (int m = 0; m != 2; ++m) run_step(replica, steps, 5, subgraph);
    return replica.take_calls();
  };
  const Calls by_calls{"run 5", "begin", "run 5"};
  const Calls captured{"capture", "run 5", "replay", "begin", "capture", "run 5", "replay"};
  BOOST_TEST((step(1) == by_calls));
  BOOST_TEST((step(2) == by_calls));
  BOOST_TEST((step(1) == captured));
  BOOST_TEST((step(2) == captured));
  BOOST_TEST((step(1) == Calls{"replay", "begin", "replay"}));
  BOOST_TEST((steps.graphs<FakeReplica<false>, int>()) == 4u);
}

BOOST_AUTO_TEST_CASE(a_step_that_cannot_be_captured_runs_by_calls_ever_after) {
  FakeReplica<false> replica;
  CapturedSteps steps;
  replica.comm.why_not = "it waits for the stream (a test says so)";
  for (int n = 0; n != 2; ++n) run_step(replica, steps, 5);
  replica.take_calls();
  run_step(replica, steps, 5);
  BOOST_TEST((replica.take_calls() == Calls{"capture", "run 5", "undo", "run 5"}));
  BOOST_TEST(replica.added == 1u);
  run_step(replica, steps, 5);
  BOOST_TEST((replica.take_calls() == Calls{"begin", "run 5"}));
  BOOST_TEST((steps.graphs<FakeReplica<false>, int>()) == 0u);
}

BOOST_AUTO_TEST_CASE(ranks_that_capture_together_do_so_only_when_all_are_about_to) {
  FakeReplica<true> replica;
  CapturedSteps steps;
  for (int n = 0; n != 2; ++n) run_step(replica, steps, 5);
  replica.comm.agrees = false;
  replica.take_calls();
  run_step(replica, steps, 5);
  BOOST_TEST((replica.take_calls() == Calls{"run 5"}));
  replica.comm.agrees = true;
  run_step(replica, steps, 5);
  BOOST_TEST((replica.take_calls() == Calls{"begin", "capture", "run 5", "replay"}));
}

BOOST_AUTO_TEST_CASE(batches_that_cannot_be_compared_run_by_calls) {
  struct Opaque {};
  FakeReplica<false> replica;
  StepGraphs<Capturing<false>, Opaque, FakeReplica<false>::Nothing> graphs;
  for (int n = 0; n != 3; ++n)
    graphs.run(
        replica.comm, replica.model(), {}, {false, true, 0},
        [&] { replica.comm.calls.push_back("run"); }, [] {}, [] {});
  BOOST_TEST((replica.take_calls() == Calls{"run", "run", "run"}));
}

BOOST_AUTO_TEST_SUITE_END()

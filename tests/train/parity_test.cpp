// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json on real processes that share memory.
#include <boost/test/unit_test.hpp>
#include <exception>
#include <string>

#include "train/parity.hpp"

BOOST_AUTO_TEST_SUITE(ddp_parity)

namespace {

using namespace parity;
using Meeting = ranks::SharedMemory;

/// Every optimizer is a policy here, and accumulation has none: the sum is the user's.
Ends run_by_hand(const ReferenceCase& c) {
  Ends ends;
  with_rule(c, [&]<class Rule>() {
    with_clip(c, [&]<class ClipPolicy>() {
      ends = train_on_processes<Meeting>(
          c, [&](auto& comm) { train_by_hand<Optimizer<Rule>, ClipPolicy>(comm, c); });
    });
  });
  return ends;
}

/// A short case of one rank, changed by `change`, and what is said of it.
std::string complaint_about(const auto& change) {
  nlohmann::json c = reference("ddp.json").at(0);
  c["world"] = 1;
  c["steps"] = 1;
  c["mean_loss"].erase(c["mean_loss"].begin() + 1, c["mean_loss"].end());
  change(c);
  try {
    return run_by_steps<Meeting>(reference_case(0, c)).at(0);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void require_complaint(const std::string& words, const auto& change) {
  const std::string complaint = complaint_about(change);
  BOOST_TEST(complaint.find(words) != std::string::npos, "not '" << words << "': " << complaint);
}

}  // namespace

BOOST_AUTO_TEST_CASE(shared_parameters_train_as_in_pytorch) {
  check_every_case(run_by_steps<Meeting>);
}
BOOST_AUTO_TEST_CASE(replicated_parameters_train_as_in_pytorch) {
  check_every_case(run_by_steps<Meeting, Sharding<Replicated>, SmallBuckets>);
}
BOOST_AUTO_TEST_CASE(hand_written_loops_train_as_in_pytorch) { check_every_case(run_by_hand); }

BOOST_AUTO_TEST_CASE(a_wrong_figure_is_named) {
  require_complaint("the loss of step 0 is ", [](auto& c) { c["mean_loss"][0] = 100; });
}
BOOST_AUTO_TEST_CASE(a_case_that_cannot_be_run_is_refused_with_a_reason) {
  require_complaint("do not know the optimizer 'lion'", [](auto& c) { c["optimizer"] = "lion"; });
  require_complaint("do not know the option 'amsgrad'", [](auto& c) {
    c["optimizer"] = "adam";
    c["hyper"] = {{"lr", 0.1}, {"amsgrad", true}};
  });
  require_complaint("accumulate is 9, and this test is compiled for 1 to 4",
                    [](auto& c) { c["accumulate"] = 9; });
  require_complaint("ddp.json, case 0: clip is not above zero", [](auto& c) { c["clip"] = -1; });
  require_complaint("ddp.json, case 0: ", [](auto& c) { c["dims"] = {4, 5}; });
  require_complaint("ddp.json, case 0: ", [](auto& c) { c.erase("steps"); });
}

BOOST_AUTO_TEST_SUITE_END()

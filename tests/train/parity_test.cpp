// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json on real processes that share memory.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "train/filter_case.hpp"
#include "train/parity.hpp"

BOOST_AUTO_TEST_SUITE(ddp_parity)

namespace {

using namespace parity;
using Rendezvous = ranks::SharedMemory;

/// Every optimizer is a policy here, and accumulation has none: the sum is the user's.
Ends run_by_hand(const ReferenceCase& c) {
  Ends ends;
  with_rule(c, [&]<class Rule>() {
    with_clip(c, [&]<class ClipPolicy>() {
      ends = train_on_processes<Rendezvous>(
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
    return run_by_steps<Rendezvous>(reference_case(0, c)).at(0);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void require_complaint(const std::string& words, const auto& change) {
  const std::string complaint = complaint_about(change);
  BOOST_TEST(complaint.find(words) != std::string::npos, "not '" << words << "': " << complaint);
}

template <class... Ps>
Ends run_filtered(const FilterCase& c) {
  const ReferenceCase& figures = c.reference;
  return train_on_processes<Rendezvous>(figures, [&](auto& comm) {
    DistributedDataParallel<Network, Optimizer<ReferenceRule>, Accumulate<1>, Clip<>, Ps...> ddp(
        comm, figures.model<Network>());
    choose_rule(ddp.optimizer(), figures);
    for (std::size_t s = 0; s < figures.steps; ++s) {
      ddp.model().leaves_out_fc2 = c.leaves_out_fc2(s);
      ddp.step(figures.samples(s, comm.rank().value()));
    }
    require_parameters(figures, ddp, [](const auto& view) {
      return std::vector<double>(view.data_handle(), view.data_handle() + view.size());
    });
  });
}

/// Every case of zero_filter.json, under policies that say how parameters are kept.
template <class... Ps>
void check_every_filter_case() {
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("zero_filter.json")) {
    const FilterCase c = filter_case(cases++, figures);
    const Ends ends =
        c.filtered ? run_filtered<Hooks<SkipZeroGradients>, Ps...>(c) : run_filtered<Ps...>(c);
    BOOST_TEST(ends.size() == c.reference.world);
    for (std::size_t r = 0; r < ends.size(); ++r)
      BOOST_TEST(ends[r] == "", c.reference.name << ", rank " << r << ": " << ends[r]);
  }
  BOOST_TEST(cases != 0u, "zero_filter.json has no cases");
}

}  // namespace

BOOST_AUTO_TEST_CASE(gradients_of_zero_are_skipped_as_pytorch_skips_missing_ones) {
  check_every_filter_case<>();
  check_every_filter_case<Sharding<Replicated>, SmallBuckets>();
}

BOOST_AUTO_TEST_CASE(shared_parameters_train_as_in_pytorch) {
  check_every_case(run_by_steps<Rendezvous>);
}
BOOST_AUTO_TEST_CASE(replicated_parameters_train_as_in_pytorch) {
  check_every_case(run_by_steps<Rendezvous, Sharding<Replicated>, SmallBuckets>);
}
BOOST_AUTO_TEST_CASE(hand_written_loops_train_as_in_pytorch) { check_every_case(run_by_hand); }

BOOST_AUTO_TEST_CASE(a_wrong_figure_is_named) {
  require_complaint("the loss of step 0 is ", [](auto& c) { c["mean_loss"][0] = 100; });
}
BOOST_AUTO_TEST_CASE(a_case_that_cannot_be_run_is_rejected_with_a_reason) {
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

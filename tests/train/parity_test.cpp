// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json: parameters and losses as PyTorch's DDP has them, on real processes.
#include <boost/test/unit_test.hpp>
#include <string>

#include "train/parity.hpp"

BOOST_AUTO_TEST_SUITE(ddp_parity)

namespace {

using namespace parity;

/// All ways to run one case. Accumulation by hand has no policy: the sum is the user's.
constexpr auto in_shared_memory =
    []<class Rule, class TheClip, std::size_t Accumulated>(const nlohmann::json& c) {
      const auto check = [&](const std::string& how, auto train) {
        check_ranks<ranks::SharedMemory>(c, how, train);
      };
      const std::string name = c["optimizer"];
      using Policy = Optimizer<Rule>;
      check(name + ", shared parameters", [&](auto& comm, const std::string& how) {
        train_case<Accumulated, Policy, TheClip, Accumulate<Accumulated>>(comm, c, false, how);
      });
      check(name + ", replicated", [&](auto& comm, const std::string& how) {
        train_case<Accumulated, Policy, TheClip, Accumulate<Accumulated>, Sharding<Replicated>,
                   Buckets<BucketLimits{600, 1500}>>(comm, c, false, how);
      });
      if constexpr (Accumulated == 1) {
        check(name + ", shared, by hand", [&](auto& comm, const std::string& how) {
          train_case<Accumulated, Policy, TheClip>(comm, c, true, how);
        });
      } else {
        check(name + ", replicated, by hand", [&](auto& comm, const std::string& how) {
          train_case<Accumulated, Policy, TheClip, Sharding<Replicated>>(comm, c, true, how);
        });
      }
    };

}  // namespace
BOOST_AUTO_TEST_CASE(sgd_trains_as_in_pytorch) { run_both<SGD, 2>("sgd", in_shared_memory); }
BOOST_AUTO_TEST_CASE(momentum_trains_as_in_pytorch) {
  run_both<SGDMomentum, 2>("sgd_momentum", in_shared_memory);
}
BOOST_AUTO_TEST_CASE(nesterov_trains_as_in_pytorch) {
  run_both<SGDNesterov, 3>("sgd_nesterov", in_shared_memory);
}
BOOST_AUTO_TEST_CASE(adam_trains_as_in_pytorch) { run_both<Adam, 3>("adam", in_shared_memory); }
BOOST_AUTO_TEST_CASE(adamw_trains_as_in_pytorch) { run_both<AdamW, 2>("adamw", in_shared_memory); }
BOOST_AUTO_TEST_CASE(no_case_is_left_out) { BOOST_TEST(reference("ddp.json").size() == 10u); }
BOOST_AUTO_TEST_SUITE_END()

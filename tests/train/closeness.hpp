// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Equal to rounding, for what was computed in double in another order.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace train {

inline void require_close(const std::vector<double>& have, const std::vector<double>& want,
                          const std::string& what) {
  BOOST_TEST_REQUIRE(have.size() == want.size());
  double worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i)
    worst = std::max(worst, std::abs(have[i] - want[i]) / std::max(std::abs(want[i]), 1e-2));
  BOOST_TEST(worst <= 1e-9, what << ": off by " << worst);
}

}  // namespace train

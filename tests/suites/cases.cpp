// SPDX-License-Identifier: Apache-2.0
// Two cases for tests/suites/run: a program of which none asserts anything must not pass.
#include <boost/test/unit_test.hpp>

BOOST_AUTO_TEST_CASE(that_returns_early) {}
BOOST_AUTO_TEST_CASE(that_compares) { BOOST_TEST(1 == 1); }

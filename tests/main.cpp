// SPDX-License-Identifier: Apache-2.0
// The only translation unit that compiles Boost.Test itself; the test files include its
// declarations.
#define BOOST_TEST_MODULE lockstep
#include <boost/test/included/unit_test.hpp>

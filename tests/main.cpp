// SPDX-License-Identifier: Apache-2.0
// The only translation unit that compiles Boost.Test itself; the test files include its
// declarations.
#define BOOST_TEST_MODULE lockstep
#include <boost/test/included/unit_test.hpp>

// The address sanitizer keeps less of freed memory, and remembers less of each allocation, than it
// would by itself: tests fork thousands of ranks, and every page that the parent has costs each of
// them. It calls this function where a program is linked with it.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options();
const char* __asan_default_options() {
  // clang's library looks for uses of stacks that have been left, as g++'s does not: it would take
  // the unit tests five times as long.
  return "quarantine_size_mb=8:malloc_context_size=4:detect_stack_use_after_return=0";
}

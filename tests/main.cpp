// SPDX-License-Identifier: Apache-2.0
// The only translation unit that compiles Boost.Test itself; the test files include its
// declarations.
#define BOOST_TEST_MODULE lockstep
#define BOOST_TEST_NO_MAIN
#include <boost/test/included/unit_test.hpp>
#include <boost/test/results_collector.hpp>
#include <cstdio>

namespace {

/// Did any case run? Listing the cases runs none.
struct Runs : boost::unit_test::test_observer {
  bool any = false;
  void test_unit_start(const boost::unit_test::test_unit& /*unit*/) override { any = true; }
};

}  // namespace

// Cases that all return early, because something is not here, must not look like cases that have
// compared something.
int main(int argc, char* argv[]) {
  namespace ut = boost::unit_test;
  Runs runs;
  ut::framework::register_observer(runs);
  const int status = ut::unit_test_main(&init_unit_test_suite, argc, argv);
  if (status != 0 || !runs.any) return status;
  const auto& results = ut::results_collector.results(ut::framework::master_test_suite().p_id);
  if (results.p_assertions_passed + results.p_assertions_failed != 0) return 0;
  std::fputs("FAILED: no case of this run has asserted anything\n", stderr);
  return 1;
}

// The address sanitizer keeps less of freed memory, and remembers less of each allocation, than it
// would by itself: tests fork thousands of ranks, and every page that the parent has costs each of
// them. It calls this function where a program is linked with it.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options();
const char* __asan_default_options() {
  // clang's library looks for uses of stacks that have been left, as g++'s does not: it would take
  // the unit tests five times as long.
  return "quarantine_size_mb=8:malloc_context_size=4:detect_stack_use_after_return=0";
}

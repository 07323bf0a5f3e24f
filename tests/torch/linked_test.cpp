// SPDX-License-Identifier: Apache-2.0
// LibTorch, lockstep and the system's Gloo in one program.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <span>
#include <string>

#include "comm/exercise.hpp"
#include "comm/ranks.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/launch/launch.hpp"

#if LOCKSTEP_HAS_GLOO
#include "comm/gloo_ranks.hpp"
#endif

namespace torch_tests {

/// Tests fork ranks from this process. A process that has LibTorch's threads cannot be forked: the
/// child waits for threads that it does not have.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
};
BOOST_TEST_GLOBAL_FIXTURE(OneThread);

}  // namespace torch_tests

BOOST_AUTO_TEST_SUITE(torch_linked)

namespace {

using namespace ranks;

/// A product that LibTorch computes, added up over the ranks where it lies.
void add_up_a_product(auto& comm) {
  const auto rank = static_cast<float>(comm.rank().value());
  const auto world = static_cast<float>(comm.world_size().value());
  at::Tensor product = at::matmul(at::full({64, 64}, rank + 1), at::ones({64, 64}));
  comm.all_reduce(std::span<float>(product.data_ptr<float>(), 64 * 64), Sum{});
  require(product.eq(32 * world * (world + 1)).all().item<bool>(), "the sum is wrong");
}

}  // namespace

BOOST_AUTO_TEST_CASE(tensors_are_added_up_over_ranks_through_shared_memory) {
  for (const std::size_t world : {1, 2, 4})
    expect_all_fine(run_processes(world, 20s, [](auto& comm) { add_up_a_product(comm); }));
}

#if LOCKSTEP_HAS_GLOO
BOOST_AUTO_TEST_CASE(tensors_are_added_up_over_ranks_through_the_systems_gloo) {
  for (const std::size_t world : {1, 2, 4})
    expect_all_fine(run_processes<Sockets>(world, 20s, [](auto& comm) { add_up_a_product(comm); }));
}
#endif

BOOST_AUTO_TEST_CASE(files_are_handled_by_the_systems_standard_library) {
  // LibTorch exports one of another age: on x86-64 a program that took it ended in remove_all.
  for (const char* name : {"_ZNSt10filesystem10remove_allERKNS_7__cxx114pathE",
                           "_ZNSt10filesystem7__cxx1118directory_iteratorppEv"}) {
    Dl_info where{};
    BOOST_TEST_REQUIRE(::dladdr(::dlsym(RTLD_NEXT, name), &where) != 0);
    BOOST_TEST(std::string(where.dli_fname).find("libstdc++") != std::string::npos,
               name << " is in " << where.dli_fname);
  }
}

BOOST_AUTO_TEST_CASE(ranks_that_are_forked_after_two_threads_have_computed_do_not_wait_for_them) {
  const auto product = [] { return at::matmul(at::ones({512, 512}), at::ones({512, 512})); };
  // In a process of its own: this one is to have no threads.
  expect_all_fine(run_processes(1, 20s, [&](auto&) {
    at::set_num_threads(2);
    product().exp_();
    require(lockstep::detail::has_other_threads(), "LibTorch has no threads");
    spawn(AsProcesses{}, 2, [&](const Membership&, Store&) {
      require(product().eq(512).all().template item<bool>(), "the product is wrong");
      require(at::get_num_threads() == 1, "a forked rank computes with several threads");
    });
  }));
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Every collective against a plain reference: all element types and operations, odd sizes, worlds
// of 1 to 8, as processes and as threads, in arenas and in private memory.
#include <boost/test/unit_test.hpp>
#include <tuple>

#include "exercise.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_types)

namespace {

template <std::size_t... I>
void every_type(Shared& comm, std::size_t n, std::index_sequence<I...>) {
  (every_operation<std::tuple_element_t<I + 1, detail::ElementTypes>>(comm, n), ...);
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_type_operation_and_odd_size_is_exact) {
  for (const As as : {As::processes, As::threads}) {
    for (const std::size_t world : {1, 2, 3, 4, 8}) {
      BOOST_TEST_CONTEXT("world " << world
                                  << (as == As::threads ? " of threads" : " of processes")) {
        expect_all_fine(run(as, world, [](Shared& comm) {
          for (const std::size_t n : {0, 1, 7}) {
            every_type(comm, n, std::make_index_sequence<detail::element_kinds - 1>{});
          }
        }));
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(sizes_beyond_a_slot_and_beyond_the_staging_area_are_exact) {
  for (const std::size_t world : {1, 2, 3, 4, 8}) {
    expect_all_fine(run(As::processes, world, [](Shared& comm) {
      every_operation<float>(comm, 4097);
      every_operation<std::int64_t>(comm, 513);
      every_operation<Half>(comm, 2049);
    }));
  }
  expect_all_fine(run(As::threads, 2, [](Shared& comm) {
    in_all_memory<float>(
        comm, 25_MiB / sizeof(float) + 1, [&](std::span<float> data, std::span<float>) {
          fill(data, values_of<float>(comm.rank().value()));
          comm.all_reduce(data, Average{});
          require_equal<float>(data, all_reduced<float>(Average{}, 2), "all_reduce", "25 MiB");
        });
  }));
}

BOOST_AUTO_TEST_SUITE_END()

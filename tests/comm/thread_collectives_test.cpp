// SPDX-License-Identifier: Apache-2.0
// Collectives of host memory among threads of one process, against a plain reference, bit by bit.
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/comm/threads/rendezvous.hpp"
#include "participants.hpp"

using namespace participants;
using ranks::expect_all_fine;

BOOST_AUTO_TEST_SUITE(thread_collectives)

namespace {

/// What a communicator of threads does with host memory, and nothing else.
class HostThreads : public Collectives<HostThreads>, public HostAllocating {
 public:
  explicit HostThreads(RankHandle& handle) : handle_(handle) {}

  Rank rank() const { return handle_.rank(); }
  WorldSize world_size() const { return WorldSize{handle_.world()}; }
  void abort(std::string_view reason) { handle_.abort(reason); }

  template <class C>
  void perform(const C& call) {
    handle_.rendezvous(
        call.call(),
        CallArguments{call.in.data(), const_cast<typename C::element*>(call.out.data()), nullptr,
                      true},
        [&](std::span<const CallArguments> ranks) { threads::work_for_all(call, ranks); });
  }

 private:
  RankHandle& handle_;
};

template <class T>
void every_operation(HostThreads& comm, std::size_t n) {
  ranks::in_all_memory<T>(comm, n, [&](std::span<T> data, std::span<T> pieces) {
    ranks::each_operation<T>([&](auto op) { ranks::reductions(comm, data, pieces, op); });
    ranks::movements(comm, data, pieces, false);
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_equals_a_plain_reference) {
  for (const std::size_t world : {1, 2, 3, 4, 8}) {
    expect_all_fine(run(world, [](RankHandle& handle) {
      HostThreads comm(handle);
      for (const std::size_t n : {0, 1, 7, 300}) {
        every_operation<float>(comm, n);
        every_operation<double>(comm, n);
        every_operation<Half>(comm, n);
        every_operation<std::int32_t>(comm, n);
        every_operation<std::uint8_t>(comm, n);
        ranks::pieces_in_place<float>(comm, n, Average{});
      }
    }));
  }
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Collectives of host memory among threads of one process, against a plain reference, bit by bit.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "exercise.hpp"
#include "lockstep/comm/backends/threads/host_collectives.hpp"
#include "seats.hpp"

using namespace seats;
namespace on_host = lockstep::threads::on_host;
using ranks::expect_all_fine;
using ranks::reduced;
using ranks::require_equal;
using ranks::value;

BOOST_AUTO_TEST_SUITE(thread_collectives)

namespace {

template <class T>
void fill(std::size_t rank, std::vector<T>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value<T>(rank, i);
}

/// One call, in which `work(offers)` is done.
template <class T>
void meet(Seat& seat, std::vector<T>& in, std::vector<T>& out, auto work) {
  seat.meet(make_call<T>(CollectiveKind::all_gather, in.size(), false),
            Offer{in.data(), out.data(), nullptr, true}, work);
}

template <class T, class Op>
void reductions(Seat& seat, std::size_t n, const Op& op) {
  const std::size_t world = seat.world();
  const std::size_t me = seat.rank().value();
  const std::string what = std::string(Op::name) + " of " + std::to_string(n) + " " +
                           std::string(element_name(element_kind<T>()));
  std::vector<T> data(n);
  std::vector<T> pieces(n * world);
  fill(me, data);
  meet(seat, data, data, [&](auto offers) { on_host::all_reduce<T>(offers, n, op); });
  for (std::size_t i = 0; i < n; ++i) {
    require_equal(data[i], reduced<T>(op, world, i), "all_reduce", what);
  }
  fill(me, data);
  const Rank root{world - 1};
  meet(seat, data, data, [&](auto offers) { on_host::reduce<T>(offers, n, root, op); });
  for (std::size_t i = 0; i < n; ++i) {
    require_equal(data[i], seat.rank() == root ? reduced<T>(op, world, i) : value<T>(me, i),
                  "reduce", what);
  }
  fill(me, pieces);
  meet(seat, pieces, data, [&](auto offers) { on_host::reduce_scatter<T>(offers, n, op); });
  for (std::size_t i = 0; i < n; ++i) {
    require_equal(data[i], reduced<T>(op, world, me * n + i), "reduce_scatter", what);
  }
}

template <class T>
void movements(Seat& seat, std::size_t n) {
  const std::size_t world = seat.world();
  const std::size_t me = seat.rank().value();
  const std::string what = std::to_string(n) + " " + std::string(element_name(element_kind<T>()));
  std::vector<T> data(n);
  std::vector<T> pieces(n * world);
  for (std::size_t r = 0; r < world; ++r) {
    const Rank root{r};
    fill(me, data);
    meet(seat, data, data, [&](auto offers) { on_host::broadcast<T>(offers, n, root); });
    for (std::size_t i = 0; i < n; ++i) require_equal(data[i], value<T>(r, i), "broadcast", what);
    fill(me, data);
    std::fill(pieces.begin(), pieces.end(), T{});
    meet(seat, data, pieces, [&](auto offers) { on_host::gather<T>(offers, n, root); });
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      require_equal(pieces[i], me == r ? value<T>(i / n, i % n) : T{}, "gather", what);
    }
    fill(me, pieces);
    meet(seat, pieces, data, [&](auto offers) { on_host::scatter<T>(offers, n, root); });
    for (std::size_t i = 0; i < n; ++i) {
      require_equal(data[i], value<T>(r, me * n + i), "scatter", what);
    }
  }
  fill(me, data);
  meet(seat, data, pieces, [&](auto offers) { on_host::all_gather<T>(offers, n); });
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    require_equal(pieces[i], value<T>(i / n, i % n), "all_gather", what);
  }
  std::vector<T> received(pieces.size());
  fill(me, pieces);
  meet(seat, pieces, received, [&](auto offers) { on_host::all_to_all<T>(offers, n); });
  for (std::size_t i = 0; i < received.size(); ++i) {
    require_equal(received[i], value<T>(i / n, me * n + i % n), "all_to_all", what);
  }
}

template <class T>
void every_operation() {
  for (std::size_t world : {1, 2, 3, 8}) {
    expect_all_fine(run(world, [](Seat& seat) {
      for (std::size_t n : {1, 7, 1000}) {
        ranks::each_operation<T>([&](auto op) { reductions<T>(seat, n, op); });
        movements<T>(seat, n);
      }
    }));
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(host_memory_is_exchanged_as_the_reference_says) {
  every_operation<double>();
  every_operation<BFloat16>();
  every_operation<std::int16_t>();
  every_operation<std::uint8_t>();
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every collective, called and compared with a plain reference, bit by bit.

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "ranks.hpp"

namespace ranks {

/// What rank `rank` holds at place i. Small integers, and fractions where the type has them.
template <class T>
T value(std::size_t rank, std::size_t i) {
  const auto whole = static_cast<int>((rank * 7 + i * 3) % 11) + 1;
  if constexpr (FloatingElement<T>) {
    return T(static_cast<float>(whole) / 8 - 0.5f);
  } else {
    return static_cast<T>(whole);
  }
}

/// The reference: combine in rank order, element by element.
template <class T, class Op>
T reduced(const Op& op, std::size_t world, std::size_t i) {
  auto sum = op.prepare(value<T>(0, i));
  for (std::size_t w = 1; w < world; ++w) sum = op.combine(sum, op.prepare(value<T>(w, i)));
  return op.template finish<T>(sum, world);
}

/// Equal to the last bit. The words are put together only when they are needed.
template <class T>
void require_equal(const T& a, const T& b, const char* call, const std::string& what) {
  if (std::memcmp(&a, &b, sizeof(T)) != 0) throw std::runtime_error(std::string(call) + " " + what);
}

template <class T, class Op>
void reductions(Shared& comm, std::span<T> data, std::span<T> pieces, const Op& op) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::string what = std::string(Op::name) + " of " + std::to_string(data.size()) + " " +
                           std::string(element_name(element_kind<T>()));
  const auto fill = [&] {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value<T>(me, i);
  };
  fill();
  comm.all_reduce(data, op);
  for (std::size_t i = 0; i < data.size(); ++i)
    require_equal(data[i], reduced<T>(op, world, i), "all_reduce", what);
  fill();
  auto work = comm.all_reduce_async(data, op);
  while (!work.test()) std::this_thread::yield();
  for (std::size_t i = 0; i < data.size(); ++i)
    require_equal(data[i], reduced<T>(op, world, i), "async", what);
  fill();
  const Rank root{world - 1};
  comm.reduce(data, root, op);
  for (std::size_t i = 0; i < data.size(); ++i) {
    require_equal(data[i], comm.rank() == root ? reduced<T>(op, world, i) : value<T>(me, i),
                  "reduce", what);
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) pieces[i] = value<T>(me, i);
  comm.reduce_scatter(pieces, data, op);
  for (std::size_t i = 0; i < data.size(); ++i) {
    require_equal(data[i], reduced<T>(op, world, me * data.size() + i), "reduce_scatter", what);
  }
}

template <class T>
void movements(Shared& comm, std::span<T> data, std::span<T> pieces) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::size_t n = data.size();
  const std::string what = std::to_string(n) + " " + std::string(element_name(element_kind<T>()));
  const auto fill = [&](std::span<T> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value<T>(me, i);
  };
  for (std::size_t root = 0; root < world; root += 2) {
    fill(data);
    comm.broadcast(data, Rank{root});
    for (std::size_t i = 0; i < n; ++i)
      require_equal(data[i], value<T>(root, i), "broadcast", what);
    fill(data);
    std::fill(pieces.begin(), pieces.end(), T{});
    comm.gather(data, pieces, Rank{root});
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      require_equal(pieces[i], me == root ? value<T>(i / n, i % n) : T{}, "gather", what);
    }
    fill(pieces);
    comm.scatter(pieces, data, Rank{root});
    for (std::size_t i = 0; i < n; ++i)
      require_equal(data[i], value<T>(root, me * n + i), "scatter", what);
  }
  fill(data);
  comm.all_gather(data, pieces);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    require_equal(pieces[i], value<T>(i / n, i % n), "all_gather", what);
  fill(pieces);
  std::vector<T> received(pieces.size());
  comm.all_to_all(pieces, received);
  for (std::size_t i = 0; i < received.size(); ++i) {
    require_equal(received[i], value<T>(i / n, me * n + i % n), "all_to_all", what);
  }
  if (world > 1) {  // round the ring, even ranks send first
    const Rank right{(me + 1) % world};
    const Rank left{(me + world - 1) % world};
    fill(data);
    std::vector<T> got(n);
    if (me % 2 == 0) comm.send(data, right);
    comm.receive(got, left);
    if (me % 2 != 0) comm.send(data, right);
    for (std::size_t i = 0; i < n; ++i)
      require_equal(got[i], value<T>(left.value(), i), "send", what);
  }
}

/// Both kinds of memory.
template <class T>
void in_all_memory(Shared& comm, std::size_t n, auto f) {
  const std::size_t all = n * comm.world_size().value();
  f(comm.template allocate<T>(n), comm.template allocate<T>(all));
  std::vector<T> data(n);
  std::vector<T> pieces(all);
  f(std::span<T>(data), std::span<T>(pieces));
}

template <class T>
void every_operation(Shared& comm, std::size_t n) {
  in_all_memory<T>(comm, n, [&](std::span<T> data, std::span<T> pieces) {
    const auto try_op = [&]<class Op>(Op op) {
      if constexpr (ReduceOp<Op, T>) reductions(comm, data, pieces, op);
    };
    try_op(Sum{});
    try_op(Product{});
    try_op(Min{});
    try_op(Max{});
    try_op(Average{});
    try_op(PreMultipliedSum<float>{0.25f});
    try_op(BitAnd{});
    try_op(BitOr{});
    try_op(BitXor{});
    movements(comm, data, pieces);
  });
}

inline void expect_all_fine(const Ends& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r].empty(), "rank " << r << ": " << ends[r]);
}

/// Every rank but the culprit ends with words that contain all of `parts`.
inline void expect_words(const Ends& ends, std::size_t culprit,
                         const std::vector<std::string>& parts) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    if (r == culprit) continue;
    for (const std::string& part : parts) {
      BOOST_TEST(ends[r].find(part) != std::string::npos, "rank " << r << " said: " << ends[r]);
    }
  }
}

inline constexpr std::size_t nobody = static_cast<std::size_t>(-1);

}  // namespace ranks

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every collective, called and compared with a plain reference, bit by bit.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "operations.hpp"
#include "ranks.hpp"
#include "repeating.hpp"

namespace ranks {

/// After so many places, what ranks hold repeats itself.
inline constexpr std::size_t period = 11;

/// What rank `rank` holds at position i. Small integers, and fractions where the type has them.
template <class T>
T value(std::size_t rank, std::size_t i) {
  const auto whole = static_cast<int>((rank * 7 + i * 3) % period) + 1;
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

/// The same for all places.
template <class T, class Op>
Repeating<T, period> all_reduced(const Op& op, std::size_t world) {
  return Repeating<T, period>([&](std::size_t i) { return reduced<T>(op, world, i); });
}

/// What rank `rank` holds from position `first` on.
template <class T>
Repeating<T, period> values_of(std::size_t rank, std::size_t first = 0) {
  return Repeating<T, period>([=](std::size_t i) { return value<T>(rank, first + i); });
}
template <class T>
void fill(std::span<T> values, const Repeating<T, period>& with) {
  fill_repeating<period>(values, with);
}

/// Equal to the last bit. The words are put together only when they are needed.
template <class T>
void require_equal(std::span<const T> values, const Repeating<T, period>& want, const char* call,
                   const std::string& what) {
  const std::size_t wrong = find_difference<period>(values, want);
  if (wrong != values.size()) {
    throw std::runtime_error(std::string(call) + " " + what + ", element " + std::to_string(wrong));
  }
}

/// Every rank's elements, one behind the other, are those of this rank.
template <class T>
void require_same_of_all(const std::vector<T>& all, const std::vector<T>& own) {
  for (std::size_t first = 0; first < all.size(); first += own.size()) {
    const bool same = std::memcmp(&all[first], own.data(), own.size() * sizeof(T)) == 0;
    require(same, "all_reduce differs between ranks");
  }
}

template <class T, class Op>
std::string reduction_name(std::size_t count) {
  return std::string(Op::name) + " of " + std::to_string(count) + " " +
         std::string(lockstep::detail::element_name(element_kind<T>()));
}

template <class T, class Op>
void all_reductions(auto& comm, std::span<T> data, const Op& op) {
  const std::size_t world = comm.world_size().value();
  const std::string what = reduction_name<T, Op>(data.size());
  const auto want = all_reduced<T>(op, world);
  const auto mine = values_of<T>(comm.rank().value());
  fill(data, mine);
  comm.all_reduce(data, op);
  require_equal<T>(data, want, "all_reduce", what);
  fill(data, mine);
  auto work = comm.all_reduce_async(data, op);
  while (!work.test()) std::this_thread::yield();
  require_equal<T>(data, want, "async", what);
}

template <class T, class Op>
void reductions(auto& comm, std::span<T> data, std::span<T> pieces, const Op& op) {
  all_reductions(comm, data, op);
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::string what = reduction_name<T, Op>(data.size());
  const auto want = all_reduced<T>(op, world);
  const auto mine = values_of<T>(me);
  fill(data, mine);
  const Rank root{world - 1};
  comm.reduce(data, root, op);
  if (comm.rank() == root) {
    require_equal<T>(data, want, "reduce", what);
  } else {
    require_equal<T>(data, mine, "reduce", what);
  }
  fill(pieces, mine);
  comm.reduce_scatter(pieces, data, op);
  require_equal<T>(data, want.from(me * data.size()), "reduce_scatter", what);
}

template <class T>
void movements(auto& comm, std::span<T> data, std::span<T> pieces, bool messages = true) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::size_t n = data.size();
  const std::string what =
      std::to_string(n) + " " + std::string(lockstep::detail::element_name(element_kind<T>()));
  const auto mine = values_of<T>(me);
  const Repeating<T, period> nothing([](std::size_t) { return T{}; });
  const auto require_ranks = [&](std::span<T> all, std::size_t first, const char* call) {
    for (std::size_t w = 0; w < world; ++w)
      require_equal<T>(all.subspan(w * n, n), values_of<T>(w, first), call, what);
  };
  for (std::size_t root = 0; root < world; root += 2) {
    fill(data, mine);
    comm.broadcast(data, Rank{root});
    require_equal<T>(data, values_of<T>(root), "broadcast", what);
    fill(data, mine);
    std::fill(pieces.begin(), pieces.end(), T{});
    comm.gather(data, pieces, Rank{root});
    if (me == root) {
      require_ranks(pieces, 0, "gather");
    } else {
      require_equal<T>(pieces, nothing, "gather", what);
    }
    fill(pieces, mine);
    comm.scatter(pieces, data, Rank{root});
    require_equal<T>(data, values_of<T>(root, me * n), "scatter", what);
  }
  fill(data, mine);
  comm.all_gather(data, pieces);
  require_ranks(pieces, 0, "all_gather");
  fill(pieces, mine);
  std::vector<T> received(pieces.size());
  comm.all_to_all(pieces, received);
  require_ranks(received, me * n, "all_to_all");
  if (world > 1 && messages) {  // round the ring, even ranks send first
    const Rank right{(me + 1) % world};
    const Rank left{(me + world - 1) % world};
    fill(data, mine);
    std::vector<T> got(n);
    if (me % 2 == 0) comm.send(data, right);
    comm.receive(got, left);
    if (me % 2 != 0) comm.send(data, right);
    require_equal<T>(got, values_of<T>(left.value()), "send", what);
  }
}

/// Both kinds of memory.
template <class T>
void in_all_memory(auto& comm, std::size_t n, auto f) {
  const std::size_t all = n * comm.world_size().value();
  f(comm.template allocate<T>(n), comm.template allocate<T>(all));
  std::vector<T> data(n);
  std::vector<T> pieces(all);
  f(std::span<T>(data), std::span<T>(pieces));
}

template <class T>
void every_operation(auto& comm, std::size_t n) {
  in_all_memory<T>(comm, n, [&](std::span<T> data, std::span<T> pieces) {
    each_operation<T>([&](auto op) { reductions(comm, data, pieces, op); });
    movements(comm, data, pieces);
  });
}

/// Three reductions at a time, awaited in different orders.
void several_under_way(auto& comm, int rounds) {
  const std::span<double> arena = comm.template allocate<double>(30000);
  const std::size_t world = comm.world_size().value();
  const auto require_reduced = [&](std::size_t first, std::size_t count, auto op) {
    require_equal<double>(arena.subspan(first, count), all_reduced<double>(op, world).from(first),
                          "asynchronous", "");
  };
  for (int round = 0; round < rounds; ++round) {
    fill(arena, values_of<double>(comm.rank().value()));
    auto a = comm.all_reduce_async(arena.subspan(0, 10000), Sum{});
    auto b = comm.all_reduce_async(arena.subspan(10000, 5), Max{});
    auto c = comm.all_reduce_async(arena.subspan(10005, 19995), Average{});
    if (round % 3 == 0) c.wait();
    if (round % 3 == 1) b.wait();
    if (round % 5 == 0) comm.barrier();
    a.wait();
    b.wait();
    c.wait();
    require_reduced(0, 10000, Sum{});
    require_reduced(10000, 5, Max{});
    require_reduced(10005, 19995, Average{});
  }
}

/// Many reductions, awaited only by their handles' end.
void many_under_way(auto& comm) {
  const std::span<float> arena = comm.template allocate<float>(64 * 2000);
  std::fill(arena.begin(), arena.end(), 1.f);
  using Work = decltype(comm.all_reduce_async(arena, Sum{}));
  std::vector<std::unique_ptr<Work>> works;
  for (std::size_t i = 0; i < 64; ++i) {
    works.emplace_back(new Work(comm.all_reduce_async(arena.subspan(i * 2000, 2000), Sum{})));
  }
  works.clear();
  const auto want = static_cast<float>(comm.world_size().value());
  require_equal<float>(arena, Repeating<float, period>([&](std::size_t) { return want; }),
                       "a reduction was lost", "");
}

void groups_of_six(auto& comm) {
  const std::size_t me = comm.rank().value();
  auto row = join_groups(comm, Grid<6, 3>{});
  auto column = join_groups(comm, Transposed<Grid<6, 3>>{});
  std::vector<int> sum{static_cast<int>(me)};
  row.all_reduce(sum);
  require(sum[0] == (me < 3 ? 0 + 1 + 2 : 3 + 4 + 5), "row");
  sum = {static_cast<int>(me)};
  column.all_reduce(sum);
  require(sum[0] == static_cast<int>(2 * (me % 3) + 3), "column");
  require(column.rank() == Rank{me / 3}, "position in the column");
  auto some = new_group(comm, {Rank{4}, Rank{1}});
  require(some.has_value() == (me == 4 || me == 1), "membership");
  if (some) {
    require(some->rank() == Rank{me == 4 ? 0u : 1u}, "listed order");
    some->barrier();
  }
}

/// A single number is given and returned by value.
void single_numbers(auto& comm) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const double mean = comm.all_reduce(static_cast<double>(me), Average{});
  require(mean == static_cast<double>(world - 1) / 2, "the mean of one number");
  require(comm.all_reduce(std::int64_t{1}) == static_cast<std::int64_t>(world), "the sum of ones");
  require(comm.broadcast(static_cast<float>(me), Rank{world - 1}) == static_cast<float>(world - 1),
          "the last rank's number");
  const double at_root = comm.reduce(static_cast<double>(me), Rank{world - 1}, Average{});
  require(at_root == (me + 1 == world ? mean : static_cast<double>(me)), "the mean, on one rank");
  require(comm.reduce(me == 0, Rank{0}, Min{}) == (me == 0 && world == 1), "a truth, on rank 0");
  const std::vector<int> all = comm.all_gather(static_cast<int>(me));
  for (std::size_t w = 0; w < world; ++w)
    require(all.size() == world && all[w] == static_cast<int>(w), "every rank's number");
}

/// Bools are moved, and reduced to what any or all ranks have.
void truths(auto& comm) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const bool last = me + 1 == world;
  require(comm.all_reduce(last, Max{}) && comm.all_reduce(last, BitOr{}), "any rank");
  require(comm.all_reduce(last, Min{}) == (world == 1), "all ranks, by the minimum");
  require(comm.all_reduce(last, BitAnd{}) == (world == 1), "all ranks, bit by bit");
  require(comm.broadcast(last, Rank{world - 1}), "the last rank's truth");
  const bool mine[] = {last, true, false};
  std::unique_ptr<bool[]> all(new bool[3 * world]);
  comm.all_gather(mine, std::span<bool>(all.get(), 3 * world));
  for (std::size_t w = 0; w < world; ++w) {
    require(all[3 * w] == (w + 1 == world) && all[3 * w + 1] && !all[3 * w + 2],
            "every rank's truths");
  }
  bool reduced[] = {last, true};
  comm.all_reduce(reduced, BitXor{});
  require(reduced[0] && reduced[1] == (world % 2 == 1), "an odd number of ranks");
  require(comm.all_gather_variable(std::span<const bool>(mine, me % 2)).total() == world / 2,
          "as many truths as ranks have");
}

/// Every rank brings another number of elements, some of them none.
template <class T>
void variable_gathers(auto& comm, std::size_t scale) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const auto length = [&](std::size_t w) { return scale * ((w + 1) % 3); };
  std::vector<T> mine(length(me));
  fill(std::span<T>(mine), values_of<T>(me));
  const auto verify = [&](const GatheredPieces& pieces, std::span<const T> values,
                          const char* call) {
    std::size_t begin = 0;
    for (std::size_t w = 0; w < world; ++w) {
      require(pieces.counts[w] == length(w) && pieces.offsets[w] == begin, call);
      const std::string whose = "of rank " + std::to_string(w);
      if (!values.empty())
        require_equal<T>(values.subspan(begin, length(w)), values_of<T>(w), call, whose);
      begin += length(w);
    }
    require(pieces.total() == begin && (values.empty() || values.size() == begin), call);
  };
  const Gathered<T> all = comm.all_gather_variable(mine);
  require(all.values.size() == all.total() && all.of(Rank{me}).size() == mine.size(), "sizes");
  verify(all, all.values, "all_gather_variable");
  std::vector<T> given(all.total() + 5);
  verify(comm.all_gather_variable(mine, given), std::span<const T>(given).first(all.total()),
         "all_gather_variable into given memory");
  for (std::size_t r = 0; r < world; r += 2) {
    const Gathered<T> here = comm.gather_variable(mine, Rank{r});
    require(here.values.size() == (me == r ? all.total() : 0), "values on another rank than root");
    verify(here, here.values, "gather_variable");
    std::vector<T> out(me == r ? all.total() : 0);
    const GatheredPieces pieces = comm.gather_variable(mine, out, Rank{r});
    verify(pieces, out, "gather_variable into given memory");
  }
  require(comm.all_gather_variable(std::vector<T>()).total() == 0, "nothing of all ranks");
  require(comm.gather_variable(std::vector<T>(), Rank{0}).total() == 0, "nothing for root");
}

/// A bucket's round of sharded training, asynchronously and in place: every rank gets the sums of
/// its own piece, changes them, and gets the pieces of all. Two buckets are under way at a time.
template <class T, class Op>
void pieces_in_place(auto& comm, std::size_t n, const Op& op) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const std::string what = reduction_name<T, Op>(n);
  const auto want = all_reduced<T>(op, world);
  const std::size_t all = n * world;
  const auto rounds = [&](std::span<T> buckets) {
    const std::span<T> first = buckets.first(all);
    const std::span<T> second = buckets.subspan(all);
    // Both buckets have a piece of every rank: `f(piece, rank, its first position)`.
    const auto each_piece = [&](const auto& f) {
      for (std::size_t piece = 0; piece != 2 * world; ++piece)
        f(buckets.subspan(piece * n, n), piece % world, piece * n);
    };
    fill(buckets, values_of<T>(me));
    {
      auto a = comm.reduce_scatter_async(first, first.subspan(me * n, n), op);
      auto b = comm.reduce_scatter_async(second, second.subspan(me * n, n), op);
      while (!b.test()) std::this_thread::yield();
      a.wait();
    }
    if constexpr (requires { comm.synchronize(); }) comm.synchronize();  // a stream has waited
    each_piece([&](std::span<T> piece, std::size_t w, std::size_t begin) {
      const char* const call = "reduce_scatter_async";
      if (w != me) {
        require_equal<T>(piece, values_of<T>(me, begin), call, what);
      } else {
        require_equal<T>(piece, want.from(begin), call, what);
        fill(piece, values_of<T>(me + 1, begin));
      }
    });
    {
      auto a = comm.all_gather_async(first.subspan(me * n, n), first);
      auto b = comm.all_gather_async(second.subspan(me * n, n), second);
      a.wait();
    }
    if constexpr (requires { comm.synchronize(); }) comm.synchronize();
    each_piece([&](std::span<T> piece, std::size_t w, std::size_t begin) {
      require_equal<T>(piece, values_of<T>(w + 1, begin), "all_gather_async", what);
    });
  };
  rounds(comm.template allocate<T>(2 * all));
  std::vector<T> own(2 * all);
  rounds(own);
}

/// All of the four, in small and in large.
void numbers_and_pieces(auto& comm) {
  pieces_in_place<float>(comm, 0, Sum{});
  pieces_in_place<float>(comm, 5, Average{});
  pieces_in_place<float>(comm, 40'000, Average{});
  pieces_in_place<BFloat16>(comm, 20'003, Sum{});
  single_numbers(comm);
  truths(comm);
  variable_gathers<float>(comm, 3);
  variable_gathers<std::int64_t>(comm, 2000);
}

void strings_of_four(auto& comm) {
  const std::size_t me = comm.rank().value();
  std::string text = me == 2 ? std::string(5000, 'x') + "end" : "ignored";
  broadcast_object(comm, text, Rank{2});
  require(text == std::string(5000, 'x') + "end", "broadcast_object");
  const std::string own = "rank " + std::to_string(comm.rank().value());
  require(broadcast_object(comm, own, Rank{1}) == "rank 1", "broadcast_object of a constant");
  require(&broadcast_object(comm, text, Rank{0}) == &text, "broadcast_object in place");
  const auto all = all_gather_objects(comm, std::string(me * 3000, static_cast<char>('a' + me)));
  for (std::size_t w = 0; w < 4; ++w) {
    require(all[w] == std::string(w * 3000, static_cast<char>('a' + w)), "all_gather_objects");
  }
  require(gather_objects(comm, "r", Rank{1}).size() == (me == 1 ? 4u : 0u), "gather_objects");
  const std::vector<std::string> given{"zero", "", "two", "three"};
  require(scatter_objects(comm, me == 3 ? given : std::vector<std::string>(), Rank{3}) == given[me],
          "scatter_objects");
}

/// Values whose sum depends on the order.
inline std::vector<float> rough_values(std::size_t rank, std::size_t n) {
  std::vector<float> data(n);
  for (std::size_t i = 0; i < n; ++i)
    data[i] =
        std::sin(static_cast<float>(i * 4 + rank)) * std::pow(10.f, static_cast<float>(i % 9));
  return data;
}

template <class Comm>
void sums_in_rank_order(Comm& comm, const std::vector<std::size_t>& counts) {
  for (const std::size_t n : counts) {
    std::vector<float> want = rough_values(0, n);
    for (std::size_t w = 1; w < comm.world_size().value(); ++w) {
      const std::vector<float> other = rough_values(w, n);
      for (std::size_t i = 0; i < n; ++i) want[i] += other[i];
    }
    std::vector<float> data = rough_values(comm.rank().value(), n);
    comm.all_reduce(data);
    require(data == want, "another order");
  }
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random sequences of collectives against a plain model of them: every result is a sum over
/// what ranks are known to hold. The last step may be a fault of one rank, which all others must
/// name. A sequence that fails is made smaller as long as it fails, and printed.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "repeat.hpp"

namespace ranks {

enum class StepKind : unsigned {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  all_gather_variable,
  ring,  // every rank sends to the next one
  group_all_reduce,
  all_reduce_async,
  all_gather_async,
  reduce_scatter_async,
  wait,  // for an asynchronous call, of any age
  throws,
  leaves,
  other_count,
};
inline constexpr unsigned usual_kinds = static_cast<unsigned>(StepKind::throws);
inline constexpr std::string_view step_names[] = {"all_reduce",
                                                  "reduce",
                                                  "broadcast",
                                                  "all_gather",
                                                  "gather",
                                                  "scatter",
                                                  "reduce_scatter",
                                                  "all_to_all",
                                                  "barrier",
                                                  "all_gather_variable",
                                                  "ring",
                                                  "group_all_reduce",
                                                  "all_reduce_async",
                                                  "all_gather_async",
                                                  "reduce_scatter_async",
                                                  "wait",
                                                  "throws",
                                                  "leaves",
                                                  "other_count"};

struct Step {
  StepKind kind{};
  std::size_t count = 0;
  std::size_t rank = 0;   // the root, the rank with the fault, or which call to wait for
  bool in_arena = false;  // memory from `allocate`
};
struct Sequence {
  std::size_t world = 2;
  std::vector<Step> steps;

  bool has_fault() const { return !steps.empty() && steps.back().kind >= StepKind::throws; }
  std::string text() const {
    std::string out = std::to_string(world) + " ranks:";
    for (const Step& step : steps) {
      out += "\n  " + std::string(step_names[static_cast<unsigned>(step.kind)]) + " of " +
             std::to_string(step.count) + ", rank " + std::to_string(step.rank) +
             (step.in_arena ? ", in an arena" : "");
    }
    return out;
  }
};

/// A rank that makes the steps of a sequence. Elements are integers, so that every sum is exact.
template <class Comm>
class SequenceRank {
 public:
  static constexpr std::size_t most = 3000;  // elements of a rank: more than a slot holds
  static constexpr std::size_t most_calls = 6;

  SequenceRank(Comm& comm, const Sequence& sequence) : comm_(comm), sequence_(sequence) {
    // An arena for each call in flight, and one for those that block.
    for (std::size_t i = 0; i <= most_calls; ++i)
      arenas_.push_back(comm.template allocate<int>(most * world()));
    std::vector<Rank> members;
    for (std::size_t w = 0; w < world(); w += 2) members.push_back(Rank{w});
    group_.emplace(new_group(comm, members));
  }

  void run() {
    for (number_ = 0; number_ != sequence_.steps.size(); ++number_) {
      const Step& step = sequence_.steps[number_];
      if (step.kind == StepKind::leaves && step.rank % world() == me()) return;
      make(step);
    }
    while (!calls_.empty()) finish(0);
    comm_.barrier();  // the fault of a rank is seen here at the latest
  }

 private:
  struct Outstanding {
    std::function<void()> wait;  // and then compares
    std::size_t arena;
  };

  std::size_t me() const { return comm_.rank().value(); }
  std::size_t world() const { return sequence_.world; }

  /// What a rank holds at position i in this step.
  static int value(std::size_t rank, std::size_t number, std::size_t i) {
    return static_cast<int>((rank * 31 + number * 7 + i * 3) % 1009);
  }
  int sum(std::size_t number, std::size_t i, std::size_t every = 1) const {
    int all = 0;
    for (std::size_t w = 0; w < world(); w += every) all += value(w, number, i);
    return all;
  }
  template <class F>
  void compare(std::span<const int> values, std::size_t number, const F& want) const {
    for (std::size_t i = 0; i != values.size(); ++i) {
      if (values[i] == want(i)) continue;
      throw std::runtime_error("wrong: step " + std::to_string(number) + ", element " +
                               std::to_string(i) + " is " + std::to_string(values[i]) +
                               " instead of " + std::to_string(want(i)));
    }
  }

  std::span<int> memory(const Step& step, std::size_t count, std::size_t arena) {
    if (step.in_arena) return arenas_[arena].first(count);
    own_.resize(most_calls + 1);
    own_[arena].assign(std::max(count, own_[arena].size()), 0);
    return std::span(own_[arena]).first(count);
  }
  std::span<int> filled(const Step& step, std::size_t count, std::size_t arena) {
    const std::span<int> values = memory(step, count, arena);
    for (std::size_t i = 0; i != count; ++i) values[i] = value(me(), number_, i);
    return values;
  }

  void finish(std::size_t index) {
    const Outstanding call = std::move(calls_[index]);
    calls_.erase(calls_.begin() + static_cast<std::ptrdiff_t>(index));
    call.wait();
  }
  std::size_t free_arena() {
    if (calls_.size() == most_calls) finish(0);
    std::size_t arena = 0;
    while (std::ranges::count(calls_, arena, &Outstanding::arena) != 0) ++arena;
    return arena;
  }
  /// Keeps the handle that `start()` returns, and how the result is compared.
  template <class Start, class Compare>
  void keep(std::size_t arena, const Start& start, const Compare& compare) {
    using Work = std::invoke_result_t<Start>;
    const std::shared_ptr<Work> handle(new Work(start()));
    calls_.push_back({[handle, compare] {
                        while (!handle->test()) std::this_thread::yield();
                        handle->wait();
                        compare();
                      },
                      arena});
  }

  void make(const Step& step) {
    const std::size_t n = step.count;
    const std::size_t w = world();
    const std::size_t number = number_;
    const Rank root{step.rank % w};
    const bool is_root = comm_.rank() == root;
    constexpr std::size_t blocking = most_calls;
    const auto all = [=, this](std::size_t i) { return sum(number, i); };
    const auto mine = [=, this](std::size_t i) { return value(me(), number, i); };
    const auto of_every = [=](std::size_t i) { return value(i / n, number, i % n); };
    std::vector<int> pieces;
    switch (step.kind) {
      case StepKind::all_reduce: {
        const auto data = filled(step, n, blocking);
        comm_.all_reduce(data);
        return compare(data, number, all);
      }
      case StepKind::reduce: {
        const auto data = filled(step, n, blocking);
        comm_.reduce(data, root);
        return is_root ? compare(data, number, all) : compare(data, number, mine);
      }
      case StepKind::broadcast: {
        const auto data = filled(step, n, blocking);
        comm_.broadcast(data, root);
        return compare(data, number, [&](std::size_t i) { return value(root.value(), number, i); });
      }
      case StepKind::all_gather:
        pieces.resize(n * w);
        comm_.all_gather(filled(step, n, blocking), pieces);
        return compare(pieces, number, of_every);
      case StepKind::gather:
        pieces.resize(is_root ? n * w : 0);
        comm_.gather(filled(step, n, blocking), pieces, root);
        return compare(pieces, number, of_every);
      case StepKind::scatter:
        pieces.resize(n);
        comm_.scatter(is_root ? filled(step, n * w, blocking) : std::span<int>(), pieces, root);
        return compare(pieces, number,
                       [&](std::size_t i) { return value(root.value(), number, me() * n + i); });
      case StepKind::reduce_scatter:
        pieces.resize(n);
        comm_.reduce_scatter(filled(step, n * w, blocking), pieces);
        return compare(pieces, number, [&](std::size_t i) { return sum(number, me() * n + i); });
      case StepKind::all_to_all:
        pieces.resize(n * w);
        comm_.all_to_all(filled(step, n * w, blocking), pieces);
        return compare(pieces, number,
                       [&](std::size_t i) { return value(i / n, number, me() * n + i % n); });
      case StepKind::barrier:
        return comm_.barrier();
      case StepKind::all_gather_variable: {
        const auto gathered = comm_.all_gather_variable(filled(step, n * me() % most, blocking));
        for (std::size_t r = 0; r != w; ++r) {
          require(gathered.counts[r] == n * r % most, "wrong: a count of all_gather_variable");
          compare(std::span(gathered.values).subspan(gathered.offsets[r], gathered.counts[r]),
                  number, [&](std::size_t i) { return value(r, number, i); });
        }
        return;
      }
      case StepKind::ring: {
        if (w == 1) return;
        pieces.resize(n);
        const auto data = filled(step, n, blocking);
        const Rank next{(me() + 1) % w};
        const Rank last{(me() + w - 1) % w};
        if (me() != 0) comm_.receive(pieces, last);
        comm_.send(data, next);
        if (me() == 0) comm_.receive(pieces, last);
        return compare(pieces, number,
                       [&](std::size_t i) { return value(last.value(), number, i); });
      }
      case StepKind::group_all_reduce: {
        if (!*group_) return;
        const auto data = filled({}, n, blocking);
        (*group_)->all_reduce(data);
        return compare(data, number, [&](std::size_t i) { return sum(number, i, 2); });
      }
      case StepKind::all_reduce_async: {
        const std::size_t arena = free_arena();
        const auto data = filled(step, n, arena);
        return keep(
            arena, [&] { return comm_.all_reduce_async(data); },
            [=, this] { compare(data, number, all); });
      }
      case StepKind::all_gather_async: {
        const std::size_t arena = free_arena();
        const auto data = memory(step, n * w, arena);
        const auto own = data.subspan(me() * n, n);
        for (std::size_t i = 0; i != n; ++i) own[i] = mine(i);
        return keep(
            arena, [&] { return comm_.all_gather_async(own, data); },
            [=, this] { compare(data, number, of_every); });
      }
      case StepKind::reduce_scatter_async: {
        const std::size_t arena = free_arena();
        const auto data = filled(step, n * w, arena);
        const auto own = data.subspan(me() * n, n);
        const auto want = [=, this](std::size_t i) { return sum(number, me() * n + i); };
        return keep(
            arena, [&] { return comm_.reduce_scatter_async(data, own); },
            [=, this] { compare(own, number, want); });
      }
      case StepKind::wait:
        if (!calls_.empty()) finish(step.rank % calls_.size());
        return;
      case StepKind::throws:
        if (is_root) throw std::runtime_error("out of luck");
        return;
      case StepKind::leaves:
        return;
      case StepKind::other_count: {
        const auto data = filled(step, is_root ? n + 1 : n, blocking);
        comm_.all_reduce(data);
        throw std::runtime_error("wrong: a call of different counts was made");
      }
    }
  }

  Comm& comm_;
  const Sequence& sequence_;
  std::vector<std::span<int>> arenas_;
  std::vector<std::vector<int>> own_;
  std::optional<decltype(new_group(std::declval<Comm&>(), std::vector<Rank>()))> group_;
  std::vector<Outstanding> calls_;  // before the memory that they use goes
  std::size_t number_ = 0;
};

/// What is wrong with the ranks' ends; empty if nothing is.
inline std::string judge(const Sequence& sequence, const Ends& ends) {
  for (std::size_t r = 0; r != ends.size(); ++r) {
    const std::string& end = ends[r];
    const std::string of_rank = "rank " + std::to_string(r) + " ends with '" + end + "'";
    if (!sequence.has_fault()) {
      if (!end.empty()) return of_rank;
      continue;
    }
    const Step& fault = sequence.steps.back();
    const std::size_t culprit = fault.rank % sequence.world;
    const bool is_culprit = r == culprit;
    if (is_culprit && fault.kind == StepKind::throws && end != "out of luck") return of_rank;
    if (is_culprit && fault.kind == StepKind::leaves && !end.empty()) return of_rank;
    if (is_culprit && fault.kind != StepKind::other_count) continue;
    // Ranks that call with another count are named in a pair with rank 0.
    const std::string named = "rank " + std::to_string(is_culprit ? 0 : culprit);
    if (end.find(named) == std::string::npos && end.find("ranks disagree") == std::string::npos)
      return of_rank;
  }
  return "";
}

template <class Rendezvous>
std::string try_sequence(As as, const Sequence& sequence) {
  const Ends ends =
      run<Rendezvous>(as, sequence.world, [&](auto& comm) { SequenceRank(comm, sequence).run(); });
  return judge(sequence, ends);
}

/// A sequence that fails with as few steps and elements as can be found in a hundred tries.
template <class Rendezvous>
Sequence smallest(As as, Sequence failing) {
  int tries = 0;
  const auto still_fails = [&](const Sequence& smaller) {
    return ++tries < 100 && !try_sequence<Rendezvous>(as, smaller).empty();
  };
  for (std::size_t part = failing.steps.size() / 2; part != 0; part /= 2) {
    for (std::size_t at = 0; at + part < failing.steps.size() + (failing.has_fault() ? 0 : 1);) {
      Sequence smaller = failing;
      smaller.steps.erase(smaller.steps.begin() + static_cast<std::ptrdiff_t>(at),
                          smaller.steps.begin() + static_cast<std::ptrdiff_t>(at + part));
      if (still_fails(smaller)) {
        failing = smaller;
      } else {
        at += part;
      }
    }
  }
  for (std::size_t i = 0; i != failing.steps.size(); ++i) {
    Sequence smaller = failing;
    smaller.steps[i].count = std::min<std::size_t>(smaller.steps[i].count, 1);
    if (still_fails(smaller)) failing = smaller;
  }
  return failing;
}

/// LOCKSTEP_SEQUENCES: how many, where it is set.
template <class Rendezvous>
void random_sequences(As as, int usually, int in_long_runs) {
  constexpr std::size_t counts[] = {0, 1, 7, 64, 1023, 1025, SequenceRank<Shared>::most};
  Chance chance;
  const char* const given = std::getenv("LOCKSTEP_SEQUENCES");
  const int sequences = given != nullptr ? std::atoi(given) : repetitions(usually, in_long_runs);
  std::size_t steps = 0;
  for (int i = 0; i != sequences; ++i) {
    Sequence sequence{1 + chance(4), {}};
    for (unsigned left = 1 + chance(30); left != 0; --left) {
      sequence.steps.push_back({static_cast<StepKind>(chance(usual_kinds)),
                                counts[chance(std::size(counts))], chance(12), chance(2) == 0});
    }
    if (sequence.world > 1 && chance(3) == 0)
      sequence.steps.push_back(
          {static_cast<StepKind>(usual_kinds + chance(3)), 100, chance(4), chance(2) == 0});
    steps += sequence.steps.size();
    const std::string first = try_sequence<Rendezvous>(as, sequence);
    if (first.empty()) continue;
    BOOST_TEST_MESSAGE("sequence " << i << ", " << sequence.text() << "\n" << first);
    const Sequence shown = smallest<Rendezvous>(as, sequence);
    const std::string how = try_sequence<Rendezvous>(as, shown);
    BOOST_TEST(false, "sequence " << i << ", " << shown.text() << "\n"
                                  << (how.empty() ? "(not every time)" : how));
    return;
  }
  BOOST_TEST(steps > 0);
  BOOST_TEST_MESSAGE(steps << " steps in " << sequences << " sequences");
}

}  // namespace ranks

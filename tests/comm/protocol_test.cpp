// SPDX-License-Identifier: Apache-2.0
// All schedules of the shared-memory protocol (comm/shm/communicator.hpp, comm/call/peers.hpp) for
// two and three ranks: post, compare, work, finish, leave, abort and death, on a model whose loads
// may return any value that C++'s memory model allows. Each rank is a list of the accesses that the
// communicator's functions make, under the same names; the ring has two slots.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t most_ranks = 3;
constexpr std::uint8_t ring = 2;

enum class Order : std::uint8_t {
  relaxed,
  synchronizing
};  // release for stores, acquire for loads

/// What the protocol does; each member broken is a fault that the search must find.
struct Protocol {
  Order publish = Order::synchronizing;
  Order observe = Order::synchronizing;
  bool awaits_slot = true;      // `post` waits until the slot's last call is over on all ranks
  bool awaits_finished = true;  // `Pending::wait` waits until nobody uses this rank's memory
  bool compares_first = true;   // `wait_arrived` compares before data is written
  bool looks_again = true;      // `await` reads the counter again before a fault ends the wait
};

// Atomic variables, one of each kind for every rank.
enum Atomic : std::uint8_t { arrived, finished, has_left, has_reason, atomics };

enum class Op : std::uint8_t { write, read, compare, store, await, abort, done };

struct Access {
  Op op{};
  std::uint8_t at = 0;     // the rank whose variable it is
  std::uint8_t what = 0;   // an `Atomic`, or a cell of that rank
  std::uint8_t value = 0;  // stored, awaited at least, or expected
};

// Cells: plain memory of a rank, in which accesses that nothing orders are a race.
constexpr std::uint8_t call_in(std::uint8_t slot) { return slot; }
constexpr std::uint8_t data_in(std::uint8_t slot) { return ring + slot; }
constexpr std::uint8_t memory_slice(std::size_t rank) {
  return static_cast<std::uint8_t>(2 * ring + rank);
}
constexpr std::size_t cells = 2 * ring + most_ranks;

/// One rank's accesses, in the order of the program.
class Program {
 public:
  Program(const Protocol& protocol, std::uint8_t rank, std::uint8_t world)
      : protocol_(protocol), me_(rank), world_(world) {}

  /// `Engine::post` of a call; equal `kind`s are the same call.
  Program& post(std::uint8_t kind, bool small) {
    const std::uint8_t ticket = posted_++;
    if (ticket >= ring && protocol_.awaits_slot)
      for_others([&](std::uint8_t w) { add(Op::await, w, finished, ticket - ring + 1); });
    if (!small)
      for (std::uint8_t s = 0; s < world_; ++s) add(Op::write, me_, memory_slice(s), 1);
    add(Op::write, me_, call_in(ticket % ring), kind);
    if (small) add(Op::write, me_, data_in(ticket % ring), ticket);
    add(Op::store, me_, arrived, ticket + 1);
    calls_.push_back({kind, small});
    return *this;
  }
  /// `Pending::wait` of the next posted call.
  Program& wait() {
    const std::uint8_t ticket = worked_++;
    const auto [kind, small] = calls_[ticket];
    for_others([&](std::uint8_t w) { add(Op::await, w, arrived, ticket + 1); });
    if (protocol_.compares_first)
      for_others(
          [&, kind = kind](std::uint8_t w) { add(Op::compare, w, call_in(ticket % ring), kind); });
    if (small) {  // `take_from_all` of the slots
      for_others([&](std::uint8_t w) { add(Op::read, w, data_in(ticket % ring), ticket); });
    } else {  // `push` of this rank's slice
      for (std::uint8_t w = 0; w < world_; ++w) add(Op::read, w, memory_slice(me_), 1);
      for (std::uint8_t w = 0; w < world_; ++w) add(Op::write, w, memory_slice(me_), 2);
    }
    add(Op::store, me_, finished, ticket + 1);
    if (small) return *this;
    if (protocol_.awaits_finished)
      for_others([&](std::uint8_t w) { add(Op::await, w, finished, ticket + 1); });
    for (std::uint8_t s = 0; s < world_; ++s) add(Op::read, me_, memory_slice(s), 2);
    return *this;
  }
  Program& make(std::uint8_t kind, bool small) { return post(kind, small).wait(); }
  Program& abort() { return add(Op::abort, me_, has_reason, 1); }
  std::vector<Access> leave() {
    add(Op::store, me_, has_left, 1);
    add(Op::done, me_, 0, 0);
    return accesses_;
  }

 private:
  Program& add(Op op, std::uint8_t at, std::uint8_t what, int value) {
    accesses_.push_back({op, at, what, static_cast<std::uint8_t>(value)});
    return *this;
  }
  void for_others(const std::function<void(std::uint8_t)>& f) const {
    for (std::uint8_t i = 1; i < world_; ++i) f((me_ + i) % world_);
  }

  Protocol protocol_;
  std::uint8_t me_;
  std::uint8_t world_;
  std::uint8_t posted_ = 0;
  std::uint8_t worked_ = 0;
  std::vector<std::pair<std::uint8_t, bool>> calls_;
  std::vector<Access> accesses_;
};

enum class End : std::uint8_t {
  none,
  done,
  died,
  aborted,
  names_dead,
  names_failed,
  names_left,
  disagree
};

struct Clock {
  std::array<std::uint8_t, most_ranks> of{};
  void join(const Clock& other) {
    for (std::size_t r = 0; r < most_ranks; ++r) of[r] = std::max(of[r], other.of[r]);
  }
};
/// For every atomic variable, the index of the last store that a rank knows of.
using View = std::array<std::uint8_t, most_ranks * atomics>;

struct Message {
  std::uint8_t value = 0;
  Clock clock;
  View view{};
};

/// Between the load of a counter that is too low and the end of `find_culprit`.
enum class Look : std::uint8_t { none, begun, begun_after_a_death };

struct RankState {
  std::uint8_t next = 0;  // access
  Look look = Look::none;
  End end = End::none;
  std::uint8_t culprit = 0;
  Clock clock;
  View view{};
};

struct Cell {
  std::uint8_t value = 0;
  std::uint8_t writer = 0;
  std::uint8_t written = 0;  // the writer's clock
  Clock read;                // the readers' clocks
};

/// All stores to an atomic variable. Each has one writer, so that their order is that of its
/// program.
struct Stores {
  std::uint8_t count = 1;  // the first is the initial value
  std::array<Message, 7> all{};
};

struct State {
  std::array<RankState, most_ranks> ranks;
  std::array<std::array<Cell, cells>, most_ranks> memory;
  std::array<Stores, most_ranks * atomics> stores;
};
static_assert(std::has_unique_object_representations_v<State>);

/// 128 bits stand for a state that was visited.
struct Key {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  explicit Key(const State& state) {
    std::array<std::uint64_t, sizeof(State) / 8 + 1> words{};
    std::memcpy(words.data(), &state, sizeof state);
    for (const std::uint64_t word : words) {
      first = (first ^ word) * 0x9E3779B97F4A7C15u;
      first ^= first >> 29;
      second = (second + word) * 0xD6E8FEB86659FD93u;
      second ^= second >> 32;
    }
  }
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  std::size_t operator()(const Key& key) const { return key.first; }
};

class Search {
 public:
  Search(const Protocol& protocol, std::vector<std::vector<Access>> programs, int mortal = -1)
      : protocol_(protocol), programs_(std::move(programs)), mortal_(mortal) {}

  /// Visits all states. Returns what is wrong with the first bad one, or nothing. `is_right` judges
  /// how the ranks ended.
  std::string run(const std::function<bool(const State&)>& is_right) {
    State first;
    for (std::size_t r = 0; r < most_ranks; ++r) {
      first.ranks[r].clock.of[r] = 1;
      first.ranks[r].end = r < programs_.size() ? End::none : End::done;
    }
    std::string wrong;
    for (std::size_t r = 0; r < programs_.size(); ++r) plain_accesses(first, r, wrong);
    std::vector<State> open{first};
    while (!open.empty() && wrong.empty()) {
      const State state = std::move(open.back());
      open.pop_back();
      if (!seen_.insert(Key(state)).second) continue;
      std::vector<State> after;
      for (std::size_t r = 0; r < programs_.size() && wrong.empty(); ++r)
        step(state, r, after, wrong);
      const bool all_ended = std::ranges::all_of(
          state.ranks, [](const RankState& rank) { return rank.end != End::none; });
      if (all_ended && !is_right(state)) wrong = "the ranks end wrongly: " + ends(state);
      if (!all_ended && hangs(state)) wrong = "a rank hangs: " + ends(state);
      for (State& next : after) open.push_back(std::move(next));
    }
    return wrong;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  static std::size_t variable(std::size_t rank, std::uint8_t what) { return rank * atomics + what; }
  static std::string ends(const State& state) {
    std::string text;
    for (const RankState& rank : state.ranks)
      text += std::to_string(static_cast<int>(rank.end)) + "/" + std::to_string(rank.culprit) +
              "@" + std::to_string(rank.next) + " ";
    return text;
  }

  /// Does every rank that has not ended wait for what will not happen, with nobody to blame?
  bool hangs(const State& state) const {
    for (std::size_t r = 0; r < programs_.size(); ++r) {
      if (state.ranks[r].end != End::none) continue;
      const Access& access = programs_[r][state.ranks[r].next];
      const Stores& awaited = state.stores[variable(access.at, access.what)];
      if (access.op != Op::await || awaited.all[awaited.count - 1u].value >= access.value)
        return false;
      if (state.stores[variable(access.at, has_left)].count > 1) return false;
      for (std::size_t w = 0; w < programs_.size(); ++w) {
        if (state.ranks[w].end == End::died || state.stores[variable(w, has_reason)].count > 1)
          return false;
      }
    }
    return true;
  }

  void store(State& state, std::size_t r, std::uint8_t what, std::uint8_t value) const {
    RankState& rank = state.ranks[r];
    Stores& stores = state.stores[variable(r, what)];
    rank.view[variable(r, what)] = stores.count;
    Message& message = stores.all.at(stores.count++);
    message.value = value;
    if (protocol_.publish == Order::synchronizing) {
      message.clock = rank.clock;
      message.view = rank.view;
    }
    ++rank.clock.of[r];
  }
  void load(State& state, std::size_t r, std::size_t which, std::uint8_t index) const {
    RankState& rank = state.ranks[r];
    const Message& message = state.stores[which].all[index];
    if (protocol_.observe == Order::synchronizing) {
      rank.clock.join(message.clock);
      for (std::size_t v = 0; v < rank.view.size(); ++v)
        rank.view[v] = std::max(rank.view[v], message.view[v]);
    }
    rank.view[which] = std::max(rank.view[which], index);
  }

  void end(State& state, std::size_t r, End how, std::size_t culprit) const {
    // A fault that is no consequence of another rank's is published (`give_up`).
    if (how == End::disagree || how == End::aborted || how == End::names_left)
      store(state, r, has_reason, 1);
    state.ranks[r].end = how;
    state.ranks[r].culprit = static_cast<std::uint8_t>(culprit);
  }

  /// Makes a rank's plain accesses up to its next atomic one: other ranks cannot tell when, unless
  /// there is a race.
  void plain_accesses(State& state, std::size_t r, std::string& wrong) const {
    RankState& rank = state.ranks[r];
    while (rank.end == End::none) {
      const Access& access = programs_[r][rank.next];
      if (access.op == Op::done) rank.end = End::done;
      if (access.op != Op::write && access.op != Op::read && access.op != Op::compare) return;
      Cell& cell = state.memory[access.at][access.what];
      bool races = rank.clock.of[cell.writer] < cell.written;
      if (access.op == Op::write) {
        for (std::size_t w = 0; w < most_ranks; ++w) races |= rank.clock.of[w] < cell.read.of[w];
        cell = {access.value, static_cast<std::uint8_t>(r), rank.clock.of[r], {}};
      } else {
        cell.read.of[r] = rank.clock.of[r];
      }
      if (races)
        wrong = "rank " + std::to_string(r) + " races for cell " + std::to_string(access.what) +
                " of rank " + std::to_string(access.at);
      if (access.op == Op::compare && cell.value != access.value)
        return end(state, r, End::disagree, access.at);
      if (access.op == Op::read && cell.value != access.value)
        wrong = "rank " + std::to_string(r) + " reads what belongs to another call";
      ++rank.next;
    }
  }

  void step(const State& state, std::size_t r, std::vector<State>& after,
            std::string& wrong) const {
    const RankState& rank = state.ranks[r];
    if (rank.end != End::none) return;
    const auto emit = [&](const auto& change) {
      State next = state;
      change(next, next.ranks[r]);
      plain_accesses(next, r, wrong);
      after.push_back(std::move(next));
    };
    if (mortal_ == static_cast<int>(r)) emit([&](State&, RankState& me) { me.end = End::died; });
    const Access& access = programs_[r][rank.next];
    if (access.op == Op::store) {
      emit([&](State& next, RankState& me) {
        store(next, r, access.what, access.value);
        ++me.next;
      });
    } else if (access.op == Op::abort) {
      emit([&](State& next, RankState&) { end(next, r, End::aborted, r); });
    } else if (rank.look == Look::none) {  // `wait_for`
      const std::size_t which = variable(access.at, access.what);
      const Stores& stores = state.stores[which];
      // The first store that is enough: a later one would only order more.
      std::uint8_t enough = rank.view[which];
      while (enough < stores.count && stores.all[enough].value < access.value) ++enough;
      if (enough < stores.count) {
        emit([&](State& next, RankState& me) {
          load(next, r, which, enough);
          ++me.next;
        });
      }
      if (enough != rank.view[which]) {
        const bool any_dead = std::ranges::any_of(
            state.ranks, [](const RankState& other) { return other.end == End::died; });
        emit([&](State&, RankState& me) {
          me.look = any_dead ? Look::begun_after_a_death : Look::begun;
        });
      }
    } else {
      look(state, r, access, emit);
    }
  }

  /// `find_culprit` asks who has died, who has a reason and who has left; the first that it sees
  /// ends the wait. Where it sees nobody, the rank waits as before. The lock of a dead process
  /// shows at once; loads may return old values.
  template <class Emit>
  void look(const State& state, std::size_t r, const Access& access, const Emit& emit) const {
    const RankState& rank = state.ranks[r];
    if (rank.look == Look::begun) emit([](State&, RankState& me) { me.look = Look::none; });
    bool knows_reason = false;
    for (std::size_t w = 0; w < programs_.size(); ++w)
      knows_reason |= w != r && rank.view[variable(w, has_reason)] != 0;
    for (std::size_t w = 0; w < programs_.size(); ++w) {
      if (w == r) continue;
      if (state.ranks[w].end == End::died && state.stores[variable(w, has_left)].count == 1)
        emit([&](State& next, RankState&) { conclude(next, r, End::names_dead, w, access); });
      if (rank.look == Look::begun_after_a_death) continue;
      const auto see = [&](Atomic what, End how) {
        const std::size_t which = variable(w, what);
        if (state.stores[which].count == 1) return;
        emit([&](State& next, RankState&) {
          load(next, r, which, 1);
          conclude(next, r, how, w, access);
        });
      };
      see(has_reason, End::names_failed);
      if (w == access.at && !knows_reason) see(has_left, End::names_left);
    }
  }

  /// A fault was found: it ends the wait, unless the counter has been reached meanwhile.
  void conclude(State& state, std::size_t r, End how, std::size_t culprit,
                const Access& access) const {
    RankState& me = state.ranks[r];
    const std::size_t which = variable(access.at, access.what);
    me.look = Look::none;
    if (protocol_.looks_again && state.stores[which].all[me.view[which]].value >= access.value)
      return;
    end(state, r, how, culprit);
  }

  Protocol protocol_;
  std::vector<std::vector<Access>> programs_;
  int mortal_;
  std::unordered_set<Key, KeyHash> seen_;
};

/// Three small calls and two large ones, which use every slot again; two calls are in flight at
/// once.
std::vector<Access> usual_program(const Protocol& protocol, std::uint8_t rank, std::uint8_t world) {
  Program program(protocol, rank, world);
  program.post(1, true).post(2, true).wait().wait().make(3, false);
  return program.make(4, true).make(5, false).leave();
}

std::vector<std::vector<Access>> for_all(
    std::uint8_t world, const std::function<std::vector<Access>(std::uint8_t)>& program) {
  std::vector<std::vector<Access>> programs;
  for (std::uint8_t r = 0; r < world; ++r) programs.push_back(program(r));
  return programs;
}

bool all_done(const State& state) {
  return std::ranges::all_of(state.ranks,
                             [](const RankState& rank) { return rank.end == End::done; });
}

/// Every rank has come to its end, is the culprit, or names it: directly, or as the reason of a
/// rank that does.
bool all_name(const State& state, std::size_t culprit) {
  for (std::size_t r = 0; r < most_ranks; ++r) {
    const RankState* rank = &state.ranks[r];
    if (r == culprit || rank->end == End::done) continue;
    if (rank->end == End::names_failed && rank->culprit != culprit)
      rank = &state.ranks[rank->culprit];
    if (rank->end != End::disagree && rank->culprit != culprit) return false;
  }
  return true;
}

void check(Search search, const std::function<bool(const State&)>& is_right) {
  BOOST_TEST(search.run(is_right) == "");
  BOOST_TEST_MESSAGE(search.states() << " states");
}

BOOST_AUTO_TEST_SUITE(shared_memory_protocol)

BOOST_AUTO_TEST_CASE(every_schedule_ends_with_every_call_made) {
  for (const std::uint8_t world : {2, 3})
    check({{}, for_all(world, [&](std::uint8_t r) { return usual_program({}, r, world); })},
          all_done);
}

BOOST_AUTO_TEST_CASE(a_rank_that_dies_at_any_access_is_named_by_all_others) {
  for (const std::uint8_t world : {2, 3}) {
    for (int mortal = 0; mortal < world; ++mortal) {
      const auto names = [&](const State& state) {
        return all_name(state, static_cast<std::size_t>(mortal));
      };
      check(
          {{}, for_all(world, [&](std::uint8_t r) { return usual_program({}, r, world); }), mortal},
          names);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_aborts_leaves_or_makes_another_call_is_named_by_all_others) {
  for (const std::uint8_t world : {2, 3}) {
    const auto with_culprit = [&](const std::function<std::vector<Access>(Program)>& culprit) {
      return for_all(world, [&](std::uint8_t r) {
        Program program({}, r, world);
        program.make(1, true);
        return r == 1 ? culprit(program) : program.make(2, false).make(3, true).leave();
      });
    };
    const auto names = [](const State& state) { return all_name(state, 1) && !all_done(state); };
    check({{}, with_culprit([](Program program) { return program.abort().leave(); })}, names);
    check({{}, with_culprit([](Program program) { return program.make(2, false).leave(); })},
          names);
    check({{}, with_culprit([](Program program) { return program.leave(); })}, names);
    check({{}, with_culprit([](Program program) {
             return program.make(9, false).make(3, true).leave();
           })},
          names);
  }
}

BOOST_AUTO_TEST_CASE(each_part_of_the_protocol_is_needed) {
  const auto finds = [](const Protocol& broken) {
    Search search(broken, for_all(2, [&](std::uint8_t r) { return usual_program(broken, r, 2); }));
    return !search.run(all_done).empty();
  };
  BOOST_TEST(!finds({}));
  BOOST_TEST(finds({.publish = Order::relaxed}));
  BOOST_TEST(finds({.observe = Order::relaxed}));
  BOOST_TEST(finds({.awaits_slot = false}));
  BOOST_TEST(finds({.awaits_finished = false}));
  BOOST_TEST(finds({.looks_again = false}));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace

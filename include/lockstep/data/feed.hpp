// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sends batches from ranks that read them to ranks that do not: one to all, or one to each.
///
/// Where storage is slow or far, a few ranks read and feed the others. A job does so by itself,
/// while it computes, with the policy `Feed<LeaderOfGroup>`; these functions are for hand-written
/// loops. Batches are of any type that says how it is packed (serialize.hpp), and may differ in
/// size from one call to the next: sizes travel first. An empty batch is allowed, and a good way to
/// say that there are no more.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/batch.hpp"
#include "lockstep/data/serialize.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep {

namespace axes {
struct Feed : WithName<"Feed"> {};
}  // namespace axes

/// Every rank reads its own batches.
struct Own : WithName<"Own">, Choice<axes::Feed> {};

/// The first rank of each of the job's groups reads the batches of its group, and sends them on.
struct LeaderOfGroup : WithName<"LeaderOfGroup">, Choice<axes::Feed> {};

/// One rank reads all batches, the first of the first group. It scatters them to the first ranks
/// of the other groups, each of which sends on those of its group.
struct ScatterThenBroadcast : WithName<"ScatterThenBroadcast">, Choice<axes::Feed> {};

/// The policy that says who reads: `Feed<LeaderOfGroup>` with `Groups<Grid<8, 4>>`. Every rank has
/// the batches that it would have read itself.
template <class Choice>
struct Feed : detail::ChoicePolicy<axes::Feed, Choice> {
  /// Do some ranks get their batches from others?
  static constexpr bool sends = !std::is_same_v<Choice, Own>;
};

}  // namespace lockstep

namespace lockstep::detail {

/// One rank's part in feeding.
struct FeedRoute {
  /// A rank to which batches are sent: those of `count` ranks, from the `first` that is carried on.
  struct Hop {
    Rank to;
    std::size_t first;
    std::size_t count;
  };

  Rank reader;                ///< who reads this rank's batches, maybe itself
  Rank from;                  ///< who sends them, where this rank does not read
  std::vector<Rank> carried;  ///< whose batches come here: this rank's, then those to be sent on
  std::vector<Hop> hops;

  bool reads(Rank self) const { return reader == self; }
};

/// The part of `self` in a job's groups. A message carries a batch to the one rank that needs it:
/// a broadcast would bring every rank the batches of its whole group.
template <class Choice, Topology T>
FeedRoute feed_route(const T& groups, Rank self) {
  constexpr bool by_leaders = std::is_same_v<Choice, LeaderOfGroup>;
  const auto leader = [&](std::size_t g) { return groups.member(GroupRank{g}, LocalGroupRank{0}); };
  const std::size_t own = groups.group_rank(self).value();
  FeedRoute route;
  route.reader = leader(by_leaders ? own : 0);
  route.from = self == leader(own) ? route.reader : leader(own);
  if (self != leader(own)) {
    route.carried = {self};
    return route;
  }
  for (const Rank member : groups.members(GroupRank{own})) {
    if (member != self) route.hops.push_back({member, route.carried.size(), 1});
    route.carried.push_back(member);
  }
  if (by_leaders || !route.reads(self)) return route;
  // Batches for other groups leave first: they have a longer way.
  std::vector<FeedRoute::Hop> across;
  for (std::size_t g = 0; g != groups.group_world_size(); ++g) {
    if (g == own) continue;
    const std::size_t first = route.carried.size();
    for (const Rank member : groups.members(GroupRank{g})) route.carried.push_back(member);
    across.push_back({leader(g), first, route.carried.size() - first});
  }
  route.hops.insert(route.hops.begin(), across.begin(), across.end());
  return route;
}

struct NoDevice {
  constexpr int operator()() const { return 0; }
};

/// A communicator of its own and this rank's part. The rank's thread asks for rounds of batches;
/// feeding threads make them, one after the other. All ranks ask for the same rounds in the same
/// order, so that every message meets its partner, also where an evaluation comes between two
/// steps.
///
/// `select()` makes the rank's GPU current while its result lives.
template <Communicator Comm, class Select = NoDevice>
class FeedLine {
 public:
  FeedLine(Comm comm, FeedRoute route, Select select = {})
      : comm_(std::forward<Comm>(comm)), route_(std::move(route)), select_(select) {}
  FeedLine(const FeedLine&) = delete;
  FeedLine& operator=(const FeedLine&) = delete;

  Rank rank() const { return comm_.rank(); }
  const FeedRoute& route() const { return route_; }
  bool reads() const { return route_.reads(rank()); }

  // For the rank's own thread.

  /// Asks for a round. Returns its number.
  std::uint64_t ask() { return asked_++; }

  /// Has everything been made that was asked for, within the limit?
  bool is_idle_within(std::chrono::milliseconds limit) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (made_.load() != asked_) {
      if (std::chrono::steady_clock::now() > end) return false;
      sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  /// Gives up, also where the feeding thread is in a call: that call and those of the other ranks
  /// fail with this reason.
  void abandon(std::string_view reason) { comm_.abandon(reason); }

  // For feeding threads.

  /// Begins a round when those before it are over. It is over when the result ends, however it has
  /// ended. **Host** blocks until it is its turn.
  [[nodiscard]] auto begin(std::uint64_t number) {
    for (std::uint64_t made = made_.load(); made != number; made = made_.load()) made_.wait(made);
    struct Round {
      explicit Round(FeedLine& line) : line(line), on(line.select_()) {}
      Round(const Round&) = delete;
      Round& operator=(const Round&) = delete;
      ~Round() {
        line.made_.fetch_add(1);
        line.made_.notify_all();
      }
      FeedLine& line;
      decltype(std::declval<const Select&>()()) on;
    };
    return Round(*this);
  }

  /// A message: its sizes, then its bytes. **Ranks** this one and `to`. **Host** blocks.
  void send(std::span<const std::uint64_t> sizes, std::span<const std::uint8_t> bytes, Rank to) {
    comm_.send(sizes, to);
    if (!bytes.empty()) comm_.send(bytes, to);
  }
  /// `room(sizes)` gives the memory for the bytes.
  template <class Room>
  void receive(std::span<std::uint64_t> sizes, const Room& room) {
    comm_.receive(sizes, route_.from);
    if (const std::span<std::uint8_t> bytes = room(sizes); !bytes.empty())
      comm_.receive(bytes, route_.from);
  }

 private:
  Comm comm_;
  FeedRoute route_;
  [[no_unique_address]] Select select_;
  std::uint64_t asked_ = 0;              ///< rounds that loops have asked for
  std::atomic<std::uint64_t> made_ = 0;  ///< of those, how many are over
};

}  // namespace lockstep::detail

namespace lockstep {

namespace detail {

/// The memory of this thread's parcels, which later calls use again.
struct ParcelMemory {
  ParcelWriter writer;
  std::vector<std::uint8_t> buffer;

  static ParcelMemory& of_thread() {
    static thread_local ParcelMemory memory;
    return memory;
  }
};

}  // namespace detail

/// `batch` = root's batch, on all. Memory is kept: a batch that was once as large allocates
/// nothing. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void broadcast_batch(C& comm, Batch& batch, Rank root) {
  auto& [writer, buffer] = detail::ParcelMemory::of_thread();
  std::uint64_t size[] = {0};
  if (comm.rank() == root) {
    writer.clear();
    writer.put(batch);
    size[0] = writer.size();
  }
  comm.broadcast(size, root);
  const std::span<std::uint8_t> parcel =
      comm.rank() == root ? writer.written() : detail::room_in(buffer, size[0]);
  comm.broadcast(parcel, root);
  if (comm.rank() != root) detail::ParcelReader(parcel).take(batch);
}

/// Root has a batch for every rank, each of its own size; `mine` is this rank's. On other ranks
/// `batches` is not used. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void scatter_batches(C& comm, std::span<const Batch> batches, Batch& mine, Rank root) {
  auto& [writer, buffer] = detail::ParcelMemory::of_thread();
  const std::size_t world = comm.world_size().value();
  std::vector<std::uint64_t> sizes;
  if (comm.rank() == root) {
    if (batches.size() != world) {
      detail::fail("scatter_batches", {batches.size(), " batches for ", world, " ranks"},
                   "give root one batch for every rank; it may be empty", comm.rank());
    }
    writer.clear();
    for (std::size_t w = 0; w < world; ++w) {
      const std::size_t before = writer.size();
      if (Rank{w} != root) writer.put(batches[w]);
      sizes.push_back(writer.size() - before);
    }
  }
  std::uint64_t size[] = {0};
  comm.scatter(sizes, size, root);
  if (comm.rank() != root) {
    const std::span<std::uint8_t> parcel = detail::room_in(buffer, size[0]);
    comm.receive(parcel, root);
    detail::ParcelReader(parcel).take(mine);
    return;
  }
  std::size_t begin = 0;
  for (std::size_t w = 0; w < world; ++w) {
    if (Rank{w} == root) {
      mine = batches[w];
    } else {
      comm.send(writer.written().subspan(begin, sizes[w]), Rank{w});
    }
    begin += sizes[w];
  }
}

template <Communicator C, class Batch>
void scatter_batches(C& comm, const std::vector<Batch>& batches, Batch& mine, Rank root) {
  scatter_batches(comm, std::span(batches), mine, root);
}

}  // namespace lockstep

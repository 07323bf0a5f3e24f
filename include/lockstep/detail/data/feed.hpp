// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches from ranks that read to others: `Feed`, `broadcast_batch` and `scatter_batches`.

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/serialize.hpp"
#include "lockstep/detail/topology/topology.hpp"

namespace lockstep {

namespace axes {
struct Feed : WithName<"Feed"> {};
}  // namespace axes

/// Every rank reads its own batches.
struct Own : WithName<"Own">, Choice<axes::Feed> {};

/// The first rank of each of the job's groups reads and sends the batches of its group.
struct LeaderOfGroup : WithName<"LeaderOfGroup">, Choice<axes::Feed> {};

/// The first rank of the first group reads all batches and scatters them to the first ranks of the
/// other groups, which forward those of their group.
struct ScatterThenBroadcast : WithName<"ScatterThenBroadcast">, Choice<axes::Feed> {};

/// The policy of who reads a rank's batches: `Feed<LeaderOfGroup>` with `Groups<Grid<8, 4>>`.
template <class Choice>
struct Feed : detail::ChoicePolicy<axes::Feed, Choice> {
  static constexpr bool sends = !std::is_same_v<Choice, Own>;
};

namespace detail {

struct FeedRoute {
  /// A rank whose batches pass through this rank, and the next rank on their way.
  struct Carried {
    Rank whose;
    Rank to;
  };

  Rank reader;                   ///< of this rank's batches, possibly itself
  Rank from;                     ///< sender of this rank's batches, if it does not read
  std::vector<Carried> carried;  ///< in sending order; this rank's own are the last

  bool reads(Rank self) const { return reader == self; }
};

/// The route of `self`. A broadcast instead would bring every rank the batches of its whole group.
template <class Choice, Topology T>
FeedRoute feed_route(const T& groups, Rank self) {
  constexpr bool by_leaders = std::is_same_v<Choice, LeaderOfGroup>;
  const auto leader = [&](std::size_t g) { return groups.member(GroupRank{g}, LocalGroupRank{0}); };
  const std::size_t own = groups.group_rank(self).value();
  FeedRoute route{leader(by_leaders ? own : 0), leader(own), {}};
  if (self == leader(own)) {
    route.from = route.reader;
    // Batches for other groups, with a longer way, are sent first; leaders get their own last.
    for (std::size_t g = 0; !by_leaders && route.reads(self) && g != groups.group_world_size();
         ++g) {
      if (g == own) continue;
      for (const Rank member : groups.members(GroupRank{g}))
        if (member != leader(g)) route.carried.push_back({member, leader(g)});
      route.carried.push_back({leader(g), leader(g)});
    }
    for (const Rank member : groups.members(GroupRank{own}))
      if (member != self) route.carried.push_back({member, member});
  }
  route.carried.push_back({self, self});
  return route;
}

inline constexpr auto no_device = [] { return 0; };

/// A communicator for feeding and this rank's route. All ranks request the same rounds in the same
/// order, which feeding threads make: sends and receives match even if an evaluation comes between
/// two steps. `select()` makes the rank's GPU current while its result lives.
template <Communicator Comm, class Select = decltype(no_device)>
class FeedLine {
 public:
  FeedLine(Comm comm, FeedRoute route, Select select = {})
      : comm_(std::forward<Comm>(comm)), route_(std::move(route)), select_(select) {}
  FeedLine(const FeedLine&) = delete;
  FeedLine& operator=(const FeedLine&) = delete;

  Rank rank() const { return comm_.rank(); }
  const FeedRoute& route() const { return route_; }
  bool reads() const { return route_.reads(rank()); }

  /// Requests a round and returns its number.
  std::uint64_t ask() { return asked_++; }

  /// Waits at most `limit` for all requested rounds. Returns whether they are made.
  bool is_idle_within(std::chrono::milliseconds limit) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (made_.load() != asked_) {
      if (std::chrono::steady_clock::now() > end) return false;
      sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  /// Aborts: pending calls on all ranks, the feeding thread's included, fail with this reason.
  void abort(std::string_view reason) { comm_.abort(reason); }

  /// Calls `make()` after all earlier rounds; counts the round even if it throws. **Host** blocks.
  void make_round(std::uint64_t number, const auto& make) {
    for (std::uint64_t made = made_.load(); made != number; made = made_.load()) made_.wait(made);
    [[maybe_unused]] const auto on = select_();
    const auto end = [](FeedLine* line) {
      line->made_.fetch_add(1);
      line->made_.notify_all();
    };
    const std::unique_ptr<FeedLine, void (*)(FeedLine*)> round(this, end);  // on every exit
    make();
  }

  /// The content of a message: a batch, or an error message in place of all batches of a round.
  enum Holds : std::uint64_t { batch, failure };

  /// **Ranks** this one and `to`. **Host** blocks.
  void send(Holds holds, std::span<const std::uint8_t> bytes, Rank to) {
    const std::uint64_t front[] = {holds, bytes.size()};
    comm_.send(front, to);
    if (!bytes.empty()) comm_.send(bytes, to);
  }
  /// The bytes are in `buffer`. **Ranks** this one and its sender. **Host** blocks.
  std::pair<Holds, std::span<std::uint8_t>> receive(std::vector<std::uint8_t>& buffer) {
    std::uint64_t front[2];
    comm_.receive(front, route_.from);
    const std::span<std::uint8_t> bytes = room_in(buffer, front[1]);
    if (!bytes.empty()) comm_.receive(bytes, route_.from);
    return {static_cast<Holds>(front[0]), bytes};
  }

 private:
  Comm comm_;
  FeedRoute route_;
  [[no_unique_address]] Select select_;
  std::uint64_t asked_ = 0;              ///< requested rounds
  std::atomic<std::uint64_t> made_ = 0;  ///< finished rounds
};

inline auto& archive_memory() {
  static thread_local std::pair<ArchiveWriter, std::vector<std::uint8_t>> memory;
  return memory;
}

/// Round t of a loop is the t-th batch of every rank that still has one. A reading rank loads all
/// batches of a round before it sends the first, so that a failure reaches all ranks that it feeds
/// in the same round. A thread makes `prefetch` rounds ahead; a loop's end waits for them.
template <Dataset Source, Sampling Sampler, class Line>
class FedBatches {
 public:
  using batch_type = typename Source::batch_type;
  static constexpr bool collective = true;

  struct Slot {
    std::size_t round = 0;
    std::uint64_t number = 0;  ///< among all rounds of the line
    batch_type batch;
  };

  FedBatches(const Source& dataset, const LoaderOptions& options, Line& line)
      : options_(options),
        line_(line),
        loader_(dataset, options),
        batches_(line.route().carried.size()) {
    if (line.reads()) loads_.emplace(batches_.size() * slots(), options.workers, loader_);
  }

  /// A thread makes rounds ahead even without workers: other ranks must not wait for this loop.
  std::size_t slots() const { return std::max<std::size_t>(1, options_.prefetch) + 1; }
  std::size_t workers() const { return 1; }

  /// Returns the number of rounds that concern this rank. The feeding thread must be idle.
  std::size_t begin(const Sampler& sampler, std::size_t) {
    shares_.clear();
    loader_.begin(sampler, 0);
    const std::size_t begin = sampler.position();
    // Ranks end an epoch in the same round: if this rank has drawn all, so have the others.
    const bool is_over = begin != 0 && begin >= sampler.size();
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      shares_.push_back(sampler.share_of(carried(i).whose));
      const std::size_t draws = shares_[i].size();
      batches_[i] = is_over ? 0 : batch_count(draws - std::min(begin, draws), options_);
    }
    rounds_ = *std::max_element(batches_.begin(), batches_.end());
    if (!loads_) return rounds_;
    loads_->clear();
    order_.emplace(sampler.whole());
    next_round_ = next_ = 0;
    return rounds_;
  }

  void request(Slot& slot, const Sampler&, std::size_t round) {
    slot.round = round;
    slot.number = line_.ask();
  }

  void fill(Slot& slot) {
    line_.make_round(slot.number, [&] {
      const InJobCall in(JobCall::batches);
      loads_ ? read(slot.round, slot.batch) : receive(slot.round, slot.batch);
    });
  }

  /// Aborts if an exception ends the loop on this rank alone: other ranks will not join its rounds.
  void leave() {
    constexpr std::chrono::milliseconds grace{500};
    if (scope_.is_failure() && !line_.is_idle_within(grace)) line_.abort(ended_by_exception);
  }

 private:
  using Loader = LocalBatches<Source, Sampler>;
  using Loaded = typename Loader::Slot;

  bool has_batch(std::size_t i, std::size_t round) const { return round < batches_[i]; }
  const FeedRoute::Carried& carried(std::size_t i) const { return line_.route().carried[i]; }
  bool is_own(std::size_t i) const { return i + 1 == batches_.size(); }

  void request_loads() {
    for (; next_round_ != rounds_ && !loads_->full(); advance()) {
      if (!has_batch(next_, next_round_)) continue;
      loads_->request([this](Loaded& slot) {
        const auto& share = shares_[next_];
        loader_.request(slot, share, next_round_,
                        [&](std::size_t draw) { return (*order_)[share.index(draw)]; });
      });
    }
    loads_->publish();
  }
  void advance() {
    if (++next_ != batches_.size()) return;
    next_ = 0;
    ++next_round_;
  }

  void read(std::size_t round, batch_type& own) {
    request_loads();
    std::exception_ptr failure;
    loaded_.assign(batches_.size(), nullptr);
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      if (!has_batch(i, round)) continue;
      try {
        loaded_[i] = &loads_->take();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) {
      send_failure(round, with_rank(error_of(failure), line_.rank()).what());
      std::rethrow_exception(failure);
    }
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      if (loaded_[i] == nullptr) continue;
      if (is_own(i)) {
        std::swap(own, loaded_[i]->batch);
      } else {
        writer_.clear();
        writer_.put(loaded_[i]->batch);
        line_.send(Line::batch, writer_.written(), carried(i).to);
      }
    }
  }

  void receive(std::size_t round, batch_type& own) {
    for (std::size_t i = 0; i != batches_.size(); ++i) {
      if (!has_batch(i, round)) continue;
      const auto [holds, bytes] = line_.receive(buffer_);
      if (holds == Line::failure) {
        const std::string said(bytes.begin(), bytes.end());
        send_failure(round, said);
        throw rank_failed("batches", line_.route().reader, said, line_.rank());
      }
      if (is_own(i)) {
        ArchiveReader(bytes).take(own);
      } else {
        line_.send(Line::batch, bytes, carried(i).to);
      }
    }
  }

  /// Sends an error message to the ranks that wait for this round's batches.
  void send_failure(std::size_t round, const std::string& said) {
    Rank target = line_.rank();
    for (std::size_t i = 0; !is_own(i); ++i) {
      if (!has_batch(i, round) || std::exchange(target, carried(i).to) == carried(i).to) continue;
      line_.send(Line::failure, {reinterpret_cast<const std::uint8_t*>(said.data()), said.size()},
                 target);
    }
  }

  LoaderOptions options_;
  Line& line_;
  Loader loader_;                     ///< on a reading rank
  std::vector<std::size_t> batches_;  ///< number of batches of each carried rank
  std::vector<decltype(std::declval<const Sampler&>().share_of(Rank{}))> shares_;
  std::size_t rounds_ = 0;
  ArchiveWriter writer_;
  std::vector<std::uint8_t> buffer_;

  // On a reading rank.
  std::optional<decltype(std::declval<const Sampler&>().whole())> order_;
  std::size_t next_round_ = 0;   ///< of the next batch to request
  std::size_t next_ = 0;         ///< index of its carried rank
  std::vector<Loaded*> loaded_;  ///< batches of the round, by carried rank
  std::optional<PrefetchQueue<Loaded, const Loader>> loads_;
  EndOfScope scope_;
};

/// The result of `job.open` in a job with `Feed`: a data set for the job's loops.
template <Dataset Source>
class Opened {
 public:
  using batch_type = typename Source::batch_type;

  /// Opens the data if this rank `reads`. Sizes must agree. **Ranks** all. **Host** blocks.
  Opened(auto& comm, bool reads, auto& make) {
    if (reads) source_.emplace(make());
    const std::uint64_t own[] = {reads ? 1u : 0u, reads ? source_->size() : 0u};
    std::vector<std::uint64_t> all(2 * comm.world_size().value());
    comm.all_gather(own, all);
    std::optional<std::size_t> first;
    for (std::size_t r = 0; 2 * r != all.size(); ++r) {
      if (all[2 * r] == 0) continue;
      if (!first) {
        first = r;
        size_ = all[2 * r + 1];
      } else if (all[2 * r + 1] != size_) {
        fail("open",
             {"the data of rank ", *first, " has ", size_, " samples, that of rank ", r, " has ",
              all[2 * r + 1]},
             "let all ranks that read open the same data", comm.rank());
      }
    }
  }

  std::size_t size() const { return size_; }
  /// The data set, or null if another rank reads.
  const Source* here() const { return source_ ? &*source_ : nullptr; }

  void load(std::span<const std::size_t> indices, auto&&... rest) const
    requires requires(const Source& source) { source.load(indices, rest...); }
  {
    if (!source_)
      fail("open", {"this rank has no data to load: another rank reads for it"},
           "let the loops of the job load, or leave Feed out");
    source_->load(indices, rest...);
  }

 private:
  std::optional<Source> source_;
  std::size_t size_ = 0;
};

}  // namespace detail

/// Broadcasts root's batch to all ranks. Sizes may change from call to call; an empty batch is
/// allowed, for example to mark the end. Memory is reused. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void broadcast_batch(C& comm, Batch& batch, Rank root) {
  auto& [writer, buffer] = detail::archive_memory();
  std::uint64_t size[] = {0};
  if (comm.rank() == root) {
    writer.clear();
    writer.put(batch);
    size[0] = writer.size();
  }
  comm.broadcast(size, root);
  const std::span<std::uint8_t> archive =
      comm.rank() == root ? writer.written() : detail::room_in(buffer, size[0]);
  comm.broadcast(archive, root);
  if (comm.rank() != root) detail::ArchiveReader(archive).take(batch);
}

/// Sends root's `batches`, one per rank and of any size, to `mine`. **Ranks** all. **Host** blocks.
template <Communicator C, class Batch>
void scatter_batches(C& comm, std::type_identity_t<std::span<const Batch>> batches, Batch& mine,
                     Rank root) {
  auto& [writer, buffer] = detail::archive_memory();
  const std::size_t world = comm.world_size().value();
  std::uint64_t size[] = {0};
  if (comm.rank() != root) {
    comm.receive(size, root);
    const std::span<std::uint8_t> archive = detail::room_in(buffer, size[0]);
    comm.receive(archive, root);
    detail::ArchiveReader(archive).take(mine);
    return;
  }
  if (batches.size() != world) {
    detail::fail("scatter_batches", {batches.size(), " batches for ", world, " ranks"},
                 "give root one batch for every rank; it may be empty", comm.rank());
  }
  mine = batches[root.value()];
  for (std::size_t w = 0; w < world; ++w) {
    if (Rank{w} == root) continue;
    writer.clear();
    writer.put(batches[w]);
    size[0] = writer.size();
    comm.send(size, Rank{w});
    comm.send(writer.written(), Rank{w});
  }
}

}  // namespace lockstep

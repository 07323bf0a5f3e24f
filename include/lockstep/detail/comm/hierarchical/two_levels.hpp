// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of all ranks through the communicators inside and between hosts alone.

#include "lockstep/detail/comm/hierarchical/communicator.hpp"

namespace lockstep::detail {

/// Hosts have equally many consecutive ranks: rank = host * local_world + local_rank, as launchers
/// count. Reductions gather and combine all elements, for small data and rare calls. The
/// constructor allocates device memory; a call that needs more does so before its first stage, when
/// all ranks of the host are there and nothing is in flight. **Host**, **Stream** as the levels.
template <Communicator Inside, Communicator Between>
class TwoLevels : public Collectives<TwoLevels<Inside, Between>> {
 public:
  TwoLevels(const Hosts& hosts, Inside& inside, Between& between)
      : hosts_(&hosts), inside_(&inside), between_(&between) {
    if constexpr (!works_on_host<Inside>) {
      for (const Use use : {Use::here, Use::combined}) memory_of(use).grow(*inside_, first_bytes);
    }
  }

  Rank rank() const { return Rank{host() * local_world() + local_rank()}; }
  WorldSize world_size() const { return WorldSize{hosts() * local_world()}; }
  auto timeout() const { return between_->timeout(); }

  // The two communicators have timeouts and faults of their own.
  template <class Limit>
  void set_timeout(Limit) {}
  void abort(std::string_view) {}

  /// If ranks agree inside every host, and between hosts for every local rank, then all agree.
  void agree(const Call& call) {
    on(*inside_, [&](auto& own) { own.agree(call); });
    on(*between_, [&](auto& others) { others.agree(call); });
  }

  /// The two levels compare the calls that they get, so nothing is compared here.
  template <class C>
  void perform(const C& call) {
    execute_any(*this, call);
  }

  void execute(const calls::Barrier&) {
    on(*inside_, [](auto& own) { own.barrier(); });
    on(*between_, [](auto& others) { others.barrier(); });
  }

  template <class T>
  void execute(const calls::Broadcast<T>& call) {
    if (local_rank() == local_rank_of(call.root))
      on(*between_, [&](auto& others) { others.broadcast(call.data(), Rank{host_of(call.root)}); });
    on(*inside_, [&](auto& own) { own.broadcast(call.data(), Rank{local_rank_of(call.root)}); });
  }

  template <class T>
  void execute(const calls::AllGather<T>& call) {
    const auto here = scratch(Use::here, call.out.data(), call.count * local_world());
    on(*inside_, [&](auto& own) { own.all_gather(call.in, here); });
    on(*between_, [&](auto& others) { others.all_gather(here, call.out); });
  }

  template <class T>
  void execute(const calls::Gather<T>& call) {
    connect_messages();
    const bool collects = local_rank() == local_rank_of(call.root);
    const auto here = scratch(Use::here, call.in.data(), call.count * local_world())
                          .first(collects ? call.count * local_world() : 0);
    on(*inside_, [&](auto& own) { own.gather(call.in, here, Rank{local_rank_of(call.root)}); });
    if (collects)
      on(*between_, [&](auto& others) { others.gather(here, call.out, Rank{host_of(call.root)}); });
  }

  template <class T>
  void execute(const calls::Scatter<T>& call) {
    connect_messages();
    const bool deals = local_rank() == local_rank_of(call.root);
    const auto here = scratch(Use::here, call.out.data(), call.count * local_world())
                          .first(deals ? call.count * local_world() : 0);
    if (deals)
      on(*between_, [&](auto& others) { others.scatter(call.in, here, Rank{host_of(call.root)}); });
    on(*inside_, [&](auto& own) { own.scatter(here, call.out, Rank{local_rank_of(call.root)}); });
  }

  /// Elements go to the right host first, then to the right local rank on it.
  template <class T>
  void execute(const calls::AllToAll<T>& call) {
    connect_messages();
    const auto here =
        scratch(Use::here, call.out.data(), call.in.size());  // [from host][to local_rank]
    const auto sorted =
        scratch(Use::sorted, call.out.data(), call.in.size());  // [to local_rank][from host]
    on(*between_, [&](auto& others) { others.all_to_all(call.in, here); });
    transpose(here, sorted, hosts(), local_world(), call.count);
    on(*inside_, [&](auto& own) { own.all_to_all(sorted, here); });  // [from local_rank][from host]
    transpose(here, call.out, local_world(), hosts(), call.count);
  }

  /// Pieces go to root's local rank on their own host first, then to root's host.
  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, bool on_device) {
    connect_messages();
    const bool collects = local_rank() == local_rank_of(root);
    std::vector<std::size_t> of_hosts;
    for (std::size_t h = 0; h < hosts(); ++h) {
      const auto counts = std::span(pieces.counts).subspan(h * local_world(), local_world());
      of_hosts.push_back(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
    }
    const auto own = std::span(pieces.counts).subspan(host() * local_world(), local_world());
    const GatheredPieces of_places = pieces_of({own.begin(), own.end()});
    const std::size_t most = *std::max_element(of_hosts.begin(), of_hosts.end());
    const std::span<T> here =
        scratch<T>(Use::here, on_device, most).first(collects ? of_places.total() : 0);
    on(*inside_, [&](auto& level) {
      level.gather_pieces(in, here, of_places, Rank{local_rank_of(root)}, on_device);
    });
    if (!collects) return;
    on(*between_, [&](auto& level) {
      level.gather_pieces(std::span<const T>(here), out, pieces_of(of_hosts), Rank{host_of(root)},
                          on_device);
    });
  }

  template <class C>
    requires C::is_message
  void execute(C message) {
    const Rank peer = message.root;
    const auto pass = [&](auto& level, std::size_t there) {
      message.root = Rank{there};
      on(level, [&](auto& joined) { joined.perform(message); });
    };
    if (host_of(peer) == host()) {
      pass(*inside_, local_rank_of(peer));
    } else if (local_rank_of(peer) == local_rank()) {
      pass(*between_, host_of(peer));
    } else {
      fail(collective_name(C::kind),
           {"rank ", peer,
            " is on another host and has another local rank there, and no communicator joins the "
            "two"},
           "let a rank that is on this host and has that local rank pass it on", rank());
    }
  }

  /// Reductions go in parts that fit the memory that is there.
  template <class T>
  std::span<T> scratch(const T* like, std::size_t wanted, std::size_t least) {
    const std::size_t part = std::max(least, std::min(wanted, first_bytes / sizeof(T)));
    return scratch(Use::combined, like, part);
  }
  decltype(auto) passes() { return passes_of(*inside_); }

 private:
  /// Purposes for which memory is needed at the same time.
  enum class Use : std::size_t { here, sorted, combined };

  std::size_t local_world() const { return inside_->world_size().value(); }
  std::size_t hosts() const { return between_->world_size().value(); }
  std::size_t local_rank() const { return inside_->rank().value(); }
  std::size_t host() const { return between_->rank().value(); }
  std::size_t local_rank_of(Rank rank) const { return rank.value() % local_world(); }
  std::size_t host_of(Rank rank) const { return rank.value() / local_world(); }

  /// Calls `f(level)`, whose errors get the job's numbers of ranks.
  template <class Level, class F>
  void on(Level& level, const F& f) {
    try {
      f(level);
    } catch (const Error& error) {
      const bool is_inside = static_cast<const void*>(&level) == inside_;
      const std::string problem = is_inside ? hosts_->text_inside(rank(), error.problem())
                                            : hosts_->text_between(rank(), error.problem());
      throw with_context(error, error.operation(), problem, rank());
    }
  }

  /// Before the first call that is made of messages, hosts connect for them.
  void connect_messages() {
    if constexpr (requires { between_->warm_up_messages(); }) {
      if (!std::exchange(has_messages_, true)) {
        on(*inside_, [&](auto& own) {
          by_turns(own, local_rank(), local_world(), [&] { between_->warm_up_messages(); });
        });
      }
    }
  }

  Scratch& memory_of(Use use) { return scratch_[static_cast<std::size_t>(use)]; }

  /// Memory of the same kind as `like`. **Ranks** all of this host, with the same count.
  template <class T>
  auto scratch(Use use, const T* like, std::size_t count) {
    return scratch<std::remove_const_t<T>>(use, passes_of(*inside_).is_device(like), count);
  }
  template <class T>
  std::span<T> scratch(Use use, bool on_device, std::size_t count) {
    Scratch& memory = memory_of(use);
    if (!on_device) return memory.on_host<T>(count);
    if (!memory.holds(count * sizeof(T))) grow(memory, count * sizeof(T));
    return memory.get<T>(count);
  }
  [[gnu::cold]] void grow(Scratch& memory, std::size_t bytes) {
    const Call call{CollectiveKind::allocate, JobCall::none, ElementKind::u8, false, 0, bytes};
    on(*inside_, [&](auto& own) {
      own.agree(call);
      allocate_quietly(own, [&] { memory.grow(own, bytes); });
    });
  }

  /// `to` has as many rows as `from` has columns, of pieces of `n` elements.
  template <class T>
  void transpose(std::span<T> from, std::span<T> to, std::size_t rows, std::size_t columns,
                 std::size_t n) {
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t column = 0; column < columns; ++column)
        passes_of(*inside_).copy(std::span<const T>(from).subspan((row * columns + column) * n, n),
                                 to.subspan((column * rows + row) * n, n));
  }

  const Hosts* hosts_;
  Inside* inside_;
  Between* between_;
  std::array<Scratch, 3> scratch_;
  bool has_messages_ = false;

  static constexpr std::size_t first_bytes = 4_MiB;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of all ranks where no single communicator joins them: calls go through the
/// communicators inside and between hosts.

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/adapters/hierarchical/communicator.hpp"
#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// Ranks of one host are neighbours, equally many on each: rank = host * places + place. `Inside`
/// joins the places of a host, `Between` the hosts of a place. Reductions gather elements and
/// combine them, which is meant for small data and rare calls. Memory of GPUs is allocated when it
/// is made; a call that needs more takes it before its first stage, when all ranks of the host are
/// there and nothing is under way.
///
/// **Host** and **Stream** as for the two communicators.
template <Communicator Inside, Communicator Between>
class TwoLevels : public Collectives<TwoLevels<Inside, Between>> {
 public:
  TwoLevels(const Hosts& hosts, Inside& inside, Between& between)
      : hosts_(&hosts), inside_(&inside), between_(&between) {
    if constexpr (!works_on_host<Inside>) {
      for (const Use use : {Use::here, Use::combined}) memory_of(use).grow(*inside_, first_bytes);
    }
  }

  Rank rank() const { return Rank{host() * places() + place()}; }
  WorldSize world_size() const { return WorldSize{hosts() * places()}; }
  auto timeout() const { return between_->timeout(); }

  // The two communicators have time limits and faults of their own.
  template <class Limit>
  void set_timeout(Limit) {}
  void abandon(std::string_view) {}

  /// If ranks agree inside every host, and between hosts for every place, then all ranks agree.
  void agree(const Call& call) {
    inside([&](Inside& own) { own.agree(call); });
    between([&](Between& others) { others.agree(call); });
  }

  /// The two levels compare the calls that they get, so nothing is compared here.
  template <class C>
  void perform(const C& call) {
    execute_any(*this, call);
  }

  /// First waits for the ranks of this host, then for all hosts.
  void execute(const calls::Barrier&) {
    inside([](Inside& own) { own.barrier(); });
    between([](Between& others) { others.barrier(); });
  }

  template <class T>
  void execute(const calls::Broadcast<T>& call) {
    if (place() == place_of(call.root))
      between([&](Between& others) { others.broadcast(call.data(), Rank{host_of(call.root)}); });
    inside([&](Inside& own) { own.broadcast(call.data(), Rank{place_of(call.root)}); });
  }

  template <class T>
  void execute(const calls::AllGather<T>& call) {
    const auto here = scratch(Use::here, call.out.data(), call.count * places());
    inside([&](Inside& own) { own.all_gather(call.in, here); });
    between([&](Between& others) { others.all_gather(here, call.out); });
  }

  template <class T>
  void execute(const calls::Gather<T>& call) {
    connect_messages();
    const bool collects = place() == place_of(call.root);
    const auto here = scratch(Use::here, call.in.data(), call.count * places())
                          .first(collects ? call.count * places() : 0);
    inside([&](Inside& own) { own.gather(call.in, here, Rank{place_of(call.root)}); });
    if (collects)
      between([&](Between& others) { others.gather(here, call.out, Rank{host_of(call.root)}); });
  }

  template <class T>
  void execute(const calls::Scatter<T>& call) {
    connect_messages();
    const bool deals = place() == place_of(call.root);
    const auto here = scratch(Use::here, call.out.data(), call.count * places())
                          .first(deals ? call.count * places() : 0);
    if (deals)
      between([&](Between& others) { others.scatter(call.in, here, Rank{host_of(call.root)}); });
    inside([&](Inside& own) { own.scatter(here, call.out, Rank{place_of(call.root)}); });
  }

  /// Elements go to the right host first, then to the right place on it.
  template <class T>
  void execute(const calls::AllToAll<T>& call) {
    connect_messages();
    const auto here = scratch(Use::here, call.out.data(), call.in.size());  // [from host][to place]
    const auto sorted =
        scratch(Use::sorted, call.out.data(), call.in.size());  // [to place][from host]
    between([&](Between& others) { others.all_to_all(call.in, here); });
    transpose(here, sorted, hosts(), places(), call.count);
    inside([&](Inside& own) { own.all_to_all(sorted, here); });  // [from place][from host]
    transpose(here, call.out, places(), hosts(), call.count);
  }

  /// Pieces go to root's place on their own host first, then to root's host.
  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, bool on_device) {
    connect_messages();
    const bool collects = place() == place_of(root);
    const auto first = pieces.counts.begin();
    std::vector<std::size_t> of_hosts;
    for (std::size_t h = 0; h < hosts(); ++h) {
      const auto begin = first + static_cast<std::ptrdiff_t>(h * places());
      of_hosts.push_back(
          std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(places()), std::size_t{0}));
    }
    const auto own = first + static_cast<std::ptrdiff_t>(host() * places());
    const GatheredPieces of_places =
        pieces_of(std::vector<std::size_t>(own, own + static_cast<std::ptrdiff_t>(places())));
    const std::size_t most = *std::max_element(of_hosts.begin(), of_hosts.end());
    const std::span<T> here =
        scratch<T>(Use::here, on_device, most).first(collects ? of_places.total() : 0);
    inside([&](Inside& level) {
      level.gather_pieces(in, here, of_places, Rank{place_of(root)}, on_device);
    });
    if (!collects) return;
    between([&](Between& level) {
      level.gather_pieces(std::span<const T>(here), out, pieces_of(of_hosts), Rank{host_of(root)},
                          on_device);
    });
  }

  template <class T>
  void execute(const calls::Send<T>& message) {
    to_level_of("send", message.root, [&](auto& level, Rank to) { level.send(message.in, to); });
  }
  template <class T>
  void execute(const calls::Receive<T>& message) {
    to_level_of("receive", message.root,
                [&](auto& level, Rank from) { level.receive(message.out, from); });
  }

  /// The passes of `Inside`, with scratch memory of this class.
  struct LevelPasses : std::remove_cvref_t<decltype(passes_of(std::declval<Inside&>()))> {
    TwoLevels& levels;

    /// Reductions go in parts that fit the memory that is there.
    template <class T>
    std::span<T> scratch(const T* like, std::size_t wanted, std::size_t least) const {
      const std::size_t part = std::max(least, std::min(wanted, first_bytes / sizeof(T)));
      return levels.scratch(Use::combined, like, part);
    }
  };
  LevelPasses passes() { return {passes_of(*inside_), *this}; }

 private:
  /// Purposes for which memory is needed at the same time.
  enum class Use : std::size_t { here, sorted, combined };

  std::size_t places() const { return inside_->world_size().value(); }
  std::size_t hosts() const { return between_->world_size().value(); }
  std::size_t place() const { return inside_->rank().value(); }
  std::size_t host() const { return between_->rank().value(); }
  std::size_t place_of(Rank rank) const { return rank.value() % places(); }
  std::size_t host_of(Rank rank) const { return rank.value() / places(); }

  // Errors of one level count its ranks from 0, so the error adds which ranks of the job these are.
  template <class F>
  void inside(const F& f) {
    try {
      f(*inside_);
    } catch (const Error& error) {
      throw retold(error, error.operation(), hosts_->words_inside(rank()) + error.problem(),
                   rank());
    }
  }
  template <class F>
  void between(const F& f) {
    try {
      f(*between_);
    } catch (const Error& error) {
      throw retold(error, error.operation(), hosts_->words_between(rank()) + error.problem(),
                   rank());
    }
  }

  /// Calls `message(communicator, peer's rank there)` with the level that joins the two ranks.
  template <class Message>
  void to_level_of(const char* operation, Rank peer, const Message& message) {
    if (host_of(peer) == host()) {
      inside([&](Inside& own) { message(own, Rank{place_of(peer)}); });
    } else if (place_of(peer) == place()) {
      between([&](Between& others) { message(others, Rank{host_of(peer)}); });
    } else {
      throw Error(operation,
                  "rank " + std::to_string(peer.value()) +
                      " is on another host and has another place there, and no communicator joins "
                      "the two",
                  "let a rank that is on this host and has that place pass it on", rank());
    }
  }

  /// Before the first call that is made of messages, hosts connect for them.
  void connect_messages() {
    if constexpr (requires { between_->warm_up_messages(); }) {
      if (!std::exchange(has_messages_, true)) {
        inside([&](Inside& own) {
          by_turns(own, place(), places(), [&] { between_->warm_up_messages(); });
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
    Call call;
    call.kind = CollectiveKind::allocate;
    call.element = ElementKind::u8;
    call.count = bytes;
    inside([&](Inside& own) {
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

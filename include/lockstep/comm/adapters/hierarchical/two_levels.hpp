// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All ranks, where no one communicator joins them: what is for all goes through the one
/// inside of hosts and the ones between them.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call_arguments.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/adapters/hierarchical/hosts.hpp"
#include "lockstep/comm/passes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Ranks of one host are neighbours, equally many on each: rank = host * places + place. `Inside`
/// joins the places of a host, `Between` the hosts of a place. Reductions are made of gathered
/// elements, in rank order: they are for what is small, or rare.
///
/// Every collective: **Ranks** all of them, in the same order. **Host** and **Stream** as the two
/// communicators have it.
template <Communicator Inside, Communicator Between>
class TwoLevels {
 public:
  TwoLevels(const Hosts& hosts, Inside& inside, Between& between)
      : hosts_(&hosts), inside_(&inside), between_(&between) {}

  Rank rank() const { return Rank{host() * places() + place()}; }
  WorldSize world_size() const { return WorldSize{ranks()}; }
  auto timeout() const { return between_->timeout(); }

  // The two communicators have time limits and faults of their own.
  template <class Limit>
  void set_timeout(Limit) {}
  void abandon(std::string_view) {}

  void barrier() {
    inside([](Inside& own) { own.barrier(); });  // all of this host have come
    between([](Between& others) { others.barrier(); });
  }

  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    const auto values = flat(data);
    const auto gathered = scratch(Use::combined, values, values.size() * ranks());
    all_gather(values, gathered);
    Passes<Inside>::combine(*inside_, gathered, values, op);
  }

  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    const auto values = flat(data);
    const bool takes = rank() == root;
    const auto gathered = scratch(Use::combined, values, takes ? values.size() * ranks() : 0);
    gather(values, gathered, root);
    if (takes) Passes<Inside>::combine(*inside_, gathered, values, op);
  }

  template <class Data>
  void broadcast(Data&& data, Rank root) {
    check<FlatElement<Data>>(CollectiveKind::broadcast, root);
    if (place() == place_of(root))
      between([&](Between& others) { others.broadcast(data, Rank{host_of(root)}); });
    inside([&](Inside& own) { own.broadcast(data, Rank{place_of(root)}); });
  }

  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    check_size(CollectiveKind::all_gather, from, to.size(), from.size() * ranks());
    const auto here = scratch(Use::here, to, from.size() * places());
    inside([&](Inside& own) { own.all_gather(from, here); });
    between([&](Between& others) { others.all_gather(here, to); });
  }

  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    check<FlatElement<Out>>(CollectiveKind::gather, root);
    if (rank() == root) check_size(CollectiveKind::gather, from, to.size(), from.size() * ranks());
    const bool collects = place() == place_of(root);
    const auto here = scratch(Use::here, mutable_span(from), collects ? from.size() * places() : 0);
    inside([&](Inside& own) { own.gather(from, here, Rank{place_of(root)}); });
    if (collects) between([&](Between& others) { others.gather(here, to, Rank{host_of(root)}); });
  }

  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    check<FlatElement<Out>>(CollectiveKind::scatter, root);
    if (rank() == root) check_size(CollectiveKind::scatter, to, from.size(), to.size() * ranks());
    const bool deals = place() == place_of(root);
    const auto here = scratch(Use::here, to, deals ? to.size() * places() : 0);
    if (deals) between([&](Between& others) { others.scatter(from, here, Rank{host_of(root)}); });
    inside([&](Inside& own) { own.scatter(here, to, Rank{place_of(root)}); });
  }

  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    const auto from = flat(in);
    const auto to = flat(out);
    check_size(CollectiveKind::reduce_scatter, to, from.size(), to.size() * ranks());
    const auto gathered = scratch(Use::combined, to, from.size());
    all_to_all(from, gathered);
    Passes<Inside>::combine(*inside_, gathered, to, op);
  }

  /// First to the right host, then to the right place there.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    check_size(CollectiveKind::all_to_all, from, from.size() % ranks(), 0);
    check_size(CollectiveKind::all_to_all, from, to.size(), from.size());
    const std::size_t n = from.size() / ranks();
    const auto here = scratch(Use::here, to, from.size());      // [from host][to place]
    const auto sorted = scratch(Use::sorted, to, from.size());  // [to place][from host]
    between([&](Between& others) { others.all_to_all(from, here); });
    transpose(here, sorted, hosts(), places(), n);
    inside([&](Inside& own) { own.all_to_all(sorted, here); });  // [from place][from host]
    transpose(here, to, places(), hosts(), n);
  }

  template <class Data>
  void send(const Data& data, Rank to) {
    arguments().check_peer("send", to);
    if (host_of(to) == host()) {
      inside([&](Inside& own) { own.send(data, Rank{place_of(to)}); });
    } else {
      require_column("send", to);
      between([&](Between& others) { others.send(data, Rank{host_of(to)}); });
    }
  }

  template <class Data>
  void receive(Data&& data, Rank from) {
    arguments().check_peer("receive", from);
    if (host_of(from) == host()) {
      inside([&](Inside& own) { own.receive(data, Rank{place_of(from)}); });
    } else {
      require_column("receive", from);
      between([&](Between& others) { others.receive(data, Rank{host_of(from)}); });
    }
  }

 private:
  /// What memory is needed for at the same time.
  enum class Use : std::uint8_t { here, sorted, combined };

  std::size_t places() const { return inside_->world_size().value(); }
  std::size_t hosts() const { return between_->world_size().value(); }
  std::size_t place() const { return inside_->rank().value(); }
  std::size_t host() const { return between_->rank().value(); }
  std::size_t ranks() const { return hosts() * places(); }
  std::size_t place_of(Rank rank) const { return rank.value() % places(); }
  std::size_t host_of(Rank rank) const { return rank.value() / places(); }

  // Errors of one level count its ranks from 0: they are told with who these are.

  template <class F>
  void inside(const F& f) {
    try {
      f(*inside_);
    } catch (const Error& error) {
      throw explained(error, hosts_->words_inside(rank()));
    }
  }
  template <class F>
  void between(const F& f) {
    try {
      f(*between_);
    } catch (const Error& error) {
      throw explained(error, hosts_->words_between(rank()));
    }
  }
  Error explained(const Error& error, const std::string& where) const {
    const Error named(error.operation(), where + error.problem(), error.advice(), rank());
    return error.is_consequence() ? named.as_consequence() : named;
  }

  CallArguments arguments() const { return {rank(), world_size()}; }
  template <class T>
  void check(CollectiveKind kind, Rank root) const {
    arguments().template check<std::remove_const_t<T>>(kind, root);
  }
  template <class T>
  void check_size(CollectiveKind kind, std::span<T> counted, std::size_t have,
                  std::size_t want) const {
    arguments().check_size(make_call<T>(kind, counted.size(), false), have, want);
  }
  void require_column(const char* operation, Rank peer) const {
    if (place_of(peer) == place()) return;
    throw Error(operation,
                "rank " + std::to_string(peer.value()) +
                    " is on another host and has another place there, and no communicator joins "
                    "the two",
                "let a rank that is on this host and has that place pass it on", rank());
  }

  template <class T>
  static std::span<std::remove_const_t<T>> mutable_span(std::span<T> values) {
    return {const_cast<std::remove_const_t<T>*>(values.data()), values.size()};
  }

  /// Memory for a while, of the kind that `like` is.
  template <class T>
  std::span<T> scratch(Use use, std::span<T> like, std::size_t count) {
    Scratch& memory = scratch_[static_cast<std::size_t>(use)];
    const std::size_t bytes = count * sizeof(T);
    if (!Passes<Inside>::is_device(like.data())) {
      if (memory.host.size() < bytes) memory.host.resize(bytes);
      return {reinterpret_cast<T*>(memory.host.data()), count};
    }
    if (memory.device.size() < bytes)
      memory.device = inside_->template allocate<std::uint8_t>(std::bit_ceil(bytes));
    return {reinterpret_cast<T*>(memory.device.data()), count};
  }

  /// `to` has as many rows as `from` has columns, of pieces of `n` elements.
  template <class T>
  void transpose(std::span<T> from, std::span<T> to, std::size_t rows, std::size_t columns,
                 std::size_t n) {
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t column = 0; column < columns; ++column)
        Passes<Inside>::copy(*inside_, from.subspan((row * columns + column) * n, n),
                             to.subspan((column * rows + row) * n, n));
  }

  struct Scratch {
    std::vector<std::byte> host;
    std::span<std::uint8_t> device;
  };

  const Hosts* hosts_;
  Inside* inside_;
  Between* between_;
  Scratch scratch_[3];
};

}  // namespace lockstep

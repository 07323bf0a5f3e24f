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
#include "lockstep/comm/hierarchical/passes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Ranks of one host are neighbours, equally many on each: rank = host * places + place. `inside`
/// joins the places of a host, `between` the hosts of a place. Reductions are made of gathered
/// elements, in rank order: they are for what is small, or rare.
///
/// Every collective: **Ranks** all of them, in the same order. **Host** and **Stream** as the two
/// communicators have it.
template <Communicator Inside, Communicator Between>
class TwoLevels {
 public:
  TwoLevels(Inside& inside, Between& between) : inside_(&inside), between_(&between) {}

  Rank rank() const { return Rank{host() * places() + place()}; }
  WorldSize world_size() const { return WorldSize{hosts() * places()}; }
  auto timeout() const { return between_->timeout(); }

  // The two communicators have time limits and faults of their own.
  template <class Limit>
  void set_timeout(Limit) {}
  void abandon(std::string_view) {}

  /// Throws unless all make this call: at once, or as soon as it is known.
  void agree(const Call& call)
    requires requires(Inside& inside, Between& between) {
      inside.agree(call);
      between.agree(call);
    }
  {
    inside_->agree(call);
    between_->agree(call);
  }

  void barrier() {
    inside_->barrier();  // all of this host have come
    between_->barrier();
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
    if (place() == place_of(root)) between_->broadcast(data, Rank{host_of(root)});
    inside_->broadcast(data, Rank{place_of(root)});
  }

  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    check_size(CollectiveKind::all_gather, from, to.size(), from.size() * ranks());
    const auto own = scratch(Use::own_host, to, from.size() * places());
    inside_->all_gather(from, own);
    between_->all_gather(own, to);
  }

  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    check<FlatElement<Out>>(CollectiveKind::gather, root);
    if (rank() == root) check_size(CollectiveKind::gather, from, to.size(), from.size() * ranks());
    const bool collects = place() == place_of(root);
    const auto own =
        scratch(Use::own_host, mutable_span(from), collects ? from.size() * places() : 0);
    inside_->gather(from, own, Rank{place_of(root)});
    if (collects) between_->gather(own, to, Rank{host_of(root)});
  }

  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    check<FlatElement<Out>>(CollectiveKind::scatter, root);
    if (rank() == root) check_size(CollectiveKind::scatter, to, from.size(), to.size() * ranks());
    const bool deals = place() == place_of(root);
    const auto own = scratch(Use::own_host, to, deals ? to.size() * places() : 0);
    if (deals) between_->scatter(from, own, Rank{host_of(root)});
    inside_->scatter(own, to, Rank{place_of(root)});
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
    const auto arrived = scratch(Use::own_host, to, from.size());  // [from host][to place]
    const auto sorted = scratch(Use::sorted, to, from.size());     // [to place][from host]
    between_->all_to_all(from, arrived);
    transpose(arrived, sorted, hosts(), places(), n);
    inside_->all_to_all(sorted, arrived);  // [from place][from host]
    transpose(arrived, to, places(), hosts(), n);
  }

  template <class Data>
  void send(const Data& data, Rank to) {
    CallArguments{rank(), world_size()}.check_peer("send", to);
    if (host_of(to) == host()) return inside_->send(data, Rank{place_of(to)});
    require_column("send", to);
    between_->send(data, Rank{host_of(to)});
  }

  template <class Data>
  void receive(Data&& data, Rank from) {
    CallArguments{rank(), world_size()}.check_peer("receive", from);
    if (host_of(from) == host()) return inside_->receive(data, Rank{place_of(from)});
    require_column("receive", from);
    between_->receive(data, Rank{host_of(from)});
  }

 private:
  enum class Use : std::uint8_t { own_host, sorted, combined };

  std::size_t places() const { return inside_->world_size().value(); }
  std::size_t hosts() const { return between_->world_size().value(); }
  std::size_t place() const { return inside_->rank().value(); }
  std::size_t host() const { return between_->rank().value(); }
  std::size_t ranks() const { return hosts() * places(); }
  std::size_t place_of(Rank rank) const { return rank.value() % places(); }
  std::size_t host_of(Rank rank) const { return rank.value() / places(); }

  template <class T>
  void check(CollectiveKind kind, Rank root) const {
    CallArguments{rank(), world_size()}.template check<std::remove_const_t<T>>(kind, root);
  }
  template <class T>
  void check_size(CollectiveKind kind, std::span<T> counted, std::size_t have,
                  std::size_t want) const {
    const Call call = make_call<T>(kind, counted.size(), false);
    CallArguments{rank(), world_size()}.check_size(call, have, want);
  }
  void require_column(const char* operation, Rank peer) const {
    if (place_of(peer) == place()) return;
    throw Error(operation,
                "rank " + std::to_string(peer.value()) +
                    " is on another host and has another place there, and no communicator joins "
                    "the two",
                "send through a rank of one's host and the other's place", rank());
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

  Inside* inside_;
  Between* between_;
  Scratch scratch_[3];
};

}  // namespace lockstep

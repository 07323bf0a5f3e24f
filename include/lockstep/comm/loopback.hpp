// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicator of a world of one: it copies what must be copied and otherwise compiles
/// to nothing.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <span>
#include <string_view>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/host_arena.hpp"

namespace lockstep {

/// A call that was done before it began.
struct FinishedWork {
  static constexpr bool test() { return true; }
  static constexpr void wait() {}
};

class LoopbackCommunicator {
 public:
  static constexpr std::size_t most_under_way = static_cast<std::size_t>(-1);

  static constexpr Rank rank() { return Rank{0}; }
  static constexpr WorldSize world_size() { return WorldSize{1}; }

  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

  static constexpr void barrier() {}
  static constexpr void abandon(std::string_view) {}

  /// The operation over one rank. Of all operations, only a pre-multiplied sum changes what is
  /// there.
  template <class Data, class Op = Sum>
  static constexpr void all_reduce(Data&& data, Op op = {}) {
    if constexpr (requires { op.factor; }) {
      using T = FlatElement<Data>;
      for (T& value : flat(data)) value = op.template finish<T>(op.prepare(value), 1);
    }
  }
  template <class Data, class Op = Sum>
  static constexpr FinishedWork all_reduce_async(Data&& data, Op op = {}) {
    all_reduce(data, op);
    return {};
  }
  template <class Data, class Op = Sum>
  static constexpr void reduce(Data&& data, Rank, Op op = {}) {
    all_reduce(data, op);
  }
  template <class Data>
  static constexpr void broadcast(Data&&, Rank) {}

  template <class In, class Out>
  static constexpr void all_gather(const In& in, Out&& out) {
    copy(in, out);
  }
  template <class In, class Out>
  static constexpr void gather(const In& in, Out&& out, Rank) {
    copy(in, out);
  }
  template <class In, class Out>
  static constexpr void scatter(const In& in, Out&& out, Rank) {
    copy(in, out);
  }
  template <class In, class Out>
  static constexpr void all_to_all(const In& in, Out&& out) {
    copy(in, out);
  }
  template <class In, class Out, class Op = Sum>
  static constexpr void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    copy(in, out);
    all_reduce(out, op);
  }

 private:
  template <class In, class Out>
  static constexpr void copy(const In& in, Out& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    if (from.data() != to.data()) std::copy(from.begin(), from.end(), to.begin());
  }

  std::deque<HostArena> arenas_;
};

static_assert(ArenaAllocating<LoopbackCommunicator> && AsyncReducing<LoopbackCommunicator>);
static_assert(ReduceScattering<LoopbackCommunicator> && Scattering<LoopbackCommunicator>);

}  // namespace lockstep

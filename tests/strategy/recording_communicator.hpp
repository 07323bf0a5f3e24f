// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A communicator of one process that plays one of several ranks and writes down its calls.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/core/strong.hpp"
#include "lockstep/detail/core/view.hpp"

namespace recording {

using namespace lockstep;

/// A reduction adds 100 to every element, so that what was reduced can be told from what was not.
/// Asynchronous ones do it when they are waited for.
template <std::size_t MostUnderWay = 8>
class Communicator : public Collectives<Communicator<MostUnderWay>>, public detail::HostAllocating {
 public:
  static constexpr std::size_t most_in_flight = MostUnderWay;

  explicit Communicator(std::size_t rank = 0, std::size_t world = 1) : rank_(rank), world_(world) {}

  /// What was called, in order: a reduction is named by its first element.
  std::vector<std::string> calls;

  Rank rank() const { return Rank{rank_}; }
  WorldSize world_size() const { return WorldSize{world_}; }
  void abort(std::string_view reason) { calls.push_back("abort " + std::string(reason)); }

  template <class C>
  void perform(const C& call) {
    using detail::CollectiveKind;
    if constexpr (C::kind == CollectiveKind::barrier) {
      calls.push_back("barrier");
    } else if constexpr (C::kind == CollectiveKind::all_reduce) {
      constexpr bool is_max = std::is_same_v<typename C::operation, Max>;
      calls.push_back((is_max ? "max " : "reduce ") + name(call.out));
      if constexpr (!is_max) finish(call.out);
    }
  }

  template <class C>
  auto start(const C& call) {
    calls.push_back("start " + name(call.out));
    return Work<Pending<typename C::element>>(std::in_place, *this, call.out);
  }

  template <class T>
  struct Pending {
    Communicator& comm;
    std::span<T> data;
    static bool test() { return true; }
    void wait() {
      comm.calls.push_back("wait " + name(data));
      finish(data);
    }
    static void leave() {}
  };

  /// Pieces of equal size, the last one as long as it comes.
  template <Element T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    const std::size_t most = (count + world_ - 1) / world_;
    return {std::min(rank_ * most, count), std::min((rank_ + 1) * most, count)};
  }
  /// In two blocks.
  template <class Data, class Op, class Consume>
  void reduce_slice(Data&& data, Op, const Consume& consume, detail::JobCall) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    calls.push_back("slice " + name(values));
    const auto [begin, end] = slice<T>(values.size());
    std::vector<T> results(&values[begin], &values[begin] + (end - begin));
    finish(std::span<T>(results));
    const std::size_t half = results.size() / 2;
    consume(begin, std::span<const T>(results).first(half));
    consume(begin + half, std::span<const T>(results).subspan(half));
  }

 private:
  template <class T>
  static std::string name(std::span<T> values) {
    return std::to_string(static_cast<int>(static_cast<detail::Accumulator<T>>(values[0])));
  }
  template <class T>
  static void finish(std::span<T> values) {
    for (T& value : values)
      value = static_cast<T>(
          static_cast<detail::Accumulator<T>>(static_cast<detail::Accumulator<T>>(value) + 100));
  }

  std::size_t rank_;
  std::size_t world_;
};

using Calls = std::vector<std::string>;

}  // namespace recording

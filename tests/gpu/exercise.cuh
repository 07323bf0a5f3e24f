// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every collective of a CUDA communicator, called and compared with a plain reference, bit
/// by bit.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/operations.hpp"
#include "comm/repeating.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/core/strong.hpp"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "require.hpp"

namespace exercise {

using ::require;

using namespace lockstep;

/// After so many elements, what ranks hold repeats itself.
inline constexpr std::size_t period = std::size_t{5} * 11;

/// What rank `rank` holds at place i: values whose sums are exact in every type. Products need
/// powers of two.
template <class T, class Op = Sum>
T value(std::size_t rank, std::size_t i) {
  if constexpr (FloatingElement<T>) {
    if constexpr (std::same_as<Op, Product>) {
      constexpr float powers[] = {0.5f, 1, -2, 4, -1};
      return T(powers[(rank * 3 + i) % 5]);
    }
    return T((static_cast<float>((rank * 7 + i * 3) % 11) - 3) / 8);
  } else {
    return static_cast<T>((rank * 7 + i * 3) % 11 + 1);
  }
}

/// The reference: combine in rank order, element by element.
template <class T, class Op>
T reduced(const Op& op, std::size_t world, std::size_t i) {
  auto sum = op.prepare(value<T, Op>(0, i));
  for (std::size_t w = 1; w < world; ++w) sum = op.combine(sum, op.prepare(value<T, Op>(w, i)));
  return op.template finish<T>(sum, world);
}

/// The same for all elements.
template <class T, class Op>
auto all_reduced(const Op& op, std::size_t world) {
  return ranks::Repeating<T, period>([&](std::size_t i) { return reduced<T>(op, world, i); });
}

template <class T>
std::string text(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  char hex[32];
  std::snprintf(hex, sizeof hex, " (0x%llx)", static_cast<unsigned long long>(bits));
  if constexpr (std::integral<T>) {
    return std::to_string(value) + hex;
  } else {
    return std::to_string(static_cast<double>(static_cast<detail::Accumulator<T>>(value))) + hex;
  }
}

/// Elements in device or host memory, filled and compared from the host.
template <class Comm, class T>
class Buffer {
 public:
  Buffer(Comm& comm, std::size_t count, bool on_host)
      : comm_(comm), host_(count), device_(on_host ? 0 : count * sizeof(T)), on_host_(on_host) {}

  std::span<T> span() {
    return on_host_ ? std::span<T>(host_)
                    : std::span<T>(reinterpret_cast<T*>(device_.data()), host_.size());
  }

  template <class F>
  void fill(const F& at) {
    ranks::fill_repeating<period>(std::span<T>(host_), at);
    push();
  }
  void poison() {
    if (host_.empty()) return;
    std::memset(static_cast<void*>(host_.data()), 0xA5, host_.size() * sizeof(T));
    push();
  }

  /// Every element is `at(i)`, which repeats itself within parts of `part` elements.
  template <class F>
  void expect(const std::string& what, const F& at,
              std::size_t part = static_cast<std::size_t>(-1)) {
    pull();
    for (std::size_t first = 0; first < host_.size();
         first += std::min(part, host_.size() - first)) {
      const auto values =
          std::span<const T>(host_).subspan(first, std::min(part, host_.size() - first));
      const std::size_t wrong =
          ranks::find_difference<period>(values, [&](std::size_t i) { return at(first + i); });
      if (wrong != values.size()) reject(what, first + wrong, at(first + wrong));
    }
  }
  void expect_poison(const std::string& what) {
    T poison;
    std::memset(static_cast<void*>(&poison), 0xA5, sizeof(T));
    expect(what, [&](std::size_t) { return poison; });
  }

 private:
  [[noreturn]] void reject(const std::string& what, std::size_t i, T wanted) const {
    throw std::runtime_error("rank " + std::to_string(comm_.rank().value()) + ", " + what +
                             (on_host_ ? ", host memory" : ", device memory") + ": element " +
                             std::to_string(i) + " of " + std::to_string(host_.size()) + " is " +
                             text(host_[i]) + ", expected " + text(wanted));
  }
  void push() {
    if (on_host_ || host_.empty()) return;
    check_cuda(cudaMemcpyAsync(device_.data(), host_.data(), host_.size() * sizeof(T),
                               cudaMemcpyHostToDevice, comm_.gpu().stream()),
               "cudaMemcpyAsync");
    comm_.synchronize();
  }
  void pull() {
    if (on_host_ || host_.empty()) return;
    check_cuda(cudaMemcpyAsync(host_.data(), device_.data(), host_.size() * sizeof(T),
                               cudaMemcpyDeviceToHost, comm_.gpu().stream()),
               "cudaMemcpyAsync");
    comm_.synchronize();
  }

  Comm& comm_;
  std::vector<T> host_;
  DeviceArena device_;
  bool on_host_;
};

template <class T, class Op, class Comm>
void reductions(Comm& comm, std::size_t n, bool on_host, const Op& op) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::string what = "(" + std::string(Op::name) + " of " + std::to_string(n) + " " +
                           std::string(detail::element_name(element_kind<T>())) + ")";
  const auto mine = [&](std::size_t i) { return value<T, Op>(me, i); };
  const auto result = all_reduced<T>(op, world);
  Buffer<Comm, T> data(comm, n, on_host);
  Buffer<Comm, T> pieces(comm, n * world, on_host);

  data.fill(mine);
  comm.all_reduce(data.span(), op);
  data.expect("all_reduce" + what, result);

  data.fill(mine);
  comm.all_reduce_async(data.span(), op).wait();
  data.expect("all_reduce_async" + what, result);

  const Rank root{world - 1};
  data.fill(mine);
  comm.reduce(data.span(), root, op);
  data.expect("reduce" + what,
              [&](std::size_t i) { return comm.rank() == root ? result(i) : mine(i); });

  pieces.fill(mine);
  data.poison();
  comm.reduce_scatter(pieces.span(), data.span(), op);
  data.expect("reduce_scatter" + what, [&](std::size_t i) { return result(me * n + i); });
}

/// `messages`: can every rank send to every other?
template <class T, class Comm>
void movements(Comm& comm, std::size_t n, bool on_host, bool messages = true) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::string what =
      "(" + std::to_string(n) + " " + std::string(detail::element_name(element_kind<T>())) + ")";
  const auto mine = [&](std::size_t i) { return value<T>(me, i); };
  const auto gathered = [&](std::size_t i) { return value<T>(i / n, i % n); };
  Buffer<Comm, T> data(comm, n, on_host);
  Buffer<Comm, T> pieces(comm, n * world, on_host);
  Buffer<Comm, T> other(comm, n * world, on_host);
  for (const std::size_t root : {std::size_t{0}, world - 1}) {
    data.fill(mine);
    comm.broadcast(data.span(), Rank{root});
    data.expect("broadcast" + what, [&](std::size_t i) { return value<T>(root, i); });

    data.fill(mine);
    pieces.poison();
    comm.gather(data.span(), pieces.span(), Rank{root});
    if (me == root) pieces.expect("gather" + what, gathered, n);
    if (me != root) pieces.expect_poison("gather" + what + " elsewhere");

    pieces.fill(mine);
    data.poison();
    comm.scatter(pieces.span(), data.span(), Rank{root});
    data.expect("scatter" + what, [&](std::size_t i) { return value<T>(root, me * n + i); });
  }
  data.fill(mine);
  pieces.poison();
  comm.all_gather(data.span(), pieces.span());
  pieces.expect("all_gather" + what, gathered, n);

  pieces.fill(mine);
  other.poison();
  comm.all_to_all(pieces.span(), other.span());
  other.expect(
      "all_to_all" + what, [&](std::size_t i) { return value<T>(i / n, me * n + i % n); }, n);

  if (messages && world > 1 && world % 2 == 0) {  // round the ring, even ranks send first
    const Rank right{(me + 1) % world};
    const Rank left{(me + world - 1) % world};
    Buffer<Comm, T> got(comm, n, on_host);
    data.fill(mine);
    got.poison();
    if (me % 2 == 0) comm.send(data.span(), right);
    comm.receive(got.span(), left);
    if (me % 2 != 0) comm.send(data.span(), right);
    got.expect("send" + what, [&](std::size_t i) { return value<T>(left.value(), i); });
  }
}

template <class T, class Comm>
void every_operation(Comm& comm, bool messages = true) {
  ranks::each_operation<T>([&](auto op) {
    for (const std::size_t n : {std::size_t{1}, std::size_t{1001}})
      reductions<T>(comm, n, false, op);
    reductions<T>(comm, 257, true, op);
  });
  for (const std::size_t n : {std::size_t{1}, std::size_t{1001}})
    movements<T>(comm, n, false, messages);
  movements<T>(comm, 257, true, messages);
}

/// Where no GPU is, the code of two types is as good as that of all.
template <class Comm>
void every_type(Comm& comm) {
  every_operation<float>(comm);
  every_operation<std::int16_t>(comm);
#if LOCKSTEP_RUNS_ON_GPU
  every_operation<double>(comm);
  every_operation<Half>(comm);
  every_operation<BFloat16>(comm);
  every_operation<std::int8_t>(comm);
  every_operation<std::int32_t>(comm);
  every_operation<std::int64_t>(comm);
  every_operation<std::uint8_t>(comm);
  every_operation<std::uint16_t>(comm);
  every_operation<std::uint32_t>(comm);
  every_operation<std::uint64_t>(comm);
#endif
}

/// A NaN on one rank is the result on all, in every floating type.
template <class T, class Comm>
void nan_wins(Comm& comm) {
  const std::size_t me = comm.rank().value();
  const T nan = T(__builtin_nanf(""));
  Buffer<Comm, T> data(comm, 3, false);
  const auto mine = [&](std::size_t i) {
    return i == me % 3 && me + 1 == comm.world_size().value() ? nan : T(static_cast<float>(me));
  };
  const auto check = [&](const std::string& name, float other) {
    const std::size_t where = (comm.world_size().value() - 1) % 3;
    std::vector<T> host(3);
    check_cuda(cudaMemcpyAsync(host.data(), data.span().data(), 3 * sizeof(T),
                               cudaMemcpyDeviceToHost, comm.gpu().stream()),
               "cudaMemcpyAsync");
    comm.synchronize();
    for (std::size_t i = 0; i < 3; ++i) {
      const auto wide = static_cast<detail::Accumulator<T>>(host[i]);
      const bool right =
          i == where ? wide != wide : wide == static_cast<detail::Accumulator<T>>(other);
      require(right, name + " with a NaN: element " + std::to_string(i) + " is " + text(host[i]));
    }
  };
  data.fill(mine);
  comm.all_reduce(data.span(), Min{});
  check("min", 0);
  data.fill(mine);
  comm.all_reduce(data.span(), Max{});
  check("max", static_cast<float>(comm.world_size().value() - 1));
}

/// Every rank brings another number of elements, some of them none, to all ranks and to each root.
template <class T, class Comm>
void variable_gathers(Comm& comm, std::size_t scale, bool on_host) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const auto length = [&](std::size_t w) { return scale * ((w + 1) % 3); };
  std::vector<T> gathered;
  for (std::size_t w = 0; w < world; ++w)
    for (std::size_t i = 0; i < length(w); ++i) gathered.push_back(value<T>(w, i));
  const auto expected = [&](std::size_t i) { return gathered[i]; };
  Buffer<Comm, T> mine(comm, length(me), on_host);
  Buffer<Comm, T> all(comm, gathered.size(), on_host);
  mine.fill([&](std::size_t i) { return value<T>(me, i); });
  all.poison();
  const GatheredPieces pieces = comm.all_gather_variable(mine.span(), all.span());
  require(pieces.total() == gathered.size() && pieces.counts[me] == length(me), "the counts");
  all.expect("all_gather_variable", expected, 1);
  for (std::size_t root = 0; root < world; ++root) {
    all.poison();
    comm.gather_variable(mine.span(), all.span(), Rank{root});
    if (me == root) {
      all.expect("gather_variable", expected, 1);
    } else {
      all.expect_poison("gather_variable on another rank than root");
    }
  }
}

/// Single numbers and truths, in host memory.
template <class Comm>
void single_numbers(Comm& comm) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  require(comm.all_reduce(static_cast<double>(me), Average{}) == static_cast<double>(world - 1) / 2,
          "the mean of one number");
  require(comm.all_reduce(me + 1 == world, Max{}), "what any rank has");
  require(comm.all_reduce(me + 1 == world, BitAnd{}) == (world == 1), "what all ranks have");
  require(comm.broadcast(me, Rank{world - 1}) == world - 1, "the last rank's number");
  require(comm.all_gather(me).back() == world - 1, "every rank's number");
}

/// A bucket's round of sharded training, asynchronously and in place: every rank gets the sums of
/// its own piece, and then the pieces of all.
template <class T, class Op, class Comm>
void pieces_in_place(Comm& comm, std::size_t n, bool on_host, const Op& op) {
  const std::size_t me = comm.rank().value();
  const std::size_t world = comm.world_size().value();
  const std::string what = "(" + std::string(Op::name) + " of " + std::to_string(n) + " " +
                           std::string(detail::element_name(element_kind<T>())) + ")";
  const auto sum = [&](std::size_t i) { return reduced<T>(op, world, i); };
  Buffer<Comm, T> bucket(comm, n * world, on_host);
  Buffer<Comm, T> next(comm, n * world, on_host);
  for (Buffer<Comm, T>* buffer : {&bucket, &next})
    buffer->fill([&](std::size_t i) { return value<T, Op>(me, i); });
  const std::span<T> pieces = bucket.span();
  {
    auto first = comm.reduce_scatter_async(pieces, pieces.subspan(me * n, n), op);
    auto second = comm.reduce_scatter_async(next.span(), next.span().subspan(me * n, n), op);
    first.wait();
  }
  for (Buffer<Comm, T>* buffer : {&bucket, &next}) {
    buffer->expect(
        "reduce_scatter_async" + what,
        [&](std::size_t i) { return i / n == me ? sum(i) : value<T, Op>(me, i); }, n);
  }
  comm.all_gather_async(pieces.subspan(me * n, n), pieces).wait();
  bucket.expect("all_gather_async" + what, sum);
}

/// All three, in all memory.
template <class Comm>
void numbers_and_pieces(Comm& comm) {
  for (const bool on_host : {false, true}) {
    pieces_in_place<float>(comm, 7, on_host, Average{});
    pieces_in_place<float>(comm, 30'001, on_host, Sum{});
    pieces_in_place<BFloat16>(comm, 4096, on_host, Sum{});
  }
  single_numbers(comm);
  for (const bool on_host : {false, true}) {
    variable_gathers<float>(comm, 3, on_host);
    variable_gathers<std::int64_t>(comm, 2000, on_host);
  }
}

}  // namespace exercise

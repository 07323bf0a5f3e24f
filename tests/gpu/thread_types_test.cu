// SPDX-License-Identifier: Apache-2.0
// Every collective of threads on a GPU, with every element type and operation, in device and host
// memory, against a reference on the host: the same bits on all ranks.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/operations.hpp"
#include "thread_ranks.cuh"

using namespace thread_ranks;

namespace {

using Comm = ThreadCommunicator<>;

/// A rank's memory for one test: on the device or on the host, written and read alike. `offset`
/// elements are left free at its begin, so that it is not aligned.
template <class T>
class Memory {
 public:
  Memory(Comm& comm, std::size_t count, bool on_device, std::size_t offset)
      : comm_(comm), host_(on_device ? 0 : count + offset) {
    span_ = on_device ? comm.allocate<T>(count + offset) : std::span<T>(host_);
    span_ = span_.subspan(offset);
  }

  std::span<T> span() const { return span_; }
  void set(const std::vector<T>& values) { upload(comm_, values, span_); }
  std::vector<T> get() const { return download(comm_, span_); }

 private:
  Comm& comm_;
  std::vector<T> host_;
  std::span<T> span_;
};

template <class T>
std::string words(const char* call, std::size_t n, bool on_device) {
  return std::string(call) + " of " + std::to_string(n) + " " +
         std::string(detail::element_name(element_kind<T>())) +
         (on_device ? " (device)" : " (host)");
}

template <class T, class Op>
void reductions(Comm& comm, Memory<T>& data, Memory<T>& pieces, bool on_device, const Op& op) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::size_t n = data.span().size();
  const auto what = [&](const char* call) {
    return words<T>((std::string(call) + " " + std::string(Op::name)).c_str(), n, on_device);
  };
  const std::vector<T> expected = reduced<T>(op, world, n);
  data.set(values<T>(me, n));
  comm.all_reduce(data.span(), op);
  require_equal(data.get(), expected, what("all_reduce"));

  data.set(values<T>(me, n));
  auto work = comm.all_reduce_async(data.span(), op);
  work.wait();
  require_equal(data.get(), expected, what("all_reduce_async"));
  require(work.test(), what("a call that is over says it is not"));

  const Rank root{world - 1};
  data.set(values<T>(me, n));
  comm.reduce(data.span(), root, op);
  require_equal(data.get(), comm.rank() == root ? expected : values<T>(me, n), what("reduce"));

  pieces.set(values<T>(me, n * world));
  comm.reduce_scatter(pieces.span(), data.span(), op);
  require_equal(data.get(), reduced<T>(op, world, n, me * n), what("reduce_scatter"));
  require_equal(pieces.get(), values<T>(me, n * world), what("reduce_scatter's in"));
}

template <class T>
void movements(Comm& comm, Memory<T>& data, Memory<T>& pieces, bool on_device) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::size_t n = data.span().size();
  const auto what = [&](const char* call) { return words<T>(call, n, on_device); };
  std::vector<T> everybodys;
  for (std::size_t w = 0; w < world; ++w) {
    const std::vector<T> one = values<T>(w, n);
    everybodys.insert(everybodys.end(), one.begin(), one.end());
  }
  const std::vector<T> nothing(n * world);
  for (std::size_t r = 0; r < world; r += 3) {
    const Rank root{r};
    data.set(values<T>(me, n));
    comm.broadcast(data.span(), root);
    require_equal(data.get(), values<T>(r, n), what("broadcast"));
    data.set(values<T>(me, n));
    pieces.set(nothing);
    comm.gather(data.span(), pieces.span(), root);
    require_equal(pieces.get(), me == r ? everybodys : nothing, what("gather"));
    pieces.set(values<T>(me, n * world));
    comm.scatter(pieces.span(), data.span(), root);
    require_equal(data.get(), values<T>(r, n, me * n), what("scatter"));
  }
  data.set(values<T>(me, n));
  comm.all_gather(data.span(), pieces.span());
  require_equal(pieces.get(), everybodys, what("all_gather"));
  pieces.set(nothing);
  upload(comm, values<T>(me, n), pieces.span().subspan(me * n, n));
  comm.all_gather(pieces.span().subspan(me * n, n), pieces.span());
  require_equal(pieces.get(), everybodys, what("all_gather in place"));

  Memory<T> received(comm, n * world, on_device, 0);
  pieces.set(values<T>(me, n * world));
  comm.all_to_all(pieces.span(), received.span());
  std::vector<T> dealt;
  for (std::size_t w = 0; w < world; ++w) {
    const std::vector<T> piece = values<T>(w, n, me * n);
    dealt.insert(dealt.end(), piece.begin(), piece.end());
  }
  require_equal(received.get(), dealt, what("all_to_all"));

  if (world > 1) {  // round the ring, even ranks send first
    const Rank right{(me + 1) % world};
    const Rank left{(me + world - 1) % world};
    data.set(values<T>(me, n));
    Memory<T> got(comm, n, on_device, 0);
    if (me % 2 == 0) comm.send(data.span(), right);
    comm.receive(got.span(), left);
    if (me % 2 != 0) comm.send(data.span(), right);
    require_equal(got.get(), values<T>(left.value(), n), what("send and receive"));
  }
}

template <class T>
void every_operation() {
  if (no_gpu()) return;
  for (std::size_t world : {1, 2, 3, 4, 8}) {
    expect_all_fine(run(world, [](Comm& comm) {
      for (std::size_t n : {1, 3, 256, 4099}) {
        for (bool on_device : {true, false}) {
          const std::size_t offset = on_device && n == 4099 ? 1 : 0;
          Memory<T> data(comm, n, on_device, offset);
          Memory<T> pieces(comm, n * comm.world_size().value(), on_device, offset);
          ranks::each_operation<T>(
              [&](auto op) { reductions<T>(comm, data, pieces, on_device, op); });
          movements(comm, data, pieces, on_device);
        }
      }
    }));
  }
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(thread_types, GpuCase)

BOOST_AUTO_TEST_CASE(floats) { every_operation<float>(); }
BOOST_AUTO_TEST_CASE(signed_bytes) { every_operation<std::int8_t>(); }
#if LOCKSTEP_RUNS_ON_GPU
BOOST_AUTO_TEST_CASE(doubles) { every_operation<double>(); }
BOOST_AUTO_TEST_CASE(halves) { every_operation<Half>(); }
BOOST_AUTO_TEST_CASE(bfloats) { every_operation<BFloat16>(); }
BOOST_AUTO_TEST_CASE(signed_shorts) { every_operation<std::int16_t>(); }
BOOST_AUTO_TEST_CASE(signed_ints) { every_operation<std::int32_t>(); }
BOOST_AUTO_TEST_CASE(signed_longs) { every_operation<std::int64_t>(); }
BOOST_AUTO_TEST_CASE(unsigned_bytes) { every_operation<std::uint8_t>(); }
BOOST_AUTO_TEST_CASE(unsigned_shorts) { every_operation<std::uint16_t>(); }
BOOST_AUTO_TEST_CASE(unsigned_ints) { every_operation<std::uint32_t>(); }
BOOST_AUTO_TEST_CASE(unsigned_longs) { every_operation<std::uint64_t>(); }
#endif

BOOST_AUTO_TEST_SUITE_END()

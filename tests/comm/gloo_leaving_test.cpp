// SPDX-License-Identifier: Apache-2.0
// A rank makes its last call and closes its communicator while a thread of another rank, which has
// all that it waits for, does not run. Nobody has left too early, however late that thread is.
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exercise.hpp"
#include "gloo_ranks.hpp"
#include "lockstep/detail/comm/gloo/communicator.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_gloo_leaving)

namespace {

using OverGloo = GlooCommunicator<>;
using Buffer = ::gloo::transport::UnboundBuffer;

/// Several ticks of the watchdog.
constexpr std::chrono::milliseconds some_ticks = 150ms;
/// Longer than a rank that leaves waits for the others before it closes its connections.
constexpr std::chrono::milliseconds long_pause = 2'600ms;

/// The delays of this process, which is one rank. The thread that asks for them makes its calls.
class Delays {
 public:
  /// The thread that makes calls is late by `pause` each time that Gloo has served it.
  void delay_calls(std::chrono::milliseconds pause) { begin(calls_, pause); }
  /// It is late once, the next time that what it waits for has arrived.
  void delay_arrival(std::chrono::milliseconds pause) { begin(arrival_, pause); }
  /// The watchdog is late once, the next time that it looks whether a connection is lost.
  void delay_watchdog(std::chrono::milliseconds pause) { begin(watchdog_, pause); }
  void end() { calls_ = 0ms; }

  void has_served() {
    if (is_caller()) std::this_thread::sleep_for(calls_.load());
  }
  void has_arrived() {
    has_served();
    std::this_thread::sleep_for((is_caller() ? arrival_ : watchdog_).exchange(0ms));
  }

 private:
  using Pause = std::atomic<std::chrono::milliseconds>;

  void begin(Pause& of, std::chrono::milliseconds pause) {
    caller_ = std::this_thread::get_id();
    of = pause;
  }
  bool is_caller() const { return std::this_thread::get_id() == caller_.load(); }

  std::atomic<std::thread::id> caller_;
  Pause calls_{0ms};
  Pause arrival_{0ms};
  Pause watchdog_{0ms};
};
Delays delays;

class LateBuffer : public Buffer {
 public:
  explicit LateBuffer(std::unique_ptr<Buffer> buffer)
      : Buffer(buffer->ptr, buffer->size), buffer_(std::move(buffer)) {}

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    const bool done = buffer_->waitRecv(rank, timeout);
    delays.has_arrived();
    return done;
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    const bool done = buffer_->waitSend(rank, timeout);
    delays.has_served();
    return done;
  }
  void abortWaitRecv() override { buffer_->abortWaitRecv(); }
  void abortWaitSend() override { buffer_->abortWaitSend(); }
  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    buffer_->send(to, slot, offset, bytes);
  }
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    buffer_->recv(from, slot, offset, bytes);
    delays.has_served();
  }
  void recv(std::vector<int> from, std::uint64_t slot, std::size_t offset,
            std::size_t bytes) override {
    buffer_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  std::unique_ptr<Buffer> buffer_;
};

class LateContext : public ::gloo::transport::Context {
 public:
  explicit LateContext(std::shared_ptr<Context> context)
      : Context(context->rank, context->size), context_(std::move(context)) {}

  std::unique_ptr<::gloo::transport::Pair>& getPair(int rank) override {
    return context_->getPair(rank);
  }
  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override {
    context_->setTimeout(getTimeout());
    return context_->createPair(rank);
  }
  std::unique_ptr<Buffer> createUnboundBuffer(void* data, std::size_t size) override {
    return std::make_unique<LateBuffer>(context_->createUnboundBuffer(data, size));
  }

 private:
  std::shared_ptr<Context> context_;
};

class LateDevice : public ::gloo::transport::Device {
 public:
  explicit LateDevice(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  std::string str() const override { return device_->str(); }
  const std::string& getPCIBusID() const override { return device_->getPCIBusID(); }
  std::shared_ptr<::gloo::transport::Context> createContext(int rank, int size) override {
    return std::make_shared<LateContext>(device_->createContext(rank, size));
  }

 private:
  std::shared_ptr<Device> device_;
};

struct LateSockets : Sockets {
  using Sockets::Sockets;

  OverGloo join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const Membership member = membership(rank, world, timeout);
    auto store = std::make_shared<Store>(member.host, member.port, member.secret, 20s);
    auto device = std::make_shared<LateDevice>(over_gloo::make_device("127.0.0.1", rank));
    return OverGloo(std::make_shared<over_gloo::Engine>(member, "late", store, device));
  }
};

Ends run_late(std::size_t world, auto f) { return run_processes<LateSockets>(world, 20s, f); }

/// Rank 0 is late in its last call, `f(comm)`; the others leave right after theirs.
Ends with_late_rank(std::size_t world, auto f) {
  return run_late(world, [&](OverGloo& comm) {
    comm.barrier();
    if (comm.rank() == Rank{0}) delays.delay_calls(some_ticks);
    f(comm);
    delays.end();
  });
}

void send_or_receive(OverGloo& comm, bool sends, Rank peer) {
  std::vector<float> data(1000, sends ? 7.f : 0.f);
  if (sends) {
    comm.send(data, peer);
  } else {
    comm.receive(data, peer);
    require(data[999] == 7.f, "another message");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_rank_leaves_after_a_collective_that_another_has_yet_to_return_from) {
  for (const std::size_t world : {2, 4}) {
    expect_all_fine(with_late_rank(world, [](OverGloo& comm) { comm.barrier(); }));
  }
  expect_all_fine(with_late_rank(
      2, [](OverGloo& comm) { require(comm.all_reduce(1) == 2, "the sum is wrong"); }));
}

BOOST_AUTO_TEST_CASE(a_rank_leaves_after_a_message_that_another_has_yet_to_return_from) {
  for (const std::size_t sender : {0, 1}) {
    expect_all_fine(with_late_rank(2, [&](OverGloo& comm) {
      const std::size_t me = comm.rank().value();
      send_or_receive(comm, me == sender, Rank{1 - me});
    }));
  }
}

// Its connections are closed when the late thread goes on.
BOOST_AUTO_TEST_CASE(a_rank_that_has_left_and_closed_its_connections_is_not_taken_for_dead) {
  expect_all_fine(run_late(2, [](OverGloo& comm) {
    comm.barrier();
    if (comm.rank() == Rank{0}) delays.delay_arrival(long_pause);
    comm.barrier();
  }));
}

// Rank 0's watchdog has seen it wait in the barrier, and goes on after that is over.
BOOST_AUTO_TEST_CASE(a_late_watchdog_blames_nobody_for_a_call_that_is_over) {
  expect_all_fine(run_late(3, [](OverGloo& comm) {
    comm.barrier();
    if (comm.rank() == Rank{0}) delays.delay_watchdog(4 * some_ticks);
    if (comm.rank() == Rank{2}) std::this_thread::sleep_for(some_ticks);
    comm.barrier();
    if (comm.rank() == Rank{2}) return;
    if (comm.rank() == Rank{1}) std::this_thread::sleep_for(5 * some_ticks);
    send_or_receive(comm, comm.rank() == Rank{1}, Rank{1 - comm.rank().value()});
  }));
}

// At once, or after it has closed its connections.
BOOST_AUTO_TEST_CASE(a_rank_that_leaves_without_a_collective_is_named) {
  for (const auto pause : {0ms, long_pause}) {
    const Ends ends = run_late(3, [&](OverGloo& comm) {
      comm.barrier();
      if (comm.rank() == Rank{1}) return;
      std::this_thread::sleep_for(pause);
      comm.barrier();
    });
    expect_words(ends, 1, {"barrier(): rank 1 closed its communicator without this call"});
    BOOST_TEST(ends[1].empty(), ends[1]);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_leaves_without_a_message_is_named) {
  for (const bool sends : {true, false}) {
    const Ends ends = run_late(2, [&](OverGloo& comm) {
      const bool here = comm.rank() == Rank{0};
      for (int i = 0; i < (here ? 3 : 2); ++i)
        send_or_receive(comm, here == sends, Rank{here ? 1u : 0u});
    });
    expect_words(ends, 1,
                 {std::string(sends ? "send(1000 float, to" : "receive(1000 float, from") +
                  " rank 1): rank 1 closed its communicator without this call"});
    BOOST_TEST(ends[1].empty(), ends[1]);
  }
}

BOOST_AUTO_TEST_SUITE_END()

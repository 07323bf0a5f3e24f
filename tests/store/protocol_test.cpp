// SPDX-License-Identifier: Apache-2.0
// Frames that somebody between a client and the store alters, replays, reflects, swaps or leaves
// out: the connection ends, and the job goes on.
#include "lockstep/detail/store/protocol.hpp"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/detail/store/connection.hpp"
#include "store/served.hpp"

BOOST_FIXTURE_TEST_SUITE(store_frames, Served)

using namespace lockstep;
using namespace lockstep::detail::store_protocol;
using lockstep::detail::accept_now;
using lockstep::detail::connect_to_store;
using lockstep::detail::Deadline;
using lockstep::detail::derive_key;
using lockstep::detail::Descriptor;
using lockstep::detail::listen_on;
using lockstep::detail::local_port;
using lockstep::detail::read_exact;
using lockstep::detail::StoreConnection;
using lockstep::detail::Transfer;
using lockstep::detail::try_connect;
using lockstep::detail::write_exact;
using namespace std::chrono_literals;

namespace {

constexpr const char* dropped = "closed the connection";
constexpr const char* forged = "answered with a frame that was altered or replayed";

enum Side { client, server };

/// Passes the handshake of one connection on, and gives every frame after it to `act`, which sends
/// on what it likes.
class Proxy {
 public:
  using Act = std::function<void(Proxy&, Side from, std::string frame)>;

  Proxy(std::uint16_t store, Act act) : store_(store), act_(std::move(act)) {}
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  Store connect() const { return {"127.0.0.1", port(), secret, 5s}; }
  std::uint16_t port() const { return local_port(listener_.get()); }

  void send(Side to, std::string_view bytes) const {
    write_exact(sockets_[to].get(), bytes.data(), bytes.size(), Deadline::after(5s));
  }
  static Side other(Side side) { return side == client ? server : client; }

 private:
  std::string read(Side from, std::size_t count) const {
    std::string bytes(count, '\0');
    const Transfer done =
        read_exact(sockets_[from].get(), bytes.data(), count, Deadline::after(10s));
    return done == Transfer::complete ? bytes : "";
  }
  void pass(Side from, std::size_t count) const { send(other(from), read(from, count)); }

  void run() {
    std::string why;
    if (!detail::wait_ready(listener_.get(), POLLIN, Deadline::after(10s))) return;
    sockets_[client] = accept_now(listener_.get());
    sockets_[server] = try_connect("127.0.0.1", store_, Deadline::after(5s), why);
    pass(server, hello_bytes);
    pass(client, answer_bytes);
    pass(server, tag_bytes);
    while (true) {
      pollfd both[] = {{sockets_[client].get(), POLLIN, 0}, {sockets_[server].get(), POLLIN, 0}};
      bool goes_on = ::poll(both, 2, 10'000) > 0;
      for (const Side from : {client, server}) {
        if (!goes_on || both[from].revents == 0) continue;
        std::string frame = read(from, 4);
        if (!frame.empty()) frame += read(from, Reader(frame).u32());
        goes_on = frame.size() > 4;
        if (goes_on) act_(*this, from, std::move(frame));
      }
      if (goes_on) continue;
      for (Descriptor& socket : sockets_) socket.close();
      return;
    }
  }

  std::uint16_t store_;
  Act act_;
  Descriptor listener_ = listen_on("127.0.0.1", 0);
  Descriptor sockets_[2];
  std::jthread thread_{[this] { run(); }};
};

/// Sends everything on, and first gives it to `look`.
template <class Look>
Proxy::Act after(Look look) {
  return [look](Proxy& proxy, Side from, std::string frame) {
    look(from, frame);
    proxy.send(Proxy::other(from), frame);
  };
}

/// Sends everything on, but the first two frames of `side` in the other order.
Proxy::Act swapping(Side side) {
  return
      [side, held = std::string(), count = 0](Proxy& proxy, Side from, std::string frame) mutable {
        if (from == side && ++count == 1) {
          held = std::move(frame);
        } else {
          proxy.send(Proxy::other(from), frame);
          if (from == side && count == 2) proxy.send(Proxy::other(from), held);
        }
      };
}

/// Posts `first` and `second` before a reply is awaited. Returns how the second await ended.
Transfer post_two(const Proxy& proxy, const Request& first, const Request& second) {
  std::string why;
  StoreConnection connection(
      connect_to_store("127.0.0.1", proxy.port(), derive_key(secret), Deadline::after(5s), why));
  std::uint32_t numbers[2] = {0, 0};
  connection.post(first.bytes(), numbers[0], Deadline::after(5s));
  connection.post(second.bytes(), numbers[1], Deadline::after(5s));
  std::string reply;
  connection.await(numbers[0], reply, Deadline::after(5s));
  return connection.await(numbers[1], reply, Deadline::after(5s));
}

FrameKey frame_key(std::string_view sender, char nonce = 'n') {
  return {derive_key(secret), sender, std::string(nonce_bytes, nonce),
          std::string(nonce_bytes, 'c')};
}

bool takes(FrameKey& key, std::string received) {
  return key.take_frames(received, [](std::uint32_t, std::string_view) { return true; });
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_request_with_an_altered_byte_is_not_served) {
  // The bytes before these are the length; a longer one would only be waited for.
  for (std::size_t at = 4; at < 4 + 4 + tag_bytes + 36; ++at) {
    Proxy proxy(server.port(), after([at](Side from, std::string& frame) {
                  if (from == client) frame.at(at) = static_cast<char>(frame.at(at) ^ 1);
                }));
    Store altered = proxy.connect();
    expect_error([&] { altered.set("secret", ""); }, dropped);
  }
  Proxy proxy(server.port(), after([](Side from, std::string& frame) {
                if (from == client) frame[0] = static_cast<char>(frame[0] - 1);
              }));
  Store shortened = proxy.connect();
  expect_error([&] { shortened.set("secret", ""); }, dropped);
  BOOST_TEST(!store.try_get("secret").has_value());
  BOOST_TEST(!store.try_get("secreu").has_value());
}

BOOST_AUTO_TEST_CASE(a_reply_with_an_altered_byte_is_an_error_of_its_client) {
  store.set("key", "value");
  for (std::size_t at = 4; at < 4 + 4 + tag_bytes + 10; ++at) {
    Proxy proxy(server.port(), after([at](Side from, std::string& frame) {
                  if (from == Side::server) frame.at(at) = static_cast<char>(frame.at(at) ^ 1);
                }));
    Store deceived = proxy.connect();
    expect_error([&] { deceived.get("key"); }, "get: the job's store at 127.0.0.1:", forged,
                 "a private network or a tunnel");
    expect_error([&] { deceived.add("n", 1); }, forged);  // it stays closed
  }
  BOOST_TEST(store.get("key") == "value");
}

BOOST_AUTO_TEST_CASE(a_request_that_is_sent_again_is_not_served_again) {
  Proxy proxy(server.port(), [](Proxy& self, Side from, const std::string& frame) {
    self.send(Proxy::other(from), frame);
    if (from == client) self.send(Proxy::other(from), frame);
  });
  Store repeated = proxy.connect();
  BOOST_TEST(repeated.add("n", 1) == 1);
  expect_error([&] { repeated.add("n", 1); }, dropped);
  BOOST_TEST(store.add("n", 0) == 1);
}

BOOST_AUTO_TEST_CASE(a_reply_that_is_sent_again_is_an_error) {
  Proxy doubling(server.port(), [](Proxy& self, Side from, const std::string& frame) {
    self.send(Proxy::other(from), frame);
    if (from == Side::server) self.send(Proxy::other(from), frame);
  });
  Store doubled = doubling.connect();
  BOOST_TEST(doubled.add("m", 1) == 1);
  expect_error([&] { doubled.add("m", 1); }, forged);
}

BOOST_AUTO_TEST_CASE(frames_of_another_connection_are_rejected) {
  std::string request;
  std::string reply;
  Proxy recorder(server.port(), after([&](Side from, std::string& frame) {
                   (from == client ? request : reply) = frame;
                 }));
  Store recorded = recorder.connect();
  BOOST_TEST(recorded.add("n", 1) == 1);

  Proxy to_server(server.port(), after([&](Side from, std::string& frame) {
                    if (from == client) frame = request;
                  }));
  Store other = to_server.connect();
  expect_error([&] { other.add("n", 1); }, dropped);
  BOOST_TEST(store.add("n", 0) == 1);

  Proxy to_client(server.port(), after([&](Side from, std::string& frame) {
                    if (from == Side::server) frame = reply;
                  }));
  Store deceived = to_client.connect();
  expect_error([&] { deceived.add("n", 1); }, forged);
  BOOST_TEST(recorded.add("n", 1) == 3);
}

BOOST_AUTO_TEST_CASE(a_frame_that_comes_back_to_its_sender_is_rejected) {
  Proxy to_client(server.port(), [](Proxy& self, Side from, const std::string& frame) {
    if (from == client) self.send(client, frame);
  });
  Store deceived = to_client.connect();
  // A request to set begins as a reply does that says so.
  expect_error([&] { deceived.set("key", "value"); }, forged);

  Proxy to_server(server.port(), [](Proxy& self, Side, const std::string& frame) {
    self.send(Side::server, frame);
  });
  Store lonely = to_server.connect();
  expect_error([&] { lonely.set("key", "value"); }, dropped);
  BOOST_TEST(store.get("key") == "value");
}

BOOST_AUTO_TEST_CASE(swapped_frames_are_rejected) {
  const Request add{Operation::add, "n", "", "", 1};
  const Request set{Operation::set, "n", "5"};
  Proxy requests(server.port(), swapping(client));
  BOOST_TEST((post_two(requests, add, set) == Transfer::closed));
  BOOST_TEST(!store.try_get("n").has_value());
  Proxy replies(server.port(), swapping(Side::server));
  BOOST_TEST((post_two(replies, add, add) == Transfer::forged));
  BOOST_TEST(store.add("n", 0) == 2);
}

BOOST_AUTO_TEST_CASE(a_frame_after_one_that_was_left_out_is_rejected) {
  const Request add{Operation::add, "n", "", "", 1};
  for (const Side side : {client, Side::server}) {
    Proxy proxy(server.port(),
                [side, count = 0](Proxy& self, Side from, const std::string& frame) mutable {
                  if (from != side || ++count != 1) self.send(Proxy::other(from), frame);
                });
    const Transfer expected = side == client ? Transfer::closed : Transfer::forged;
    BOOST_TEST((post_two(proxy, add, add) == expected));
  }
  BOOST_TEST(store.add("n", 0) == 2);  // of the second proxy
}

BOOST_AUTO_TEST_CASE(large_values_pass_the_proxy) {
  Proxy proxy(server.port(), after([](Side, std::string&) {}));
  Store far = proxy.connect();
  const std::string large(3'000'001, 'x');
  far.set("large", large);
  BOOST_TEST((far.get("large") == large));
}

BOOST_AUTO_TEST_CASE(keys_of_frames_belong_to_sender_nonces_and_place) {
  FrameKey sends = frame_key("server");
  const std::string first = sends.frame(1, "body");
  const std::string second = sends.frame(1, "body");
  BOOST_TEST(first != second);
  FrameKey receives = frame_key("server");
  BOOST_TEST(takes(receives, first + second));
  for (FrameKey other : {frame_key("client"), frame_key("server", 'm'), FrameKey(), receives})
    BOOST_TEST(!takes(other, first));
  FrameKey late = frame_key("server");
  BOOST_TEST(!takes(late, second));
}

BOOST_AUTO_TEST_SUITE_END()

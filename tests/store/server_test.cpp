// SPDX-License-Identifier: Apache-2.0
// Strangers, scanners and broken clients against a live store, while a real client goes on.
#include "lockstep/detail/store/server.hpp"
#include "lockstep/detail/store/connection.hpp"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/served.hpp"

using namespace lockstep;
namespace store_protocol = lockstep::detail::store_protocol;
using lockstep::detail::connect_to_store;
using lockstep::detail::Deadline;
using lockstep::detail::derive_key;
using lockstep::detail::Descriptor;
using lockstep::detail::read_exact;
using lockstep::detail::StoreServer;
using lockstep::detail::StoreSocket;
using lockstep::detail::Transfer;
using lockstep::detail::try_connect;
using lockstep::detail::write_exact;
using store_protocol::Operation;
using namespace std::chrono_literals;

namespace {

std::string request(StoreSocket& from, std::uint32_t number,
                    const store_protocol::Request& request) {
  return from.sends.frame(number, request.bytes());
}

/// A store, and a client that uses it all the time; it must come through unharmed.
struct Besieged : Served {
  std::atomic<std::int64_t> count = 0;
  std::string complaint;
  std::jthread client{[this](const std::stop_token& stop) {
    complaint = error_of([&] {
      while (!stop.stop_requested()) count += store.add("steady", 1) == count + 1 ? 1 : 1'000'000;
    });
  }};

  ~Besieged() {
    const std::int64_t before = count;
    const Deadline patience = Deadline::after(5000ms);
    while (count < before + 5 && !patience.passed()) std::this_thread::sleep_for(1ms);
    BOOST_TEST(count >= before + 5);
    client.request_stop();
    client.join();
    BOOST_TEST(complaint == "");
    BOOST_TEST(store.add("steady", 0) == count);
  }

  Descriptor connect() const {
    std::string why;
    Descriptor socket = try_connect("127.0.0.1", server.port(), Deadline::after(2000ms), why);
    BOOST_TEST_REQUIRE(static_cast<bool>(socket), why);
    return socket;
  }

  /// A connection past the handshake, to be misused.
  StoreSocket trusted() const {
    std::string why;
    return connect_to_store("127.0.0.1", server.port(), derive_key(secret), Deadline::after(2000ms),
                            why);
  }

  static void send(const Descriptor& socket, std::string_view bytes) {
    write_exact(socket.get(), bytes.data(), bytes.size(), Deadline::after(2000ms));
  }
  static void send(const StoreSocket& socket, std::string_view bytes) {
    send(socket.descriptor, bytes);
  }

  /// Whether the server closes the connection. What it says before does not matter.
  static bool is_dropped(const Descriptor& socket) {
    const Deadline patience = Deadline::after(20s);
    char byte = 0;
    Transfer done = Transfer::complete;
    while (done == Transfer::complete) {
      done = read_exact(socket.get(), &byte, 1, patience);
    }
    return done == Transfer::closed;
  }

  static void reset(Descriptor socket) {
    const linger at_once{1, 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
};

}  // namespace

BOOST_FIXTURE_TEST_SUITE(store_server, Besieged)

BOOST_AUTO_TEST_CASE(an_http_request_is_turned_away) {
  const Descriptor browser = connect();
  send(browser, "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n");
  BOOST_TEST(is_dropped(browser));
}

BOOST_AUTO_TEST_CASE(garbage_is_turned_away) {
  std::mt19937 random(7);
  for (int i = 0; i < 50; ++i) {
    const Descriptor stranger = connect();
    std::string garbage(24 + random() % 5000, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    send(stranger, garbage);
    BOOST_TEST(is_dropped(stranger));
  }
}

BOOST_AUTO_TEST_CASE(who_says_nothing_or_too_little_is_dropped_in_two_seconds) {
  const Descriptor silent = connect();
  const Descriptor slow = connect();
  send(slow, "12345");
  const auto begin = std::chrono::steady_clock::now();
  BOOST_TEST(is_dropped(silent));
  BOOST_TEST(is_dropped(slow));
  BOOST_TEST((std::chrono::steady_clock::now() - begin > 1500ms));
}

BOOST_AUTO_TEST_CASE(a_wrong_secret_is_rejected_and_named) {
  expect_error([&] { Store("127.0.0.1", server.port(), "guess", 300ms); }, "another secret",
               "127.0.0.1:" + std::to_string(server.port()), "0.3 s");
}

BOOST_AUTO_TEST_CASE(who_has_no_proof_of_the_secret_is_not_served) {
  const Descriptor liar = connect();
  send(liar, std::string(store_protocol::answer_bytes, 'x'));
  StoreSocket nobody;
  send(liar, request(nobody, 1, {Operation::set, "stolen", "1"}));
  BOOST_TEST(is_dropped(liar));
  BOOST_TEST(!store.try_get("stolen").has_value());
}

BOOST_AUTO_TEST_CASE(a_recorded_connection_that_is_played_again_is_not_served) {
  const Descriptor client = connect();
  std::string hello(store_protocol::hello_bytes, '\0');
  read_exact(client.get(), hello.data(), hello.size(), Deadline::after(5s));
  const std::string theirs = hello.substr(store_protocol::magic.size());
  const std::string own(store_protocol::nonce_bytes, 'c');
  const std::uint64_t proof = store_protocol::tag(derive_key(secret), "client", theirs, own);
  const store_protocol::Request add{Operation::add, "recorded", "", "", 1};
  store_protocol::FrameKey key(derive_key(secret), "client", theirs, own);
  const std::string recorded =
      store_protocol::Writer{}.raw(own).u64(proof).raw(key.frame(1, add.bytes())).bytes();
  send(client, recorded);
  BOOST_TEST(store.get("recorded") == "1");
  const Descriptor stranger = connect();
  send(stranger, recorded);
  BOOST_TEST(is_dropped(stranger));
  BOOST_TEST(store.add("recorded", 0) == 1);
}

BOOST_AUTO_TEST_CASE(a_server_without_the_secret_is_noticed_by_the_client) {
  StoreServer impostor("something else");
  const std::uint16_t ports[] = {impostor.port(), server.port()};
  Store client("127.0.0.1", ports, secret, 5000ms);
  BOOST_TEST(client.port() == server.port());
}

BOOST_AUTO_TEST_CASE(a_store_of_another_release_is_named) {
  // It says what the first release of the protocol said.
  const Descriptor old = lockstep::detail::listen_on("127.0.0.1", 0);
  std::jthread serve([&] {
    const Deadline patience = Deadline::after(10s);
    while (lockstep::detail::wait_ready(old.get(), POLLIN, patience)) {
      const Descriptor client = lockstep::detail::accept_now(old.get());
      if (client) send(client, "LOCKSTP1" + std::string(store_protocol::nonce_bytes, 'n'));
      char byte = 0;
      if (read_exact(client.get(), &byte, 1, patience) == Transfer::complete && byte == '.') return;
    }
  });
  expect_error([&] { Store("127.0.0.1", lockstep::detail::local_port(old.get()), secret, 100ms); },
               "speaks version 1 of lockstep's protocol and this program version 5", "one release");
  std::string why;
  const Descriptor end =
      try_connect("127.0.0.1", lockstep::detail::local_port(old.get()), Deadline::after(5s), why);
  send(end, ".");
}

BOOST_AUTO_TEST_CASE(scanners_come_and_go) {
  for (int i = 0; i < 300; ++i) {
    if (i % 2 == 0) {
      connect();
    } else {
      reset(connect());
    }
  }
}

BOOST_AUTO_TEST_CASE(idle_strangers_do_not_lock_clients_out) {
  std::vector<Descriptor> crowd;
  for (std::size_t i = 0; i < StoreServer::max_strangers + 30; ++i) crowd.push_back(connect());
  BOOST_TEST(another().add("welcome", 1) == 1);
}

BOOST_AUTO_TEST_CASE(a_frame_that_is_too_long_or_too_short_ends_the_connection) {
  const StoreSocket liar = trusted();
  send(liar, store_protocol::Writer{}.u32(0xffffffffu).bytes());
  BOOST_TEST(is_dropped(liar.descriptor));
  const StoreSocket short_one = trusted();
  send(short_one, store_protocol::Writer{}.u32(11).bytes());
  BOOST_TEST(is_dropped(short_one.descriptor));
}

BOOST_AUTO_TEST_CASE(requests_that_make_no_sense_end_the_connection) {
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    StoreSocket confused = trusted();
    std::string body(random() % 40, '\0');
    for (char& c : body) c = static_cast<char>(random() % 12);
    if (!body.empty()) body[0] = static_cast<char>(random() % 13);
    send(confused, confused.sends.frame(1, body));
  }
  StoreSocket empty = trusted();
  send(empty, empty.sends.frame(1, ""));
  BOOST_TEST(is_dropped(empty.descriptor));
}

BOOST_AUTO_TEST_CASE(half_a_frame_and_a_reset_disturb_nobody) {
  for (int i = 0; i < 50; ++i) {
    StoreSocket dying = trusted();
    const std::string large(100000, 'x');
    const std::string whole = request(dying, 1, {Operation::set, "key", large});
    send(dying, std::string_view(whole).substr(0, static_cast<std::size_t>(i) * 1999));
    if (i % 2 == 0) reset(std::move(dying.descriptor));
  }
}

BOOST_AUTO_TEST_CASE(a_client_that_dies_in_a_barrier_no_longer_counts) {
  StoreSocket dying = trusted();
  send(dying, request(dying, 1, {Operation::gather, "barrier/b", "", "", 0, 1, 3, true}));
  std::this_thread::sleep_for(100ms);
  dying.descriptor.close();
  expect_error([&] { store.barrier("b", Rank{0}, WorldSize{3}, 300ms); }, "ranks 1, 2 did not");
}

BOOST_AUTO_TEST_CASE(a_client_that_dies_in_a_gather_or_cancels_no_longer_counts) {
  const auto arrive = [](StoreSocket& from, std::uint32_t number, std::uint32_t rank) {
    send(from,
         request(from, number, {Operation::gather, "gather/g", "piece", "", 0, rank, 4, true}));
  };
  StoreSocket dying = trusted();
  StoreSocket cancelling = trusted();
  arrive(dying, 1, 1);
  arrive(cancelling, 5, 2);
  std::this_thread::sleep_for(100ms);
  dying.descriptor.close();
  send(cancelling, request(cancelling, 6, {Operation::cancel, "", "", "", 5}));
  expect_error([&] { store.gather("g", Rank{0}, WorldSize{4}, "", 300ms); }, "ranks 1, 2, 3 did");
}

BOOST_AUTO_TEST_CASE(a_client_that_reads_nothing_holds_up_nobody) {
  store.set("large", std::string(4_MiB, 'x'));
  StoreSocket deaf = trusted();
  for (int i = 0; i < 200; ++i) send(deaf, request(deaf, 1, {Operation::get, "large"}));
  BOOST_TEST((another().get("large").size() == 4_MiB));
}

BOOST_AUTO_TEST_SUITE_END()

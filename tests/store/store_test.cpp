// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/store/store.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/store/socket.hpp"
#include "store/served.hpp"

using namespace lockstep;
using lockstep::detail::sip_hash;
using lockstep::detail::StoreServer;
using lockstep::detail::try_listen;
using namespace std::chrono_literals;

BOOST_FIXTURE_TEST_SUITE(store, Served)

BOOST_AUTO_TEST_CASE(sip_hash_gives_the_papers_test_vector) {
  std::string message;
  for (char c = 0; c < 15; ++c) message += c;
  BOOST_TEST(sip_hash({0x0706050403020100u, 0x0f0e0d0c0b0a0908u}, message) == 0xa129ca6149be45e5u);
}

BOOST_AUTO_TEST_CASE(values_are_set_read_replaced_and_erased) {
  Store other = another();
  BOOST_TEST(!store.try_get("a").has_value());
  store.set("a", "1");
  BOOST_TEST(other.get("a") == "1");
  other.set("a", std::string("\0two\n", 5));
  BOOST_TEST((store.try_get("a") == std::string("\0two\n", 5)));
  store.set("empty", "");
  BOOST_TEST((other.try_get("empty") == ""));
  BOOST_TEST(store.erase("a"));
  BOOST_TEST(!store.erase("a"));
  BOOST_TEST(!other.try_get("a").has_value());
}

BOOST_AUTO_TEST_CASE(the_largest_value_passes_and_a_larger_one_is_an_error) {
  const std::string large(detail::store_protocol::max_value_bytes, 'x');
  store.set("large", large);
  BOOST_TEST((another().get("large") == large));
  expect_error([&] { store.set("larger", large + "x"); }, "set: ", "larger", "16 MiB");
  expect_error([&] { store.set(std::string(5000, 'k'), ""); }, "key of 5000 bytes", "4096");
  BOOST_TEST(store.add("still here", 1) == 1);
}

BOOST_AUTO_TEST_CASE(compare_set_has_pytorchs_meaning) {
  BOOST_TEST(store.compare_set("k", "x", "new") == "x");
  BOOST_TEST(!store.try_get("k").has_value());
  BOOST_TEST(store.compare_set("k", "", "first") == "first");
  BOOST_TEST(store.compare_set("k", "wrong", "second") == "first");
  BOOST_TEST(store.compare_set("k", "first", "second") == "second");
  BOOST_TEST(store.get("k") == "second");
}

BOOST_AUTO_TEST_CASE(add_counts_and_rejects_what_is_not_a_number) {
  BOOST_TEST(store.add("n", 5) == 5);
  BOOST_TEST(store.add("n", -7) == -2);
  BOOST_TEST(store.get("n") == "-2");
  store.set("word", "word");
  expect_error([&] { store.add("word", 1); }, "'word'", "not a number");
}

BOOST_AUTO_TEST_CASE(eight_clients_that_add_at_once_lose_nothing) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      Store mine = another();
      for (int i = 0; i < 250; ++i) mine.add("sum", 1);
    });
  }
  threads.clear();
  BOOST_TEST(store.add("sum", 0) == 2000);
}

BOOST_AUTO_TEST_CASE(one_client_serves_many_threads_while_some_wait) {
  std::atomic<int> woken = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] { woken += store.get("late") == "now" ? 1 : 0; });
  }
  for (int i = 1; i <= 100; ++i) BOOST_TEST_REQUIRE(store.add("busy", 1) == i);
  BOOST_TEST(woken == 0);
  store.set("late", "now");
  threads.clear();
  BOOST_TEST(woken == 4);
}

BOOST_AUTO_TEST_CASE(waits_that_take_too_long_name_what_is_missing) {
  store.set("here", "");
  expect_error([&] { store.get("nobody", 100ms); }, "get: ", "'nobody'", "0.1 s");
  expect_error([&] { store.wait({"x", "here", "y"}, 100ms); }, "wait: ", "0.1 s: x, y;");
  std::jthread late([&] {
    Store other = another();
    other.set("x", "");
    other.set("y", "");
  });
  store.wait({"x", "here", "y"}, 5000ms);
  store.wait({}, 1ms);
}

BOOST_AUTO_TEST_CASE(a_barrier_holds_until_all_have_come_and_can_be_used_again) {
  std::atomic<int> arrived = 0;
  std::vector<std::jthread> threads;
  std::atomic<bool> early = false;
  for (std::size_t r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      Store mine = another();
      for (int round = 1; round <= 25; ++round) {
        ++arrived;
        mine.barrier("again", Rank{r}, WorldSize{4});
        if (arrived < 4 * round) early = true;
      }
    });
  }
  threads.clear();
  BOOST_TEST(!early);
}

BOOST_AUTO_TEST_CASE(a_barrier_names_the_ranks_that_are_missing) {
  std::string said;
  std::jthread rank_3(
      [&] { said = error_of([&] { another().barrier("b", Rank{3}, WorldSize{5}, 1000ms); }); });
  while (server.clients() < 2) std::this_thread::yield();
  std::this_thread::sleep_for(50ms);
  expect_error([&] { store.barrier("b", Rank{0}, WorldSize{5}, 200ms); }, "rank 0, barrier",
               "ranks 1, 2, 4 did not come to 'b' within 0.2 s");
  rank_3.join();
  BOOST_TEST(said.find("did not come") != std::string::npos);
  // Those whose time was over do not count as having come.
  expect_error([&] { store.barrier("b", Rank{1}, WorldSize{2}, 50ms); }, "rank 0 did not come");
}

BOOST_AUTO_TEST_CASE(a_barrier_rejects_ranks_that_disagree) {
  expect_error([&] { store.barrier("c", Rank{4}, WorldSize{4}, 50ms); }, "not in a world of 4");
  std::string said;
  std::jthread waiting(
      [&] { said = error_of([&] { another().barrier("c", Rank{0}, WorldSize{2}, 1000ms); }); });
  while (server.clients() < 2) std::this_thread::yield();
  std::this_thread::sleep_for(50ms);
  expect_error([&] { store.barrier("c", Rank{1}, WorldSize{3}, 50ms); }, "world of 2", "counts 3");
  expect_error([&] { store.barrier("c", Rank{0}, WorldSize{2}, 50ms); }, "waits in it already");
  waiting.join();
  BOOST_TEST(said.find("rank 1 did not") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(a_gather_gives_every_rank_the_pieces_of_all_and_can_be_used_again) {
  std::atomic<int> wrong = 0;
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      Store mine = another();
      for (std::size_t round = 0; round < 25; ++round) {
        // Ranks 1 and 3 say the same, rank 2 nothing.
        const auto piece = [&](std::size_t w) {
          return w == 2 ? "" : std::to_string(round) + std::string(w == 0 ? 70000 : 3, 'x');
        };
        const auto all = mine.gather("again", Rank{r}, WorldSize{4}, piece(r));
        for (std::size_t w = 0; w < 4; ++w) wrong += all.size() == 4 && all[w] == piece(w) ? 0 : 1;
      }
    });
  }
  threads.clear();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(
      (store.gather("alone", Rank{0}, WorldSize{1}, "me") == std::vector<std::string>{"me"}));
}

BOOST_AUTO_TEST_CASE(a_gather_names_the_ranks_that_are_missing_and_rejects_too_much) {
  expect_error([&] { store.gather("g", Rank{1}, WorldSize{3}, "x", 100ms); }, "rank 1, gather",
               "ranks 0, 2 did not come to 'g' within 0.1 s");
  const std::string half(9_MiB, 'x');
  // Rank 1 gives its half while rank 0 waits, which on a busy machine takes more than a second.
  std::string said, rejected;
  for (auto limit = 1000ms; limit < 60s && rejected.find("16 MiB") == std::string::npos;
       limit *= 2) {
    std::atomic<bool> over = false;
    const std::jthread first([&] {
      said = error_of([&] { another().gather("large", Rank{0}, WorldSize{2}, half, limit); });
      over = true;
    });
    while (rejected.find("16 MiB") == std::string::npos && !over) {
      rejected = error_of([&] { store.gather("large", Rank{1}, WorldSize{2}, half, 0ms); });
    }
  }
  BOOST_TEST(rejected.find("'large': all ranks together give it more than 16 MiB") !=
             std::string::npos);
  BOOST_TEST(said.find("rank 1 did not come") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(shared_stores_have_one_connection_and_their_own_time_limits) {
  const std::size_t before = server.clients();
  {
    Store first = store.share();
    Store second = first.share();
    second.set_timeout(77ms);
    BOOST_TEST((first.timeout() == 5000ms && second.timeout() == 77ms));
    std::jthread waits([&] { first.get("late"); });
    std::jthread watches([&] { second.get("later", 5000ms); });
    for (int i = 0; i < 100; ++i) store.add("n", 1);
    BOOST_TEST(server.clients() == before);
    store.set("late", "");
    store.set("later", "");
  }
  BOOST_TEST(store.add("n", 0) == 100);
}

BOOST_AUTO_TEST_CASE(a_watch_hears_of_changes_and_asks_nothing) {
  detail::StoreWatch watch(store, "watched");
  BOOST_TEST(!watch.news().has_value());
  const auto next = [&] {
    std::optional<std::string> value;
    while (!value) value = watch.news();
    return *value;
  };
  Store other = another();
  other.set("watched", "1");
  BOOST_TEST(next() == "1");
  other.set("watched", "1");  // which is no change
  store.add("n", 0);          // by its answer, the watch's next request has arrived and is counted
  const std::uint64_t asked = server.requests();
  for (int i = 0; i < 100; ++i) BOOST_TEST_REQUIRE(!watch.news().has_value());
  BOOST_TEST(server.requests() == asked);
  other.set("watched", "");
  BOOST_TEST(next() == "");
  std::jthread reads([&] { store.try_get("never", 300ms); });  // the answer for this thread too
  other.set("watched", "2");
  BOOST_TEST(next() == "2");
  reads.join();
  server.shut_down();
  expect_error(
      [&] {
        while (true) watch.news();
      },
      "watch: ", "the job's store");
}

BOOST_AUTO_TEST_CASE(a_server_that_ends_ends_the_waits_of_its_clients) {
  std::jthread end([&] {
    std::this_thread::sleep_for(100ms);
    server.shut_down();
  });
  expect_error([&] { store.get("never"); }, "get: ", "closed the connection", "has ended");
  expect_error([&] { store.set("a", "b"); }, "closed the connection");
}

BOOST_AUTO_TEST_CASE(a_client_waits_for_a_server_that_starts_later) {
  std::uint16_t port = 0;
  {
    port = StoreServer(secret).port();
  }
  std::optional<StoreServer> late;
  std::jthread later([&] {
    std::this_thread::sleep_for(200ms);
    late.emplace(secret, "127.0.0.1", port);
  });
  Store client("127.0.0.1", port, secret, 10000ms);
  client.set("a", "b");
  BOOST_TEST(client.get("a") == "b");
}

BOOST_AUTO_TEST_CASE(a_port_in_use_is_an_error_that_says_so) {
  expect_error([&] { StoreServer twice(secret, "127.0.0.1", server.port()); },
               std::to_string(server.port()), "in use", "another port");
}

BOOST_AUTO_TEST_CASE(ipv6_and_names_work_where_the_host_has_them) {
  Store by_name("localhost", server.port(), secret, 5000ms);
  BOOST_TEST(by_name.add("n", 1) == 1);
  StoreServer everywhere(secret, "");
  Store v4("127.0.0.1", everywhere.port(), secret, 5000ms);
  BOOST_TEST(v4.add("n", 1) == 1);
  int error = 0;
  if (try_listen("::1", 0, error)) {
    StoreServer v6(secret, "::1");
    Store client("::1", v6.port(), secret, 5000ms);
    BOOST_TEST(client.add("n", 1) == 1);
  }
}

/// Passes on what a client and the server send, at some 8 MB a second.
class SlowRelay {
 public:
  explicit SlowRelay(std::uint16_t server) : listening_(detail::listen_on("127.0.0.1", 0)) {
    relays_.emplace_back([this, server] {
      while (!ends_) {
        if (!detail::wait_ready(listening_.get(), POLLIN, detail::Deadline::after(20ms))) continue;
        const detail::Descriptor client(::accept(listening_.get(), nullptr, nullptr));
        std::string why;
        const detail::Descriptor to =
            detail::try_connect("127.0.0.1", server, detail::Deadline::after(5s), why);
        std::jthread back([&] { pass(to.get(), client.get()); });
        pass(client.get(), to.get());
      }
    });
  }
  ~SlowRelay() { ends_ = true; }
  std::uint16_t port() const { return detail::local_port(listening_.get()); }

 private:
  void pass(int from, int to) const {
    std::vector<char> bytes(1 << 16);
    while (!ends_) {
      if (!detail::wait_ready(from, POLLIN, detail::Deadline::after(20ms))) continue;
      const ssize_t n = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (n <= 0) break;
      std::this_thread::sleep_for(8ms);
      detail::write_exact(to, bytes.data(), static_cast<std::size_t>(n),
                          detail::Deadline::after(10s));
    }
    ::shutdown(to, SHUT_RDWR);
  }

  detail::Descriptor listening_;
  std::atomic<bool> ends_ = false;
  std::vector<std::jthread> relays_;
};

BOOST_AUTO_TEST_CASE(a_large_value_may_take_longer_than_an_answer) {
  const SlowRelay relay(server.port());
  Store slow("127.0.0.1", relay.port(), secret, 500ms);
  const std::string large(12 << 20, 'x');
  slow.set("large", large);  // some 1.5 s each way
  BOOST_TEST((slow.get("large") == large));
}

BOOST_AUTO_TEST_SUITE_END()

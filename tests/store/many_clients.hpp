// SPDX-License-Identifier: Apache-2.0
#pragma once
// The clients of a large job's store, emulated in one process: each has a connection of its own and
// asks what a rank asks, through the code that ranks use. A few threads post the requests of many.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/store/connection.hpp"
#include "lockstep/detail/store/server.hpp"
#include "require.hpp"

namespace many_clients {

using lockstep::detail::Deadline;
using lockstep::detail::StoreConnection;
using lockstep::detail::StoreServer;
using lockstep::detail::Transfer;
using lockstep::detail::store_protocol::Operation;
using lockstep::detail::store_protocol::Request;

class Crowd {
 public:
  Crowd(StoreServer& server, const std::string& secret, std::size_t clients)
      : clients_(clients), numbers_(clients) {
    const auto key = lockstep::detail::derive_key(secret);
    for_each([&](std::size_t r) {
      std::string why;
      auto socket = lockstep::detail::connect_to_store("127.0.0.1", server.port(), key,
                                                       Deadline::after(limit), why);
      require(static_cast<bool>(socket), why.c_str());
      clients_[r] = std::make_unique<StoreConnection>(std::move(socket));
    });
  }

  std::size_t size() const { return clients_.size(); }

  /// What a rank asks when it joins: the world, its number, the job's id, and who is where.
  void join(std::size_t ranks_of_a_host) {
    for_each([&](std::size_t r) {
      const std::string joined = key("joined/", r);
      exchange(r, {Operation::add, joined, "", "", 1});
    });
    for (const char* const name : {"world", "job"}) {
      for_each([&](std::size_t r) { exchange(r, {Operation::compare_set, name, "1"}); });
    }
    gather("rendezvous", [&](std::size_t r) {
      return "host " + std::to_string(r / ranks_of_a_host) +
             " 0f9e7a52-7f2c-4b53-a1b0-2c1c0d34f5aa";
    });
  }

  /// Every client gives a piece and gets those of all.
  template <class Piece>
  void gather(const std::string& name, const Piece& piece) {
    post([&](std::size_t r) { return arrival(r, name, piece(r)); });
    await([&](std::size_t, const std::string& body) {
      require(body.size() > 5 + 4 * size() && body[0] == 1, "a gather failed");
    });
  }

  void barrier() {
    post([&](std::size_t r) { return arrival(r, "barrier", ""); });
    await([](std::size_t, const std::string& body) { require(body[0] == 1, "a barrier failed"); });
  }

  /// All watch one key, which the last of them then sets.
  void notice() {
    const std::size_t last = size() - 1;
    post([](std::size_t) {
      Request get{Operation::get, "notice"};
      get.waits = true;
      return get.bytes();
    });
    exchange(last, {Operation::set, "notice", "failed"});
    await([](std::size_t, const std::string& body) { require(body[0] == 1, "no notice came"); });
  }

 private:
  static constexpr std::chrono::seconds limit{60};
  static constexpr std::size_t threads = 2;

  static std::string key(const char* name, std::size_t r) { return name + std::to_string(r); }
  std::string arrival(std::size_t r, const std::string& name, const std::string& piece) const {
    return Request{Operation::gather,
                   name,
                   piece,
                   "",
                   0,
                   static_cast<std::uint32_t>(r),
                   static_cast<std::uint32_t>(size()),
                   true}
        .bytes();
  }

  template <class F>
  void for_each(const F& f) {
    std::vector<std::string> complaints(threads);
    {
      std::vector<std::jthread> running;
      for (std::size_t t = 0; t < threads; ++t) {
        running.emplace_back([&, t] {
          try {
            for (std::size_t r = t; r < size(); r += threads) f(r);
          } catch (const std::exception& error) {
            complaints[t] = error.what();
          }
        });
      }
    }
    for (const std::string& complaint : complaints) require(complaint.empty(), complaint.c_str());
  }

  template <class Make>
  void post(const Make& make) {
    for_each([&](std::size_t r) {
      require(clients_[r]->post(make(r), numbers_[r], Deadline::after(limit)) == Transfer::complete,
              "a request could not be sent");
    });
  }
  template <class Judge>
  void await(const Judge& judge) {
    for_each([&](std::size_t r) {
      std::string body;
      require(clients_[r]->await(numbers_[r], body, Deadline::after(limit)) == Transfer::complete,
              "no reply came");
      judge(r, body);
    });
  }
  void exchange(std::size_t r, const Request& message) {
    std::uint32_t number = 0;
    std::string body;
    require(
        clients_[r]->post(message.bytes(), number, Deadline::after(limit)) == Transfer::complete &&
            clients_[r]->await(number, body, Deadline::after(limit)) == Transfer::complete &&
            body[0] == 1,
        "a request failed");
  }

  std::vector<std::unique_ptr<StoreConnection>> clients_;
  std::vector<std::uint32_t> numbers_;
};

/// The seconds that each part took, and the requests that the store served.
struct Times {
  double connect = 0;
  double join = 0;
  double gather = 0;
  double notice = 0;
  std::uint64_t requests = 0;
  double meet() const { return connect + join + gather; }
};

/// As many ranks meet as a job of them does: they connect, join, and compare their GPUs. Then all
/// hear of a notice.
inline Times play(std::size_t ranks) {
  using Clock = std::chrono::steady_clock;
  const std::string secret = "sesame";
  StoreServer server(secret, "127.0.0.1", 0, 2 * ranks);  // both ends are in this process
  Times times;
  auto begin = Clock::now();
  const auto lap = [&] {
    const auto end = Clock::now();
    return std::chrono::duration<double>(end - std::exchange(begin, end)).count();
  };
  Crowd all(server, secret, ranks);
  times.connect = lap();
  all.join(8);
  times.join = lap();
  all.gather("gpus", [](std::size_t r) {
    return std::string(8, static_cast<char>(r / 8)) + "GPU-" + std::to_string(r) +
           "-0f9e7a52-7f2c-4b53-a1b0-2c1c0d34";
  });
  all.barrier();
  times.gather = lap();
  all.notice();
  times.notice = lap();
  times.requests = server.requests();
  return times;
}

}  // namespace many_clients

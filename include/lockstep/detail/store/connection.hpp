// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A client's authenticated connection to the store, which threads share.

#include <condition_variable>
#include <map>
#include <mutex>

#include "lockstep/detail/store/protocol.hpp"
#include "lockstep/detail/store/socket.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// A client's socket after the handshake, and the keys of its frames.
struct StoreSocket {
  Descriptor descriptor{};
  store_protocol::FrameKey sends{};
  store_protocol::FrameKey receives{};

  explicit operator bool() const { return static_cast<bool>(descriptor); }
};

/// Connects to a store that proves that it knows the key; empty otherwise, with the reason.
inline StoreSocket connect_to_store(const std::string& host, std::uint16_t port, SipKey key,
                                    Deadline deadline, std::string& why) {
  using namespace store_protocol;
  // Each attempt has its own limit, because a port may accept and stay silent.
  const Deadline limit = sooner(deadline, Deadline::after(handshake_limit));
  Descriptor socket = try_connect(host, port, limit, why);
  if (!socket) return {};
  char hello[hello_bytes];
  const Transfer heard = read_exact(socket.get(), hello, sizeof hello, limit);
  const std::string_view word(hello, magic.size());
  const std::string_view name = magic.substr(0, magic.size() - 1);
  if (heard != Transfer::complete || !word.starts_with(name)) {
    why = "what listens there is not a lockstep store";
    return {};
  }
  if (word != magic) {
    why = text({"the store there speaks version ", word.substr(name.size()),
                " of lockstep's protocol and this program version ", magic.substr(name.size()),
                ": build all programs of a job with one release"});
    return {};
  }
  const std::string_view server_nonce(hello + magic.size(), nonce_bytes);
  const std::string client_nonce = random_bytes(nonce_bytes);
  const std::uint64_t own = tag(key, "client", server_nonce, client_nonce);
  const std::string answer = Writer{}.raw(client_nonce).u64(own).bytes();
  char proof[tag_bytes];
  if (write_exact(socket.get(), answer.data(), answer.size(), limit) != Transfer::complete ||
      read_exact(socket.get(), proof, sizeof proof, limit) != Transfer::complete ||
      Reader({proof, sizeof proof}).u64() != tag(key, "server", server_nonce, client_nonce)) {
    why = "the store there has another secret: it is another job's";
    return {};
  }
  return StoreSocket{std::move(socket), FrameKey(key, "client", server_nonce, client_nonce),
                     FrameKey(key, "server", server_nonce, client_nonce)};
}

/// Requests and replies. One of the waiting threads reads for all; replies without one are dropped.
class StoreConnection {
 public:
  explicit StoreConnection(StoreSocket socket) : socket_(std::move(socket)) {}

  Transfer post(std::string_view body, std::uint32_t& number, Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (end_ != Transfer::complete) return end_;
      number = next_++;
      replies_.emplace(number, std::nullopt);
    }
    const Transfer sent = send(number, body, deadline);
    if (sent != Transfer::complete) forget(number);
    return sent;
  }

  /// Waits for the reply to a request; past the deadline it looks once.
  Transfer await(std::uint32_t number, std::string& body, Deadline deadline) {
    std::unique_lock lock(mutex_);
    for (bool looked = false;; looked = true) {
      const auto reply = replies_.find(number);
      if (reply == replies_.end()) return Transfer::closed;
      if (std::optional<std::string>& here = reply->second; here || end_ != Transfer::complete) {
        const Transfer done = here ? Transfer::complete : end_;
        if (here) body = *std::move(here);
        replies_.erase(reply);
        return done;
      }
      if (looked && deadline.passed()) return Transfer::timed_out;
      if (!is_read_) {
        read_some(lock, deadline);
      } else if (!deadline.is_ever()) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, deadline.when());
      }
    }
  }

  /// Cancels a request that waits at the server, if the message can be sent within 100 ms.
  void cancel(std::uint32_t number) {
    store_protocol::Request request{store_protocol::Operation::cancel};
    request.number = number;
    std::uint32_t own = 0;
    post(request.bytes(), own, Deadline::after(std::chrono::milliseconds(100)));
    forget(own);  // it has no reply
  }

  /// The bytes that have come, of any replies.
  std::uint64_t received() {
    const std::lock_guard lock(mutex_);
    return received_;
  }

  /// Drops the reply to a request.
  void forget(std::uint32_t number) {
    const std::lock_guard lock(mutex_);
    replies_.erase(number);
  }

 private:
  Transfer send(std::uint32_t number, std::string_view body, Deadline deadline) {
    const std::lock_guard turn(sending_);  // also because a tag counts the frames before it
    const std::string out = socket_.sends.frame(number, body);
    const Transfer sent = write_exact(socket_.descriptor.get(), out.data(), out.size(), deadline);
    // After a partial request the server could not parse the next one.
    if (sent != Transfer::complete) {
      const std::lock_guard lock(mutex_);
      close(Transfer::closed);
    }
    return sent;
  }

  /// Reads, or waits for data until the deadline, without the lock; then another thread takes over.
  void read_some(std::unique_lock<std::mutex>& lock, Deadline deadline) {
    is_read_ = true;
    lock.unlock();
    char buffer[65536];
    const int fd = socket_.descriptor.get();
    ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN && wait_ready(fd, POLLIN, deadline)) {
      n = ::recv(fd, buffer, sizeof buffer, 0);
    }
    const bool nothing = n < 0 && (errno == EAGAIN || errno == EINTR);
    lock.lock();
    is_read_ = false;
    if (n > 0) {
      received_ += static_cast<std::uint64_t>(n);
      input_.append(buffer, static_cast<std::size_t>(n));
      const auto sort = [&](std::uint32_t number, std::string_view body) {
        if (const auto reply = replies_.find(number); reply != replies_.end()) reply->second = body;
        return true;
      };
      if (!socket_.receives.take_frames(input_, sort)) close(Transfer::forged);
    } else if (!nothing) {
      close(Transfer::closed);
    }
    changed_.notify_all();
  }

  void close(Transfer why) {
    if (end_ == Transfer::complete) end_ = why;
    ::shutdown(socket_.descriptor.get(), SHUT_RDWR);  // wakes the reading thread
    changed_.notify_all();
  }

  StoreSocket socket_;
  std::mutex sending_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::map<std::uint32_t, std::optional<std::string>> replies_;  // by request, once received
  std::string input_;
  std::uint32_t next_ = 1;
  std::uint64_t received_ = 0;
  bool is_read_ = false;
  Transfer end_ = Transfer::complete;  // how the connection has ended, if it has
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The client side of the job's key-value store.

#include "lockstep/detail/core/strong.hpp"

namespace lockstep {

namespace detail {
class StoreClient;
class StoreWatch;
namespace store_protocol {
enum class Operation : std::uint8_t;
}
}  // namespace detail

/// A client of the job's key-value store, which threads may share: a wait blocks no other thread's
/// request. A failed request is never repeated: the client cannot know whether it was done.
class Store {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Connects, with retries until `timeout`, which is also the default limit of requests.
  Store(const std::string& host, std::uint16_t port, const std::string& secret,
        Milliseconds timeout);

  /// Connects to the first of the ports at which a store with this secret answers.
  Store(const std::string& host, std::span<const std::uint16_t> ports, const std::string& secret,
        Milliseconds timeout);
  Store(Store&&) noexcept = default;
  Store& operator=(Store&&) noexcept = default;

  /// The same store over the same connection, which closes with the last such object.
  Store share() const { return {client_, timeout_}; }

  std::uint16_t port() const;
  Milliseconds timeout() const { return timeout_; }
  /// Sets the limit of this object's later requests.
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// Stores a value, and replaces an earlier one.
  void set(std::string_view key, std::string_view value);

  /// A key's value, once it is set. This and what follows throw after `limit`, or `timeout()`.
  std::string get(std::string_view key, std::optional<Milliseconds> limit = {});

  /// The value of a key if it has one now or within `limit`.
  std::optional<std::string> try_get(std::string_view key, Milliseconds limit = Milliseconds(0));

  /// Waits until all keys are set.
  void wait(const std::vector<std::string>& keys, std::optional<Milliseconds> limit = {});

  /// Atomically adds to a number, 0 at first. Returns the sum.
  std::int64_t add(std::string_view key, std::int64_t delta);

  /// Atomically sets `desired` if the value is `expected`, or if there is none and `expected` is
  /// empty. Returns the stored value; `expected` if there is none.
  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view desired);

  /// Returns whether the key existed.
  bool erase(std::string_view key);

  /// Waits until all ranks have reached the barrier of this name, which can then be reused. Ranks
  /// that timed out or died do not count. **Ranks** all. **Host** blocks. **Stream** none.
  void barrier(std::string_view name, Rank rank, WorldSize world,
               std::optional<Milliseconds> limit = {});

  /// The values of all ranks, in rank order, with one request per rank; at most 16 MiB in all. The
  /// name can then be reused. **Ranks** all must call. **Host** blocks. **Stream** none.
  std::vector<std::string> gather(std::string_view name, Rank rank, WorldSize world,
                                  std::string_view value, std::optional<Milliseconds> limit = {});

 private:
  friend class detail::StoreWatch;
  using Operation = detail::store_protocol::Operation;
  Store(std::shared_ptr<detail::StoreClient> client, Milliseconds timeout)
      : timeout_(timeout), client_(std::move(client)) {}

  Milliseconds timeout_;
  std::shared_ptr<detail::StoreClient> client_;
};

namespace detail {

/// Watches one key. The server reports changes, so that polling costs no request.
class StoreWatch {
 public:
  StoreWatch(const Store& store, std::string key);
  StoreWatch(const StoreWatch&) = delete;
  StoreWatch& operator=(const StoreWatch&) = delete;
  ~StoreWatch();

  /// The value, if new since the last. Throws where the store is gone. **Host** does not block.
  std::optional<std::string> news();

 private:
  std::uint32_t ask();

  std::string key_;
  Store store_;
  std::optional<std::uint32_t> pending_;  // the number of the request
  std::optional<std::string> known_;
};

}  // namespace detail

}  // namespace lockstep

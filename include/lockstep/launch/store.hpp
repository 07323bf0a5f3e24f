// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store as a rank sees it: keys and values that all ranks of a job share.

#include "lockstep/core/strong.hpp"

namespace lockstep {

namespace detail {
class StoreClient;
class StoreConnection;
class StoreWatch;
namespace store_protocol {
enum class Operation : std::uint8_t;
}
}  // namespace detail

/// A client of the job's store. Any number of threads may use one, over one connection: the server
/// answers each request as soon as it can, so a wait never blocks another thread's request.
///
/// A failed request is never repeated, because the client cannot know whether an `add` was done.
class Store {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Connects, trying again until the store is there or the time is over. `timeout` is also the
  /// limit for requests that are not given one of their own.
  Store(const std::string& host, std::uint16_t port, const std::string& secret,
        Milliseconds timeout);

  /// Connects to the first of several ports that has the store; ports that refuse, stay silent or
  /// do not know the secret are skipped.
  Store(const std::string& host, std::span<const std::uint16_t> ports, const std::string& secret,
        Milliseconds timeout);
  Store(Store&&) noexcept = default;
  Store& operator=(Store&&) noexcept = default;

  /// The same store over the same connection, which stays open until the last such object has gone.
  Store share() const { return {client_, timeout_}; }

  std::uint16_t port() const;
  Milliseconds timeout() const { return timeout_; }
  /// Sets the limit of this object's later requests, after which a store that does not answer is an
  /// error.
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// Stores a value, and replaces an earlier one.
  void set(std::string_view key, std::string_view value);

  /// The value of a key, as soon as a rank has set it. This and the operations below wait for
  /// `timeout()` at most where they are given no limit of their own.
  std::string get(std::string_view key, std::optional<Milliseconds> limit = {});

  /// The value of a key if it has one now, or gets one in that time.
  std::optional<std::string> try_get(std::string_view key, Milliseconds limit = Milliseconds(0));

  /// Waits until all keys have been set.
  void wait(const std::vector<std::string>& keys, std::optional<Milliseconds> limit = {});

  /// Adds to a number, which begins at 0, atomically. Returns the new number.
  std::int64_t add(std::string_view key, std::int64_t delta);

  /// Sets `desired` if the value is `expected`, or if there is none and `expected` is empty,
  /// atomically. Returns the value that is stored then; `expected` if there was none and none was
  /// set.
  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view desired);

  /// Removes a key. Returns whether it was there.
  bool erase(std::string_view key);

  /// Waits until all ranks of the world have come to the barrier of this name, which can then be
  /// used again. A rank whose time is over, or that dies, no longer counts as having come. Ranks:
  /// all must call. Host: blocks. Stream: none.
  void barrier(std::string_view name, Rank rank, WorldSize world,
               std::optional<Milliseconds> limit = {});

  /// What every rank of the world has given to the gather of this name, in rank order: one request
  /// a rank, where a key for each would take a request for every pair. The name can then be used
  /// again. All ranks together give at most 16 MiB. **Ranks** all must call. **Host** blocks.
  std::vector<std::string> gather(std::string_view name, Rank rank, WorldSize world,
                                  std::string_view value, std::optional<Milliseconds> limit = {});

 private:
  friend class detail::StoreWatch;
  using Operation = detail::store_protocol::Operation;
  Store(std::shared_ptr<detail::StoreClient> client, Milliseconds timeout)
      : timeout_(timeout), client_(std::move(client)) {}
  std::vector<std::string> meet(std::string_view operation, std::string_view name, Rank rank,
                                WorldSize world, std::string_view value,
                                std::optional<Milliseconds> limit);

  Milliseconds timeout_;
  std::shared_ptr<detail::StoreClient> client_;
};

namespace detail {

/// Watches one key. The store says when its value changes, so that looking costs no request and no
/// answer, however many ranks look however often.
class StoreWatch {
 public:
  StoreWatch(const Store& store, std::string key);
  StoreWatch(const StoreWatch&) = delete;
  StoreWatch& operator=(const StoreWatch&) = delete;
  ~StoreWatch();

  /// The value, if it is another one than at the last call that returned one. Throws where the
  /// store is gone. **Host** does not block.
  std::optional<std::string> news();

 private:
  void ask();

  std::string key_;
  Store store_;
  std::shared_ptr<StoreConnection> connection_;  // of the request that waits
  std::uint32_t number_ = 0;
  std::optional<std::string> known_;
};

}  // namespace detail

}  // namespace lockstep

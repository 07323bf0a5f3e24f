// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store as a rank sees it: keys and values that all ranks of a job share.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

namespace detail {
class StoreClient;
}

/// A client of the job's store. Any number of threads may use one: each request takes a connection
/// of its own for as long as it lasts, an idle one or a new one. So a wait is a request like any
/// other: the server answers it as soon as it can, and it never blocks another thread's request.
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
  Store(Store&&) noexcept;
  Store& operator=(Store&&) noexcept;
  ~Store();

  std::uint16_t port() const;
  Milliseconds timeout() const;
  /// Sets the limit of later requests, after which a store that does not answer is an error.
  void set_timeout(Milliseconds timeout);

  /// Stores a value, and replaces an earlier one.
  void set(std::string_view key, std::string_view value);

  /// The value of a key, as soon as a rank has set it.
  std::string get(std::string_view key) { return get(key, timeout()); }
  std::string get(std::string_view key, Milliseconds timeout);

  /// The value of a key if it has one now, or gets one in that time.
  std::optional<std::string> try_get(std::string_view key, Milliseconds timeout = Milliseconds(0));

  /// Waits until all keys have been set.
  void wait(const std::vector<std::string>& keys) { wait(keys, timeout()); }
  void wait(const std::vector<std::string>& keys, Milliseconds timeout);

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
  void barrier(std::string_view name, Rank rank, WorldSize world) {
    barrier(name, rank, world, timeout());
  }
  void barrier(std::string_view name, Rank rank, WorldSize world, Milliseconds timeout);

 private:
  std::unique_ptr<detail::StoreClient> client_;
};

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/store.ipp"
#endif

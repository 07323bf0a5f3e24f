// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's rendezvous in the job's store.

#include <chrono>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/library.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail::over_gloo {

/// The part of the job's store in which the ranks of one communicator leave their addresses.
///
/// Each rank sets one value, an address for every other rank, and then waits for and reads those of
/// all. In communicators of up to `most_gathered` ranks setting a value is therefore a gather,
/// which brings all of them. In larger ones that would be too long a message for the store; there a
/// rank reads one value after the other.
class MeetingStore : public ::gloo::rendezvous::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr std::size_t most_gathered = 128;

  MeetingStore(lockstep::Store& store, std::string prefix, Rank rank, WorldSize world,
               Milliseconds timeout)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), world_(world), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const std::string_view value(data.data(), data.size());
    if (world_.value() > most_gathered || !known_.empty()) {
      store_.set(prefix_ + key, value);
      return;
    }
    const std::string own = store_protocol::Writer{}.text(key).text(value).bytes();
    for (const std::string& piece : store_.gather(prefix_ + "mesh", rank_, world_, own, timeout_)) {
      store_protocol::Reader in(piece);
      std::string name(in.text());
      known_.emplace(std::move(name), in.text());
    }
  }
  std::vector<char> get(const std::string& key) override {
    const std::string& value = find(key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override {
    // Gloo's limit is meant for connecting, not for meeting, and is not used here. It reads what it
    // has waited for: one request does both.
    for (const std::string& key : keys) find(key);
  }

 private:
  const std::string& find(const std::string& key) {
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    return known_.emplace(key, store_.get(prefix_ + key, timeout_)).first->second;
  }

  lockstep::Store& store_;
  std::string prefix_;
  Rank rank_;
  WorldSize world_;
  Milliseconds timeout_;
  std::map<std::string, std::string> known_;
};

}  // namespace lockstep::detail::over_gloo

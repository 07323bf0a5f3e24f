// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's rendezvous in the job's store.

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/library.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::over_gloo {

/// The part of the job's store in which the ranks of one communicator leave their addresses.
class MeetingStore : public ::gloo::rendezvous::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;

  MeetingStore(lockstep::Store& store, std::string prefix, Milliseconds timeout)
      : store_(store), prefix_(std::move(prefix)), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, std::string_view(data.data(), data.size()));
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get(prefix_ + key, timeout_);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override {
    // Gloo's limit is meant for connecting, not for meeting, and is not used here.
    std::vector<std::string> named;
    named.reserve(keys.size());
    for (const std::string& key : keys) named.push_back(prefix_ + key);
    store_.wait(named, timeout_);
  }

 private:
  lockstep::Store& store_;
  std::string prefix_;
  Milliseconds timeout_;
};

}  // namespace lockstep::detail::over_gloo

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which gradients of a backward pass have arrived, and which buckets they complete.

#include <array>
#include <bitset>
#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/model/tensor_table.hpp"

namespace lockstep {

template <class Model>
class Readiness {
 public:
  static constexpr std::size_t count = parameter_table<Model>.size();

  /// Nothing has arrived.
  void reset(const auto& plan) {
    ready_.reset();
    for (std::size_t b = 0; b != plan.bucket_count; ++b)
      missing_[b] = plan.bucket_table[b].parameters;
  }

  /// A gradient has arrived, for the first time in this pass.
  void mark(std::size_t parameter, std::size_t bucket) {
    if (ready_[parameter]) [[unlikely]] {
      throw Error("backward", "the gradient of " + name_of(parameter) + " was marked ready twice",
                  "call step.ready once for each parameter, when its gradient is complete");
    }
    ready_[parameter] = true;
    --missing_[bucket];
  }

  bool is_ready(std::size_t parameter) const { return ready_[parameter]; }
  bool is_complete(std::size_t bucket) const { return missing_[bucket] == 0; }
  bool all_ready() const { return ready_.all(); }

  /// The names of those that have not arrived, at most eight of them.
  std::string missing_names() const {
    constexpr std::size_t most = 8;
    std::string names;
    std::size_t listed = 0;
    for (std::size_t p = 0; p < count && listed < most; ++p) {
      if (!ready_[p]) names += (listed++ == 0 ? "" : ", ") + name_of(p);
    }
    const std::size_t missing = count - ready_.count();
    return missing > most ? names + " and " + std::to_string(missing - most) + " more" : names;
  }

  static std::string name_of(std::size_t parameter) {
    return std::string(parameter_table<Model>.name(parameter));
  }

 private:
  std::bitset<count> ready_;
  std::array<std::size_t, count> missing_{};  // by bucket
};

}  // namespace lockstep

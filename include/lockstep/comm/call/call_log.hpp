// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The calls that a rank has made, for backends that compare calls only afterwards.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/call/messages.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail {

/// How far a rank has come: the number of its calls and a hash over all of them. Ranks that have
/// made equally many calls have made the same calls if their hashes are equal.
struct LogHead {
  std::uint64_t calls = 0;
  std::uint64_t hash = 0;

  friend bool operator==(const LogHead&, const LogHead&) = default;
};

/// A chain of hashes over all calls, and the last `kept` calls in full.
class CallLog {
 public:
  static constexpr std::size_t kept = 4096;

  std::uint64_t calls() const { return head_.calls; }
  LogHead head() const { return head_; }

  void add(const Call& call) {
    head_.hash = Hash{}
                     .number(head_.hash)
                     .number(static_cast<std::uint64_t>(call.kind))
                     .number(static_cast<std::uint64_t>(call.part_of))
                     .number(static_cast<std::uint64_t>(call.element))
                     .number(call.root)
                     .number(call.count)
                     .text(call.operation.data())
                     .value();
    ++head_.calls;
    if (entries_.size() < kept) {
      entries_.push_back({call, head_.hash});
    } else {
      entries_[(head_.calls - 1) % kept] = {call, head_.hash};
    }
  }

  /// The call with this number, from 0, while it is kept.
  const Call* find(std::uint64_t number) const {
    return number < calls() && calls() - number <= kept ? &entries_[number % kept].call : nullptr;
  }

  /// Has this rank made other calls than the one of this head? Nothing if it cannot tell, being
  /// behind or too far ahead.
  std::optional<bool> differs(const LogHead& other) const {
    if (other.calls == 0) return false;
    if (find(other.calls - 1) == nullptr) return std::nullopt;
    return entries_[(other.calls - 1) % kept].hash != other.hash;
  }

  /// Forgets all calls, because they did not happen.
  void clear() {
    head_ = {};
    entries_.clear();
  }

  /// The number of calls, and those that are kept as they lie in memory: ranks run one program.
  std::string bytes() const {
    std::string out = store_protocol::Writer{}.u64(calls()).bytes();
    for (std::uint64_t n = first(); n < calls(); ++n)
      out.append(reinterpret_cast<const char*>(find(n)), sizeof(Call));
    return out;
  }

  /// The number of the first call that is kept.
  std::uint64_t first() const { return calls() - std::min<std::uint64_t>(calls(), kept); }

 private:
  struct Entry {
    Call call;
    std::uint64_t hash = 0;  // over this call and all before it
  };

  LogHead head_;
  std::vector<Entry> entries_;
};

/// Another rank's log as it came over the wire: the calls from `first` on.
struct SentLog {
  std::uint64_t first = 0;
  std::vector<Call> calls;

  /// Nothing where the bytes are not a whole log.
  static std::optional<SentLog> from_bytes(std::string_view bytes) {
    store_protocol::Reader in(bytes);
    const std::uint64_t made = in.u64();
    const std::uint64_t kept = std::min<std::uint64_t>(made, CallLog::kept);
    SentLog log{made - kept, std::vector<Call>(kept)};
    const std::string_view sent = in.raw(kept * sizeof(Call));
    if (!in.ok()) return std::nullopt;
    if (kept != 0) std::memcpy(log.calls.data(), sent.data(), sent.size());
    for (Call& call : log.calls) {
      if (static_cast<std::size_t>(call.kind) >= std::size(collective_names)) return std::nullopt;
      if (static_cast<std::size_t>(call.element) >= element_kinds) return std::nullopt;
      if (static_cast<std::size_t>(call.part_of) >= std::size(job_call_names) &&
          call.part_of < JobCall::step_of_subgraphs)
        return std::nullopt;
      call.operation.back() = '\0';
    }
    return log;
  }
};

/// The error of ranks that made different calls; nothing if the logs are equal as far as both go.
/// `rank` is the rank that sent `other`.
inline std::optional<Error> find_disagreement(const CallLog& rank0, const SentLog& other, Rank rank,
                                              Rank me) {
  const std::uint64_t both = std::min(rank0.calls(), other.first + other.calls.size());
  for (std::uint64_t n = std::max(rank0.first(), other.first); n < both; ++n) {
    const Call& here = *rank0.find(n);
    const Call& there = other.calls[n - other.first];
    if (here == there) continue;
    return ranks_disagree(n, here.text(), rank, there.text(), me);
  }
  return std::nullopt;
}

/// How far a rank is, as it tells the others when one of them has waited for long.
struct Position {
  std::uint64_t calls = 0;  // that it has made
  std::string call;         // the call that it is in, or empty

  friend bool operator==(const Position&, const Position&) = default;
};

/// `rank 1 is in no call (made 4 of 5)`. `calls` is the number that the asking rank has made.
inline std::string position_text(Rank rank, const std::optional<Position>& position,
                                 std::uint64_t calls) {
  const std::string name = "rank " + std::to_string(rank.value());
  if (!position) return name + " does not answer";
  const std::string in = position->call.empty() ? "no call" : position->call;
  const std::string made = "made " + std::to_string(position->calls);
  if (position->calls >= calls) return name + " is in " + in + " (" + made + ")";
  return name + " is in " + in + " (" + made + " of " + std::to_string(calls) + ")";
}

}  // namespace lockstep::detail

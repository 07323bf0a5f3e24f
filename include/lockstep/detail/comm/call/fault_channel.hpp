// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The log of calls, for later comparison, and the fault channel in the job's store.

#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/store/protocol.hpp"
#include "lockstep/detail/store/store.hpp"

namespace lockstep::detail {

/// A rank's progress: the number of its calls, a hash over all of them, and the current call.
struct Position {
  std::uint64_t calls = 0;
  std::uint64_t hash = 0;
  std::string call{};

  friend bool operator==(const Position&, const Position&) = default;
};

/// A chain of hashes over all calls, and the last `kept` calls in full.
class CallLog {
 public:
  static constexpr std::size_t kept = 4096;

  std::uint64_t calls() const { return head_.calls; }
  /// This rank's progress, without the text of its current call.
  const Position& head() const { return head_; }

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
    entries_[head_.calls++ % kept] = {call, head_.hash};
  }

  /// The call with this number, from 0, if it is still kept.
  const Call* find(std::uint64_t number) const {
    return number < calls() && number >= first() ? &entries_[number % kept].call : nullptr;
  }
  std::uint64_t first() const { return calls() - std::min<std::uint64_t>(calls(), kept); }

  /// Do this rank's calls differ from those of `other`? Nothing if it is behind or too far ahead.
  std::optional<bool> differs(const Position& other) const {
    if (other.calls == 0) return false;
    if (find(other.calls - 1) == nullptr) return std::nullopt;
    return entries_[(other.calls - 1) % kept].hash != other.hash;
  }

  /// Serializes the first kept call's number and the texts of all kept calls, for another rank.
  std::string bytes() const {
    store_protocol::Writer out;
    out.u64(first());
    for (std::uint64_t n = first(); n < calls(); ++n) out.text(find(n)->text());
    return out.bytes();
  }

 private:
  struct Entry {
    Call call;
    std::uint64_t hash = 0;  // over this call and all before it
  };

  Position head_;
  std::vector<Entry> entries_ = std::vector<Entry>(kept);  // call n is at n % kept
};

/// The error if rank 0's log differs from `other`, that of `rank`, as far as both go.
inline std::optional<Error> find_disagreement(const CallLog& rank0, std::string_view other,
                                              Rank rank, Rank me) {
  store_protocol::Reader in(other);
  for (std::uint64_t n = in.u64(); in.ok() && n < rank0.calls(); ++n) {
    const std::string_view there = in.text();
    const Call* const here = rank0.find(n);
    if (!in.ok() || here == nullptr || here->text() == there) continue;
    return ranks_disagree(n, here->text(), rank, there, me);
  }
  return std::nullopt;
}

/// `rank 1 is in no call (made 4 of 5)`. `calls` is the number that the asking rank has made.
inline std::string position_text(Rank rank, const std::optional<Position>& position,
                                 std::uint64_t calls) {
  if (!position) return text({"rank ", rank, " does not answer"});
  return text({"rank ", rank, " is in ", position->call.empty() ? "no call" : position->call,
               " (made ", position->calls,
               position->calls < calls ? text({" of ", calls, ")"}) : ")"});
}

struct Notice {
  enum class Kind : std::uint8_t {
    none,
    question,  // a rank has waited for long: all publish their progress
    failed,    // `rank` has failed, for this reason
    differs,   // `rank` has made other calls than rank 0
  };

  Kind kind = Kind::none;
  Rank rank;
  std::string reason;

  bool is_fault() const { return kind != Kind::none && kind != Kind::question; }

  std::string bytes() const {
    return store_protocol::Writer{}
        .byte(static_cast<std::uint8_t>(kind))
        .u32(static_cast<std::uint32_t>(rank.value()))
        .text(reason)
        .bytes();
  }
  static Notice from_bytes(std::string_view bytes) {
    store_protocol::Reader in(bytes);
    const auto kind = static_cast<Kind>(in.byte());
    const Rank rank{in.u32()};
    const std::string reason(in.text());
    return in.ok() ? Notice{kind, rank, reason} : Notice{};
  }
};

/// The fault channel: a communicator's keys in the store. Thread-safe. Throws if the store is gone.
class FaultChannel {
 public:
  /// `name` is the communicator's: the same on all its ranks, and unique in the job.
  FaultChannel(std::shared_ptr<Store> store, const std::string& name, Rank rank)
      : store_(std::move(store)), prefix_("lockstep/faults/" + name + "/"), rank_(rank) {}

  Notice notice() const {
    const auto bytes = store_->try_get(prefix_ + "notice");
    return bytes ? Notice::from_bytes(*bytes) : Notice{};
  }

  /// The store pushes every new notice: polling the watch costs no request.
  std::unique_ptr<StoreWatch> watch() const {
    return std::make_unique<StoreWatch>(*store_, prefix_ + "notice");
  }

  /// The interval of a rank's periodic requests: the store gets at most a thousand a second in all.
  static Milliseconds pace(std::size_t world) { return Milliseconds(world); }

  /// Asks all ranks for their progress, unless there is a fault already.
  void ask() const { post({Notice::Kind::question, rank_, ""}); }

  /// Publishes that this rank failed. Returns the first fault, which is the one that counts.
  Notice fail(std::string_view reason) const {
    return post({Notice::Kind::failed, rank_, std::string(reason.substr(0, most_reason_bytes))});
  }

  /// Publishes this rank's own abort reason, which shows that it did not crash.
  void give_reason(std::string_view reason) const {
    store_->set(prefix_ + "reason/" + std::to_string(rank_.value()),
                reason.substr(0, most_reason_bytes));
  }
  std::optional<std::string> reason(std::size_t rank) const {
    return store_->try_get(prefix_ + "reason/" + std::to_string(rank));
  }

  /// Publishes that this rank's calls differ from rank 0's, and its log. Returns the first fault.
  Notice differ(const CallLog& log) const {
    store_->set(prefix_ + "log", log.bytes());
    return post({Notice::Kind::differs, rank_, ""});
  }

  /// Rank 0 publishes its progress, with which the others compare their logs.
  void set_head(const Position& head) const { set_position("head", head); }
  Position head() const { return position("head").value_or(Position{}); }

  /// Publishes this rank's progress, after some rank has asked for it.
  void set_position(const Position& own) const { set_position(position_of(rank_.value()), own); }
  std::vector<std::optional<Position>> positions(std::size_t world) const {
    std::vector<std::optional<Position>> all(world);
    for (std::size_t w = 0; w < world; ++w) all[w] = position(position_of(w));
    return all;
  }

  /// The error of ranks that disagree. Only rank 0 compares logs, so that all name the same calls.
  Error disagreement(const CallLog& log, Rank differing, Milliseconds timeout) const {
    if (rank_ == Rank{0}) {
      auto found = find_disagreement(log, store_->get(prefix_ + "log", timeout), differing, rank_);
      if (!found) {
        found.emplace("an earlier call",
                      text({"ranks disagree: rank 0 and rank ", differing,
                            " made different calls, more than ", CallLog::kept, " calls ago"}),
                      advice, rank_);
      }
      store_->set(prefix_ + "disagreement",
                  store_protocol::Writer{}.text(found->operation()).text(found->problem()).bytes());
      return *found;
    }
    const std::string bytes = store_->get(prefix_ + "disagreement", timeout);
    store_protocol::Reader in(bytes);
    const std::string_view operation = in.text();
    return {operation, in.text(), advice, rank_};
  }

 private:
  static constexpr const char* advice = "let every rank make the same calls in the same order";
  static constexpr std::size_t most_reason_bytes = 64 << 10;

  static std::string position_of(std::size_t rank) { return text({"position/", rank}); }
  void set_position(const std::string& key, const Position& own) const {
    store_->set(prefix_ + key,
                store_protocol::Writer{}.u64(own.calls).u64(own.hash).text(own.call).bytes());
  }
  std::optional<Position> position(const std::string& key) const {
    const auto bytes = store_->try_get(prefix_ + key);
    if (!bytes) return std::nullopt;
    store_protocol::Reader in(*bytes);
    return Position{in.u64(), in.u64(), std::string(in.text())};  // in this order
  }

  /// A fault replaces a question; nothing replaces a fault.
  Notice post(const Notice& notice) const {
    const std::string key = prefix_ + "notice";
    const std::string bytes = notice.bytes();
    std::string there;
    while (true) {
      const std::string now = store_->compare_set(key, there, bytes);
      if (now == bytes) return notice;
      const Notice other = Notice::from_bytes(now);
      if (!notice.is_fault() || other.is_fault()) return other;
      there = now;
    }
  }

  std::shared_ptr<Store> store_;
  std::string prefix_;
  Rank rank_;
};

}  // namespace lockstep::detail

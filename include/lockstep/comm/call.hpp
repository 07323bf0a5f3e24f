// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's description of its call, by which ranks notice when they disagree.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

enum class CollectiveKind : std::uint16_t {
  barrier,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  send,
  receive,
  allocate,
  new_group,
  replay,
  capture,
  all_gather_variable,
  gather_variable,
};

inline constexpr std::string_view collective_names[] = {
    "barrier",        "all_reduce", "reduce",  "broadcast",
    "all_gather",     "gather",     "scatter", "reduce_scatter",
    "all_to_all",     "send",       "receive", "allocate",
    "new_group",      "replay",     "capture", "all_gather_variable",
    "gather_variable"};

constexpr std::string_view collective_name(CollectiveKind kind) {
  return collective_names[static_cast<std::size_t>(kind)];
}

/// The call of a job that a collective is part of, for errors in the words of the program.
enum class JobCall : std::uint16_t {
  none,  // the program has made the collective itself
  step,
  epochs,
  batches,
  evaluate,
  predict,
  reduce_metrics,
  save,
  load,
  open,
  forward,  // passes of a program's own loop
  backward,
  /// From here on a step of sub-graphs: the other bits say which, the lowest the whole model.
  step_of_subgraphs = 0x8000,
};

/// A step that uses these sets, by bits.
constexpr JobCall step_of_subgraphs(std::uint32_t sets) {
  return static_cast<JobCall>(static_cast<std::uint32_t>(JobCall::step_of_subgraphs) | sets);
}
/// How many sets can be told apart so, beside the whole model.
inline constexpr std::size_t most_compared_subgraphs = 14;

inline constexpr std::string_view job_call_names[] = {
    "",     "step", "epochs", "batches", "evaluate", "predict", "reduce_metrics",
    "save", "load", "open",   "forward", "backward"};

/// A call in words.
std::string job_call_text(JobCall call);

/// The job's call that this thread is in.
inline JobCall& job_call_of_thread() {
  static thread_local JobCall call = JobCall::none;
  return call;
}
constexpr JobCall current_job_call() {
  return std::is_constant_evaluated() ? JobCall::none : job_call_of_thread();
}

/// The call of a step, for collectives that do not know the job: it has told its thread where ranks
/// compare sub-graphs, and otherwise it is this one.
inline JobCall step_call_of_thread(JobCall otherwise = JobCall::step) {
  const JobCall call = job_call_of_thread();
  return call >= JobCall::forward ? call : otherwise;
}

/// Collectives of this thread are part of a job's call while this object lives. The collectives of
/// a step are told so by a constant instead.
class InJobCall {
 public:
  explicit InJobCall(JobCall call) : before_(std::exchange(job_call_of_thread(), call)) {}
  ~InJobCall() { job_call_of_thread() = before_; }
  InJobCall(const InJobCall&) = delete;
  InJobCall& operator=(const InJobCall&) = delete;

 private:
  JobCall before_;
};

/// One rank's description of a call. It travels between ranks as it is. All ranks of a collective
/// must give equal descriptions; a sender and its receiver give matching ones.
struct Call {
  CollectiveKind kind = CollectiveKind::barrier;
  JobCall part_of = JobCall::none;
  ElementKind element = ElementKind::unsupported;
  bool staged = false;     // the memory is not visible to other ranks
  std::uint16_t root = 0;  // or the other rank of a message
  std::uint64_t count = 0;
  std::array<char, 24> operation{};  // the reduce operation's name

  friend bool operator==(const Call&, const Call&) = default;

  constexpr Call& with(std::string_view name) {
    name.copy(operation.data(), operation.size() - 1);
    return *this;
  }

  /// Do a message that is sent and one that is received have the same type and length?
  constexpr bool carries_the_same_as(const Call& other) const {
    return element == other.element && count == other.count;
  }

  /// The call as errors name it: `all_reduce(sum of 100 float)`, or with the job's call that it is
  /// part of, `evaluate (its all_gather(1 uint64))`.
  std::string text() const;

 private:
  std::string collective_text() const;
};

}  // namespace lockstep::detail

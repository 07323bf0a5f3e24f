// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Profiler<...>`: what records the phases of a job's steps, and the spans that it gets.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

class Session;

namespace axes {
struct Profiler : WithName<"Profiler"> {};
}  // namespace axes

/// What a span is of. The name is a literal; `number` says which step, bucket or unit.
struct SpanName {
  static constexpr std::uint64_t no_number = ~std::uint64_t{0};

  const char* name;
  std::uint64_t number = no_number;
  std::uint64_t bytes = 0;
};

/// The policy for what records the phases of steps: `Profiler<Trace>` (lockstep/trace.hpp),
/// `Profiler<Nvtx>` (lockstep/nvtx.cuh), both, or nothing, which costs nothing. A recorder of one's
/// own has a class `Span`, made of a `SpanName` where a phase begins and destroyed where it ends, a
/// function `count(name, value)`, and a class `Recording(session, path)`, which lives as the job.
template <class... Recorders>
struct Profiler : detail::ValuePolicy<axes::Profiler> {
  static constexpr bool records = sizeof...(Recorders) != 0;
  /// Is there a recorder that `--trace` turns on?
  static constexpr bool has_trace = (requires { Recorders::file_flag; } || ...);

  struct [[nodiscard("a span ends with its object")]] Span : Recorders::Span... {
    constexpr explicit Span(const SpanName& name) : Recorders::Span(name)... {}
  };
  static constexpr void count(const char* name, double value) {
    (Recorders::count(name, value), ...);
  }
  struct Recording : Recorders::Recording... {
    constexpr Recording(Session& session, const std::string& path)
        : Recorders::Recording(session, path)... {}
    constexpr void after_step() { (Recorders::Recording::after_step(), ...); }
    /// The job ends: its communicators are still there, for the last time.
    constexpr void before_end() { (Recorders::Recording::before_end(), ...); }
  };
  /// Ranks may differ in what they record.
  static constexpr void fingerprint(detail::Hash&) {}
};

}  // namespace lockstep

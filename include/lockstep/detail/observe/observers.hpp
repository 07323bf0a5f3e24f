// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Observers<...>`: who looks at a job while it trains, and what they are told.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

class Session;

namespace axes {
struct Observers : WithName<"Observers"> {};
}  // namespace axes

/// What a span is of. The name is a literal; `number` says which step, bucket or unit.
struct SpanName {
  static constexpr std::uint64_t no_number = ~std::uint64_t{0};

  const char* name;
  std::uint64_t number = no_number;
  std::uint64_t bytes = 0;
};

/// Where observers write; empty for those that are off.
struct ObserverPaths {
  std::string trace{};        ///< `--trace FILE`, with `Trace`
  std::string tensorboard{};  ///< `--tensorboard FOLDER`, with `TensorBoard`
  std::string prometheus{};   ///< `--prometheus FILE`, with `Prometheus`
};

/// The base of observers, which hide what they want to know. It is a template so that the bases of
/// several are distinct types.
template <class Self>
struct Observer {
  /// A phase of a step on the calling thread, as long as the object lives.
  struct Span {
    constexpr explicit Span(const SpanName&) {}
  };
  /// The member of `ObserverPaths` that turns it on, and the option on the command line.
  static constexpr std::string ObserverPaths::* path = nullptr;
  static constexpr std::string_view option{};

  /// One on each rank, which lives as long as the job, or longer than all else of it.
  struct Watch {
    constexpr Watch(Session&, const ObserverPaths&) {}
    /// A number of the step that ends.
    constexpr void count(const char* /*name*/, double /*value*/) {}
    /// The job is made.
    constexpr void after_begin(auto& /*job*/) {}
    constexpr void after_step() {}
    /// After a step, some ten times a second, or after each where steps are long.
    constexpr void at_interval(auto& /*job*/) {}
    constexpr void after_epoch(auto& /*job*/) {}
    /// The job's communicators are there for the last time.
    constexpr void before_end() {}
  };
};

/// The policy for who looks on: `Observers<Trace>` (lockstep/trace.hpp), `TensorBoard` and
/// `Prometheus` (lockstep/metrics.hpp), `Nvtx` (lockstep/nvtx.cuh), several, or none, which costs
/// nothing. One of one's own derives from `Observer`.
template <class... Each>
struct Observers : detail::ValuePolicy<axes::Observers> {
  static constexpr bool any = sizeof...(Each) != 0;
  /// Does one of them write to this path?
  static constexpr bool has([[maybe_unused]] std::string ObserverPaths::* path) {
    return ((Each::path == path) || ...);
  }

  struct [[nodiscard("a span ends with its object")]] Span : Each::Span... {
    constexpr explicit Span(const SpanName& name) : Each::Span(name)... {}
  };
  struct Watch : Each::Watch... {
    constexpr Watch(Session& session, const ObserverPaths& paths)
        : Each::Watch(session, paths)... {}
    constexpr void count(const char* name, double value) { (Each::Watch::count(name, value), ...); }
    constexpr void after_begin(auto& job) { (Each::Watch::after_begin(job), ...); }
    constexpr void after_step() { (Each::Watch::after_step(), ...); }
    constexpr void at_interval(auto& job) { (Each::Watch::at_interval(job), ...); }
    constexpr void after_epoch(auto& job) { (Each::Watch::after_epoch(job), ...); }
    constexpr void before_end() { (Each::Watch::before_end(), ...); }
  };
  /// Ranks may differ in who looks on.
  static constexpr void fingerprint(detail::Hash&) {}
};

}  // namespace lockstep

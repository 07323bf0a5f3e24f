// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The axis of parameter groups: sets of parameters with their own optimizer options.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct ParameterGroups : WithName<"ParameterGroups"> {};
}  // namespace axes

/// A set of parameters, selected by name and rank. `begin(options)` sets the set's initial options.
template <class S>
concept ParameterSet = std::is_empty_v<S> && requires(std::string_view name, detail::Hash& hash) {
  { S::contains(name, std::size_t{1}) } -> std::same_as<bool>;
  S::fingerprint(hash);
};

/// Parameters by name: `Named<"head.*", "*.scale">`, where `*` stands for any characters.
template <Name... Patterns>
struct Named : detail::NamePatterns<Patterns...> {
  static constexpr bool contains(std::string_view name, std::size_t /*rank*/) {
    return detail::NamePatterns<Patterns...>::match(name);
  }
  static constexpr void begin(auto& /*options*/) {}
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text("Named");
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

/// Parameters of rank 0 or 1: biases, and the weights of norms.
struct Vectors {
  static constexpr bool contains(std::string_view /*name*/, std::size_t rank) { return rank <= 1; }
  static constexpr void begin(auto& /*options*/) {}
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("Vectors"); }
};

/// A set with weight decay 0 unless set: `NoDecay<"*.bias">` by name, `NoDecay<>` for `Vectors`.
template <Name... Patterns>
struct NoDecay : std::conditional_t<sizeof...(Patterns) == 0, Vectors, Named<Patterns...>> {
  static constexpr void begin(auto& options) {
    if constexpr (requires { options.weight_decay; }) options.weight_decay = 0;
  }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text("NoDecay");
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

/// The policy that gives sets of parameters their own options, as PyTorch's parameter groups:
///
///     using Head = Named<"head.*">;
///     using Job = Trainer<Net, Optimizer<AdamW>, ParameterGroups<NoDecay<>, Head>>;
///     job.optimizer(Head{}).lr = 1e-4;
///
/// A parameter is in the first set that contains it, or else in group 0 (`job.optimizer()`).
template <class... Sets>
struct ParameterGroups : detail::ValuePolicy<axes::ParameterGroups> {
  static constexpr std::size_t count = sizeof...(Sets) + 1;
  static constexpr bool well_formed = (ParameterSet<Sets> && ...);

  /// The number of the first set that contains a parameter, from 1, or 0.
  static constexpr std::size_t group_of([[maybe_unused]] std::string_view name,
                                        [[maybe_unused]] std::size_t rank) {
    std::size_t group = 0;
    const bool found = ((++group, Sets::contains(name, rank)) || ...);
    return found ? group : 0;
  }

  template <class Set>
  static constexpr std::size_t number_of() {
    std::size_t group = 0;
    const bool found = ((++group, std::is_same_v<Set, Sets>) || ...);
    return found ? group : 0;
  }

  /// Turns the options of group 0 into a group's initial options.
  static constexpr void begin([[maybe_unused]] std::size_t group, [[maybe_unused]] auto& options) {
    std::size_t number = 0;
    ((++number == group ? Sets::begin(options) : void()), ...);
  }

  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::ParameterGroups::name).number(sizeof...(Sets));
    (Sets::fingerprint(hash), ...);
  }
};

namespace detail {

/// The options of all groups. A set follows group 0 until its own options are first accessed; then
/// it has a copy, as PyTorch's groups have of the optimizer's defaults.
template <class Rule, class Groups>
struct GroupOptions {
  using Options = typename Rule::Options;
  Options common{};
  std::array<std::optional<Options>, Groups::count - 1> own{};  // by set, without group 0

  Options of(std::size_t group) const {
    if (group != 0 && own[group - 1]) return *own[group - 1];
    Options options = common;
    Groups::begin(group, options);
    return options;
  }

  template <class Set>
  Options& mine() {
    constexpr std::size_t group = Groups::template number_of<Set>();
    static_assert(group != 0,
                  "lockstep: this set is none of the job's ParameterGroups; add it there, spelled "
                  "the same");
    if constexpr (group != 0) {
      if (!own[group - 1]) own[group - 1] = of(group);
      return *own[group - 1];
    }
    return common;
  }
};

}  // namespace detail

}  // namespace lockstep

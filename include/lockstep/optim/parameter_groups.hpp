// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The axis of parameter groups: sets of parameters whose updates have numbers of their own.

#include "lockstep/core/name.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct ParameterGroups : WithName<"ParameterGroups"> {};
}  // namespace axes

/// A set of parameters, told by their names and their numbers of extents. `begin(options)` changes
/// the numbers that the set begins with.
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

/// Parameters with one extent or none: biases, and the scales and shifts of norms.
struct Vectors {
  static constexpr bool contains(std::string_view /*name*/, std::size_t rank) { return rank <= 1; }
  static constexpr void begin(auto& /*options*/) {}
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("Vectors"); }
};

/// A set whose weight decay is 0 unless it is set: `NoDecay<"*.bias", "norm*">` by name, and
/// `NoDecay<>` for all `Vectors`.
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

/// The policy that gives sets of parameters numbers of their own:
///
///     using Head = Named<"head.*">;
///     using Job = Trainer<Net, Optimizer<AdamW>, ParameterGroups<NoDecay<>, Head>>;
///     job.optimizer(Head{}).lr = 1e-4;
///
/// A parameter is in the first set that contains it. All others are in group 0, whose numbers are
/// `job.optimizer()`.
template <class... Sets>
struct ParameterGroups : detail::ValuePolicy<axes::ParameterGroups> {
  static constexpr std::size_t count = sizeof...(Sets) + 1;
  static constexpr bool well_formed = (ParameterSet<Sets> && ...);

  /// 0, or from 1 the number of the set that contains a parameter.
  static constexpr std::size_t group_of([[maybe_unused]] std::string_view name,
                                        [[maybe_unused]] std::size_t rank) {
    std::size_t group = 0;
    const bool found = ((++group, Sets::contains(name, rank)) || ...);
    return found ? group : 0;
  }

  /// The number of a set, or 0.
  template <class Set>
  static constexpr std::size_t number_of() {
    std::size_t group = 0;
    const bool found = ((++group, std::is_same_v<Set, Sets>) || ...);
    return found ? group : 0;
  }

  /// The numbers with which a group begins, made from those of group 0.
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

/// The options of all groups. A set follows group 0 until its own options are asked for: then it
/// has a copy, as PyTorch's groups have of the optimizer's defaults.
template <class Rule, class Groups>
struct GroupOptions {
  using Options = typename Rule::Options;
  Options common{};
  std::array<std::optional<Options>, Groups::count - 1> own{};  // by number of the set, from 0

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
    } else {
      return common;
    }
  }
};

}  // namespace detail

}  // namespace lockstep

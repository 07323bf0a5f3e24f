// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The concept of a gradient hook, the questions that a pipeline asks of one, and the axis of
/// hooks.

#include "lockstep/core/hash.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

/// A parameter's gradient in a bucket. A matrix has the parameter's first extent as its rows and
/// all others as its columns; a vector has one column.
struct HookedTensor {
  std::size_t parameter = 0;  ///< its number, as the model lists parameters
  std::size_t first = 0;      ///< its first element in the bucket
  std::size_t rows = 1;
  std::size_t columns = 1;

  constexpr std::size_t count() const { return rows * columns; }
};

namespace detail {

// A hook is a class with a name and one nested template, for which an object is made for every
// bucket, with the type of its elements:
//
//     struct Sign {
//       static constexpr std::string_view name = "Sign";
//       template <class T>
//       struct Bucket {
//         void begin(std::span<T> values, auto& next) { ...; next.begin(values); }
//         void finish(std::span<T> values, auto& next) { next.finish(values); ...; }
//       };
//     };
//
// `begin` is called when a bucket's gradients are complete, while backward continues: it hands on
// what should travel. `finish` is called when the averages are needed, and leaves them in `values`.
// It may hand on more, in rounds of `next.begin` and `next.finish`. Whatever is handed on is
// averaged over ranks, in place; it stays where it is between the two calls. **Ranks** all make the
// same calls, with as many elements.
//
// What a `Bucket` may have beyond that:
// - a constructor `explicit Bucket(auto& bucket)`, which is given the `HookedBucket`;
// - `using Sends = U`, where it hands on elements of another type than its own;
// - a second template argument, `template <class T, class Device> struct Bucket`: `bucket.device()`
//   is one, and knows the passes over memory of the host or of a GPU;
// - `most_sent()`, the most elements that it hands on at once, where these are not the bucket's;
// - `for_each_kept(f)`, which calls `f(parameter, state, span, Keeper)` for all that the bucket
//   keeps from step to step: checkpoints have it.
// The hook itself may have `fingerprint(Hash&)`, where its name does not say everything,
// `rounds`, how many times a bucket calls `next.begin` in a step: one where it is not said, and
// `phase(step)`, where steps differ in what they enqueue: steps of one phase can share a graph.

/// Is a hook's `Bucket` a template of the elements' type alone, or of the device too?
template <class H>
concept HookOfElements = requires { typename H::template Bucket<float>; };
template <class H>
concept HookOfDevices = requires { typename H::template Bucket<float, void>; };

/// A class that can be one of `Hooks<...>` and takes part in reductions.
template <class H>
concept GradientHook = requires {
  { H::name } -> std::convertible_to<std::string_view>;
} && (HookOfElements<H> || HookOfDevices<H>);

/// Does a hook bear no other of its kind: one that leaves something out?
template <class H>
concept LeavingOut = requires { requires H::is_alone_of_its_kind; };
/// Does a hook hand on every element, in another type?
template <class H>
concept Converting = requires { requires H::changes_only_type; };
/// Does a hook hand on more than once in a step?
template <class H>
concept HookOfRounds = requires { requires(H::rounds > 1); };
/// Are a hook's numbers out of their range?
template <class H>
concept HookOutOfRange = requires { requires !H::well_formed; };
/// Does a hook have parameters averaged after some updates?
template <class H>
concept ParameterAveraging = requires { H::averages_parameters(std::uint64_t{1}); };

/// Has a hook begun that begins after `Start` steps?
template <std::uint64_t Start>
constexpr bool has_begun(std::uint64_t step) {
  return step + 1 > Start;  // zero is less than no number, of which compilers would warn
}

/// A list of hooks.
template <class... H>
struct HookList {
  static constexpr std::size_t size = sizeof...(H);
  /// Does one hand on more than once? Then collectives begin while other buckets are under way.
  static constexpr bool has_rounds = (HookOfRounds<H> || ...);
  /// Are the hooks' numbers in their range?
  static constexpr bool has_good_numbers = (!HookOutOfRange<H> && ...);
  /// Can they follow each other so?
  static constexpr bool is_in_order = (std::size_t{0} + ... + (LeavingOut<H> ? 1 : 0)) <= 1;
  /// Which of its kinds of steps each makes after so many steps. A captured step can be replayed
  /// for others of its kind.
  static constexpr std::uint64_t phase([[maybe_unused]] std::uint64_t step) {
    std::uint64_t phase = 0;
    [[maybe_unused]] const auto add = [&]<class Hook>(std::type_identity<Hook>) {
      phase *= 16;
      if constexpr (requires { Hook::phase(step); }) phase += Hook::phase(step);
    };
    (add(std::type_identity<H>{}), ...);
    return phase;
  }
  /// Does every element travel, if in another type?
  static constexpr bool only_convert = (Converting<H> && ...);
  /// Do ranks train alone for some steps?
  static constexpr bool averages_parameters = (ParameterAveraging<H> || ...);
  /// Are parameters averaged after this update, the first of which is 1?
  static constexpr bool averages_after([[maybe_unused]] std::uint64_t update) {
    bool due = false;
    [[maybe_unused]] const auto ask = [&]<class Hook>(std::type_identity<Hook>) {
      if constexpr (ParameterAveraging<Hook>) due = due || Hook::averages_parameters(update);
    };
    (ask(std::type_identity<H>{}), ...);
    return due;
  }
};

template <class... A, class... B>
HookList<A..., B...> operator+(HookList<A...>, HookList<B...>);

/// The hooks that take part in reductions, in their order.
template <class... H>
using StagesAmong =
    decltype((HookList<>{} + ... + std::conditional_t<GradientHook<H>, HookList<H>, HookList<>>{}));

/// Who keeps a state of a hook: every rank its own, or all ranks the same.
enum class Keeper : std::uint8_t { each_rank, all_ranks };

}  // namespace detail

namespace axes {
struct Hooks : WithName<"Hooks"> {};
}  // namespace axes

/// An element of `Hooks<...>`: a parameter whose gradient, averaged over ranks, is zero in every
/// element keeps its value and its states, without decay or momentum, as one that has no gradient
/// in PyTorch. Its count of updates does not advance.
///
/// It is no stage of the reduction: gradients travel as they do without it.
struct SkipZeroGradients : WithName<"SkipZeroGradients"> {};

namespace detail {

/// Is an element of `Hooks<...>` a filter of updates? The others are stages of a reduction.
template <class Hook>
inline constexpr bool filters_updates = std::is_same_v<Hook, SkipZeroGradients>;

/// A hook that is no more: whoever gives one to `Hooks` gets this sentence.
template <class... Asked>
struct RemovedHook {
  static_assert(sizeof...(Asked) == 0,
                "lockstep: the hooks TopK and NoReduction were removed; use PowerSGD to send less");
  static constexpr std::string_view name = "a removed hook";
  template <class T>
  struct Bucket {};
};
}  // namespace detail

/// Removed: naming it in `Hooks` says what to use instead.
template <auto...>
using TopK = detail::RemovedHook<void>;
/// Removed, likewise.
using NoReduction = detail::RemovedHook<void>;

/// Gradient hooks, applied from left to right: compression, quantisation, a user's own. The first
/// is given a bucket's gradients; what it hands on is given to the next, and what the last one
/// hands on is averaged over ranks.
template <class... Given>
struct Hooks : detail::ValuePolicy<axes::Hooks> {
  /// Those that take part in a reduction, in their order.
  using stages = detail::StagesAmong<Given...>;

  static constexpr bool well_formed =
      ((detail::filters_updates<Given> || detail::GradientHook<Given>) && ...);
  /// Do gradients travel in another way than without hooks?
  static constexpr bool has_stages = stages::size != 0;
  /// Are parameters left alone whose averaged gradient is zero?
  static constexpr bool skips_zero_gradients = (detail::filters_updates<Given> || ...);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Hooks::name);
    [[maybe_unused]] const auto add = [&]<class Hook>(std::type_identity<Hook>) {
      hash.text(Hook::name);
      if constexpr (requires { Hook::fingerprint(hash); }) Hook::fingerprint(hash);
    };
    (add(std::type_identity<Given>{}), ...);
  }
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The concept of a gradient hook, its optional properties, and the `Hooks` axis.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

/// A parameter's gradient in a bucket, with the first extent as rows and the others as columns.
struct HookedTensor {
  std::size_t parameter = 0;  ///< index in the model's list of parameters
  std::size_t first = 0;      ///< its first element in the bucket
  std::size_t rows = 1;
  std::size_t columns = 1;

  constexpr std::size_t count() const { return rows * columns; }
};

namespace detail {

// A hook is a class with a name and a nested template `Bucket`; each bucket gets an object of it:
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
// `begin` is called when a bucket's gradients are complete, while backward continues; it passes
// what is to be reduced to `next`. `finish` is called when the averages are needed and leaves them
// in `values`; it may run more rounds of `next`. What is passed on is averaged in place and must
// stay where it is between the two calls. **Ranks** all make the same calls, with equal counts.
//
// A `Bucket` may also have
// - a constructor `explicit Bucket(auto& bucket)`, which gets the `HookedBucket`;
// - `using Sends = U`, if it passes on elements of another type;
// - a second template argument, `template <class T, class Device> struct Bucket`, the type of
//   `bucket.device()`, which has the passes over host or device memory;
// - `most_sent()`, the most elements that it passes on at once, if not the bucket's count;
// - `for_each_state(f)`, which calls `f(parameter, state, span, Keeper)` for all state that
//   checkpoints must save.
//
// The hook itself may have `fingerprint(Hash&)`, if its name does not identify it; `rounds`, its
// `next.begin` calls per step (else 1); and `phase(step)`: steps of one phase can share a graph.

/// Is `Bucket` a template of the element type alone, or of the device too?
template <class H>
concept HookOfElements = requires { typename H::template Bucket<float>; };
template <class H>
concept HookOfDevices = requires { typename H::template Bucket<float, void>; };

/// A class that may be listed in `Hooks<...>` and takes part in the reduction.
template <class H>
concept GradientHook = requires {
  { H::name } -> std::convertible_to<std::string_view>;
} && (HookOfElements<H> || HookOfDevices<H>);

/// Does the hook drop part of the gradients? At most one such hook is allowed.
template <class H>
concept LeavingOut = requires { requires H::is_alone_of_its_kind; };
/// Does the hook pass on every element, in another type?
template <class H>
concept Converting = requires { requires H::changes_only_type; };
template <class H>
concept HookOfRounds = requires { requires(H::rounds > 1); };
template <class H>
concept HookOutOfRange = requires { requires !H::well_formed; };
template <class H>
concept ParameterAveraging = requires { H::averages_parameters(std::uint64_t{1}); };

/// Is a hook active that starts after `Start` steps?
template <std::uint64_t Start>
constexpr bool has_begun(std::uint64_t step) {
  return step + 1 > Start;  // `step >= Start` warns if Start is 0
}

template <class... H>
struct HookList {
  static constexpr std::size_t size = sizeof...(H);
  /// Does a hook reduce more than once? Then collectives begin while other buckets are in flight.
  static constexpr bool has_rounds = (HookOfRounds<H> || ...);
  static constexpr bool has_good_numbers = (!HookOutOfRange<H> && ...);
  static constexpr bool is_in_order = (std::size_t{0} + ... + (LeavingOut<H> ? 1 : 0)) <= 1;
  /// Combines the phases of all hooks. A captured step can be replayed for steps of the same phase.
  static constexpr std::uint64_t phase([[maybe_unused]] std::uint64_t step) {
    std::uint64_t phase = 0;
    ((phase = 16 * phase + phase_of<H>(step)), ...);
    return phase;
  }
  /// Is every element reduced, possibly in another type?
  static constexpr bool only_convert = (Converting<H> && ...);
  /// Do ranks skip the reduction of gradients in some steps?
  static constexpr bool averages_parameters = (ParameterAveraging<H> || ...);
  /// Are parameters averaged after this update? The first update is 1.
  static constexpr bool averages_after([[maybe_unused]] std::uint64_t update) {
    return (averages<H>(update) || ...);
  }

 private:
  template <class Hook>
  static constexpr std::uint64_t phase_of([[maybe_unused]] std::uint64_t step) {
    if constexpr (requires { Hook::phase(step); }) return Hook::phase(step);
    return 0;
  }
  template <class Hook>
  static constexpr bool averages([[maybe_unused]] std::uint64_t update) {
    if constexpr (ParameterAveraging<Hook>) return Hook::averages_parameters(update);
    return false;
  }
};

template <class... A, class... B>
HookList<A..., B...> operator+(HookList<A...>, HookList<B...>);

template <class... H>
using StagesAmong =
    decltype((HookList<>{} + ... + std::conditional_t<GradientHook<H>, HookList<H>, HookList<>>{}));

/// Is a hook's state different on each rank or the same on all ranks?
enum class Keeper : std::uint8_t { each_rank, all_ranks };

}  // namespace detail

namespace axes {
struct Hooks : WithName<"Hooks"> {};
}  // namespace axes

/// A parameter whose averaged gradient is all zero is not updated, like one without gradient in
/// PyTorch: value, optimizer states and step counter stay. The reduction is unchanged.
struct SkipZeroGradients : WithName<"SkipZeroGradients"> {};

namespace detail {

/// Does a hook filter updates? All others are stages of the reduction.
template <class Hook>
inline constexpr bool filters_updates = std::is_same_v<Hook, SkipZeroGradients>;

/// Placeholder for a removed hook: naming one in `Hooks` fails with this message.
template <class... Asked>
struct RemovedHook {
  static_assert(sizeof...(Asked) == 0,
                "lockstep: the hooks TopK and NoReduction were removed; use PowerSGD to send less");
  static constexpr std::string_view name = "a removed hook";
  template <class T>
  struct Bucket {};
};
}  // namespace detail

/// Removed: see the message of `RemovedHook`.
template <auto...>
using TopK = detail::RemovedHook<void>;
/// Removed: naming it is a compile error that says what to use.
using NoReduction = detail::RemovedHook<void>;

/// Gradient hooks, applied to a bucket from left to right; the last one's result is averaged.
template <class... Given>
struct Hooks : detail::ValuePolicy<axes::Hooks> {
  /// The hooks that take part in the reduction, in order.
  using stages = detail::StagesAmong<Given...>;

  static constexpr bool well_formed =
      ((detail::filters_updates<Given> || detail::GradientHook<Given>) && ...);
  static constexpr bool has_stages = stages::size != 0;
  static constexpr bool skips_zero_gradients = (detail::filters_updates<Given> || ...);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Hooks::name);
    (detail::add_choice<Given>(hash), ...);
  }
};

}  // namespace lockstep

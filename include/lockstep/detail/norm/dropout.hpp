// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Dropout on CPUs and GPUs. Backward regenerates the mask, so none is stored.

#include <cstring>

#include "lockstep/detail/norm/work.hpp"

namespace lockstep {

namespace detail {

/// Elements 2i and 2i + 1 use the two halves of the layer's random number i. An element is dropped
/// if its half is below `below` (at most 2^32); the others are multiplied by `scale`.
struct DropoutRule {
  std::uint64_t below = 0;
  double scale = 1;

  LOCKSTEP_HOST_DEVICE static constexpr std::uint32_t half(std::uint64_t bits, std::size_t i) {
    return static_cast<std::uint32_t>(bits >> (i % 2 * 32));
  }
  template <class T>
  LOCKSTEP_HOST_DEVICE static constexpr T apply(std::uint32_t half, std::uint64_t below,
                                                Accumulator<T> scale, T value) {
    using A = Accumulator<T>;
    return static_cast<T>(half < below ? A{0} : static_cast<A>(value) * scale);
  }
};

/// The passes `drop` and, in evaluation, `copy`: the host's below, the GPU's in dropout.cuh.
template <class Memory>
struct DropoutPass;

template <>
struct DropoutPass<HostMemory> {
  template <class T>
  static void drop(auto&, LayerRandom random, const DropoutRule& rule, const T* from, T* to,
                   std::size_t count) {
    const std::uint64_t below = rule.below;
    const auto scale = static_cast<Accumulator<T>>(rule.scale);
    for (std::size_t i = 0; i + 1 < count; i += 2) {
      const std::uint64_t bits = random.bits(i / 2);
      to[i] = DropoutRule::apply<T>(DropoutRule::half(bits, 0), below, scale, from[i]);
      to[i + 1] = DropoutRule::apply<T>(DropoutRule::half(bits, 1), below, scale, from[i + 1]);
    }
    if (count % 2 != 0) {
      const std::size_t last = count - 1;
      const std::uint32_t half = DropoutRule::half(random.bits(last / 2), 0);
      to[last] = DropoutRule::apply<T>(half, below, scale, from[last]);
    }
  }
  template <class T>
  static void copy(auto&, const T* from, T* to, std::size_t count) {
    if (to != from && count != 0) std::memcpy(to, from, count * sizeof(T));
  }
};

}  // namespace detail

/// In training, drops elements with probability p and divides the others by 1 - p; in evaluation,
/// copies. It saves nothing. Its model declares `static constexpr bool draws = true;`.
///
///     Dropout<"drop1"> drop{0.5};
///     drop.forward(step, x, y);     // in forward; y may be x
///     drop.backward(step, dy, dx);  // in backward; dx may be dy
///
/// Two layers with the same name drop the same elements. If the number of layers is known only at
/// run time, the name is a constructor argument: `Dropout<> drop("blocks.3.drop", 0.1)`.
template <Name Text = "">
class Dropout {
  static constexpr bool has_name = !Text.view().empty();

 public:
  explicit Dropout(double p = 0.5)
    requires(has_name)
      : Dropout(detail::hash_of(Text.view()), Text.view(), p) {}
  explicit Dropout(std::string_view name, double p = 0.5)
    requires(!has_name)
      : Dropout(detail::hash_of(name), name, p) {}

  /// y = x with elements dropped. **Host** blocks on a CPU only. **Stream** ordered on the step's.
  template <class Step, class X, class Y>
  void forward(Step& step, const X& x, const Y& y) const {
    if constexpr (detail::require_layer_views<detail::StepMemory<Step>, X, Y>()) {
      if (x.size() != y.size()) [[unlikely]] {
        detail::fail("Dropout",
                     {has_name ? Text.view() : std::string_view("a layer"), " reads ", x.size(),
                      " elements and writes ", y.size()},
                     "give it two views of the same shape");
      }
      using Pass = detail::DropoutPass<typename X::memory>;
      const typename X::value_type* const from = x.data_handle();
      if constexpr (!Step::is_training()) {
        Pass::copy(step, from, y.data_handle(), x.size());
      } else if constexpr (!Step::draws) {
        static_cast<void>(step.random(layer_));  // reports what is missing
      } else {
        Pass::drop(step, step.random(layer_), rule_, from, y.data_handle(), x.size());
      }
    }
  }
  /// dx = dy with the elements dropped that forward dropped in this micro-batch.
  void backward(auto& step, const auto& dy, const auto& dx) const { forward(step, dy, dx); }

 private:
  Dropout(std::uint64_t layer, std::string_view name, double p) : layer_(layer) {
    if (!(p >= 0 && p <= 1)) {
      detail::fail("Dropout", {"the probability of ", name, " is ", std::to_string(p)},
                   "give it a number from 0 to 1");
    }
    rule_.below = static_cast<std::uint64_t>(std::llround(p * 0x1p32));
    rule_.scale = p < 1 ? 1 / (1 - p) : 0;
  }

  std::uint64_t layer_;
  detail::DropoutRule rule_;
};

}  // namespace lockstep

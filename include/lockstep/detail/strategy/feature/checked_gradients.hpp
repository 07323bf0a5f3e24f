// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checked mode (LOCKSTEP_CHECKED): finds elements of gradients that were not written.

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/strategy/features.hpp"

namespace lockstep::detail {

/// The bits of an unwritten element: a signalling NaN, which no arithmetic gives. Arithmetic with
/// it sets the quiet bit at most, where it keeps the bits at all, so that += to it is found, too.
template <class B>
struct UnwrittenBits {
  using Bits = B;
  B pattern;
  B quiet_bit;

  LOCKSTEP_HOST_DEVICE constexpr bool are(B bits) const { return (bits & ~quiet_bit) == pattern; }
};

template <class T>
constexpr auto unwritten() {
  if constexpr (std::is_same_v<T, double>) {
    return UnwrittenBits<std::uint64_t>{0x7ff5a5a5a5a5a5a5, 0x0008000000000000};
  } else if constexpr (std::is_same_v<T, float>) {
    return UnwrittenBits<std::uint32_t>{0x7fa5a5a5, 0x00400000};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return UnwrittenBits<std::uint16_t>{0x7fa5, 0x0040};
  } else {
    static_assert(std::is_same_v<T, Half>, "parameters have elements of these four types");
    return UnwrittenBits<std::uint16_t>{0x7da5, 0x0200};
  }
}

/// An element that was unwritten when its gradient was marked as ready.
struct Unwritten {
  std::size_t parameter;
  std::size_t element;
};

/// The check on a device: `spoil` fills a gradient before backward, `inspect` searches it when it
/// is ready, `take` returns the first find since the last `take`. For GPUs in features.cuh.
template <class Device>
class WrittenCheck;

template <>
class WrittenCheck<Cpu> {
 public:
  explicit WrittenCheck(const auto& /*comm*/) {}

  template <class T>
  void spoil(std::span<T> gradient) {
    constexpr auto bits = unwritten<T>().pattern;
    for (T& element : gradient) std::memcpy(static_cast<void*>(&element), &bits, sizeof bits);
  }

  template <class T>
  void inspect(std::size_t parameter, std::span<const T> gradient) {
    for (std::size_t i = 0; i != gradient.size() && !found_; ++i) {
      typename decltype(unwritten<T>())::Bits bits;
      std::memcpy(&bits, &gradient[i], sizeof bits);
      if (unwritten<T>().are(bits)) found_ = Unwritten{parameter, i};
    }
  }

  std::optional<Unwritten> take() {
    const std::optional<Unwritten> found = found_;
    found_.reset();
    return found;
  }

 private:
  std::optional<Unwritten> found_;
};

template <class Traits, class Comm>
class CheckedGradients : public Stages<CheckedGradients<Traits, Comm>> {
 public:
  explicit CheckedGradients(auto& gradients) : check_(gradients.comm()) {}

  void before_backward(auto& gradients, bool /*live*/) {
    if constexpr (!Traits::frees_gradients) {
      if (gradients.adds()) gradients.second_arena();
      for (std::size_t p = 0; p != gradients.layout().infos().size(); ++p) {
        if (gradients.layout().plan().is_trained(p) && !gradients.readiness().is_ready(p))
          spoil(gradients, p);
      }
    }
  }
  void bucket_claimed(auto& gradients, std::size_t bucket) {
    for (const std::size_t p : gradients.layout().plan().members(bucket)) spoil(gradients, p);
  }
  template <class T>
  void gradient_ready(auto& gradients, std::size_t p) {
    check_.inspect(p, std::span<const T>(gradients.template written<T>(p)));
  }
  void after_backward(auto& gradients) {
    const auto found = check_.take();
    if (!found) return;
    const auto& info = gradients.layout().infos()[found->parameter];
    std::string index;  // of the element, the last axis first
    std::size_t rest = found->element;
    for (std::size_t axis = info.rank; axis-- > 0; rest /= info.extents[axis])
      index.insert(0, (axis == 0 ? "" : ", ") + std::to_string(rest % info.extents[axis]));
    fail("backward",
         {"the gradient of ", gradients.layout().name(found->parameter),
          " was marked ready, and its element (", index, ") had not been written"},
         "write every element with =, before step.ready; += adds to what nobody has cleared");
  }

 private:
  void spoil(auto& gradients, std::size_t p) {
    Traits::with_element(
        gradients.layout().infos()[p].element,
        [&]<class T>(std::type_identity<T>) { check_.spoil(gradients.template written<T>(p)); });
  }

  WrittenCheck<typename Traits::device> check_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of gradients that finds elements which a model has not written
/// (LOCKSTEP_CHECKED).

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/core/checked.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/strategy/written_check.hpp"

namespace lockstep::detail {

/// A base of `Self`, the gradients. Unless the mode is on there is nothing in it.
template <class Self, class Traits, class Comm>
class CheckedGradients {
 protected:
  explicit CheckedGradients(Comm& comm) : check_(comm) {}

  /// Before a pass: fills what the model is to write. Where memory is handed out bucket by bucket,
  /// that is done one parameter after the other.
  void spoil() {
    if (self().pass_.adds) self().second_arena();
    const auto& layout = self().layout_;
    for (std::size_t p = 0; p != layout.infos().size(); ++p) {
      if (layout.plan().is_trained(p) && !self().readiness_.is_ready(p)) spoil(p);
    }
  }
  void spoil(std::size_t p) {
    Traits::with_element(self().layout_.infos()[p].element, [&]<class T>(std::type_identity<T>) {
      check_.spoil(self().template written<T>(p, self().pass_.adds));
    });
  }

  /// A gradient is said to be complete.
  template <class T>
  void inspect(std::size_t p) {
    check_.inspect(p, std::span<const T>(self().template written<T>(p, self().pass_.adds)));
  }

  void require_written() {
    const auto found = check_.take();
    if (!found) return;
    const auto& info = self().layout_.infos()[found->parameter];
    std::string place;  // the indices of the element, the last first
    std::size_t rest = found->element;
    for (std::size_t axis = info.rank; axis-- > 0; rest /= info.extents[axis])
      place.insert(0, (axis == 0 ? "" : ", ") + std::to_string(rest % info.extents[axis]));
    fail("backward",
         {"the gradient of ", self().layout_.name(found->parameter),
          " was marked ready, and its element (", place, ") had not been written"},
         "write every element with =, before step.ready; += adds to what nobody has cleared");
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  using Check =
      std::conditional_t<is_checked, WrittenCheck<typename Traits::device>, NoWrittenCheck>;
  [[no_unique_address]] Check check_;
};

}  // namespace lockstep::detail

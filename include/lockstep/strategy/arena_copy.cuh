// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A GPU's tensors on the host, in declared types, to read and to write back: those that
/// somebody asks for, and no others.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// The values that a model initializes (see `ArenaValues`), as a copy on the host.
/// `Declared` and `Used` are the layouts of one model's tensors in two sets of types. Where an
/// optimizer keeps master weights, `masters` hold the used tensors in float, element for element:
/// they are read instead of the used ones, and both are written. Frozen tensors have no masters.
///
/// A tensor takes host memory from `open` to `close`; besides there are two buffers of `window`
/// bytes, through which values are written, converted and copied. **Host** blocks in every member;
/// the stream that uses the arenas must be empty.
template <class Declared, class Used>
class ArenaCopy {
 public:
  static constexpr std::size_t window = HostStaging::window;

  ArenaCopy(const auto& model, std::byte* used, std::byte* masters = nullptr)
      : declared_(model),
        used_(model),
        arena_(used),
        masters_(masters),
        open_(declared_.infos().size()) {}

  bool is_open(std::size_t tensor) const { return open_[tensor].has_value(); }
  /// Brings a tensor's values to the host. Returns where an arena would begin in which they lie as
  /// the declared layout says.
  std::byte* open(std::size_t tensor) {
    if (!is_open(tensor)) {
      open_[tensor].emplace(declared_.plan().placements[tensor].bytes);
      const Elements from = has_master(tensor) ? master(tensor) : used(tensor);
      staging_.receive(open_[tensor]->data(), declared_kind(tensor), from.data, from.kind,
                       count(tensor));
    }
    return open_[tensor]->data() - declared_.plan().placements[tensor].offset;
  }

  /// Copies an open tensor to the GPU, and gives its memory back.
  void close(std::size_t tensor) {
    if (!is_open(tensor)) return;
    send(tensor, open_[tensor]->data(), 0, count(tensor));
    open_[tensor].reset();
  }
  /// The same for all open tensors.
  void flush() {
    for (std::size_t tensor = 0; tensor != open_.size(); ++tensor) close(tensor);
  }

  /// Calls `f(values)` for pieces of a tensor of T, in order, that cover it: it writes all of them.
  /// No memory is needed for the tensor.
  template <class T, class F>
  void fill(std::size_t tensor, const Placement&, const F& f) {
    const std::size_t all = count(tensor);
    if (is_open(tensor)) return f(elements_at<T>(open_[tensor]->data(), 0, all * sizeof(T)));
    if (piece_.bytes() == 0) piece_ = HostArena(window);
    constexpr std::size_t most = window / sizeof(T);
    for (std::size_t first = 0; first < all; first += most) {
      const std::size_t some = std::min(most, all - first);
      f(elements_at<T>(piece_.data(), 0, some * sizeof(T)));
      send(tensor, piece_.data(), first, some);
    }
  }

 private:
  /// Elements in device memory.
  struct Elements {
    std::byte* data;
    ElementKind kind;
  };
  Elements used(std::size_t tensor) const {
    return {arena_ + used_.plan().placements[tensor].offset, used_.infos()[tensor].element};
  }
  Elements master(std::size_t tensor) const {
    const std::size_t before =
        used_.plan().placements[tensor].offset / element_size(used_.infos()[tensor].element);
    return {masters_ + before * sizeof(float), ElementKind::f32};
  }
  bool has_master(std::size_t tensor) const {
    return masters_ != nullptr && used_.plan().is_trained(tensor);
  }
  ElementKind declared_kind(std::size_t tensor) const { return declared_.infos()[tensor].element; }
  std::size_t count(std::size_t tensor) const { return declared_.infos()[tensor].count(); }

  /// The host's elements, from the tensor's element `first` on, in the used tensor and its master.
  void send(std::size_t tensor, const std::byte* from, std::size_t first, std::size_t some) {
    const auto to = [&](const Elements& all) {
      staging_.send(all.data + first * element_size(all.kind), all.kind, from,
                    declared_kind(tensor), some);
    };
    to(used(tensor));
    if (has_master(tensor)) to(master(tensor));
  }

  [[no_unique_address]] Declared declared_;
  [[no_unique_address]] Used used_;
  std::byte* arena_;
  std::byte* masters_;
  std::vector<std::optional<HostArena>> open_;  // the memory of open tensors
  HostStaging staging_;
  HostArena piece_{0};  // of a tensor that is filled
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A GPU's tensors on the host, in declared types, to read and to write back: those that
/// somebody asks for, and no others.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// The values that a model initializes (see `ArenaValues`), as a copy on the host.
/// `Declared` and `Used` are the layouts of one model's tensors in two sets of types. Where an
/// optimizer keeps master weights, `masters` hold the used tensors in float, element for element:
/// they are read instead of the used ones, and both are written. Frozen tensors have no masters.
///
/// A tensor takes host memory from `open` to `close`; besides there are two buffers of `window`
/// bytes, through which values are written, converted and copied. **Host** blocks in every member;
/// the stream that uses the arenas must be empty.
template <class Declared, class Used, class Types, class Model, TensorRole Role>
class ArenaCopy {
 public:
  static constexpr std::size_t window = HostStaging::window;

  ArenaCopy(const Model& model, std::byte* used, std::byte* masters = nullptr)
      : declared_layout_(model),
        used_layout_(model),
        used_(used),
        masters_(masters),
        open_(declared_layout_.infos().size()) {}

  bool is_open(std::size_t tensor) const { return open_[tensor].has_value(); }
  /// Brings a tensor's values to the host. Returns where an arena would begin in which they lie as
  /// the declared layout says.
  std::byte* open(std::size_t tensor) {
    const Placement& where = declared_layout_.plan().placements[tensor];
    if (!is_open(tensor)) {
      open_[tensor].emplace(where.bytes);
      with_types(tensor, [&]<class D, class U>(std::type_identity<D>, std::type_identity<U>) {
        in_pieces<D, U>(tensor, [&](std::size_t first, std::size_t count) {
          D* const to = values<D>(tensor) + first;
          if (has_master(tensor)) {
            receive(to, master_at<U>(tensor) + first, count);
          } else {
            receive(to, used_at<U>(tensor) + first, count);
          }
        });
      });
    }
    return open_[tensor]->data() - where.offset;
  }

  /// Copies an open tensor to the GPU, and gives its memory back.
  void close(std::size_t tensor) {
    if (!is_open(tensor)) return;
    with_types(tensor, [&]<class D, class U>(std::type_identity<D>, std::type_identity<U>) {
      in_pieces<D, U>(tensor, [&](std::size_t first, std::size_t count) {
        send<U>(tensor, values<D>(tensor) + first, first, count);
      });
    });
    open_[tensor].reset();
  }
  /// The same for all open tensors.
  void flush() {
    for (std::size_t tensor = 0; tensor != open_.size(); ++tensor) close(tensor);
  }

  /// Calls `f(values)` for pieces of a tensor, in order, that cover it: it writes all of them. No
  /// memory is needed for the tensor.
  template <class D, class F>
  void fill(std::size_t tensor, const Placement&, const F& f) {
    if (is_open(tensor)) return f(std::span<D>(values<D>(tensor), info(tensor).count()));
    with_types(tensor, [&]<class T, class U>(std::type_identity<T>, std::type_identity<U>) {
      if constexpr (std::is_same_v<T, D>) {
        if (piece_.bytes() == 0) piece_ = HostArena(window);
        in_pieces<D, U>(tensor, [&](std::size_t first, std::size_t count) {
          D* const from = reinterpret_cast<D*>(piece_.data());
          f(std::span<D>(from, count));
          send<U>(tensor, from, first, count);
        });
      }
    });
  }

 private:
  /// Device memory's elements on the host.
  template <class To, class From>
  void receive(To* to, const From* from, std::size_t count) {
    staging_.copy(reinterpret_cast<std::byte*>(to), element_kind<To>(),
                  reinterpret_cast<const std::byte*>(from), element_kind<From>(), count);
  }

  /// The host's elements in the used tensor, and in its master.
  template <class U, class D>
  void send(std::size_t tensor, const D* from, std::size_t first, std::size_t count) {
    send_to(used_at<U>(tensor) + first, from, count);
    if (has_master(tensor)) send_to(master_at<U>(tensor) + first, from, count);
  }
  template <class To, class From>
  void send_to(To* to, const From* from, std::size_t count) {
    staging_.copy(reinterpret_cast<std::byte*>(to), element_kind<To>(),
                  reinterpret_cast<const std::byte*>(from), element_kind<From>(), count);
  }

  /// Calls `f(first, count)` for pieces of a tensor that fit the window in every type.
  template <class D, class U, class F>
  void in_pieces(std::size_t tensor, const F& f) const {
    constexpr std::size_t most = window / std::max({sizeof(D), sizeof(U), sizeof(float)});
    const std::size_t all = info(tensor).count();
    for (std::size_t first = 0; first < all; first += most) f(first, std::min(most, all - first));
  }

  const TensorInfo& info(std::size_t tensor) const { return declared_layout_.infos()[tensor]; }
  template <class D>
  D* values(std::size_t tensor) const {
    return reinterpret_cast<D*>(open_[tensor]->data());
  }
  template <class U>
  U* used_at(std::size_t tensor) const {
    return reinterpret_cast<U*>(used_ + used_layout_.plan().placements[tensor].offset);
  }
  template <class U>
  float* master_at(std::size_t tensor) const {
    return reinterpret_cast<float*>(masters_) +
           used_layout_.plan().placements[tensor].offset / sizeof(U);
  }
  bool has_master(std::size_t tensor) const {
    return masters_ != nullptr && used_layout_.plan().is_trained(tensor);
  }

  /// Calls `f` with the types of a tensor's elements, as declared and as used.
  template <class F>
  void with_types(std::size_t tensor, const F& f) const {
    with_element<Model, Role>(info(tensor).element, [&]<class D>(std::type_identity<D> declared) {
      f(declared, std::type_identity<ElementOf<Types::of(element_kind<D>())>>{});
    });
  }

  [[no_unique_address]] Declared declared_layout_;
  [[no_unique_address]] Used used_layout_;
  std::byte* used_;
  std::byte* masters_;
  std::vector<std::optional<HostArena>> open_;  // the memory of open tensors
  HostStaging staging_;
  HostArena piece_{0};  // of a tensor that is filled
};

}  // namespace lockstep::detail

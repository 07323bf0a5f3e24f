// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A copy of a GPU's tensors on the host, in declared types, to read and to write back.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// `Declared` and `Used` are the layouts of one model's tensors in two sets of types. Where an
/// optimizer keeps master weights, `masters` hold the used tensors in float, element for element:
/// they are read instead of the used ones, and both are written. Frozen tensors have no masters.
/// **Host** blocks in constructor and `deliver`; the stream that uses the arenas must be empty.
template <class Declared, class Used, class Types, class Model, TensorRole Role>
class ArenaCopy {
 public:
  ArenaCopy(const Model& model, std::byte* used, std::byte* masters = nullptr)
      : declared_layout_(model),
        used_layout_(model),
        used_(used),
        masters_(masters),
        declared_(declared_layout_.plan().all_bytes) {
    const HostArena now = download(used_, used_layout_.plan().all_bytes);
    const HostArena masters_now = download(masters_, master_bytes());
    for_each_tensor([&]<class D, class U>(D* declared, std::size_t count, std::size_t offset,
                                          std::type_identity<U>) {
      if (has_master(offset)) {
        convert(declared, master_at<U>(masters_now, offset), count);
      } else {
        convert(declared, reinterpret_cast<const U*>(now.data() + offset), count);
      }
    });
  }

  /// Host memory in the declared layout, to read and to write.
  std::byte* declared() const { return declared_.data(); }

  /// Copies the host's values to the GPU.
  void deliver() const {
    const HostArena used(used_layout_.plan().all_bytes);
    const HostArena masters(master_bytes());
    for_each_tensor([&]<class D, class U>(D* declared, std::size_t count, std::size_t offset,
                                          std::type_identity<U>) {
      convert(reinterpret_cast<U*>(used.data() + offset), declared, count);
      if (has_master(offset)) convert(master_at<U>(masters, offset), declared, count);
    });
    copy_now(used_, used.data(), used.bytes());
    copy_now(masters_, masters.data(), masters.bytes());
  }

 private:
  template <class To, class From>
  static void convert(To* to, const From* from, std::size_t count) {
    for (std::size_t i = 0; i != count; ++i)
      to[i] =
          static_cast<To>(static_cast<Accumulator<To>>(static_cast<Accumulator<From>>(from[i])));
  }

  template <class U>
  static float* master_at(const HostArena& masters, std::size_t offset) {
    return reinterpret_cast<float*>(masters.data()) + offset / sizeof(U);
  }

  /// Has the used tensor at `offset` a master?
  bool has_master(std::size_t offset) const {
    return masters_ != nullptr && offset < used_layout_.plan().bytes;
  }

  std::size_t master_bytes() const {
    if (masters_ == nullptr) return 0;
    const auto& plan = used_layout_.plan();
    return plan.bytes / element_size(plan.bucket_table[0].element) * sizeof(float);
  }

  static HostArena download(const std::byte* from, std::size_t bytes) {
    HostArena now(bytes);
    copy_now(now.data(), from, now.bytes());
    return now;
  }

  template <class F>
  void for_each_tensor(const F& f) const {
    for (std::size_t i = 0; i != declared_layout_.infos().size(); ++i) {
      const TensorInfo& info = declared_layout_.infos()[i];
      with_element<Model, Role>(info.element, [&]<class D>(std::type_identity<D>) {
        f(reinterpret_cast<D*>(declared_.data() + declared_layout_.plan().placements[i].offset),
          info.count(), used_layout_.plan().placements[i].offset,
          std::type_identity<ElementOf<Types::of(element_kind<D>())>>{});
      });
    }
  }

  [[no_unique_address]] Declared declared_layout_;
  [[no_unique_address]] Used used_layout_;
  std::byte* used_;
  std::byte* masters_;
  HostArena declared_;
};

}  // namespace lockstep::detail

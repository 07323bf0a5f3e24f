// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The values of parameters and buffers before the first step.

#include <cmath>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// Hands out a model's tensors to be written, before training begins:
///
///     void initialize(auto& initial) {
///       const auto weight = initial.param("weight"_p);
///       weight(0, 0) = initial.random().normal();
///     }
///
/// A model without `initialize` gets `fill_by_default`. Both are called on rank 0 only, and all
/// ranks get its values.
template <class Model, class Layout, class BufferLayout>
class InitialValues {
 public:
  InitialValues(const Layout& layout, const BufferLayout& buffers, std::byte* parameter_arena,
                std::byte* buffer_arena, Seed seed)
      : layout_(layout),
        buffer_layout_(buffers),
        parameters_(parameter_arena),
        buffers_(buffer_arena),
        seed_(seed),
        random_(seed) {}

  template <class Key>
  auto param(Key key) const {
    return layout_.template view<HostMemory, false>(parameters_, key);
  }
  template <class Key>
  auto buffer(Key key) const {
    return buffer_layout_.template view<HostMemory, false>(buffers_, key);
  }
  /// Calls `f(name, view)` for every parameter, or buffer, to be written.
  template <class F>
  void for_each_parameter(F&& f) const {
    layout_.template for_each<HostMemory, false>(parameters_, f);
  }
  template <class F>
  void for_each_buffer(F&& f) const {
    buffer_layout_.template for_each<HostMemory, false>(buffers_, f);
  }
  RandomStream& random() { return random_; }

  /// Matrices and higher tensors: uniform in +-1/sqrt(n) with n the elements of one row, as
  /// PyTorch's linear and convolution layers start. Vectors: zero, but one where the last part of
  /// the name is `weight`, which scales a normalised activation. Scalars: zero. A tensor's values
  /// depend on the seed and its name, not on what else the model has.
  void fill_by_default() const {
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) fill_by_default(p);
  }

 private:
  void fill_by_default(std::size_t p) const {
    const TensorInfo& info = layout_.infos()[p];
    const std::string_view name = layout_.name(p);
    const auto& placement = layout_.plan().placements[p];
    with_element<Model, TensorRole::parameter>(info.element, [&]<class T>(std::type_identity<T>) {
      const auto values = elements_at<T>(parameters_, placement.offset, placement.bytes);
      if (info.rank < 2) {
        const bool scales = info.rank == 1 && (name == "weight" || name.ends_with(".weight"));
        for (T& value : values) value = static_cast<T>(scales ? 1.f : 0.f);
        return;
      }
      const double row = static_cast<double>(info.count()) / static_cast<double>(info.extents[0]);
      const double bound = 1 / std::sqrt(row);
      RandomStream random(Seed{seed_.value() ^ hash_of(name)});
      for (T& value : values)
        value = static_cast<T>(static_cast<Accumulator<T>>(random.uniform(-bound, bound)));
    });
  }

  const Layout& layout_;
  const BufferLayout& buffer_layout_;
  std::byte* parameters_;
  std::byte* buffers_;
  Seed seed_;
  RandomStream random_;
};

/// A model that gives its tensors their initial values.
template <class Model, class Initial>
concept Initializing = requires(Model& model, Initial& initial) { model.initialize(initial); };

/// Lets the model write its initial values, or fills them in by default.
template <class Model, class Initial>
void initialize_model(Model& model, Initial& initial) {
  if constexpr (Initializing<Model, Initial>) {
    model.initialize(initial);
  } else {
    initial.fill_by_default();
  }
}

}  // namespace lockstep::detail

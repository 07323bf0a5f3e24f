// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The values of parameters and buffers before the first step.

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/core/random_stream.hpp"

namespace lockstep::detail {

/// The values that a model initializes: on the host the arena itself. Elsewhere `open` copies a
/// tensor to the host and returns where its layout would begin, `close` copies it back.
struct ArenaValues {
  std::byte* data;

  constexpr ArenaValues(std::byte* arena) : data(arena) {}  // implicit: an arena holds its values

  std::byte* open(std::size_t) const { return data; }
  static constexpr bool is_open(std::size_t) { return true; }
  static constexpr void close(std::size_t) {}
  static constexpr void flush() {}
  /// Calls `f(values)` for pieces of a tensor, in order, that cover it; `f` writes all of them.
  template <class T, class F>
  void fill(std::size_t, const Placement& where, const F& f) const {
    f(elements_at<T>(data, where.offset, where.bytes));
  }
};

/// Hands out a model's tensors to be written, before training begins:
///
///     void initialize(auto& initial) {
///       const auto weight = initial.param("weight"_p);
///       weight(0, 0) = initial.random().normal();
///     }
///
/// A model without `initialize` gets `fill_by_default`. Rank 0 calls them, for all ranks.
///
/// On a CPU the views are of the parameters themselves. On a GPU they are of host memory, allocated
/// per tensor: for `param` and `buffer` until `flush` or the end, for `for_each_parameter` and
/// `for_each_buffer` until `f` returns; `fill_by_default` needs none.
template <class Model, class Layout, class Parameters = ArenaValues, class Buffers = ArenaValues>
class InitialValues {
 public:
  InitialValues(const Layout& layout, const BufferLayout<Model>& buffers,
                Parameters parameter_values, Buffers buffer_values, Seed seed)
      : layout_(layout),
        buffer_layout_(buffers),
        parameters_(parameter_values),
        buffers_(buffer_values),
        seed_(seed),
        random_(seed) {}

  auto param(auto key) const {
    return layout_.template view<HostMemory, false>(
        open<TensorRole::parameter>(layout_, parameters_, key), key);
  }
  auto buffer(auto key) const {
    return buffer_layout_.template view<HostMemory, false>(
        open<TensorRole::buffer>(buffer_layout_, buffers_, key), key);
  }
  /// Calls `f(name, view)` for every parameter, or buffer; a view is valid inside `f` only.
  void for_each_parameter(auto&& f) const { for_each(layout_, parameters_, f); }
  void for_each_buffer(auto&& f) const { for_each(buffer_layout_, buffers_, f); }
  /// Copies what was written to where it is used, and invalidates earlier views: `initialize` of a
  /// model that is larger than the host's memory calls it after every few tensors.
  void flush() const {
    parameters_.flush();
    buffers_.flush();
  }
  RandomStream& random() { return random_; }

  /// Writes tensors that start at one, such as weights of norms, before the model's `initialize`.
  void fill_ones() const {
    fill_ones<TensorRole::parameter>(layout_, parameters_);
    fill_ones<TensorRole::buffer>(buffer_layout_, buffers_);
  }

  /// Matrices and higher tensors: uniform in +-1/sqrt(n) with n elements a row, as PyTorch's linear
  /// and convolution layers. Vectors: one if the last part of the name is `weight` (a norm's
  /// scale), else zero. Scalars: zero. A tensor's values depend on the seed and its name only.
  void fill_by_default() const {
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) fill_by_default(p);
  }

 private:
  /// A key that names no tensor is rejected where its view is made.
  template <TensorRole Role, class Key>
  static std::byte* open(const auto& layout, auto& values, Key key) {
    const std::size_t tensor = tensor_index<Model, Role>(key);
    return tensor < layout.infos().size() ? values.open(tensor) : nullptr;
  }

  static void for_each(const auto& layout, auto& values, auto& f) {
    std::size_t latest = 0;
    bool was_open = false;
    const auto open = [&](std::size_t tensor) {
      was_open = values.is_open(latest = tensor);
      return values.open(tensor);
    };
    layout.template for_each<HostMemory, false>(open, [&](auto name, auto view) {
      f(name, view);
      if (!was_open) values.close(latest);
    });
  }

  template <TensorRole Role>
  static void fill_ones(const auto& layout, auto& values) {
    for (std::size_t tensor = 0; tensor != layout.infos().size(); ++tensor) {
      if (layout.infos()[tensor].starts_at_one) fill_with<Role>(layout, values, tensor, 1);
    }
  }
  template <TensorRole Role>
  static void fill_with(const auto& layout, auto& values, std::size_t tensor, float number) {
    with_element<Model, Role>(layout.infos()[tensor].element, [&]<class T>(std::type_identity<T>) {
      values.template fill<T>(tensor, layout.plan().placements[tensor], [&](std::span<T> all) {
        std::ranges::fill(all, static_cast<T>(number));
      });
    });
  }

  void fill_by_default(std::size_t p) const {
    const TensorInfo& info = layout_.infos()[p];
    const std::string_view name = layout_.name(p);
    if (info.rank < 2) {
      const bool scales = info.rank == 1 && (name == "weight" || name.ends_with(".weight"));
      return fill_with<TensorRole::parameter>(layout_, parameters_, p, scales ? 1.f : 0.f);
    }
    with_element<Model, TensorRole::parameter>(info.element, [&]<class T>(std::type_identity<T>) {
      const double row = static_cast<double>(info.count()) / static_cast<double>(info.extents[0]);
      const double bound = 1 / std::sqrt(row);
      RandomStream random(Seed{seed_.value() ^ hash_of(name)});
      parameters_.template fill<T>(p, layout_.plan().placements[p], [&](std::span<T> values) {
        for (T& value : values)
          value = static_cast<T>(static_cast<Accumulator<T>>(random.uniform(-bound, bound)));
      });
    });
  }

  const Layout& layout_;
  const BufferLayout<Model>& buffer_layout_;
  Parameters parameters_;
  Buffers buffers_;
  Seed seed_;
  RandomStream random_;
};

void initialize_model(auto& model, auto& initial) {
  initial.fill_ones();
  if constexpr (requires { model.initialize(initial); }) {
    model.initialize(initial);
  } else {
    initial.fill_by_default();
  }
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms over several ranks on tensors in host memory, by the passes of lockstep's own
/// norms.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/MemoryFormat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/norm/host_norm.hpp"
#include "lockstep/norm/moments.hpp"
#include "lockstep/norm/norm_work.hpp"
#include "lockstep/torch/elements.hpp"
#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/norm_numbers.hpp"

namespace lockstep::detail {

/// One norm's statistics, from its forward pass to its backward pass.
class HostNormPasses {
 public:
  /// y of the samples of this rank, with the statistics of all. **Ranks** all. **Host** blocks.
  at::Tensor forward(const NormTensors& norm, const NormNumbers& numbers,
                     const NormExchange& exchange, std::string_view name) {
    const at::Tensor x = dense(norm.x);
    at::Tensor y = at::empty_like(x);
    with_float(x.scalar_type(), name, [&]<class T>(std::type_identity<T>) {
      const NormShape shape = shape_of(x);
      work_.reserve(shape.channels, exchange.world());
      work_.measure(HostStream{}, shape, data<T>(x));
      exchange.all_gather(std::span<const double>(work_.own()), work_.all(exchange.world()));
      settle(norm, numbers, shape, exchange.world(), name);
      const Affine<Accumulator<T>> affine(norm, shape.channels);
      work_.template normalise<Fusion::none>(HostStream{}, shape, data<T>(x), affine.view(),
                                             static_cast<const T*>(nullptr), data<T>(y));
    });
    return y;
  }

  /// The gradients of this rank's samples. Those of weight and bias are sums over them alone, which
  /// the job averages. **Ranks** all. **Host** blocks.
  NormGradients backward(const NormTensors& norm, const at::Tensor& gradient,
                         const NormNeeds& needs, const NormExchange& exchange,
                         std::string_view name) {
    NormGradients gradients;
    const at::Tensor x = dense(norm.x);
    const at::Tensor dy = gradient.contiguous(format_of(x));
    with_float(x.scalar_type(), name, [&]<class T>(std::type_identity<T>) {
      using A = Accumulator<T>;
      const NormShape shape = shape_of(x);
      const Affine<A> affine(norm, shape.channels);
      const auto numbers = at::TensorOptions().dtype(scalar_type<A>);
      const auto count = static_cast<std::int64_t>(shape.channels);
      if (needs.weight) gradients.weight = at::empty({count}, numbers);
      if (needs.bias) gradients.bias = at::empty({count}, numbers);
      work_.template reduce_backward<Fusion::none>(
          HostStream{}, shape, data<T>(x), static_cast<const T*>(nullptr), data<T>(dy),
          affine.view(),
          NormAffineGradients<A>{needs.weight ? data<A>(gradients.weight) : nullptr,
                                 needs.bias ? data<A>(gradients.bias) : nullptr},
          static_cast<T*>(nullptr));
      if (!needs.x) return;
      exchange.all_reduce(work_.sums());
      gradients.x = at::empty_like(x);
      work_.template input_gradient<Fusion::none>(HostStream{}, shape, data<T>(x), data<T>(dy),
                                                  affine.view(), data<T>(gradients.x));
    });
    if (needs.weight) gradients.weight = gradients.weight.to(norm.weight.scalar_type());
    if (needs.bias) gradients.bias = gradients.bias.to(norm.bias.scalar_type());
    return gradients;
  }

  /// How many values a channel has on all ranks.
  double count() const { return work_.count(); }

 private:
  template <class T>
  static T* data(const at::Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }

  /// Weight and bias as numbers of the sums' type; ones and zeros where the norm has none.
  template <class A>
  class Affine {
   public:
    Affine(const NormTensors& norm, std::size_t channels)
        : weight_(numbers(norm.weight, channels, 1)), bias_(numbers(norm.bias, channels, 0)) {}
    NormAffine<A> view() const {
      return {static_cast<const A*>(weight_.const_data_ptr()),
              static_cast<const A*>(bias_.const_data_ptr())};
    }

   private:
    static at::Tensor numbers(const at::Tensor& given, std::size_t channels, int otherwise) {
      if (given.defined()) return given.detach().to(scalar_type<A>).contiguous();
      const auto options = at::TensorOptions().dtype(scalar_type<A>);
      const auto count = static_cast<std::int64_t>(channels);
      return otherwise == 1 ? at::ones({count}, options) : at::zeros({count}, options);
    }
    at::Tensor weight_;
    at::Tensor bias_;
  };

  /// The order of a tensor's elements in memory: channels first or last.
  static at::MemoryFormat format_of(const at::Tensor& x) {
    if (x.is_contiguous()) return at::MemoryFormat::Contiguous;
    return x.suggest_memory_format();
  }
  /// The tensor without gaps, in the order that it has or is nearest to.
  static at::Tensor dense(const at::Tensor& x) { return x.detach().contiguous(format_of(x)); }
  static NormShape shape_of(const at::Tensor& x) {
    const auto samples = static_cast<std::size_t>(x.size(0));
    const auto channels = static_cast<std::size_t>(x.size(1));
    std::size_t positions = 1;
    for (std::int64_t axis = 2; axis < x.dim(); ++axis)
      positions *= static_cast<std::size_t>(x.size(axis));
    if (x.is_contiguous()) return {samples, channels, positions};
    return {samples * positions, channels, 1};
  }

  template <class F>
  static void with_float(at::ScalarType type, std::string_view name, const F& f) {
    switch (kind_of(type)) {
      case ElementKind::f32:
        return f(std::type_identity<float>{});
      case ElementKind::f64:
        return f(std::type_identity<double>{});
      case ElementKind::f16:
        return f(std::type_identity<Half>{});
      case ElementKind::bf16:
        return f(std::type_identity<BFloat16>{});
      default:
        fail(name, {"a synchronised batch norm was given a tensor of ", c10::toString(type)},
             "give it one of float, double, half or bfloat16");
    }
  }

  /// Merges what all ranks measured, and moves the running statistics, if there are any.
  void settle(const NormTensors& norm, const NormNumbers& numbers, const NormShape& shape,
              std::size_t world, std::string_view name) {
    const BatchNormOptions options{.eps = numbers.eps, .momentum = numbers.momentum};
    std::int64_t batches = 0;  // the module has counted the batch already
    if (!norm.running_mean.defined()) {
      work_.settle(HostStream{}, shape, world, options, name);
      return;
    }
    with_float(norm.running_mean.scalar_type(), name, [&]<class R>(std::type_identity<R>) {
      work_.settle(HostStream{}, shape, world, options,
                   NormRunning<R>{data<R>(norm.running_mean), data<R>(norm.running_var), &batches},
                   name);
    });
    norm.running_mean.unsafeGetTensorImpl()->bump_version();
    norm.running_var.unsafeGetTensorImpl()->bump_version();
  }

  NormWork<HostMemory> work_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `CompressTo<BFloat16>` and `CompressTo<Half>`: gradients are reduced in 16 bits.

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/hook/hook.hpp"

namespace lockstep {

/// Casts gradients to `To` for the all-reduce and back, as PyTorch's `bf16_compress_hook` and
/// `fp16_compress_hook` do. A sum is rounded once if the communicator accumulates in float.
template <FloatingElement To>
struct CompressTo {
  static constexpr std::string_view name =
      std::same_as<To, Half> ? "CompressTo<Half>"
      : std::same_as<To, BFloat16>
          ? "CompressTo<BFloat16>"
          : (std::same_as<To, float> ? "CompressTo<float>" : "CompressTo<double>");

  static constexpr bool changes_only_type = true;

  template <class T, class Device>
  class Bucket {
   public:
    using Sends = To;

    explicit Bucket(auto& bucket)
        : device_(bucket.device()), sent_(bucket.template allocate<To>(bucket.count())) {}

    void begin(std::span<T> values, auto& next) {
      const std::span<To> sent = sent_.first(values.size());
      device_.cast(sent, values);
      next.begin(sent);
    }
    void finish(std::span<T> values, auto& next) {
      const std::span<To> sent = sent_.first(values.size());
      next.finish(sent);
      device_.cast(values, sent);
    }

   private:
    Device& device_;
    std::span<To> sent_;
  };
};

}  // namespace lockstep

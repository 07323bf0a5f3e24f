// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `CompressTo<BFloat16>` and `CompressTo<Half>`: gradients travel in 16 bits.

#include <concepts>
#include <span>
#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/hook/hook.hpp"

namespace lockstep {

/// Gradients are rounded to `To` before they travel, and their averages come back in the bucket's
/// own type, as with PyTorch's `bf16_compress_hook` and `fp16_compress_hook`. Ranks add in the
/// communicator's way, so that a sum is rounded once wherever that adds in float.
template <FloatingElement To>
struct CompressTo {
  static constexpr std::string_view name =
      std::same_as<To, Half> ? "CompressTo<Half>"
      : std::same_as<To, BFloat16>
          ? "CompressTo<BFloat16>"
          : (std::same_as<To, float> ? "CompressTo<float>" : "CompressTo<double>");

  template <class T, class Device>
  class Bucket {
   public:
    using Sends = To;

    explicit Bucket(auto& bucket)
        : device_(bucket.device()), sent_(bucket.template allocate<To>(bucket.count())) {}

    void begin(std::span<T> values, auto& next) {
      device_.cast(sent_, values);
      next.begin(sent_);
    }
    void finish(std::span<T> values, auto& next) {
      next.finish(sent_);
      device_.cast(values, sent_);
    }

   private:
    Device& device_;
    std::span<To> sent_;
  };
};

}  // namespace lockstep

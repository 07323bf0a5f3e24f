// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `TopK<Share>`: only the largest elements of a gradient travel.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/hook/selection.hpp"

namespace lockstep {

struct TopKOptions {
  /// So many steps are reduced without compression first.
  std::uint64_t start = 0;
};

/// Of every bucket each rank sends the share of its elements that are largest, with their places;
/// the rest is added to its next gradient (error feedback). Ranks select different places, so the
/// selections are gathered, and nothing can come after this hook.
template <double Share, TopKOptions Options = TopKOptions{}>
struct TopK {
  static constexpr std::string_view name = "TopK";
  static constexpr bool well_formed = Share > 0 && Share <= 1;
  static constexpr bool is_last = true;
  static constexpr bool is_alone_of_its_kind = true;
  /// Steps before and after the start.
  static constexpr std::uint64_t phase(std::uint64_t step) {
    return detail::has_begun<Options.start>(step) ? 1 : 0;
  }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.number(__builtin_bit_cast(std::uint64_t, Share)).number(Options.start);
  }

  template <class T, class Device>
  class Bucket {
   public:
    explicit Bucket(auto& bucket)
        : step_(bucket.step()),
          ranks_(bucket.ranks()),
          tensors_(bucket.tensors()),
          passes_(bucket.device(), make_plan(bucket)),
          sent_(bucket.template allocate<std::uint32_t>(passes_.plan().words())),
          all_(bucket.template allocate<std::uint32_t>(passes_.plan().words() * ranks_)) {}

    void begin(std::span<T> values, auto& next) {
      under_way_ = detail::has_begun<Options.start>(step_);
      if (!under_way_) return next.begin(values);
      passes_.select(values, sent_);
      next.begin_gather(sent_, all_);
    }
    void finish(std::span<T> values, auto& next) {
      if (!under_way_) return next.finish(values);
      next.finish_gather();
      passes_.add_up(all_, ranks_, values);
    }

    /// Residuals are each rank's own.
    void for_each_kept(const auto& f) {
      for (const HookedTensor& tensor : tensors_)
        f(tensor.parameter, "TopK.residual",
          passes_.residual().subspan(tensor.first, tensor.count()), detail::Keeper::each_rank);
    }

   private:
    static detail::SelectionPlan<T> make_plan(const auto& bucket) {
      if (bucket.count() > std::numeric_limits<std::uint32_t>::max()) {
        throw Error("TopK", "a bucket has " + std::to_string(bucket.count()) + " elements",
                    "choose Buckets of less than 2^32 elements", bucket.rank());
      }
      std::size_t elements = 0;
      for (const HookedTensor& tensor : bucket.tensors()) elements += tensor.count();
      const auto wanted =
          static_cast<std::size_t>(std::ceil(Share * static_cast<double>(elements)));
      return {bucket.count(), std::clamp<std::size_t>(wanted, 1, bucket.count())};
    }

    const std::uint64_t& step_;
    std::size_t ranks_;
    std::span<const HookedTensor> tensors_;
    detail::Selection<T, Device> passes_;
    std::span<std::uint32_t> sent_;
    std::span<std::uint32_t> all_;
    bool under_way_ = false;
  };
};

}  // namespace lockstep

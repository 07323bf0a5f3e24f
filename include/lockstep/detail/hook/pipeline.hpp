// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The chain of a bucket's hooks, which ends with the communicator's all-reduce.

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/hook/hook.hpp"

namespace lockstep::detail {

/// Passes over memory for all hooks: `cast`, `scale` and `zero`. The host's complete before they
/// return; a GPU's (hook_device.cuh) are enqueued on its `stream()`. A hook's own are beside it.
template <class Device>
class HookDevice;

template <>
class HookDevice<Cpu> {
 public:
  template <class T>
  using Elements = std::vector<T>;

  constexpr explicit HookDevice(const auto&) {}

  template <class To, class From>
  static void cast(std::span<To> to, std::span<From> from) {
    convert(to.data(), from.data(), to.size());
  }
  template <class T>
  static void scale(std::span<T> values, double factor) {
    using A = Accumulator<T>;
    for (T& value : values) value = static_cast<T>(static_cast<A>(value) * static_cast<A>(factor));
  }
  template <class T>
  static void zero(std::span<T> values) {
    if (!values.empty()) std::memset(static_cast<void*>(values.data()), 0, values.size_bytes());
  }
};

}  // namespace lockstep::detail

namespace lockstep {

/// A bucket as the constructor of a hook's `Bucket` sees it. It outlives the hook's object.
template <class Comm, class Device>
class HookedBucket {
 public:
  HookedBucket(Comm& comm, Device& device, std::size_t number, std::size_t count,
               std::span<const HookedTensor> tensors, const std::uint64_t& step,
               std::uint64_t& bytes)
      : comm_(comm),
        device_(device),
        number_(number),
        count_(count),
        tensors_(tensors),
        step_(step),
        bytes_(bytes) {}

  /// The bucket's index: buckets begin in this order.
  std::size_t number() const { return number_; }
  /// Elements, including the padding between tensors, which is zero.
  std::size_t count() const { return count_; }
  /// The bucket's gradients, in memory order.
  std::span<const HookedTensor> tensors() const { return tensors_; }
  /// Completed reductions of all buckets: 0 in the first step.
  const std::uint64_t& step() const { return step_; }

  Rank rank() const { return comm_.rank(); }
  std::size_t ranks() const { return comm_.world_size().value(); }
  Comm& communicator() { return comm_; }
  Device& device() { return device_; }

  /// Zeroed memory that suits the communicator best, for buffers to be reduced, freed with the
  /// communicator. **Ranks** all, with the same count, in the constructor of the hook's object.
  template <class T>
  std::span<T> allocate(std::size_t count) {
    return count == 0 ? std::span<T>() : comm_.template allocate<T>(count);
  }

  /// This bucket for a later stage that gets `count` elements that belong to no tensor.
  HookedBucket of_others(std::size_t count) const {
    return HookedBucket(comm_, device_, number_, count, {}, step_, bytes_);
  }

  /// Counts bytes that this rank passes to a collective.
  void count_sent(std::size_t bytes) { bytes_ += bytes; }

 private:
  Comm& comm_;
  Device& device_;
  std::size_t number_;
  std::size_t count_;
  std::span<const HookedTensor> tensors_;
  const std::uint64_t& step_;
  std::uint64_t& bytes_;
};

namespace detail {

/// A hook's object for buckets of T, constructed from the bucket if possible.
template <class Hook, class T, class Comm, class Device>
auto make_bucket_of_hook(HookedBucket<Comm, Device>& bucket) {
  const auto make = [&]<class Own>(std::type_identity<Own>) {
    if constexpr (std::is_constructible_v<Own, HookedBucket<Comm, Device>&>) {
      return Own(bucket);
    } else {
      return Own();
    }
  };
  if constexpr (HookOfDevices<Hook>) {
    return make(std::type_identity<typename Hook::template Bucket<T, Device>>{});
  } else {
    return make(std::type_identity<typename Hook::template Bucket<T>>{});
  }
}

template <class Own, class T>
constexpr auto sent_by() {
  if constexpr (requires { typename Own::Sends; }) {
    return std::type_identity<typename Own::Sends>{};
  } else {
    return std::type_identity<T>{};
  }
}

/// The hooks of `List` in order, followed by the communicator.
template <class T, class Comm, class Device, class List>
class Pipeline;

/// The last stage averages over ranks.
template <class T, class Comm, class Device>
class Pipeline<T, Comm, Device, HookList<>> {
  static constexpr GradientReduction how = std::is_same_v<T, Half> && AveragingBySums<Comm>
                                               ? GradientReduction::folded_sum_of_halves
                                               : GradientReduction::average;
  using Handle = decltype(std::declval<Comm&>().all_reduce_async(std::declval<std::span<T>>(),
                                                                 reduction_of_gradients<how>(1)));

 public:
  explicit Pipeline(HookedBucket<Comm, Device>& bucket) : bucket_(bucket) {}

  /// Starts an average in place. **Ranks** all. **Host** as `all_reduce_async` of the communicator.
  void begin(std::span<T> values) {
    bucket_.count_sent(values.size_bytes());
    const auto start = [&] {
      return bucket_.communicator().all_reduce_async(
          values, reduction_of_gradients<how>(bucket_.ranks()), step_call_of_thread());
    };
    work_.emplace(MadeInPlace<decltype(start)>{start});
  }
  /// The average is complete; on a GPU, work enqueued from here on sees it.
  void finish([[maybe_unused]] std::span<T> values) {
    wait();
    if constexpr (how != GradientReduction::average) {
      const double factor = folded_factor(how, bucket_.ranks());
      if (factor != 1) bucket_.device().scale(values, factor);
    }
  }

  void wait() {
    if (!work_) return;
    work_->wait();
    work_.reset();
  }
  void forget() {
    if (work_) work_->forget();
    work_.reset();
  }
  static constexpr void for_each_state(const auto&) {}

 private:
  HookedBucket<Comm, Device>& bucket_;
  std::optional<Handle> work_;
};

template <class T, class Comm, class Device, class First, class... Rest>
class Pipeline<T, Comm, Device, HookList<First, Rest...>> {
  using Own = decltype(make_bucket_of_hook<First, T>(std::declval<HookedBucket<Comm, Device>&>()));
  using Sent = typename decltype(sent_by<Own, T>())::type;
  using Next = Pipeline<Sent, Comm, Device, HookList<Rest...>>;

 public:
  explicit Pipeline(HookedBucket<Comm, Device>& bucket)
      : own_(make_bucket_of_hook<First, T>(bucket)),
        handed_on_(handed_on(bucket)),
        next_(handed_on_) {}
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  void begin(std::span<T> values) { own_.begin(values, next_); }
  void finish(std::span<T> values) { own_.finish(values, next_); }

  void wait() { next_.wait(); }
  void forget() { next_.forget(); }

  /// Calls `f(parameter, state, values, keeper)` for the state of all stages.
  void for_each_state(const auto& f) {
    if constexpr (requires { own_.for_each_state(f); }) own_.for_each_state(f);
    next_.for_each_state(f);
  }

 private:
  /// The bucket as the next stage sees it, which differs if this stage has `most_sent`.
  HookedBucket<Comm, Device> handed_on(const HookedBucket<Comm, Device>& bucket) const {
    if constexpr (requires { own_.most_sent(); }) {
      return bucket.of_others(own_.most_sent());
    } else {
      return bucket;
    }
  }

  Own own_;
  HookedBucket<Comm, Device> handed_on_;
  Next next_;
};

}  // namespace detail

}  // namespace lockstep

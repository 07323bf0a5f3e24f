// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How `ParallelStrategy<DP>` cuts a batch into shares, and where replicas read them.

#include <tuple>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep {

/// The replicas of `ParallelStrategy<DP>`, their devices, and how long they wait for each other.
struct DpOptions {
  std::size_t replicas = dynamic;  ///< `dynamic`: as many as `World<N>` says, else one per device
  Seed seed{0};
  std::chrono::milliseconds timeout = default_timeout;
  /// The GPU of every replica; empty: the first ones. On a CPU they only count and name replicas.
  std::vector<std::size_t> devices{};
  /// The device whose replica gathers outputs and takes their loss; by default the first.
  std::optional<std::size_t> output_device{};
};

namespace detail {

/// The number of replicas: as given, listed or known when compiled, else one for each device.
std::size_t replicas_of(const DpOptions& options, std::size_t static_replicas,
                        std::size_t (*devices)());
std::size_t output_replica(const DpOptions& options, std::size_t replicas);

/// Rows [first, first + count) of a batch.
struct RowRange {
  std::size_t first = 0;
  std::size_t count = 0;
  friend constexpr bool operator==(const RowRange&, const RowRange&) = default;
};

/// Replica i's rows of `size`, as `torch.chunk` cuts them, ceil(size / replicas) each until none
/// are left: 4 replicas get 2, 2, 1 and 0 of 5 rows.
constexpr RowRange chunk(std::size_t size, std::size_t replicas, std::size_t i) {
  const std::size_t most = (size + replicas - 1) / replicas;
  const std::size_t first = std::min(i * most, size);
  return {first, std::min(most, size - first)};
}

/// Replica i's rows where counts differ by at most one: 4 replicas get 2, 1, 1 and 1 of 5 rows.
constexpr RowRange even_share(std::size_t size, std::size_t replicas, std::size_t i) {
  const std::size_t longer = size % replicas;
  return {i * (size / replicas) + std::min(i, longer), size / replicas + (i < longer ? 1 : 0)};
}

struct BatchCut {
  std::size_t replicas = 1;
  bool evenly = false;

  RowRange rows(std::size_t size, std::size_t replica) const {
    return evenly ? even_share(size, replicas, replica) : chunk(size, replicas, replica);
  }
};

/// A batch that can write its rows [first, first + count) to another batch, whose memory it reuses.
template <class B>
concept SlicedInto = requires(const B& batch, std::size_t n, B& out) {
  { batch.size() } -> std::convertible_to<std::size_t>;
  batch.slice(n, n, out);
  requires std::default_initializable<B>;
};

/// A batch that can return its rows [first, first + count) as another batch or as a view.
template <class B>
concept Sliced = requires(const B& batch, std::size_t n) {
  { batch.size() } -> std::convertible_to<std::size_t>;
  batch.slice(n, n);
};

/// How a T is cut: `sizes(value, f)` calls `f(size)` for each part that is cut; a replica's share,
/// `take(value, rows_of)`, has `rows_of(size)` of them. Other values are shared by reference.
template <class T>
struct Cutting {
  static constexpr bool cuts = false;
  static void sizes(const T&, const auto&) {}
  static const T& take(const T& value, const auto&) {
    return value;  // NOLINT(bugprone-return-const-ref-from-parameter): batches are no temporaries
  }
};

template <class T>
inline constexpr bool is_cut = Cutting<T>::cuts;

template <class T>
using ShareOf =
    decltype(Cutting<T>::take(std::declval<const T&>(), std::declval<RowRange (&)(std::size_t)>()));

template <class B>
  requires SlicedInto<B> || Sliced<B>
struct Cutting<B> {
  static constexpr bool cuts = true;
  static void sizes(const B& batch, const auto& f) { f(batch.size()); }
  static auto take(const B& batch, const auto& rows_of) {
    const RowRange rows = rows_of(batch.size());
    if constexpr (SlicedInto<B>) {
      B share;
      batch.slice(rows.first, rows.count, share);
      return share;
    } else {
      return batch.slice(rows.first, rows.count);
    }
  }
};

template <class T, std::size_t Extent>
struct Cutting<std::span<T, Extent>> {
  static constexpr bool cuts = true;
  static void sizes(std::span<T, Extent> values, const auto& f) { f(values.size()); }
  static std::span<T> take(std::span<T, Extent> values, const auto& rows_of) {
    const RowRange rows = rows_of(values.size());
    return values.subspan(rows.first, rows.count);
  }
};

template <class T, class Allocator>
struct Cutting<std::vector<T, Allocator>> {
  using Values = std::vector<T, Allocator>;
  static constexpr bool cuts = true;
  static void sizes(const Values& values, const auto& f) { f(values.size()); }
  static Values take(const Values& values, const auto& rows_of) {
    const RowRange rows = rows_of(values.size());
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(rows.first);
    return Values(first, first + static_cast<std::ptrdiff_t>(rows.count));
  }
};

/// A row-major tensor with any number of rows. Declared only, for its type.
template <class Memory, class T, std::size_t First, std::size_t... Rest>
View<Memory, T, dynamic, Rest...> any_rows(std::type_identity<View<Memory, T, First, Rest...>>);
template <template <class, class, class, class> class Mdspan, class T,
          template <class, std::size_t...> class Shape, class Index, std::size_t First,
          std::size_t... Rest, class Order, class Accessor>
  requires RowMajorMdspan<Mdspan<T, Shape<Index, First, Rest...>, Order, Accessor>>
Mdspan<T, Shape<Index, dynamic, Rest...>, Order, Accessor> any_rows(
    std::type_identity<Mdspan<T, Shape<Index, First, Rest...>, Order, Accessor>>);

template <class Tensor>
  requires requires { any_rows(std::type_identity<Tensor>{}); }
struct Cutting<Tensor> {
  using AnyRows = decltype(any_rows(std::type_identity<Tensor>{}));
  static constexpr bool cuts = true;
  static void sizes(const Tensor& tensor, const auto& f) { f(tensor.extent(0)); }
  static auto take(const Tensor& tensor, const auto& rows_of) {
    const RowRange rows = rows_of(tensor.extent(0));
    return [&]<std::size_t... Axis>(std::index_sequence<Axis...>) {
      const std::size_t row = (std::size_t{1} * ... * tensor.extent(Axis + 1));
      return AnyRows(tensor.data_handle() + rows.first * row, rows.count,
                     tensor.extent(Axis + 1)...);
    }(std::make_index_sequence<Tensor::rank() - 1>{});
  }
};

/// The share of a tuple, pair or array consists of the shares of its parts.
template <class Shares, class Parts>
struct PartsCutting {
  static constexpr bool cuts = true;
  static void sizes(const Parts& parts, const auto& f) {
    std::apply([&]<class... Ts>(const Ts&... part) { (Cutting<Ts>::sizes(part, f), ...); }, parts);
  }
  static Shares take(const Parts& parts, const auto& rows_of) {
    return std::apply(
        [&]<class... Ts>(const Ts&... part) { return Shares{Cutting<Ts>::take(part, rows_of)...}; },
        parts);
  }
};

template <class... Ts>
  requires(is_cut<Ts> || ...)
struct Cutting<std::tuple<Ts...>> : PartsCutting<std::tuple<ShareOf<Ts>...>, std::tuple<Ts...>> {};

template <class A, class B>
  requires(is_cut<A> || is_cut<B>)
struct Cutting<std::pair<A, B>> : PartsCutting<std::pair<ShareOf<A>, ShareOf<B>>, std::pair<A, B>> {
};

template <class T, std::size_t N>
  requires is_cut<T>
struct Cutting<std::array<T, N>> : PartsCutting<std::array<ShareOf<T>, N>, std::array<T, N>> {};

/// An allocator of a map, for its shares; other arguments of the map stay as they are.
template <class Share, class Argument>
auto argument_of_shares() {
  if constexpr (requires { typename Argument::value_type; }) {
    using Traits = std::allocator_traits<Argument>;
    return std::type_identity<typename Traits::template rebind_alloc<Share>>{};
  } else {
    return std::type_identity<Argument>{};
  }
}

/// `std::map`, `std::unordered_map` and similar containers, whose headers are not included here.
template <template <class...> class Map, class K, class T, class... Rest>
  requires(sizeof...(Rest) >= 2) && is_cut<T> &&
          std::same_as<typename Map<K, T, Rest...>::mapped_type, T>
struct Cutting<Map<K, T, Rest...>> {
  using Values = Map<K, T, Rest...>;
  using Entry = std::pair<const K, ShareOf<T>>;
  using Shares = Map<K, ShareOf<T>, typename decltype(argument_of_shares<Entry, Rest>())::type...>;
  static constexpr bool cuts = true;
  static void sizes(const Values& values, const auto& f) {
    for (const auto& [key, value] : values) Cutting<T>::sizes(value, f);
  }
  static Shares take(const Values& values, const auto& rows_of) {
    Shares shares;
    for (const auto& [key, value] : values) shares.emplace(key, Cutting<T>::take(value, rows_of));
    return shares;
  }
};

/// Writes replica `i`'s share into `share`, reusing its memory if the batch is `SlicedInto`.
template <class Batch>
void take_share(const Batch& batch, const BatchCut& cut, std::size_t i,
                std::optional<ShareOf<Batch>>& share) {
  if constexpr (SlicedInto<Batch>) {
    const RowRange rows = cut.rows(batch.size(), i);
    if (!share) share.emplace();
    batch.slice(rows.first, rows.count, *share);
  } else {
    share.emplace(Cutting<Batch>::take(batch, [&](std::size_t size) { return cut.rows(size, i); }));
  }
}

/// Replica `i`'s rows of the first part that is cut; 0 if it has none of some part, as in PyTorch.
template <class Batch>
std::size_t samples_of(const Batch& batch, const BatchCut& cut, std::size_t i) {
  std::size_t samples = 0;
  std::size_t fewest = std::numeric_limits<std::size_t>::max();
  bool first = true;
  Cutting<Batch>::sizes(batch, [&](std::size_t size) {
    const std::size_t count = cut.rows(size, i).count;
    if (std::exchange(first, false)) samples = count;
    fewest = std::min(fewest, count);
  });
  return fewest == 0 ? 0 : samples;
}

/// The samples of a whole batch: its `size()`, or the rows of its first part.
template <class Batch>
std::size_t row_count(const Batch& batch) {
  constexpr bool counts = requires { batch.size(); } || is_cut<Batch>;
  static_assert(counts,
                "lockstep: this batch does not say how many samples it has; give it `std::size_t "
                "size() const`");
  if constexpr (requires { batch.size(); }) {
    return batch.size();
  } else if constexpr (counts) {
    return samples_of(batch, BatchCut{}, 0);
  }
  return 0;
}

template <class Batch>
consteval bool require_scattering() {
  static_assert(is_cut<Batch>,
                "lockstep: ParallelStrategy<DP> cannot cut this batch into shares; give it size() "
                "and void slice(first, count, out) const, or use spans, vectors or views");
  return is_cut<Batch>;
}

/// The shares of all replicas in the current batch.
class BatchShares {
 public:
  explicit BatchShares(BatchCut cut) : cut_(cut), rows_(cut.replicas) {}

  /// Counts the samples of every replica. Throws for an empty batch.
  void count(const auto& batch) {
    samples_ = largest_ = 0;
    for (std::size_t i = 0; i != rows_.size(); ++i) {
      rows_[i] = {samples_, samples_of(batch, cut_, i)};
      samples_ += rows_[i].count;
      largest_ = std::max(largest_, rows_[i].count);
    }
    if (samples_ == 0) [[unlikely]]
      fail("DP", {"the batch is empty"}, "give it a sample for one replica at least");
  }

  /// Throws if a replica has no sample: the norms of the others would wait for its statistics.
  void require_samples() const;

  const BatchCut& cut() const { return cut_; }
  /// A replica's samples, the total of all replicas, and the largest count of any.
  RowRange operator[](std::size_t replica) const { return rows_[replica]; }
  std::size_t samples() const { return samples_; }
  std::size_t largest() const { return largest_; }

 private:
  BatchCut cut_;
  std::vector<RowRange> rows_;
  std::size_t samples_ = 0;
  std::size_t largest_ = 0;
};

/// Where a replica's model reads its share: keeps the latest share of every type of batch. With
/// `HasWhole`, the replica that takes the loss (`is_root`) keeps whole batches too.
template <class Execution, bool HasWhole>
class DeviceShare {
  /// A dependent type, because clang would look into the class before it is complete.
  template <class Batch>
  using Complete = std::conditional_t<std::is_void_v<Batch>, Batch, DeviceShare>;

 public:
  /// The types that the model gets for a whole `Batch` and for a share of one.
  template <class Batch>
  using Whole = std::remove_cvref_t<decltype(std::declval<Execution&>().to_device(
      std::declval<const Batch&>()))>;
  template <class Batch>
  using Share = std::remove_cvref_t<decltype(std::declval<Complete<Batch>&>().to_device(
      std::declval<const Batch&>(), std::declval<const BatchShares&>(), nullptr))>;

  DeviceShare(Execution& execution, std::size_t replica, bool is_root)
      : execution_(execution), replica_(replica), is_root_(is_root) {}

  /// The batch must outlive its share, which may be a view of it.
  template <class Batch>
  void take(const Batch& batch, const BatchShares& shares) {
    Shares<Batch>& shares_on_device = storage_.get<Shares<Batch>>();
    if constexpr (HasWhole) {
      if (is_root_) shares_on_device.whole = &whole_to_device(batch);
    }
    if (shares[replica_].count != 0)
      shares_on_device.share = &to_device(batch, shares, shares_on_device.whole);
  }

  template <class Batch>
  const Share<Batch>& share() {
    return *storage_.get<Shares<Batch>>().share;
  }
  /// The whole batch, on the replica that takes the loss.
  template <class Batch>
  const Whole<Batch>& whole() {
    return *storage_.get<Shares<Batch>>().whole;
  }

 private:
  template <class Batch>
  struct Shares {
    const Whole<Batch>* whole = nullptr;
    const Share<Batch>* share = nullptr;
  };
  /// A copy from another device. `IsWhole`: a batch and its share may have the same type.
  template <class Batch, bool IsWhole>
  struct NearCopy {
    typename Execution::template Near<Batch> kept;
  };

  /// Does the model read the batch itself, which may be on another device?
  template <class Batch>
  static constexpr bool may_be_far = std::is_same_v<Whole<Batch>, Batch> &&
                                     requires { requires Execution::template Near<Batch>::copies; };

  template <class Batch>
  const auto& whole_to_device(const Batch& batch) {
    if constexpr (may_be_far<Batch>) {
      return execution_.bring_near(batch, storage_.get<NearCopy<Batch, true>>().kept);
    } else {
      return execution_.to_device(batch);
    }
  }

  /// If the whole batch is on this replica's device, the share is a part of it.
  template <class Batch>
  const auto& to_device(const Batch& batch, const BatchShares& shares,
                        [[maybe_unused]] const Whole<Batch>* whole) {
    if constexpr (HasWhole && (!std::is_same_v<Whole<Batch>, Batch> || may_be_far<Batch>)) {
      using OnDevice = std::remove_cvref_t<decltype(share_to_device(batch, shares))>;
      static_assert(std::is_same_v<ShareOf<Whole<Batch>>, OnDevice>,
                    "lockstep: LossOnOutput needs the whole batch and a share of it on one device; "
                    "give what the batch becomes there slice(first, count), or use LossOnReplica");
      if (whole != nullptr) return cut_out(*whole, shares);
    }
    return share_to_device(batch, shares);
  }

  template <class Batch>
  const auto& share_to_device(const Batch& batch, const BatchShares& shares) {
    if constexpr (may_be_far<ShareOf<Batch>>) {
      return execution_.bring_near(cut_out(batch, shares),
                                   storage_.get<NearCopy<ShareOf<Batch>, false>>().kept);
    } else if constexpr (requires { execution_.to_device(batch, 0, 0, 0); }) {
      const RowRange rows = shares.cut().rows(batch.size(), replica_);
      return execution_.to_device(batch, rows.first, rows.count, shares.largest());
    } else if constexpr (std::is_same_v<ShareOf<Batch>, Batch>) {
      return execution_.to_device(shares.cut().replicas == 1 ? batch : cut_out(batch, shares));
    } else {
      return execution_.to_device(cut_out(batch, shares));
    }
  }

  template <class Cuttable>
  const ShareOf<Cuttable>& cut_out(const Cuttable& from, const BatchShares& shares) {
    auto& share = storage_.get<std::optional<ShareOf<Cuttable>>>();
    take_share(from, shares.cut(), replica_, share);
    return share.value();
  }

  Execution& execution_;
  std::size_t replica_;
  bool is_root_;
  TypedStorage storage_;
};

}  // namespace detail

}  // namespace lockstep

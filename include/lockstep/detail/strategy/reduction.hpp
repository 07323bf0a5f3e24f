// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the gradients of buckets are averaged over ranks: whole, in slices, or through hooks.

#include "lockstep/detail/hook/pipeline.hpp"
#include "lockstep/detail/strategy/concepts.hpp"
#include "lockstep/detail/strategy/job_groups.hpp"
#include "lockstep/detail/strategy/replica_traits.hpp"

namespace lockstep::detail {

template <class Traits, class Comm>
constexpr GradientReduction gradient_reduction() {
  if constexpr (Traits::gathers_outputs) return GradientReduction::sum;
  // Hooks see averages, as in PyTorch.
  if constexpr (!AveragingBySums<Comm> || Traits::alone || Traits::is_hooked)
    return GradientReduction::average;
  bool has_halves = false;
  Traits::for_each_kind([&]<class T>(std::type_identity<T>) {
    has_halves |= std::is_same_v<typename Traits::template reduce_type<T>, Half>;
  });
  return has_halves ? GradientReduction::folded_sum_of_halves : GradientReduction::folded_sum;
}

/// For each bucket, an optional `Of<T>`, where T is the type of the bucket's parameters.
template <class Traits, template <class> class Of>
class BucketSlots {
 public:
  explicit BucketSlots(std::size_t buckets)
      : rows_(make_rows(buckets, std::make_index_sequence<Traits::kinds().size>{})) {}

  template <class T>
  std::optional<Of<T>>& at(std::size_t bucket) {
    return std::get<Row<T>>(rows_).slots[bucket];
  }

  template <class T, class Start>
  void start(std::size_t bucket, const Start& start) {
    at<T>(bucket).emplace(MadeInPlace<Start>{start});
  }
  /// Waits for a bucket's call, if one is pending.
  template <class T>
  void wait(std::size_t bucket) {
    auto& slot = at<T>(bucket);
    if (!slot) return;
    slot->wait();
    slot.reset();
  }
  /// Drops all handles: their calls belonged to a failed capture and never ran.
  void forget() {
    const auto forget_row = [](auto& row) {
      for (auto& slot : row.slots) {
        if (slot) slot->forget();
        slot.reset();
      }
    };
    std::apply([&](auto&... row) { (forget_row(row), ...); }, rows_);
  }

 private:
  /// A type of its own for each T: several may have handles of one type.
  template <class T>
  struct Row {
    explicit Row(std::size_t buckets) : slots(buckets) {}
    std::vector<std::optional<Of<T>>> slots;
  };
  template <std::size_t... K>
  static auto make_rows(std::size_t buckets, std::index_sequence<K...>)
      -> std::tuple<Row<ElementOf<Traits::kinds().kinds[K]>>...> {
    return {Row<ElementOf<Traits::kinds().kinds[K]>>(buckets)...};
  }

  decltype(make_rows(0, std::make_index_sequence<Traits::kinds().size>{})) rows_;
};

template <class Traits, class Comm, class T>
auto all_reduce_gradients(Comm& comm, std::span<T> gradients) {
  constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
  return comm.all_reduce_async(gradients, reduction_of_gradients<how>(comm.world_size().value()),
                               step_call<Traits, JobCall::backward>());
}

/// All kinds have `start<T>(bucket, gradients)`, for a complete bucket with parameters of T,
/// `wait<T>(bucket)`, which averages in place, and `forget()`. This one all-reduces whole buckets.
template <class Traits, class Comm>
class BucketReductions {
 public:
  template <class T>
  using ReduceType = typename Traits::template reduce_type<T>;

  BucketReductions(Comm& comm, const auto& layout, const auto* /*groups*/)
      : comm_(comm), handles_(layout.plan().bucket_count) {}

  template <class T>
  void start(std::size_t bucket, std::span<ReduceType<T>> gradients) {
    handles_.template start<T>(
        bucket, [&] { return all_reduce_gradients<Traits, Comm>(comm_, gradients); });
  }
  template <class T>
  void wait(std::size_t bucket) {
    handles_.template wait<T>(bucket);
  }
  void forget() { handles_.forget(); }

 private:
  template <class T>
  using Handle = decltype(all_reduce_gradients<Traits>(std::declval<Comm&>(),
                                                       std::declval<std::span<ReduceType<T>>>()));

  Comm& comm_;
  BucketSlots<Traits, Handle> handles_;
};

/// Reduces a piece inside this rank's group, then across groups.
template <class Inside, class Across, class T, class Op>
struct ScatterAcross {
  Inside inside;
  Across& across;
  std::span<T> own;
  Op op;

  void wait() {
    inside.wait();
    across.all_reduce(own, op, step_call_of_thread());
  }
  void forget() { inside.forget(); }
};

/// The ranks that divide buckets, and the collectives of their slices. `scatter` and `gather` take
/// all pieces of a bucket, contiguous and of equal length, and return the handle of a pending call.
///
/// With `Groups<Grid<W, G>>` buckets are divided inside of each group, and groups are replicas of
/// each other: a slice is reduce-scattered inside, all-reduced across, and all-gathered inside.
template <class Traits, class Comm>
class ShardSpace {
  using Groups = JobGroupsOf<Traits, Comm>;
  static constexpr GradientReduction how = gradient_reduction<Traits, Comm>();

 public:
  ShardSpace(Comm& comm, Groups* groups) : comm_(&comm), groups_(groups) {
    if constexpr (Traits::shards_groups) {
      const auto topology = topology_for<typename Traits::job_topology>(comm.world_size());
      const auto group = topology.group_rank(comm.rank());
      shards_ = topology.group_size(group);
      shard_ = topology.local_group_rank(comm.rank()).value();
      is_saved_ = group == topology.group_rank(Rank{0});
    } else {
      shards_ = comm.world_size().value();
      shard_ = comm.rank().value();
    }
    require_shards(shards_, comm.rank());
  }

  std::size_t shards() const { return shards_; }
  /// Does this rank save its slices? All groups keep the same, and rank 0's group saves them.
  bool is_saved() const { return is_saved_; }

  template <class T>
  Shard slice(std::size_t count) const {
    return shard_of<typename Traits::template sliced<T>>(count, shard_, shards_);
  }
  /// All pieces, with the room behind it, of a bucket of `count` Ts, at `data` in any type.
  template <class T, class ReduceType>
  std::span<ReduceType> pieces(ReduceType* data, std::size_t count) const {
    return {data, shard_length<typename Traits::template sliced<T>>(count, shards_) * shards_};
  }

  /// Reduces this rank's piece over ranks, as `gradient_reduction` says. **Ranks** all.
  template <class T>
  auto scatter(std::span<T> pieces) const {
    const std::span<T> own = own_piece(pieces);
    const auto start = [&] {
      return inside().reduce_scatter_async(pieces, own,
                                           reduction_of_gradients<how>(comm_->world_size().value()),
                                           step_call<Traits>());
    };
    if constexpr (Traits::shards_groups) {
      constexpr auto then = how == GradientReduction::average ? how : GradientReduction::sum;
      using Op = decltype(reduction_of_gradients<then>(1));
      using Across = std::remove_reference_t<decltype(groups_->across())>;
      return ScatterAcross<decltype(start()), Across, T, Op>{start(), groups_->across(), own,
                                                             reduction_of_gradients<then>(1)};
    } else {
      return start();
    }
  }
  /// All-gathers the pieces from their owners, this rank's in place or from `own`. **Ranks** all.
  template <class T>
  auto gather(std::span<T> pieces) const {
    return gather(std::span<const T>(own_piece(pieces)), pieces, step_call<Traits>());
  }
  template <class T>
  auto gather(std::span<const T> own, std::span<T> pieces, JobCall part_of) const {
    return inside().all_gather_async(own, pieces, part_of);
  }
  /// Sums a number over the owners of shards. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void add_others(double& number) const {
    inside().all_reduce(std::span(&number, 1), Sum{}, step_call<Traits>());
  }

 private:
  auto& inside() const {
    if constexpr (Traits::shards_groups) {
      return groups_->group();
    } else {
      return *comm_;
    }
  }
  template <class T>
  std::span<T> own_piece(std::span<T> pieces) const {
    const std::size_t length = pieces.size() / shards_;
    return pieces.subspan(shard_ * length, length);
  }

  Comm* comm_;
  Groups* groups_;
  std::size_t shards_;
  std::size_t shard_;  // this rank's index
  bool is_saved_ = true;
};

/// `Sharding<ZeroRedundancy>`: a rank gets its slices, and the first bucket whole for join flags.
template <class Traits, class Comm>
class ShardReductions : public BucketReductions<Traits, Comm> {
  using Whole = BucketReductions<Traits, Comm>;
  using Space = ShardSpace<Traits, Comm>;
  template <class T>
  using ReduceType = typename Whole::template ReduceType<T>;

 public:
  ShardReductions(Comm& comm, const auto& layout, JobGroupsOf<Traits, Comm>* groups)
      : Whole(comm, layout, groups), space_(comm, groups), handles_(layout.plan().bucket_count) {}

  const Space& space() const { return space_; }

  template <class T>
  void start(std::size_t bucket, std::span<ReduceType<T>> gradients) {
    if (Traits::joins && bucket == 0) return Whole::template start<T>(bucket, gradients);
    handles_.template start<T>(bucket, [&] {
      return space_.scatter(space_.template pieces<T>(gradients.data(), gradients.size()));
    });
  }
  template <class T>
  void wait(std::size_t bucket) {
    if (Traits::joins && bucket == 0) return Whole::template wait<T>(bucket);
    handles_.template wait<T>(bucket);
  }
  template <class T>
  bool is_in_flight(std::size_t bucket) {
    return handles_.template at<T>(bucket).has_value();
  }
  void forget() {
    handles_.forget();
    Whole::forget();
  }

 private:
  template <class T>
  using Handle =
      decltype(std::declval<const Space&>().scatter(std::declval<std::span<ReduceType<T>>>()));

  Space space_;
  BucketSlots<Traits, Handle> handles_;
};

/// A pipeline of hooks for every bucket.
template <class Traits, class Comm>
class HookedReductions {
  using layout = typename Traits::layout;
  using Device = HookDevice<typename Traits::device>;
  using Stages = typename Traits::hooks::stages;
  template <class T>
  using ReduceType = typename Traits::template reduce_type<T>;
  template <class T>
  using PipelineOf = Pipeline<ReduceType<T>, Comm, Device, Stages>;

 public:
  HookedReductions(Comm& comm, const layout& where, const auto* /*groups*/)
      : device_(comm),
        layout_(where),
        slots_(where.plan().bucket_count),
        pipelines_(where.plan().bucket_count) {
    for (std::size_t b = 0; b != slots_.size(); ++b) {
      const Bucket& bucket = layout_.plan().bucket_table[b];
      Slot& slot = slots_[b];
      for (const std::size_t p : layout_.plan().members(b))
        slot.tensors.push_back(tensor(bucket, p));
      slot.bucket.emplace(comm, device_, b,
                          bucket.count() + flags_behind<Traits>(b, comm.world_size()),
                          std::span<const HookedTensor>(slot.tensors), steps_, bytes_);
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        pipelines_.template at<T>(b).emplace(*slot.bucket);
      });
    }
  }
  HookedReductions(const HookedReductions&) = delete;
  HookedReductions& operator=(const HookedReductions&) = delete;

  /// Drops pending reductions and the latest micro-batch, whose capture failed: they never ran.
  void forget() {
    steps_ = steps_before_;
    bytes_ = bytes_before_;
    for_each_pipeline([](auto& pipeline) { pipeline.forget(); });
    for (Slot& slot : slots_) slot.in_flight = nullptr;
  }

  template <class T>
  void start(std::size_t bucket, std::span<ReduceType<T>> gradients) {
    slots_[bucket].in_flight = gradients.data();
    pipelines_.template at<T>(bucket)->begin(gradients);
  }

  /// Waits for a bucket's averages, if they are pending. **Ranks** all, in the order of buckets.
  template <class T>
  void wait(std::size_t bucket) {
    Slot& slot = slots_[bucket];
    if (slot.in_flight == nullptr) return;
    if constexpr (Stages::has_rounds && !StreamCommunicator<Comm>) {
      // A further round would finish the other buckets' calls without knowing their types.
      for_each_pipeline([](auto& pipeline) { pipeline.wait(); });
    }
    auto* const gradients = static_cast<ReduceType<T>*>(std::exchange(slot.in_flight, nullptr));
    pipelines_.template at<T>(bucket)->finish({gradients, slot.bucket->count()});
  }

  /// Counts a step, whichever buckets were reduced in it.
  void count_step() { ++steps_; }
  /// Resumes after so many steps, with states that are zero until they are copied in.
  void begin_anew(std::uint64_t steps) {
    steps_ = steps;
    for_each_state(
        [&](std::size_t, std::string_view, auto values, Keeper) { device_.zero(values); });
  }
  std::uint64_t bytes_sent() const { return bytes_; }
  void count_sent(std::size_t bytes) { bytes_ += bytes; }

  /// Announces a micro-batch that may be captured. Returns the phase of the hooks' work in it.
  std::uint64_t begin_graph(bool completes) {
    // Replays of this phase will send as many bytes as the latest step, if that was enqueued.
    if (const std::uint64_t phase = Stages::phase(steps_before_);
        steps_ != steps_before_ && !sent_in(phase)) {
      sent_.emplace_back(phase, bytes_ - bytes_before_);
    }
    steps_before_ = steps_;
    bytes_before_ = bytes_;
    if (!completes) return 0;
    // The device must know the step's number, captured or replayed.
    if constexpr (requires { device_.set_step(steps_); }) device_.set_step(steps_);
    return Stages::phase(steps_);
  }
  void replayed() {
    bytes_ += sent_in(Stages::phase(steps_)).value_or(0);
    ++steps_;
  }

  /// Calls `f(parameter, state, values, keeper)` for every state of hooks.
  void for_each_state(const auto& f) {
    for_each_pipeline([&](auto& pipeline) { pipeline.for_each_state(f); });
  }

 private:
  struct Slot {
    std::vector<HookedTensor> tensors;
    std::optional<HookedBucket<Comm, Device>> bucket;
    void* in_flight = nullptr;  // the gradients in flight
  };

  std::optional<std::uint64_t> sent_in(std::uint64_t phase) const {
    for (const auto& [captured, bytes] : sent_)
      if (captured == phase) return bytes;
    return std::nullopt;
  }

  HookedTensor tensor(const Bucket& bucket, std::size_t parameter) const {
    const auto& info = layout_.infos()[parameter];
    const std::size_t first = (layout_.plan().placements[parameter].offset - bucket.offset) /
                              element_size(bucket.element);
    const std::size_t rows = info.rank == 0 ? 1 : info.extents[0];
    return {parameter, first, rows, rows == 0 ? 0 : info.count() / rows};
  }

  void for_each_pipeline(const auto& f) {
    for (std::size_t b = 0; b != slots_.size(); ++b) {
      Traits::with_element(
          layout_.plan().bucket_table[b].element,
          [&]<class T>(std::type_identity<T>) { f(*pipelines_.template at<T>(b)); });
    }
  }

  [[no_unique_address]] Device device_;
  const layout& layout_;
  std::uint64_t steps_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t steps_before_ = 0;  // at the latest micro-batch that could be captured
  std::uint64_t bytes_before_ = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sent_;  // by phase, of which there are few
  std::vector<Slot> slots_;
  BucketSlots<Traits, PipelineOf> pipelines_;
};

template <class Traits, class Comm>
using ReductionsOf =
    std::conditional_t<Traits::scatters_buckets, ShardReductions<Traits, Comm>,
                       std::conditional_t<Traits::is_hooked, HookedReductions<Traits, Comm>,
                                          BucketReductions<Traits, Comm>>>;

}  // namespace lockstep::detail

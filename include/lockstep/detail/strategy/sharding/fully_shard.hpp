// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Sharding<FullyShard>`: ranks keep slices of parameters, and gather a few units at a time.

#include "lockstep/detail/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// A rank owns a slice of every bucket, a unit, and keeps no other parameters. A pass of the model
/// gathers units into a ring of slots: forward from the first declared to the last, backward in
/// reverse. The first parameter of a unit that the model asks for waits for the unit, and starts to
/// gather those that follow. A unit is released when its slot is needed.
///
/// All ranks gather the same units in the same order, because units that a rank passes over are
/// gathered, too. A unit that is asked for again after its release is gathered again: all ranks
/// must ask for it then, and the descriptions of their calls tell the unit.
///
/// Frozen parameters are in no unit: every rank keeps them, at `frozen` plus their offset.
template <class Traits, class Comm>
class OwnsUnits : public OwnedShards<Traits, Comm> {
  using layout = typename Traits::layout;
  using Shards = OwnedShards<Traits, Comm>;
  using Shards::gathers_, Shards::space_, Shards::with_bucket;
  using Policy = typename Traits::template policy<axes::Sharding>;
  static constexpr std::size_t ring =
      Policy::template option<axes::GatheredUnits, GatheredUnits<3>>::count;
  static constexpr bool reshards =
      Policy::template option<axes::ReshardAfterForward, ReshardAfterForward<true>>::reshards;
  /// The units that are gathered while one is in use. With a ring of two the other is.
  static constexpr std::size_t ahead = ring == 2 ? 1 : ring - 2;

 public:
  OwnsUnits(Comm& comm, const layout& where, std::byte* frozen, JobGroupsOf<Traits, Comm>* groups)
      : Shards(comm, where, groups),
        frozen_(frozen),
        holders_(reshards ? std::min(ring, units()) : units(), no_bucket),
        is_pending_(holders_.size()),
        releases_(holders_.size()) {
    for (std::size_t b = 0; b != units(); ++b) {
      with_bucket(b, [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
        const std::size_t pieces =
            space_.template pieces<T>(static_cast<T*>(nullptr), bucket.count()).size();
        this->template add<T>(b, bucket, space_.template slice<T>(bucket.count()),
                              pieces / space_.shards());
        slot_bytes_ = std::max(slot_bytes_, align_up(pieces * sizeof(T)));
      });
    }
    shards_ = allocate(comm, this->state_bytes());
    slots_ = allocate(comm, holders_.size() * slot_bytes_);
  }

  /// Gathered units are out of date. The next step's first ones are gathered at once, except
  /// outside of a captured step.
  void publish(bool /*was_fused*/) {
    release_all();
    begin_forward();
    if constexpr (!Traits::captures) start_until(ring);
  }

  /// The bytes of parameters that this rank keeps: its slices, and the ring.
  std::size_t bytes() const { return this->state_bytes() + holders_.size() * slot_bytes_; }
  /// This rank's element of a unit at `offset` of the arena.
  std::byte* kept_parameter(std::size_t offset) const { return shards_ + this->kept(offset); }
  /// Calls `f(values, first)` for the elements of a parameter that this rank keeps.
  void for_each_slice(std::size_t parameter, const auto& f) const {
    Traits::with_element(this->layout_.infos()[parameter].element, [&]<class T>(
                                                                       std::type_identity<T>) {
      this->for_each_of(parameter, [&](std::size_t first, std::size_t count, std::size_t offset) {
        f(elements_at<T>(kept_parameter(offset), 0, count * sizeof(T)), first);
      });
    });
  }

  // A pass of the model.

  void begin_forward() { begin(false); }
  void begin_backward() { begin(true); }
  /// Gathers the units that the model has not asked for, as other ranks may have.
  void end_forward() { start_until(units()); }
  /// The same at the end of an evaluation, after which a captured step may begin.
  void end_evaluation() {
    end_forward();
    if constexpr (Traits::captures) release_all();
  }
  /// Ends all gathers, because an update will write what they read. A captured micro-batch ends
  /// without gathered units, as the next one begins.
  void end_backward() {
    if constexpr (Traits::notes_usage) start_until(units());
    finish_all();
    if constexpr (Traits::captures) release_all();
  }

  /// A parameter, valid until its unit is released. **Ranks** all, in one order. **Host** blocks
  /// until its unit is gathered, or on a GPU the compute stream waits.
  auto parameter(auto key) {
    const std::size_t p = tensor_index<typename Traits::model, TensorRole::parameter>(key);
    auto view = this->layout_.template view<typename Traits::memory, true>(arena_of(p), key);
    if constexpr (is_checked) {
      const std::size_t b = this->layout_.plan().placements[p].bucket;
      if (b != no_bucket) view.set_releases(releases_[slot_of(b)]);
    }
    return view;
  }
  void for_each_parameter(auto&& f) {
    this->layout_.template for_each<typename Traits::memory, true>(
        [this](std::size_t p) { return arena_of(p); }, f);
  }
  /// Releases the units inside of a scope, and gathers more in advance. **Ranks** all.
  template <class Key>
  void done([[maybe_unused]] Key key) {
    using Model = typename Traits::model;
    if constexpr (TensorListing<Model>) {
      release(
          this->layout_.plan().placements[tensor_index<Model, TensorRole::parameter>(key)].bucket);
    } else {
      static_assert(
          has_parameter_in<Model>(Key::name),
          "lockstep: step.done was given a name that is no scope with parameters; write that of "
          "a unit, such as \"blocks\"_p / at<3>");
      for (std::size_t b = 0; b != units(); ++b) {
        const auto members = this->layout_.plan().members(b);
        if (is_in(this->layout_.name(members.front()), Key::name) &&
            is_in(this->layout_.name(members.back()), Key::name))
          release(b);
      }
    }
  }

  /// Waits for pending gathers, and releases all units: what follows writes parameters.
  void release_all() {
    finish_all();
    for (std::size_t slot = 0; slot != holders_.size(); ++slot) empty(slot);
  }
  /// Drops the gathers of a failed capture.
  void forget() {
    gathers_.forget();
    std::ranges::fill(is_pending_, std::uint8_t{0});
    pending_ = 0;
    release_all();
  }

 private:
  std::size_t units() const { return this->buckets(); }
  static std::byte* allocate(Comm& comm, std::size_t size) {
    if (size == 0) return nullptr;
    return reinterpret_cast<std::byte*>(comm.template allocate<std::uint8_t>(size).data());
  }
  static constexpr bool is_in(std::string_view name, std::string_view scope) {
    return name.starts_with(scope) && (name.size() == scope.size() || name[scope.size()] == '.');
  }
  template <class Model>
  static consteval bool has_parameter_in(std::string_view scope) {
    const auto& all = tensor_table<Model, TensorRole::parameter>;
    for (std::size_t i = 0; i != all.size(); ++i)
      if (is_in(all.name(i), scope)) return true;
    return false;
  }

  /// Where an arena with the plan's layout would begin for the parameter's gathered unit.
  std::byte* arena_of(std::size_t parameter) {
    const auto& plan = this->layout_.plan();
    if (parameter >= this->layout_.infos().size()) return frozen_;  // rejected by its view
    const std::size_t b = plan.placements[parameter].bucket;
    if (b == no_bucket) return frozen_;
    if (b != latest_) ask(b);
    return slots_ + slot_of(b) * slot_bytes_ - plan.bucket_table[b].offset;
  }

  // Buckets are numbered as backward meets them; forward goes from the last to the first.

  std::size_t slot_of(std::size_t b) const { return b % holders_.size(); }
  std::size_t unit_at(std::size_t place) const {
    return is_backward_ ? place : units() - 1 - place;
  }
  bool holds(std::size_t b) const { return holders_[slot_of(b)] == b; }

  void begin(bool is_backward) {
    is_backward_ = is_backward;
    next_ = 0;
    latest_ = no_bucket;
  }
  [[gnu::noinline]] void ask(std::size_t b) {
    const std::size_t place = unit_at(b);  // its own inverse
    start_until(place + 1);
    start(b);  // again, if it was released
    finish(slot_of(b));
    start_until(std::min(units(), place + 1 + ahead));
    latest_ = b;
  }
  /// Starts the gathers of this pass up to a place.
  void start_until(std::size_t place) {
    while (next_ < std::min(place, units())) start(unit_at(next_++));
  }
  void start(std::size_t b) {
    if (holds(b)) return;
    if (pending_ == most_shards_in_flight<Comm>) finish_all();
    const std::size_t slot = slot_of(b);
    finish(slot);
    empty(slot);
    with_bucket(b, [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      const auto pieces = space_.template pieces<T>(
          reinterpret_cast<T*>(slots_ + slot * slot_bytes_), bucket.count());
      const Shard own = space_.template slice<T>(bucket.count());
      const std::span<const T> kept(
          reinterpret_cast<const T*>(kept_parameter(bucket.offset + own.begin * sizeof(T))),
          pieces.size() / space_.shards());
      gathers_.template start<T>(b, [&] { return space_.gather(kept, pieces, gather_of_unit(b)); });
    });
    holders_[slot] = b;
    is_pending_[slot] = 1;
    ++pending_;
  }
  void finish(std::size_t slot) {
    if (is_pending_[slot] == 0) return;
    [[maybe_unused]] const typename Traits::span span({"wait for unit", holders_[slot]});
    is_pending_[slot] = 0;
    --pending_;
    this->wait_for_gather(holders_[slot]);
  }
  void finish_all() {
    for (std::size_t slot = 0; slot != holders_.size(); ++slot) finish(slot);
  }
  void end_views(std::size_t slot) {
    if (holders_[slot] == latest_) latest_ = no_bucket;
    ++releases_[slot];
  }
  void empty(std::size_t slot) {
    end_views(slot);
    holders_[slot] = no_bucket;
  }
  void release(std::size_t b) {
    if (!reshards || b == no_bucket || !holds(b)) return;
    // Forward's last units are backward's first: they stay, on every rank.
    if (!is_backward_ && b < holders_.size()) return end_views(slot_of(b));
    finish(slot_of(b));
    empty(slot_of(b));
    while (next_ != units() && holders_[slot_of(unit_at(next_))] == no_bucket)
      start(unit_at(next_++));
  }

  std::byte* frozen_;
  std::vector<std::size_t> holders_;      // the unit in each slot
  std::vector<std::uint8_t> is_pending_;  // by slot
  std::vector<std::uint64_t> releases_;   // by slot
  std::size_t pending_ = 0;
  std::size_t slot_bytes_ = 0;
  std::byte* shards_ = nullptr;
  std::byte* slots_ = nullptr;
  bool is_backward_ = false;
  std::size_t next_ = 0;            // the place in this pass of the next unit to gather
  std::size_t latest_ = no_bucket;  // the unit that was asked for last
};

template <class Traits, class Comm>
using OwnedBy = std::conditional_t<
    Traits::gathers_parameters, OwnsUnits<Traits, Comm>,
    std::conditional_t<Traits::shards, OwnsShard<Traits, Comm>,
                       std::conditional_t<Traits::shares_parameters, OwnsSlice<Traits, Comm>,
                                          OwnsAll<Traits, Comm>>>>;

/// One unit as the model declares it, by which rank 0 writes initial values: no rank has memory for
/// all parameters. Rank 0 says what is next, and the others follow.
template <class Traits, class Comm, class Execution, class Updating>
class UnitExchange {
  using layout = typename Traits::layout;
  /// Master weights are float, as declared.
  template <class T>
  using Declared = std::conditional_t<Traits::keeps_masters, float, T>;

 public:
  UnitExchange(Comm& comm, Execution& execution, const layout& where, Updating& updater)
      : comm_(comm), execution_(execution), layout_(where), updater_(updater), whole_(largest()) {}

  std::size_t bytes() const { return whole_.bytes(); }

  // Rank 0.

  /// Copies a unit from its owners to host memory.
  void fetch(std::size_t b, std::byte* to) {
    follow(tell({Order::fetch, b}));
    execution_.copy(to, whole_.data(), bytes());
    await();
  }
  /// Gives a unit in host memory to its owners.
  void store(std::size_t b, const std::byte* from) {
    execution_.copy(whole_.data(), from, bytes());
    follow(tell({Order::store, b}));
    await();
  }
  void end() { tell({Order::end, 0}); }

  /// The other ranks: take part until rank 0 ends.
  void follow_all() {
    for (Task task = tell({}); task.order != Order::end; task = tell({})) follow(task);
  }

 private:
  enum class Order : std::uint8_t { fetch, store, end };
  struct Task {
    Order order = Order::end;
    std::size_t unit = 0;
  };

  Task tell(Task task) {
    const std::uint64_t told = comm_.broadcast(
        std::uint64_t{task.unit * 3 + static_cast<std::uint64_t>(task.order)}, Rank{0});
    return {static_cast<Order>(told % 3), static_cast<std::size_t>(told / 3)};
  }
  void follow(Task task) {
    const Bucket& bucket = layout_.plan().bucket_table[task.unit];
    const auto& space = updater_.owned().space();
    Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
      using D = Declared<T>;
      const std::size_t count = bucket.count();
      const Shard own = space.template slice<T>(count);
      const std::size_t offset = bucket.offset + own.begin * sizeof(T);
      T* const used = reinterpret_cast<T*>(updater_.owned().kept_parameter(offset));
      D* const declared = reinterpret_cast<D*>(
          Traits::keeps_masters ? updater_.masters_at(offset) : reinterpret_cast<std::byte*>(used));
      const auto whole = space.template pieces<T>(reinterpret_cast<D*>(whole_.data()), count);
      if (task.order == Order::fetch) {
        const std::span<const D> kept(declared, whole.size() / space.shards());
        return space.gather(kept, whole, current_job_call()).wait();
      }
      comm_.broadcast(whole.first(count), Rank{0});
      if (own.count() == 0) return;
      execution_.copy(reinterpret_cast<std::byte*>(declared),
                      reinterpret_cast<const std::byte*>(whole.data() + own.begin),
                      own.count() * sizeof(D));
      if constexpr (Traits::keeps_masters)
        execution_.cast(std::span<T>(used, own.count()), std::span<D>(declared, own.count()));
    });
  }
  void await() {
    if constexpr (StreamCommunicator<Comm>) comm_.synchronize();
  }
  std::size_t largest() const {
    std::size_t most = 0;
    const auto compare = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      const auto all = updater_.owned().space().template pieces<T>(
          static_cast<Declared<T>*>(nullptr), bucket.count());
      most = std::max(most, all.size_bytes());
    };
    Traits::for_each_typed(layout_.plan().buckets(), compare);
    return most;
  }

  Comm& comm_;
  Execution& execution_;
  const layout& layout_;
  Updating& updater_;
  typename Execution::Arena whole_;
};

/// The values that rank 0 initializes (see `ArenaValues`): two units in host memory at a time, in
/// declared types, and `Frozen` the values of parameters in no unit. A view is valid until a
/// parameter of the next unit but one is asked for.
template <class Traits, class Exchange, class Frozen>
class UnitValues {
  using layout = typename Traits::layout;

 public:
  UnitValues(Exchange& exchange, const layout& where,
             const typename Traits::declared_layout& declared, Frozen& frozen)
      : exchange_(exchange), layout_(where), declared_(declared), frozen_(frozen) {}

  std::byte* open(std::size_t tensor) {
    const Placement& where = layout_.plan().placements[tensor];
    if (where.bucket == no_bucket) return frozen_.open(tensor);
    const Bucket& bucket = layout_.plan().bucket_table[where.bucket];
    const std::size_t before = (where.offset - bucket.offset) / element_size(bucket.element);
    return bring(where.bucket) + before * element_size(declared_.infos()[tensor].element) -
           declared_.plan().placements[tensor].offset;
  }
  bool is_open(std::size_t tensor) const {
    return layout_.plan().is_trained(tensor) || frozen_.is_open(tensor);
  }
  void close(std::size_t tensor) {
    if (!layout_.plan().is_trained(tensor)) frozen_.close(tensor);
  }
  void flush() {
    for (Open& unit : open_) store(unit);
    frozen_.flush();
  }
  template <class T, class F>
  void fill(std::size_t tensor, const Placement& where, const F& f) {
    if (!layout_.plan().is_trained(tensor)) return frozen_.template fill<T>(tensor, where, f);
    f(elements_at<T>(open(tensor), where.offset, where.bytes));
  }

 private:
  struct Open {
    std::size_t unit = no_bucket;
    HostArena memory{0};
  };

  std::byte* bring(std::size_t b) {
    if (open_[0].unit != b) {
      std::swap(open_[0], open_[1]);
      if (open_[0].unit != b) {
        store(open_[0]);
        if (open_[0].memory.bytes() == 0) open_[0].memory = HostArena(exchange_.bytes());
        exchange_.fetch(b, open_[0].memory.data());
        open_[0].unit = b;
      }
    }
    return open_[0].memory.data();
  }
  void store(Open& unit) {
    if (unit.unit != no_bucket) exchange_.store(unit.unit, unit.memory.data());
    unit.unit = no_bucket;
  }

  Exchange& exchange_;
  const layout& layout_;
  const typename Traits::declared_layout& declared_;
  Frozen& frozen_;
  std::array<Open, 2> open_;  // the latest first
};

}  // namespace lockstep::detail

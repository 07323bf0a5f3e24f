// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What every collective through shared memory is made of: a call that all ranks compare, the
/// place of everybody's data, and the exchange of pieces.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call_arguments.hpp"
#include "lockstep/comm/shm/control.hpp"
#include "lockstep/comm/shm/engine.hpp"
#include "lockstep/comm/shm/work.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::shm {

template <class T>
constexpr bool is_small(std::size_t count) {
  return count * sizeof(T) <= small_bytes;
}

template <class T>
void copy(const T* from, T* to, std::size_t count) {
  if (from != to && count != 0) std::memmove(to, from, count * sizeof(T));
}

/// All ranks, as the collectives of one see them. Copied freely: it refers to the engine, and knows
/// at compile time what can be known (the world's size, and whether a helper takes turns).
template <std::size_t Ranks, bool Helped>
class Peers {
 public:
  explicit Peers(Engine& engine) : engine_(&engine) {}

  Rank rank() const { return engine_->me(); }
  std::size_t me() const { return engine_->rank(); }
  std::size_t world() const { return Ranks == dynamic ? engine_->world() : Ranks; }
  CallArguments arguments() const { return {rank(), WorldSize{world()}}; }

  /// The call as the others will compare it. Arguments that cannot be right fail here and now.
  template <class T, class U>
  Call describe(CollectiveKind kind, std::span<U> data, Rank root = Rank{0}) const {
    static_assert(std::same_as<std::remove_const_t<U>, T>,
                  "lockstep: a collective's arguments have one element type");
    arguments().template check<T>(kind, root);
    return make_call<T>(kind, data.size(), !location(data), root.value());
  }

  void check_size(const Call& call, std::size_t have, std::size_t want) const {
    arguments().check_size(call, have, want);
  }

  /// Where other ranks find the data: anywhere if it is small (it travels in the slot), else in an
  /// arena.
  template <class T>
  std::optional<std::uint64_t> location(std::span<T> data) const {
    return is_small<T>(data.size()) ? 0 : arena_offset(data);
  }
  template <class T>
  std::optional<std::uint64_t> arena_offset(std::span<T> data) const {
    return engine_->locate(data.data(), data.size_bytes());
  }

  /// Rank w's data for a call: in its slot, its arena or its staging area.
  template <class T>
  auto small_source(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->slot(w, ticket).data.data());
    };
  }
  template <class T>
  auto arena_source(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->at(engine->slot(w, ticket).offset));
    };
  }
  template <class T>
  auto staging_source() const {
    return [engine = engine_](std::size_t w) {
      return reinterpret_cast<T*>(engine->block(w).staging.data());
    };
  }

  /// Posts a call: `small` travels in the slot, `offset` says where other data lies, and
  /// `execute(ticket)` is this rank's share of the work. `others_read`: as in `Work`.
  template <class T, class Execute>
  auto post(const Call& call, std::span<const T> small, bool others_read, Execute execute,
            std::uint64_t offset = 0) const {
    return Work<Execute, Helped>(
        *engine_, call, offset,
        [&](Slot& slot) {
          if (!small.empty()) std::memcpy(slot.data.data(), small.data(), small.size_bytes());
        },
        others_read, execute);
  }

  /// The general exchange: every rank offers `pieces` pieces of `count` elements, then reads what
  /// it needs of the others. `execute(source, stride, begin, n)`: elements [begin, begin + n) of
  /// piece p of rank w are at `source(w) + p * stride`.
  template <class T, class Execute>
  void exchange(const Call& call, std::span<const T> in, std::size_t pieces, std::size_t count,
                const Execute& execute) const {
    if (is_small<T>(pieces * count)) {
      Call small = call;
      small.staged = false;
      post(small, in, false, [&](std::uint64_t ticket) {
        execute(small_source<T>(ticket), count, 0, count);
      }).wait();
    } else if (!call.staged) {
      const std::uint64_t offset = engine_->locate(in.data(), in.size_bytes()).value_or(0);
      const auto read = [&](std::uint64_t ticket) {
        execute(arena_source<T>(ticket), count, 0, count);
      };
      post(call, std::span<const T>(), true, read, offset).wait();
    } else {
      exchange_staged(call, in, pieces, count, execute);
    }
  }

 private:
  /// As much at a time as the staging area holds.
  template <class T, class Execute>
  void exchange_staged(const Call& call, std::span<const T> in, std::size_t pieces,
                       std::size_t count, const Execute& execute) const {
    const std::size_t most = std::max<std::size_t>(1, staging_bytes / sizeof(T) / pieces);
    T* const staging = staging_source<T>()(me());
    for (std::size_t begin = 0; begin < count; begin += most) {
      const std::size_t n = std::min(most, count - begin);
      for (std::size_t p = 0; p < pieces && !in.empty(); ++p)
        copy(in.data() + p * count + begin, staging + p * n, n);
      post(call, std::span<const T>(), true, [&](std::uint64_t) {
        execute(staging_source<T>(), n, begin, n);
      }).wait();
    }
  }

  Engine* engine_;
};

}  // namespace lockstep::shm

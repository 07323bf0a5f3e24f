// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where one rank of a shared-memory communicator finds all ranks' data of a call.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/backends/shm/engine.hpp"
#include "lockstep/comm/combine.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::shm {

/// A reference to the engine. `Ranks` is the world's size where the compiler knows it.
template <std::size_t Ranks>
class Peers {
 public:
  explicit Peers(Engine& engine) : engine_(&engine) {}

  Rank rank() const { return engine_->rank(); }
  std::size_t me() const { return rank().value(); }
  std::size_t world() const { return Ranks == dynamic ? engine_->world() : Ranks; }

  // Rank w's data: in its slot, its arena or its staging area.

  template <class T>
  auto in_slots(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->slot(w, ticket).data.data());
    };
  }
  template <class T>
  auto in_arenas(std::uint64_t ticket) const {
    return [engine = engine_, ticket](std::size_t w) {
      return reinterpret_cast<T*>(engine->arenas().at(engine->slot(w, ticket).offset));
    };
  }
  template <class T>
  auto in_staging() const {
    return [engine = engine_](std::size_t w) {
      return reinterpret_cast<T*>(engine->block(w).staging.data());
    };
  }

  /// All ranks' data, looked up once.
  template <class T, class Source>
  std::vector<T*> all(const Source& source) const {
    std::vector<T*> data(world());
    for (std::size_t w = 0; w < data.size(); ++w) data[w] = source(w);
    return data;
  }

  /// All-reduces this rank's slice of all ranks' data, in place.
  template <class T, class Op>
  void push_own_slice(const std::vector<T*>& data, std::size_t count, const Op& op) const {
    const auto [begin, end] = slice_of<T>(count, me(), world());
    push<Ranks, T>(data, begin, end, op);
  }

 private:
  Engine* engine_;
};

}  // namespace lockstep::detail::shm

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The optimizer's states and the master weights of the elements that a rank updates.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// They are packed, element by element in the order of the pieces that the rank owns: where ranks
/// divide parameters, a rank keeps those of its own elements alone.
template <class Traits, class Comm, class Execution>
class OptimizerStates {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using Owned = OwnedBy<Traits, Comm>;
  using Arena = typename Execution::Arena;
  static constexpr bool divides = Traits::divides_states;

 public:
  OptimizerStates(Comm& comm, Execution& execution, const layout& where, const Owned& owned)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        owned_(owned),
        masters_(Traits::keeps_masters ? widened(owned.kept_bytes()) : 0),
        states_(Rule::states * widened(owned.kept_bytes())) {}

  std::size_t state_bytes() const { return states_.bytes(); }

  /// The states of the elements from `offset` on; one more, so that the array is never empty.
  std::array<std::byte*, Rule::states + 1> states_at(std::size_t offset) const {
    std::array<std::byte*, Rule::states + 1> states{};
    for (std::size_t k = 0; k != Rule::states; ++k)
      states[k] = states_.data() + widened(k * owned_.kept_bytes()) + state_offset(offset);
    return states;
  }
  /// The master weights of the elements from `offset` on.
  std::byte* masters_at(std::size_t offset) const {
    return masters_.data() + widened(owned_.kept(offset));
  }

  /// Calls `f(parameter, state, values, first)` for every state: the parameter's number, the
  /// state's name, and its values from value `first` on.
  template <class F>
  void for_each_state(const F& f) const {
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (!layout_.plan().is_trained(p)) continue;
      Traits::with_element(layout_.infos()[p].element, [&]<class T>(std::type_identity<T>) {
        using A = Accumulator<T>;
        owned_.for_each_of(p, [&](std::size_t first, std::size_t count, std::size_t offset) {
          const auto states = states_at(offset);
          for (std::size_t k = 0; k != Rule::states; ++k)
            f(p, state_name<Rule>(k), std::span<A>(reinterpret_cast<A*>(states[k]), count), first);
        });
      });
    }
  }
  /// Calls `f(values, first)` for the master weights of a parameter, from weight `first` on.
  template <class F>
  void for_each_master(std::size_t parameter, const F& f) const {
    owned_.for_each_of(parameter, [&](std::size_t first, std::size_t count, std::size_t offset) {
      f(std::span<float>(reinterpret_cast<float*>(masters_at(offset)), count), first);
    });
  }

  // Initial values: rank 0 writes the master weights of all parameters, laid out as these.

  /// Memory for that where ranks keep some weights alone, and on other ranks for one bucket.
  /// **Ranks** all; it is followed by `settle_allocations`.
  Arena allocate_masters() const {
    if constexpr (!divides) return Arena(0);
    if (comm_.rank() == Rank{0}) return Arena(widened(layout_.plan().bytes));
    std::size_t most = 0;
    for (const Bucket& bucket : layout_.plan().buckets()) most = std::max(most, bucket.bytes);
    return Arena(widened(most));
  }
  /// Where rank 0 writes them.
  std::byte* masters_in(const Arena& allocated) const {
    return divides ? allocated.data() : masters_.data();
  }
  /// Every rank takes those that it keeps. **Ranks** all. **Stream** the compute stream.
  void distribute_masters([[maybe_unused]] const Arena& allocated) const {
    if constexpr (!divides) return broadcast(masters_.data(), masters_.bytes());
    const bool has_all = comm_.rank() == Rank{0};
    for (std::size_t b = 0; b != layout_.plan().bucket_count; ++b) {
      const Bucket& bucket = layout_.plan().bucket_table[b];
      std::byte* const all = allocated.data() + (has_all ? widened(bucket.offset) : 0);
      broadcast(all, widened(bucket.bytes));
      owned_.template for_each<Pieces::buckets>([&](const auto& own) {
        if (own.number == b && own.count.value() != 0)
          execution_.copy(masters_at(own.offset), all + widened(own.offset - bucket.offset),
                          own.count.value() * sizeof(float));
      });
    }
  }

 private:
  /// The offset of states or master weights, which are in float for elements of 16 bits, else in
  /// the elements' own type.
  static constexpr std::size_t widened(std::size_t offset) {
    bool has_16_bits = false;
    for (std::size_t k = 0; k != Traits::kinds().size; ++k)
      has_16_bits = has_16_bits || element_size(Traits::kinds().kinds[k]) == 2;
    return has_16_bits ? 2 * offset : offset;
  }

  /// Where the state of the element at `offset` lies. Those of a piece lie together; where some
  /// elements have 16 bits, a piece of wider ones fills half of its room.
  std::size_t state_offset(std::size_t offset) const {
    std::size_t found = widened(owned_.kept(offset));
    if constexpr (widened(1) != 1 && Traits::kinds().size != 1) {
      owned_.template for_each<Pieces::runs>(
          [&]<class T, std::size_t Count>(const UpdatePiece<T, Count>& piece) {
            if (sizeof(T) != 2 && piece.offset <= offset && offset < piece.offset + piece.bytes())
              found = widened(owned_.kept(piece.offset)) + (offset - piece.offset);
          });
    }
    return found;
  }

  void broadcast(std::byte* data, std::size_t bytes) const {
    comm_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(data), bytes), Rank{0});
  }

  Comm& comm_;
  Execution& execution_;
  const layout& layout_;
  const Owned& owned_;
  Arena masters_;
  Arena states_;
};

}  // namespace lockstep::detail

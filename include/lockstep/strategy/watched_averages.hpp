// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Where the gradients lie that kernels look at, so that what they find can be named.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::detail {

/// Averages in one or several places, of which each lies as a part of the parameters' arena does.
class WatchedAverages {
 public:
  /// Place `number` has `count` averages, or at least so many, from `data` on. They are those of
  /// the parameters from byte `offset` of the arena on. Sizes are those of an average and of a
  /// parameter's element.
  void note(std::size_t number, const void* data, std::size_t offset, std::size_t count,
            std::size_t travelling, std::size_t element) {
    if (number >= places_.size()) places_.resize(number + 1);
    Place& place = places_[number];
    place = {reinterpret_cast<std::uintptr_t>(data), offset, std::max(place.count, count),
             travelling, element};
  }

  /// The byte of the parameters' arena that belongs to the average at an address.
  std::size_t offset_of(std::uintptr_t address) const {
    for (const Place& place : places_) {
      if (address < place.first || address >= place.first + place.count * place.travelling)
        continue;
      return place.offset + (address - place.first) / place.travelling * place.element;
    }
    return 0;
  }

 private:
  struct Place {
    std::uintptr_t first = 0;
    std::size_t offset = 0;
    std::size_t count = 0;
    std::size_t travelling = 1;
    std::size_t element = 1;
  };
  std::vector<Place> places_;
};

}  // namespace lockstep::detail

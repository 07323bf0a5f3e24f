// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of strings: names, shapes, settings, anything that is not a tensor.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

namespace detail {
inline std::span<std::uint8_t> bytes_of(std::string& text) {
  return {reinterpret_cast<std::uint8_t*>(text.data()), text.size()};
}
}  // namespace detail

/// `object` = root's object, which is returned. **Ranks** all. **Host** blocks.
template <Communicator C>
std::string& broadcast_object(C& comm, std::string& object, Rank root) {
  std::uint64_t size[] = {object.size()};
  comm.broadcast(size, root);
  object.resize(size[0]);
  comm.broadcast(detail::bytes_of(object), root);
  return object;
}
/// The same for one that has no name: `const auto id = broadcast_object(comm, make_id(), Rank{0});`
template <Communicator C>
[[nodiscard("the object is returned")]] std::string broadcast_object(C& comm,
                                                                     const std::string& object,
                                                                     Rank root) {
  std::string copy = object;
  return std::move(broadcast_object(comm, copy, root));
}

/// Every rank's object, by rank. **Ranks** all. **Host** blocks.
template <Communicator C>
std::vector<std::string> all_gather_objects(C& comm, std::string object) {
  const std::size_t world = comm.world_size().value();
  const std::uint64_t size[] = {object.size()};
  std::vector<std::uint64_t> sizes(world);
  comm.all_gather(size, sizes);
  std::uint64_t longest = 0;
  for (std::uint64_t n : sizes) longest = std::max(longest, n);
  object.resize(longest);
  std::string all(longest * world, '\0');
  comm.all_gather(detail::bytes_of(object), detail::bytes_of(all));
  std::vector<std::string> objects;
  objects.reserve(world);
  for (std::size_t w = 0; w < world; ++w) objects.push_back(all.substr(w * longest, sizes[w]));
  return objects;
}

/// On root, every rank's object; elsewhere nothing. **Ranks** all. **Host** blocks.
template <Communicator C>
std::vector<std::string> gather_objects(C& comm, std::string object, Rank root) {
  std::vector<std::string> objects = all_gather_objects(comm, std::move(object));
  if (comm.rank() != root) objects.clear();
  return objects;
}

/// Root has an object for every rank; each rank gets its own. **Ranks** all. **Host** blocks.
template <Communicator C>
std::string scatter_objects(C& comm, const std::vector<std::string>& objects, Rank root) {
  std::string mine;
  for (std::size_t w = 0; w < comm.world_size().value(); ++w) {
    std::string object = comm.rank() == root ? objects.at(w) : std::string();
    broadcast_object(comm, object, root);
    if (comm.rank() == Rank{w}) mine = std::move(object);
  }
  return mine;
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random files: tensors of random kinds and shapes, with the memory that their data is in.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/core/hash.hpp"

namespace checkpoint {

/// Random numbers, one after another.
struct Random {
  std::uint64_t stream;
  std::uint64_t place = 0;
  std::uint64_t operator()() { return lockstep::detail::random_at(stream, place++); }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>((*this)() % n); }
};

/// A file to write and the data of its tensors.
struct Sample {
  lockstep::detail::FileToWrite file;
  std::deque<std::vector<std::byte>> data;

  void add(std::string name, lockstep::ElementKind kind, std::vector<std::uint64_t> shape,
           Random& random) {
    std::size_t bytes = lockstep::detail::element_size(kind);
    for (const std::uint64_t extent : shape) bytes *= extent;
    auto& values = data.emplace_back(bytes);
    for (std::byte& value : values) value = static_cast<std::byte>(random());
    file.tensors.push_back({std::move(name), kind, std::move(shape), values});
  }
};

inline Sample random_sample(std::uint64_t stream, std::size_t most_tensors = 12) {
  Random random{stream};
  Sample sample;
  for (std::size_t i = random.below(most_tensors + 1); i > 0; --i) {
    const auto kind = static_cast<lockstep::ElementKind>(1 + random.below(12));
    std::vector<std::uint64_t> shape(random.below(4));
    for (std::uint64_t& extent : shape) extent = random.below(random.below(4) == 0 ? 2 : 9);
    static constexpr const char* scopes[] = {"fc", "été.", "a \"b\"\n", "lockstep/", ""};
    sample.add(scopes[random.below(5)] + std::to_string(i), kind, std::move(shape), random);
  }
  sample.file.facts.add("version", 1).add("step", random());
  if (random.below(2) == 0) sample.file.metadata.emplace_back("note", "é \" \\ \n");
  return sample;
}

}  // namespace checkpoint

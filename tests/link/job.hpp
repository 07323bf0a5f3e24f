// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The job that both translation units of the link test see.

#include "lockstep/lockstep.hpp"

namespace link_test {

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Repeat<"layers", 3, ParameterList<Parameter<"w", float, 70>>>>;
};

using Job = Trainer<Net, ParallelStrategy<DDP>, World<4>>;

inline std::size_t offset() {
  alignas(arena_alignment) static std::byte arena[Job::layout::plan().bytes];
  const Job::bare_step step(Net{}, {arena, arena});
  const auto* const data = reinterpret_cast<std::byte*>(step.grad("layers.1.w"_p).data_handle());
  return static_cast<std::size_t>(data - arena);
}

std::uint64_t other_fingerprint();
std::size_t other_offset();

/// The same line twice: by a translation unit that links the library, and by one that does not.
std::string text_by_library(const Score& score);
std::string text_without_library(const Score& score);

}  // namespace link_test

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the ranks of a job compare before they train: numbers and data.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/strategy/agreement.hpp"

namespace lockstep::detail {

/// Compares the numbers of optimizer and schedule over ranks: a different learning rate on one rank
/// would be a silent error. **Ranks** all. **Host** blocks.
template <class Comm, class Wrapper>
void require_same_numbers(Comm& comm, Wrapper& wrapped, std::size_t groups) {
  std::string numbers;
  const auto add = [&](const std::string& whose, const auto& options) {
    options.for_each([&](std::string_view name, double number) {
      char digits[32];
      std::snprintf(digits, sizeof digits, " %.17g\n", number);
      numbers.append(whose).append(name).append(digits);
    });
  };
  for (std::size_t group = 0; group != groups; ++group)
    add(group == 0 ? "optimizer " : text({"optimizer of group ", group, ": "}),
        wrapped.group_options().of(group));
  add("schedule ", wrapped.schedule());
  require_agreement(comm, hash_of(numbers), [&] { return numbers; });
}

/// Compares data over ranks: with other sizes or seeds, samples would be left out or taken twice.
/// Ranks that are fed (`sends`) must also be fed as far ahead. **Ranks** all. **Host** blocks.
template <class Comm>
void require_same_data(Comm& comm, std::size_t samples, const LoaderOptions& options, Seed seed,
                       bool sends = false) {
  if (comm.world_size() == WorldSize{1}) return;
  std::string data = text({"data of ", samples, " samples\nbatches of ", options.batch_size,
                           " samples", options.drop_last ? ", full ones only" : "",
                           "\na sampler with seed ", seed.value(), "\n"});
  if (sends) data += text({"batches sent ", options.prefetch, " ahead\n"});
  require_agreement(comm, hash_of(data), [&] { return data; });
}

/// Compares seeds over ranks that may have data of their own. Returns the most batches of any rank.
/// **Ranks** all. **Host** blocks.
template <class Comm>
std::size_t most_batches(Comm& comm, std::size_t batches, Seed seed) {
  const std::string sampler = text({"a sampler with seed ", seed.value(), "\n"});
  require_agreement(comm, hash_of(sampler), [&] { return sampler; });
  std::uint64_t most[] = {batches};
  comm.all_reduce(most, Max{});
  return most[0];
}

}  // namespace lockstep::detail

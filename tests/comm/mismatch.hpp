// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Calls that differ between ranks, through any communicator.

#include <algorithm>
#include <string>
#include <vector>

#include "exercise.hpp"

namespace ranks {

/// Two calls that differ: an error everywhere, naming both, and the data untouched.
template <class Rendezvous>
void expect_mismatch(As as, auto call, const std::string& first, const std::string& second) {
  const Ends ends = run<Rendezvous>(as, 3, [&](auto& comm) {
    auto arena = comm.template allocate<float>(4000);
    std::fill(arena.begin(), arena.end(), 1.f);
    comm.barrier();
    try {
      call(comm, arena, comm.rank() == Rank{1});
    } catch (const Error&) {
      for (float x : arena) require(x == 1.f, "a buffer was written");
      throw;
    }
  });
  expect_words(ends, nobody,
               {"ranks disagree", "rank 0 called " + first, "rank 1 called " + second});
}

/// By count, operation, kind, element type and root.
template <class Rendezvous>
void expect_mismatches(As as) {
  expect_mismatch<Rendezvous>(
      as, [](auto& comm, auto arena, bool odd) { comm.all_reduce(arena.first(odd ? 3999 : 4000)); },
      "all_reduce(sum of 4000 float)", "all_reduce(sum of 3999 float)");
  expect_mismatch<Rendezvous>(
      as,
      [](auto& comm, auto arena, bool odd) {
        if (odd) {
          comm.all_reduce(arena, Max{});
        } else {
          comm.all_reduce(arena, Sum{});
        }
      },
      "all_reduce(sum of 4000 float)", "all_reduce(max of 4000 float)");
  expect_mismatch<Rendezvous>(
      as,
      [](auto& comm, auto arena, bool odd) {
        if (odd) {
          comm.broadcast(arena, Rank{0});
        } else {
          comm.all_reduce(arena);
        }
      },
      "all_reduce(sum of 4000 float)", "broadcast(4000 float, root 0)");
  expect_mismatch<Rendezvous>(
      as,
      [](auto& comm, auto arena, bool odd) {
        std::vector<int> ints(4);
        if (odd) {
          comm.all_reduce(ints);
        } else {
          comm.all_reduce(arena.first(4));
        }
      },
      "all_reduce(sum of 4 float)", "all_reduce(sum of 4 int32)");
  expect_mismatch<Rendezvous>(
      as, [](auto& comm, auto arena, bool odd) { comm.broadcast(arena, Rank{odd ? 1u : 0u}); },
      "broadcast(4000 float, root 0)", "broadcast(4000 float, root 1)");
}

}  // namespace ranks

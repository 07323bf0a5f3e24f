// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A communicator's ranks as those of a step, so that modules run in them without a job.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "comm/ranks.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/torch/sync_batch_norm.hpp"

namespace synced_ranks {

using namespace lockstep;
using ranks::Ends;
using ranks::require;

struct CommRanks {
  static constexpr bool communicates = true;
  ranks::Shared* comm;

  std::size_t world() const { return comm->world_size().value(); }
  Rank rank() const { return comm->rank(); }
  template <class T>
  void all_gather(std::span<const T> own, std::span<T> all) const {
    comm->all_gather(own, all);
  }
  template <class T>
  void all_reduce(std::span<T> values) const {
    comm->all_reduce(values, Sum{});
  }
};

inline void require_close(const at::Tensor& have, const at::Tensor& want, const std::string& what,
                          double within) {
  require(have.sizes() == want.sizes(), what + " has another shape");
  if (want.numel() == 0) return;
  const at::Tensor wide = want.to(at::kDouble);
  const double apart = (have.to(at::kDouble) - wide).abs().max().item<double>();
  const double size = std::max(1.0, wide.abs().max().item<double>());
  require(apart <= within * size,
          what + " differs by " + std::to_string(apart) + " of " + std::to_string(size));
}

/// Runs a function on processes, each with one thread of LibTorch's.
inline Ends on_ranks(std::size_t world, auto f) {
  return ranks::run_processes(world, std::chrono::seconds(30), [&](ranks::Shared& comm) {
    at::set_num_threads(1);
    f(comm);
  });
}
inline void expect_fine(const Ends& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r] == "", "rank " << r << " of " << ends.size() << ": " << ends[r]);
}
inline void expect_all_say(const Ends& ends, const std::string& words) {
  for (const std::string& end : ends)
    BOOST_TEST(end.find(words) != std::string::npos, "'" << words << "' is not in: " << end);
}

}  // namespace synced_ranks

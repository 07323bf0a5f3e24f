// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A data set of a job whose ranks are fed: all know its size, and those that read have it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/dataset.hpp"

namespace lockstep::detail {

/// What `job.open` gives in a job with `Feed<LeaderOfGroup>` or `Feed<ScatterThenBroadcast>`: a
/// data set for `batches`, `evaluate`, `predict` and `fit`.
template <Dataset Source>
class Opened {
 public:
  using batch_type = typename Source::batch_type;

  /// `make()` opens it where this rank `reads`. **Ranks** all. **Host** blocks until all have come.
  template <class Comm, class Make>
  Opened(Comm& comm, bool reads, Make& make) {
    if (reads) source_.emplace(make());
    const std::uint64_t own[] = {reads ? 1u : 0u, reads ? source_->size() : 0u};
    std::vector<std::uint64_t> all(2 * comm.world_size().value());
    comm.all_gather(own, all);
    std::optional<std::size_t> first;
    for (std::size_t r = 0; 2 * r != all.size(); ++r) {
      if (all[2 * r] == 0) continue;
      if (!first) {
        first = r;
        size_ = all[2 * r + 1];
      } else if (all[2 * r + 1] != size_) {
        fail("open",
             {"the data of rank ", *first, " has ", size_, " samples, that of rank ", r, " has ",
              all[2 * r + 1]},
             "let all ranks that read open the same data", comm.rank());
      }
    }
  }

  std::size_t size() const { return size_; }
  /// The data set itself; null where another rank reads.
  const Source* here() const { return source_ ? &*source_ : nullptr; }

  template <class Batch>
    requires Loading<Source, Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    read().load(indices, out);
  }
  template <class Batch>
    requires PassLoading<Source, Batch>
  void load(std::span<const std::size_t> indices, Pass pass, Batch& out) const {
    read().load(indices, pass, out);
  }

 private:
  const Source& read() const {
    if (!source_)
      fail("open", {"this rank has no data to load: another rank reads for it"},
           "let the loops of the job load, or leave Feed out");
    return *source_;
  }

  std::optional<Source> source_;
  std::size_t size_ = 0;
};

}  // namespace lockstep::detail

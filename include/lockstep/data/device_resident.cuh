// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DeviceResident train(fashion_mnist("train"))`: a data set in a GPU's memory, whose
/// batches are gathered there.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>

#include "lockstep/data/batch_iterator.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/resident_batch.cuh"
#include "lockstep/data/resident_rows.cuh"
#include "lockstep/data/sample.hpp"
#include "lockstep/data/sampler_state.hpp"
#include "lockstep/data/wait_meter.hpp"

namespace lockstep {

namespace detail {

/// Says in words what cannot be uploaded. Returns whether it can.
template <class Source>
consteval bool require_residence() {
  static_assert(
      LabelledSet<Source>,
      "lockstep: DeviceResident uploads data sets whose batches are LabelledBatches; give "
      "samples `inputs` of one width and `label`, or upload other batches in the step "
      "(BatchUpload)");
  if constexpr (LabelledSet<Source>) {
    constexpr bool stays = !changes_by_pass<Source>();
    static_assert(stays,
                  "lockstep: this data set draws random numbers, and DeviceResident would freeze "
                  "them, because it uploads samples once; draw them in the model (step.random), "
                  "or keep the data on the host (Pinned)");
    return stays;
  }
  return false;
}

}  // namespace detail

/// A data set of labelled rows in the memory of the GPU that is current when this is made: in a
/// job's function that is the rank's. Bytes stay bytes there and become floats when a batch is
/// gathered, with the bits that the host's loader gives them. Where a job's replicas are on several
/// GPUs (`ParallelStrategy<DP>`), every GPU gets a copy when it first needs one.
///
/// `epoch.batches(train, 64)`, `job.evaluate`, `fit`, `predict` and `DataLoader` take it. The
/// sampler is the same as on the host; no batch is copied from there. Copies of this object share
/// the rows.
template <class Source>
class DeviceResident {
  static constexpr bool is_fine = detail::require_residence<Source>();
  using Rows = detail::ResidentRowsOf<Source>;

 public:
  using batch_type = ResidentBatch<typename Rows::input_type, typename Rows::label_type,
                                   typename Rows::stored_type>;

  /// **Host** blocks until all rows are on the GPU. `source` is not needed any more then.
  explicit DeviceResident(const Source& source) : rows_(std::make_shared<const Rows>(source)) {}

  std::size_t size() const { return rows_->size(); }
  std::size_t width() const { return rows_->width(); }

  /// A batch of any samples: for programs that choose them by rules of their own.
  void load(std::span<const std::size_t> indices, batch_type& out) const {
    auto& part = out.part;
    part.data = rows_;
    // Whoever has the batch that was there still has its loop.
    if (part.loop == nullptr || part.loop.use_count() != 1)
      part.loop = std::make_shared<detail::ResidentLoop>();
    detail::ResidentLoop& loop = *part.loop;
    loop.number = detail::ResidentLoop::next_number();
    loop.total = loop.batch_size = indices.size();
    loop.draws.clear();
    for (const std::size_t index : indices) loop.draws.push_back(draw(index, 1));
    part.first = 0;
    part.rows = indices.size();
  }

  // What the loader needs.

  const std::shared_ptr<const Rows>& resident_rows() const { return rows_; }
  detail::Draw draw(std::size_t index, float weight) const {
    if (index >= size()) [[unlikely]]
      refuse(index);
    return {static_cast<std::uint32_t>(index), weight};
  }

 private:
  [[noreturn, gnu::cold, gnu::noinline]] void refuse(std::size_t index) const {
    detail::fail("DeviceResident", {"sample ", index, " of ", size()},
                 "draw from the samples that there are");
  }

  std::shared_ptr<const Rows> rows_;
};

/// The batches of an epoch are drawn by the iterating thread, a few thousand samples at a time, and
/// gathered where they are used: workers, and what they load ahead, are not needed.
template <class Source, detail::Sampling Sampler>
class DataLoader<DeviceResident<Source>, Sampler> {
 public:
  using batch_type = typename DeviceResident<Source>::batch_type;

  DataLoader(const DeviceResident<Source>& dataset, Sampler& sampler, LoaderOptions options)
      : dataset_(dataset),
        sampler_(sampler),
        options_(detail::checked_loading(options, dataset.size(), sampler.samples())) {}

  std::size_t size() const { return detail::batch_count(sampler_.size(), options_); }
  /// How long the loop has waited for its samples to be drawn, where the options say `timed`.
  std::chrono::duration<double> waited() const { return waits_.total(); }
  SamplerState state() const { return sampler_.state(); }
  void resume(const SamplerState& state) { sampler_.resume(state); }

  using Iterator = detail::BatchIterator<DataLoader>;

  Iterator begin() {
    sampler_.start();
    begun_ = sampler_.position();
    const std::size_t draws = sampler_.size() - begun_;
    left_ = detail::batch_count(draws, options_);
    auto loop = std::make_shared<detail::ResidentLoop>();
    loop->total = draws;
    loop->batch_size = options_.batch_size;
    loop->draws.reserve(draws);
    batch_.part = {dataset_.resident_rows(), std::move(loop), 0, 0};
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Iterator;

  /// The next batch; null at the end of the epoch.
  const batch_type* next() {
    if (left_ == 0) return nullptr;
    auto& part = batch_.part;
    detail::ResidentLoop& loop = *part.loop;
    part.first += part.rows;
    part.rows = std::min(options_.batch_size, loop.total - part.first);
    const std::size_t needed = part.first + part.rows;
    if (loop.draws.size() < needed) {
      const std::size_t end =
          std::min(loop.total, std::max(needed, loop.draws.size() + draws_at_a_time));
      if (options_.timed) {
        waits_.measure([&] { draw_until(loop, end); });
      } else {
        draw_until(loop, end);
      }
    }
    --left_;
    sampler_.advance(part.rows);
    return &batch_;
  }

  void draw_until(detail::ResidentLoop& loop, std::size_t end) {
    for (std::size_t k = loop.draws.size(); k != end; ++k) {
      const float weight = Sampler::masks ? sampler_.weight(begun_ + k) : 1.f;
      loop.draws.push_back(dataset_.draw(sampler_[begun_ + k], weight));
    }
  }

  static constexpr std::size_t draws_at_a_time = 8192;

  const DeviceResident<Source> dataset_;
  Sampler& sampler_;
  LoaderOptions options_;
  std::size_t begun_ = 0;  ///< the draw at which the loop began
  std::size_t left_ = 0;   ///< batches not given out yet
  batch_type batch_;
  detail::WaitMeter waits_;
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model's outputs for a data set: a row for each sample, in the order of the data.

#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/data/sampler.hpp"
#include "lockstep/detail/model/model.hpp"

namespace lockstep {

/// Which ranks get the outputs of all samples.
enum class Gather : std::uint8_t {
  rank0,  ///< rank 0 alone
  all,    ///< every rank
  none,   ///< none: every rank has its own block of samples
};

/// How `job.predict` runs.
struct PredictOptions {
  std::size_t batch_size = 1;  ///< of one rank
  Gather gather = Gather::rank0;
};

/// Rows of outputs in host memory, of samples `first()` to `first() + size() - 1`.
template <class Output>
class Predictions;

template <class T, std::size_t... E>
class Predictions<OutputOf<T, E...>> {
 public:
  using Sizes = typename OutputOf<T, E...>::Sizes;

  Predictions() = default;
  /// `sizes` are the extents of one sample's output.
  Predictions(std::size_t first, std::vector<T> values, const Sizes& sizes)
      : sizes_(sizes), first_(first), values_(std::move(values)) {
    for (const std::size_t size : sizes) width_ *= size;
  }

  std::size_t size() const { return width_ == 0 ? 0 : values_.size() / width_; }
  bool empty() const { return size() == 0; }
  /// The sample of the first row.
  std::size_t first() const { return first_; }
  /// The number of elements of one sample's output.
  std::size_t width() const { return width_; }

  /// The outputs of the i-th sample here.
  std::span<const T> operator[](std::size_t i) const {
    return std::span(values_).subspan(i * width_, width_);
  }
  /// All outputs, with the number of samples as the first extent.
  HostView<const T, dynamic, E...> view() const {
    return std::apply(
        [&](auto... extents) {
          return HostView<const T, dynamic, E...>(values_.data(), size(), extents...);
        },
        sizes_);
  }
  /// All outputs, row by row.
  const std::vector<T>& values() const { return values_; }

 private:
  Sizes sizes_{};
  std::size_t first_ = 0;
  std::size_t width_ = 1;
  std::vector<T> values_;
};

namespace detail {

/// The blocks of all ranks, of one length each, concatenated up to `size` elements. Sent in pieces:
/// the communicator's staging memory stays allocated. **Ranks** all. **Host** blocks.
template <class T, class Comm>
std::vector<T> gather_blocks(Comm& comm, const std::vector<T>& own, std::size_t size,
                             Gather gather) {
  constexpr std::size_t piece = 4_MiB / sizeof(T);
  const std::size_t world = comm.world_size().value();
  const bool receives = gather == Gather::all || comm.rank() == Rank{0};
  std::vector<T> all(receives ? size : 0);
  std::vector<T> landed;
  for (std::size_t at = 0; at < own.size(); at += piece) {
    const auto part = std::span(own).subspan(at, std::min(piece, own.size() - at));
    landed.resize(receives ? part.size() * world : 0);
    if (gather == Gather::all) {
      comm.all_gather(part, landed);
    } else {
      comm.gather(part, landed, Rank{0});
    }
    for (std::size_t r = 0; receives && r != world; ++r) {
      const std::size_t to = std::min(r * own.size() + at, size);
      std::copy_n(landed.data() + r * part.size(), std::min(part.size(), size - to),
                  all.data() + to);
    }
  }
  return all;
}

/// A rank that has evaluated all of its `batches` takes part in the evaluations of others, where
/// steps gather parameters. **Ranks** all, with the same numbers of all samples.
void follow_evaluations([[maybe_unused]] auto& wrapper, [[maybe_unused]] std::size_t batches,
                        [[maybe_unused]] std::size_t samples,
                        [[maybe_unused]] std::size_t batch_size) {
  if constexpr (requires { wrapper.evaluate_nothing(); }) {
    const std::size_t ranks = wrapper.communicator().world_size().value();
    const std::size_t longest = (samples + ranks - 1) / ranks;
    for (; batches < (longest + batch_size - 1) / batch_size; ++batches) wrapper.evaluate_nothing();
  }
}

/// Predicts the block of samples that `loader` loads on each rank. **Ranks** all. **Host** blocks.
template <class Output, class Comm, class Wrapper, class Loader>
Predictions<Output> predict_all(Comm& comm, Wrapper& wrapper, const BlockSampler& block,
                                Loader&& loader, const PredictOptions& options) {
  using T = typename Output::element;
  const auto sizes = Output::sizes(std::as_const(wrapper).model());
  std::size_t width = 1;
  for (const std::size_t size : sizes) width *= size;

  // Gathered blocks have one length: all padding comes after the last sample.
  const bool pads = options.gather != Gather::none;
  std::vector<T> own((pads ? block.longest() : block.size()) * width);
  T* next = own.data();
  std::size_t batches = 0;
  for (const auto& batch : loader) {
    const auto rows = wrapper.predict(batch);
    wrapper.copy_outputs(rows, next);
    next += rows.size();
    ++batches;
  }
  follow_evaluations(wrapper, batches, block.samples(), options.batch_size);
  if (!pads) return {block.first(), std::move(own), sizes};
  return {0, gather_blocks(comm, own, block.samples() * width, options.gather), sizes};
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file lockstep's sampler for LibTorch's loaders, and LibTorch's data sets for lockstep's.

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include "lockstep/detail/data/sampler.hpp"
#include "lockstep/detail/torch/collate.hpp"

namespace lockstep {

namespace detail {

/// LibTorch's examples as batches that can be sent to ranks, copied to GPUs and split by DP.
template <class Way, class Data, class Target>
void pack(Way& archive, ::torch::data::Example<Data, Target>& example) {
  if constexpr (std::is_void_v<Target>) {
    archive(example.data);
  } else {
    archive(example.data, example.target);
  }
}

WorldSize world_of(const auto& ranks) {
  if constexpr (requires { ranks.world_size(); }) {
    return WorldSize{ranks.world_size()};
  } else {
    return WorldSize{ranks.world()};
  }
}

}  // namespace detail

inline namespace torch_modules {

/// lockstep's `DistributedSampler` for LibTorch's loaders:
///
///     RankSampler<> sampler(*dataset.size(), session);
///     auto loader = torch::data::make_data_loader(dataset.map(Stack<>()), sampler, 64);
///     for (std::size_t epoch = 0; epoch != 10; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ddp.step(batch);
///     }
///
/// Draws what Python's DistributedSampler draws, in the same order. Copies share one state, so
/// `set_epoch` reaches the loader's copy; without `set_epoch` every epoch has the same order.
template <class Remainder = Padding, class Order = TorchShuffle>
class RankSampler final : public ::torch::data::samplers::Sampler<> {
  static_assert(!std::is_same_v<Remainder, Masked>,
                "lockstep: Masked gives duplicates weight 0, and the batches of LibTorch's loaders "
                "have no weights; choose Padding, DropLast or Exact, or use lockstep's loader with "
                "as_dataset");

 public:
  using Draws = DistributedSampler<Remainder, Order>;

  RankSampler(std::size_t samples, WorldSize world, Rank rank, SamplerOptions options = {})
      : options_(options), draws_(std::make_shared<Draws>(samples, world, rank, options)) {}
  template <class Ranks>
    requires requires(const Ranks& ranks) { ranks.rank(); }
  RankSampler(std::size_t samples, const Ranks& ranks, SamplerOptions options = {})
      : RankSampler(samples, detail::world_of(ranks), Rank{ranks.rank()}, options) {}

  /// Sets the order of the next epoch that a loader begins.
  void set_epoch(Epoch epoch) { draws_->set_epoch(epoch); }
  void set_epoch(std::size_t epoch) { set_epoch(Epoch{epoch}); }
  Epoch epoch() const { return draws_->epoch(); }

  /// The number of samples that this rank draws in an epoch.
  std::size_t size() const { return draws_->size(); }

  // Called by LibTorch's loaders.

  /// Begins the epoch, or continues a loaded one.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override {
    if (new_size && *new_size != draws_->samples()) {
      Draws other(*new_size, draws_->world(), draws_->rank(), options_);
      other.set_epoch(draws_->epoch());
      *draws_ = std::move(other);
    }
    draws_->start();
  }
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    const std::size_t first = draws_->position();
    const std::size_t count = std::min(batch_size, draws_->size() - first);
    if (count == 0) return std::nullopt;
    std::vector<std::size_t> indices(count);
    for (std::size_t i = 0; i != count; ++i) indices[i] = (*draws_)[first + i];
    draws_->advance(count);
    return indices;
  }

  /// A loader with workers draws ahead of its loop, and what it has drawn counts as done.
  void save(::torch::serialize::OutputArchive& archive) const override {
    const SamplerState state = draws_->state();
    std::array<std::uint64_t, state_values> numbers{
        state.samples,       state.world.value(), state.seed.value(), state.rule,
        state.epoch.value(), state.first,         state.position};
    archive.write(key, as_tensor(numbers).view(at::kLong).clone(), true);
  }
  /// The next `reset` continues from the saved state, also with another number of ranks.
  void load(::torch::serialize::InputArchive& archive) override {
    at::Tensor values;
    archive.read(key, values, true);
    if (values.numel() != std::int64_t{state_values} || values.scalar_type() != at::kLong)
      detail::fail("RankSampler", {"the archive holds the state of another sampler"},
                   "load what a RankSampler has saved");
    const auto* n = static_cast<const std::int64_t*>(values.const_data_ptr());
    const auto number = [&](int i) { return static_cast<std::uint64_t>(n[i]); };
    draws_->resume({number(0), WorldSize{number(1)}, Seed{number(2)}, number(3), Epoch{number(4)},
                    number(5), number(6)});
  }

 private:
  static constexpr const char* key = "lockstep.sampler";
  static constexpr std::size_t state_values = 7;

  SamplerOptions options_;
  std::shared_ptr<Draws> draws_;
};

}  // namespace torch_modules

namespace detail {

/// A LibTorch data set of batches, with a copy per reading thread: its functions are not const.
template <class D>
class TorchBatches {
 public:
  using batch_type = typename D::BatchType;

  explicit TorchBatches(D dataset) : dataset_(std::move(dataset)) {
    const auto size = dataset_.size();
    if (!size)
      fail("as_dataset", {"the data set does not know how many samples it has"},
           "give its size() a number");
    size_ = *size;
  }
  std::size_t size() const { return size_; }
  void load(std::span<const std::size_t> indices, batch_type& out) const {
    with_copy([&](D& dataset) {
      out = dataset.get_batch(c10::ArrayRef<std::size_t>(indices.data(), indices.size()));
    });
  }
  void with_copy(const auto& f) const {
    spares_.with([&](std::optional<D>& copy) {
      if (!copy) copy.emplace(dataset_);
      f(*copy);
    });
  }

 private:
  D dataset_;
  std::size_t size_ = 0;
  mutable Spares<std::optional<D>> spares_;
};

/// A data set of single examples: a source of samples and of batches of tensors.
template <class D>
class TorchSamples : public LoadsSamples<TorchSamples<D>, typename D::ExampleType, TensorCollate> {
 public:
  using sample_type = typename D::ExampleType;
  explicit TorchSamples(D dataset) : dataset_(std::move(dataset)) {}

  std::size_t size() const { return dataset_.size(); }
  void read(std::size_t index, sample_type& out) const {
    dataset_.with_copy([&](D& dataset) { out = dataset.get(index); });
  }

 private:
  TorchBatches<D> dataset_;
};

}  // namespace detail

inline namespace torch_modules {

/// A LibTorch data set for lockstep's loaders, jobs and pipelines: `job.open([] { return
/// as_dataset(MNIST(folder)); })`. With `get(index)` it yields `TensorBatch`es and is a source for
/// `map`; a mapped one yields its own batches. Every loading thread has a copy.
template <class D>
auto as_dataset(D dataset) {
  constexpr bool is_indexed = requires(D& d, std::size_t i) { d.get(i); };
  constexpr bool is_batched = requires(D& d, c10::ArrayRef<std::size_t> i) { d.get_batch(i); };
  static_assert(is_indexed || is_batched,
                "lockstep: as_dataset takes data sets of LibTorch's that have get(index) or "
                "get_batch(indices); a stream has no places that ranks could share");
  if constexpr (is_indexed) {
    return detail::TorchSamples<D>(std::move(dataset));
  } else if constexpr (is_batched) {
    return detail::TorchBatches<D>(std::move(dataset));
  } else {
    return dataset;
  }
}

}  // namespace torch_modules

}  // namespace lockstep

namespace torch::data {

/// One compile error for lockstep's sampler in LibTorch's loader.
template <class Dataset, class Remainder, class Order, class Options>
void make_data_loader(Dataset&&, const ::lockstep::DistributedSampler<Remainder, Order>&,
                      Options&&) {
  static_assert(sizeof(Remainder) == 0,
                "lockstep: DistributedSampler is for lockstep's DataLoader; give LibTorch's loader "
                "a RankSampler");
}

}  // namespace torch::data

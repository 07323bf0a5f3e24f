// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Images as bytes in memory, with a class each; they become floats when a batch is loaded.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/labelled_batch.hpp"
#include "lockstep/data/sample.hpp"

namespace lockstep {

/// How a byte becomes a float: `(byte / 255 - mean) / deviation`.
struct Normalization {
  float mean = 0;
  float deviation = 1;
};

/// Images of bytes with labels, in memory; batches are floats.
class ImageDataset {
 public:
  using batch_type = LabelledBatch<float, std::int32_t>;
  using sample_type = OwnedSample<float, std::int32_t>;

  /// `pixels` holds the images one after another, as many as there are labels; every label is below
  /// `classes`. `origin` is what errors call the data.
  ImageDataset(std::vector<std::uint8_t> pixels, std::vector<std::uint8_t> labels,
               std::size_t classes, Normalization normalization = {},
               const std::string& origin = "ImageDataset");

  std::size_t size() const { return labels_.size(); }
  std::size_t width() const { return width_; }
  std::size_t classes() const { return classes_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    out.resize(indices.size(), width_);
    for (std::size_t i = 0; i != indices.size(); ++i) {
      convert(indices[i], out.row(i).data());
      out.labels[i] = labels_[indices[i]];
    }
  }

  /// The same floats as in a batch.
  void read(std::size_t index, sample_type& out) const {
    out.inputs.resize(width_);
    convert(index, out.inputs.data());
    out.label = labels_[index];
  }

 private:
  void convert(std::size_t index, auto* to) const {
    const std::uint8_t* const image = pixels_.data() + index * width_;
    std::transform(image, image + width_, to,
                   [this](std::uint8_t pixel) { return values_[pixel]; });
  }

  std::vector<std::uint8_t> pixels_;
  std::vector<std::uint8_t> labels_;
  std::size_t classes_;
  std::size_t width_ = 0;
  std::array<float, 256> values_{};
};

static_assert(Dataset<ImageDataset>);
static_assert(SampleSource<ImageDataset>);

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/image_dataset.ipp"
#endif

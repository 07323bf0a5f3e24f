// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Images as bytes, with a class each, which become floats when a batch is loaded; and a
/// generated problem of such images, which is the same on every platform.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data.hpp"
#include "lockstep/detail/core/hash.hpp"

using namespace lockstep;  // as every example has it

/// Bytes of a vector, or of a mapped file from a place to its end. Copies share them.
class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(std::vector<std::uint8_t> bytes)
      : memory_(std::make_shared<const std::vector<std::uint8_t>>(std::move(bytes))),
        bytes_(*memory_) {}
  SharedBytes(std::shared_ptr<const MappedFile> file, std::size_t first) : file_(std::move(file)) {
    const std::span<const std::byte> all = file_->bytes().subspan(first);
    bytes_ = {reinterpret_cast<const std::uint8_t*>(all.data()), all.size()};
  }

  const std::uint8_t* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  std::uint8_t operator[](std::size_t i) const { return bytes_[i]; }
  auto begin() const { return bytes_.begin(); }
  auto end() const { return bytes_.end(); }

  bool is_mapped() const { return file_ != nullptr; }

  /// Throws where a mapped file has changed since.
  void require_intact() const {
    if (file_) file_->require_intact();
  }

  /// Where the file is read at random, lets the kernel begin to read these bytes.
  void will_read(std::size_t first, std::size_t count) const {
    if (file_ && file_->reads_at_random())
      file_->will_read(file_->size() - bytes_.size() + first, count);
  }

 private:
  std::shared_ptr<const std::vector<std::uint8_t>> memory_;
  std::shared_ptr<const MappedFile> file_;
  std::span<const std::uint8_t> bytes_;
};

/// How a byte becomes a float: `(byte / 255 - mean) / deviation`.
struct Normalization {
  float mean = 0;
  float deviation = 1;
};

/// Images of bytes with labels, in memory or in mapped files; batches are floats. Copies share the
/// bytes.
class ImageDataset {
 public:
  using batch_type = LabelledBatch<float, std::int32_t>;
  using sample_type = OwnedSample<float, std::int32_t>;

  /// `pixels` holds the images one after another, as many as there are labels; every label is below
  /// `classes`. `origin` is what errors call the data.
  ImageDataset(SharedBytes pixels, SharedBytes labels, std::size_t classes,
               Normalization normalization = {}, const std::string& origin = "ImageDataset")
      : pixels_(std::move(pixels)), labels_(std::move(labels)), origin_(origin), classes_(classes) {
    width_ = labels_.empty() ? 0 : pixels_.size() / labels_.size();
    if (width_ * labels_.size() != pixels_.size()) {
      lockstep::detail::fail(
          origin, {pixels_.size(), " pixels are no whole images for ", labels_.size(), " labels"},
          "give one label for every image");
    }
    for (std::size_t i = 0; i != labels_.size(); ++i) {
      if (labels_[i] < classes_) continue;
      lockstep::detail::fail(
          origin, {"label ", labels_[i], " of sample ", i, ", with ", classes_, " classes"},
          "set the number of classes, or check that the labels belong to these images");
    }
    for (std::size_t byte = 0; byte != values_.size(); ++byte) {
      values_[byte] =
          (static_cast<float>(byte) / 255.f - normalization.mean) / normalization.deviation;
    }
  }

  std::size_t size() const { return labels_.size(); }
  std::size_t width() const { return width_; }
  std::size_t classes() const { return classes_; }

  // All images one after another, their labels, and what every byte stands for. `prepare({})` comes
  // before they are read.
  std::span<const std::uint8_t> pixels() const { return {pixels_.data(), pixels_.size()}; }
  std::span<const std::uint8_t> labels() const { return {labels_.data(), labels_.size()}; }
  std::span<const float, 256> values() const { return values_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    prepare(indices);
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

  /// What must be done once before the samples of a batch are read one by one; `load` does it.
  void prepare(std::span<const std::size_t> indices) const {
    if (!pixels_.is_mapped() && !labels_.is_mapped()) return;
    labels_.require_intact();
    pixels_.require_intact();
    for (const std::size_t i : indices) {
      if (i < size()) pixels_.will_read(i * width_, width_);
    }
  }

 private:
  [[noreturn, gnu::cold]] void fail_index(std::size_t index) const {
    lockstep::detail::fail(origin_, {"there is no sample ", index, ": there are ", size()},
                           "ask for samples below their number");
  }

  void convert(std::size_t index, auto* to) const {
    if (index >= size()) [[unlikely]]
      fail_index(index);
    const std::uint8_t* const image = pixels_.data() + index * width_;
    std::transform(image, image + width_, to,
                   [this](std::uint8_t pixel) { return values_[pixel]; });
  }

  SharedBytes pixels_;
  SharedBytes labels_;
  std::string origin_;
  std::size_t classes_;
  std::size_t width_ = 0;
  std::array<float, 256> values_{};
};

static_assert(Dataset<ImageDataset>);
static_assert(SampleSource<ImageDataset>);

/// The shape of a generated data set; by default that of Fashion-MNIST.
struct GeneratedOptions {
  std::size_t samples = 60'000;
  std::size_t width = 784;
  std::size_t classes = 10;
  Seed seed{0};
  Normalization normalization{};
};

/// Every class has a pattern; a sample is its class's pattern, dimmed, under noise. The splits (any
/// two names) share the patterns and differ in their samples, so that a model trained on one can be
/// tested on the other.
inline ImageDataset generated_dataset(const std::string& split,
                                      const GeneratedOptions& options = {}) {
  if (options.classes == 0 || options.classes > 256)
    lockstep::detail::fail("generated_dataset", {options.classes, " classes"},
                           "labels are bytes: ask for 1 to 256 classes");
  const std::uint64_t of_patterns = lockstep::detail::mix_bits(options.seed.value());
  const std::uint64_t of_labels =
      lockstep::detail::mix_bits(of_patterns ^ lockstep::detail::hash_of(split));
  const std::uint64_t of_noise = lockstep::detail::mix_bits(of_labels);
  constexpr std::uint32_t strength = 30;  // of 256: the nearest pattern is right 19 times in 20

  std::vector<std::uint8_t> patterns(options.classes * options.width);
  for (std::size_t i = 0; i != patterns.size(); ++i)
    patterns[i] = static_cast<std::uint8_t>(lockstep::detail::random_at(of_patterns, i));
  std::vector<std::uint8_t> pixels(options.samples * options.width);
  std::vector<std::uint8_t> labels(options.samples);
  std::uint64_t noise = 0;  // eight bytes at a time
  for (std::size_t i = 0, at = 0; i != options.samples; ++i) {
    labels[i] =
        static_cast<std::uint8_t>(lockstep::detail::random_at(of_labels, i) % options.classes);
    const std::uint8_t* const pattern = patterns.data() + labels[i] * options.width;
    for (std::size_t j = 0; j != options.width; ++j, ++at, noise >>= 8) {
      if (at % 8 == 0) noise = lockstep::detail::random_at(of_noise, at / 8);
      pixels[at] = static_cast<std::uint8_t>(
          (strength * pattern[j] + (256 - strength) * static_cast<std::uint8_t>(noise)) >> 8);
    }
  }
  return {std::move(pixels), std::move(labels), options.classes, options.normalization,
          "generated_dataset"};
}

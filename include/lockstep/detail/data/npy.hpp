// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file NumPy's `.npy` files: mapped for reading, and written.

#include <cstring>
#include <ranges>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/mapped_file.hpp"

namespace lockstep {

class NpyFile;

namespace detail {

/// The contents of a header, checked against the size of the file.
struct NpyHeader {
  ElementKind kind = ElementKind::unsupported;
  std::vector<std::size_t> shape;
  std::size_t begin = 0;  ///< byte offset of the elements
};

/// Parses the header of a file. An error names the file, the byte and what is expected there.
NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& path);

/// NumPy's name of a kind, without the byte order.
std::string_view npy_type(ElementKind kind);

/// "(3, 4)", as Python writes it.
inline std::string npy_shape_text(std::span<const std::size_t> shape) {
  return text({"(", joined(shape), shape.size() == 1 ? ",)" : ")"});
}

[[noreturn, gnu::cold]] void fail_npy_kind(const std::string& path, ElementKind has,
                                           ElementKind wanted, std::string_view what);

void write_npy_bytes(const std::string& path, ElementKind kind, std::span<const std::byte> bytes,
                     std::span<const std::size_t> shape);

/// Throws unless there is one label, of a type that `wanted` can hold, per row of inputs.
void check_npy_labels(const NpyFile& inputs, const NpyFile& labels, ElementKind wanted);

/// An integer of any kind; `nullopt` if it exceeds int64.
std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element);

[[noreturn, gnu::cold]] void fail_npy_label(const NpyFile& file, std::size_t sample,
                                            ElementKind wanted);

}  // namespace detail

/// An array of any element type and shape from `numpy.save`: versions 1 to 3 of the format,
/// little-endian, in C order. Bfloat16, which NumPy lacks, is `V2`. Copies share the mapping.
class NpyFile {
 public:
  explicit NpyFile(const std::string& path);

  const std::string& path() const { return file_->path(); }
  ElementKind kind() const { return header_.kind; }
  const std::vector<std::size_t>& shape() const { return header_.shape; }

  std::span<const std::byte> bytes() const { return file_->bytes().subspan(header_.begin); }

  /// The byte offset of an element in the file, for errors.
  std::size_t byte_of(std::size_t element) const {
    return header_.begin + element * detail::element_size(header_.kind);
  }

  const MappedFile& file() const { return *file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  detail::NpyHeader header_;
};

/// A file of `T` as rows, by the first axis, read on demand. As a source, a sample is a row.
template <Element T>
class NpyArray {
 public:
  using sample_type = std::span<const T>;

  explicit NpyArray(const std::string& path) : file_(path) {
    if (file_.kind() != element_kind<T>())
      detail::fail_npy_kind(file_.path(), file_.kind(), element_kind<T>(), "read as");
    const auto& shape = file_.shape();
    size_ = shape.empty() ? 1 : shape.front();
    values_ = {reinterpret_cast<const T*>(file_.bytes().data()), file_.bytes().size() / sizeof(T)};
    width_ = size_ == 0 ? 0 : values_.size() / size_;
  }

  std::size_t size() const { return size_; }
  std::size_t width() const { return width_; }
  const std::vector<std::size_t>& shape() const { return file_.shape(); }
  const NpyFile& file() const { return file_; }

  std::span<const T> values() const { return values_; }

  std::span<const T> row(std::size_t i) const {
    if (i >= size_) [[unlikely]]
      detail::fail("NpyArray",
                   {"there is no row ", i, " in '", file_.path(), "', which has ", size_},
                   "ask for rows below their number");
    return values_.subspan(i * width_, width_);
  }

  void read(std::size_t index, sample_type& out) const { out = row(index); }

  /// Called once per batch: throws if the file has changed; with random access, reads rows ahead.
  void prepare(std::span<const std::size_t> indices) const {
    file_.file().require_intact();
    if (!file_.file().reads_at_random()) return;
    for (const std::size_t i : indices) {
      if (i < size_) file_.file().will_read(file_.byte_of(i * width_), width_ * sizeof(T));
    }
  }

 private:
  NpyFile file_;
  std::span<const T> values_;
  std::size_t size_ = 0;
  std::size_t width_ = 0;
};

/// Writes a row-major array of this shape, by default with one axis; replaces the file atomically.
template <std::ranges::contiguous_range Values>
  requires Element<std::ranges::range_value_t<Values>>
void write_npy(const std::string& path, const Values& values, std::vector<std::size_t> shape = {}) {
  const std::span all(std::ranges::data(values), std::ranges::size(values));
  if (shape.empty()) shape = {all.size()};
  detail::write_npy_bytes(path, element_kind<std::ranges::range_value_t<Values>>(),
                          std::as_bytes(all), shape);
}

/// Rows of one file with labels of another, read on demand: files may be larger than memory.
/// Integer labels may have another integer type there; loading one that `Y` cannot hold throws.
template <Element X, Element Y>
class NpyDataset {
 public:
  using batch_type = LabelledBatch<X, Y>;
  using sample_type = LabelledSample<X, Y>;

  NpyDataset(NpyArray<X> inputs, NpyFile labels)
      : inputs_(std::move(inputs)), labels_(std::move(labels)) {
    detail::check_npy_labels(inputs_.file(), labels_, element_kind<Y>());
  }

  std::size_t size() const { return inputs_.size(); }
  std::size_t width() const { return inputs_.width(); }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    prepare(indices);
    out.resize(indices.size(), width());
    for (std::size_t i = 0; i != indices.size(); ++i) {
      // g++ 12 compiles std::ranges::copy to a loop over elements.
      std::copy_n(inputs_.row(indices[i]).data(), width(), out.row(i).data());
      out.labels[i] = label(indices[i]);
    }
  }

  void read(std::size_t index, sample_type& out) const { out = {inputs_.row(index), label(index)}; }

  /// Called once per batch (by `load`): see `NpyArray::prepare`.
  void prepare(std::span<const std::size_t> indices) const {
    labels_.file().require_intact();
    inputs_.prepare(indices);
  }

 private:
  Y label(std::size_t index) const {
    if constexpr (std::integral<Y>) {
      if (labels_.kind() != element_kind<Y>()) {
        const std::optional<std::int64_t> value = detail::npy_integer(labels_, index);
        if (!value || !std::in_range<Y>(*value))
          detail::fail_npy_label(labels_, index, element_kind<Y>());
        return static_cast<Y>(*value);
      }
    }
    Y value;
    std::memcpy(&value, labels_.bytes().data() + index * sizeof(Y), sizeof(Y));
    return value;
  }

  NpyArray<X> inputs_;
  NpyFile labels_;
};

static_assert(Dataset<NpyDataset<float, std::int32_t>>);
static_assert(SampleSource<NpyDataset<float, std::int32_t>>);

/// The samples of `inputs`, of shape (n, ...), and `labels`, of shape (n) or (n, 1).
template <Element X, Element Y>
NpyDataset<X, Y> npy_dataset(const std::string& inputs, const std::string& labels) {
  return {NpyArray<X>(inputs), NpyFile(labels)};
}

}  // namespace lockstep

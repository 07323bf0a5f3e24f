// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Arrays in `.npy` files, NumPy's format: mapped to be read, and written.

#include <cstring>
#include <initializer_list>
#include <ranges>

#include "lockstep/core/element.hpp"
#include "lockstep/data/batch.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/mapped_file.hpp"

namespace lockstep {

namespace detail {

/// What the header of a file says, checked against the size of the file.
struct NpyHeader {
  ElementKind kind = ElementKind::unsupported;
  std::vector<std::size_t> shape;
  std::size_t begin = 0;  ///< the byte at which the elements begin
};

/// Reads the header of a file whose bytes these are. An error names the file, the byte and what
/// should be there.
NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& path);

/// What NumPy calls a kind, without the letter of the byte order.
std::string_view npy_type(ElementKind kind);

/// "(3, 4)", as Python writes it.
std::string npy_shape_text(std::span<const std::size_t> shape);

[[noreturn, gnu::cold]] void fail_npy_kind(const std::string& path, ElementKind has,
                                           ElementKind wanted, std::string_view what);
[[noreturn, gnu::cold]] void fail_npy_row(const std::string& path, std::size_t row,
                                          std::size_t rows);

void write_npy_bytes(const std::string& path, ElementKind kind, std::span<const std::byte> bytes,
                     std::span<const std::size_t> shape);

}  // namespace detail

/// An array of any element type and shape, as `numpy.save` wrote it: versions 1 to 3 of the
/// format, little-endian, in C order. Bfloat16, which NumPy does not have, is its `V2`. Copies
/// share the mapping.
class NpyFile {
 public:
  explicit NpyFile(const std::string& path, Access access = Access::automatic);

  const std::string& path() const { return file_->path(); }
  ElementKind kind() const { return header_.kind; }
  const std::vector<std::size_t>& shape() const { return header_.shape; }

  /// The elements, row after row.
  std::span<const std::byte> bytes() const { return file_->bytes().subspan(header_.begin); }

  /// The byte of the file at which an element begins, for errors.
  std::size_t place_of(std::size_t element) const {
    return header_.begin + element * detail::element_size(header_.kind);
  }

  const MappedFile& file() const { return *file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  detail::NpyHeader header_;
};

/// A file whose elements are `T`, as rows: as many as its first extent says, each of all the
/// others. It reads nothing before a row is asked for, so it may be larger than memory. As a source
/// of samples, a sample is a row.
template <Element T>
class NpyArray {
 public:
  using sample_type = std::span<const T>;

  explicit NpyArray(const std::string& path, Access access = Access::automatic)
      : NpyArray(NpyFile(path, access)) {}

  explicit NpyArray(NpyFile file) : file_(std::move(file)) {
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

  /// All elements, row after row.
  std::span<const T> values() const { return values_; }

  std::span<const T> row(std::size_t i) const {
    if (i >= size_) [[unlikely]]
      detail::fail_npy_row(file_.path(), i, size_);
    return values_.subspan(i * width_, width_);
  }

  void read(std::size_t index, sample_type& out) const { out = row(index); }

  /// What must be done once before the rows of a batch are read: a file that has changed is an
  /// error, and the rows of a file that is read at random are fetched together.
  void prepare(std::span<const std::size_t> indices) const {
    file_.file().require_intact();
    if (!file_.file().reads_at_random()) return;
    for (const std::size_t i : indices) {
      if (i < size_) file_.file().will_read(file_.place_of(i * width_), width_ * sizeof(T));
    }
  }

 private:
  NpyFile file_;
  std::span<const T> values_;
  std::size_t size_ = 0;
  std::size_t width_ = 0;
};

/// Writes an array of this shape; its elements lie row after row. Whatever happens, there is the
/// old file or the new one.
template <std::ranges::contiguous_range Values>
  requires Element<std::ranges::range_value_t<Values>>
void write_npy(const std::string& path, const Values& values, std::span<const std::size_t> shape) {
  const std::span all(std::ranges::data(values), std::ranges::size(values));
  detail::write_npy_bytes(path, element_kind<std::ranges::range_value_t<Values>>(),
                          std::as_bytes(all), shape);
}

/// The same with a list of extents; without one, with one axis.
template <std::ranges::contiguous_range Values>
void write_npy(const std::string& path, const Values& values,
               std::initializer_list<std::size_t> shape = {}) {
  const std::size_t all[] = {std::ranges::size(values)};
  write_npy(path, values, shape.size() == 0 ? std::span<const std::size_t>(all) : std::span(shape));
}

namespace detail {

/// Checks that two files belong together: one label, of a type that `wanted` can hold, for every
/// row of inputs.
void check_npy_labels(const NpyFile& inputs, const NpyFile& labels, ElementKind wanted);

/// An integer of any kind; nothing where it is above the signed ones.
std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element);

[[noreturn, gnu::cold]] void fail_npy_label(const NpyFile& file, std::size_t sample,
                                            ElementKind wanted);

}  // namespace detail

/// Rows of one file with labels of another. Nothing is read before it is drawn, so the files may be
/// larger than memory. Inputs are `X` in the file too; integer labels may have another integer type
/// there, as NumPy's are int64 unless one says otherwise, and a label that `Y` cannot hold is an
/// error when it is loaded. Copies share the mapping.
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
  const NpyArray<X>& inputs() const { return inputs_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    prepare(indices);
    out.resize(indices.size(), width());
    for (std::size_t i = 0; i != indices.size(); ++i) {
      // Not std::ranges::copy, which g++ 12 makes a loop over elements of.
      std::copy_n(inputs_.row(indices[i]).data(), width(), out.row(i).data());
      out.labels[i] = label(indices[i]);
    }
  }

  void read(std::size_t index, sample_type& out) const { out = {inputs_.row(index), label(index)}; }

  /// What must be done once before the samples of a batch are read one by one; `load` does it.
  void prepare(std::span<const std::size_t> indices) const {
    labels_.file().require_intact();
    inputs_.prepare(indices);
  }

 private:
  /// The row was asked for first, so the index is below the size.
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

/// A sample for every row of `inputs`, which has the shape (n, ...); `labels` has (n) or (n, 1).
template <Element X, Element Y>
NpyDataset<X, Y> npy_dataset(const std::string& inputs, const std::string& labels,
                             Access access = Access::automatic) {
  return {NpyArray<X>(inputs, access), NpyFile(labels)};
}

}  // namespace lockstep

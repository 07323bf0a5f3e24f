// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Files of tokens for language models: windows of consecutive tokens.

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/mapped_file.hpp"

namespace lockstep {

/// Windows of tokens: the inputs of a model and, shifted by one, its targets.
template <class Token>
struct TokenBatch {
  std::vector<Token> tokens;   ///< row-major, `length` + 1 per row
  std::vector<float> weights;  ///< per sample: 1, or 0 for a duplicate under `Masked`
  std::size_t length = 0;

  std::size_t size() const { return weights.size(); }
  std::size_t token_count() const { return size() * length; }

  /// The whole window of a sample; `inputs` and `targets` are its overlapping parts.
  std::span<Token> row(std::size_t i) {
    return std::span(tokens).subspan(i * (length + 1), length + 1);
  }
  std::span<const Token> row(std::size_t i) const {
    return std::span(tokens).subspan(i * (length + 1), length + 1);
  }
  std::span<const Token> inputs(std::size_t i) const { return row(i).first(length); }
  std::span<const Token> targets(std::size_t i) const { return row(i).last(length); }

  /// Resizes to `rows` windows of weight 1; memory is reused.
  void resize(std::size_t rows, std::size_t window_length) {
    length = window_length;
    tokens.resize(rows * (length + 1));
    weights.assign(rows, 1.f);
  }

  /// Copies samples [first, first + count) into another batch, whose memory is reused.
  void slice(std::size_t first, std::size_t count, TokenBatch& out) const {
    out.resize(count, length);
    std::copy_n(tokens.data() + first * (length + 1), count * (length + 1), out.tokens.data());
    std::copy_n(weights.data() + first, count, out.weights.data());
  }

  friend void pack(auto& archive, TokenBatch& batch) {
    archive(batch.length, batch.tokens, batch.weights);
  }
};

static_assert(WeightedBatch<TokenBatch<std::uint16_t>>);

/// How a file of tokens is cut into windows.
struct TokenOptions {
  std::size_t stride = 0;        ///< tokens from one window to the next; 0: `length`
  std::size_t header_bytes = 0;  ///< bytes before the tokens (llm.c: 1024)
  std::uint64_t vocabulary = 0;  ///< loading a token that is not below it throws; 0: any token
};

namespace detail {

class TokenFiles {
 public:
  TokenFiles(std::span<const std::string> paths, ElementKind token, std::size_t length,
             const TokenOptions& options);

  std::size_t size() const { return windows_; }

  std::pair<const MappedFile&, std::size_t> byte_of(std::size_t window) const {
    if (window >= windows_) [[unlikely]]
      fail("TokenDataset",
           {"there is no window ", window, ": '", files_.front().file->path(),
            files_.size() == 1 ? "' has " : "' and those behind it have ", windows_},
           "ask for windows below their number");
    const File& file =
        *std::prev(std::ranges::upper_bound(files_, window, {}, &File::first_window));
    return {*file.file, file.begin + (window - file.first_window) * stride_bytes_};
  }

 private:
  struct File {
    std::shared_ptr<const MappedFile> file;
    std::size_t begin = 0;         ///< byte offset of the tokens
    std::size_t first_window = 0;  ///< sample index of the first window
  };
  std::vector<File> files_;
  std::size_t stride_bytes_;
  std::size_t windows_ = 0;
};

[[noreturn, gnu::cold]] void fail_token(const std::string& path, std::size_t byte,
                                        std::int64_t token, std::uint64_t vocabulary);

}  // namespace detail

/// Sample i is the `length` + 1 tokens from i * stride on: `length` inputs and as many targets;
/// tokens that fill no window are left out. A file has little-endian tokens after `header_bytes`,
/// or is a one-dimensional `.npy` file. Windows of several files follow each other; none spans two.
template <IntegerElement Token>
class TokenDataset {
 public:
  using batch_type = TokenBatch<Token>;
  using sample_type = std::span<const Token>;  ///< a window

  TokenDataset(const std::string& path, std::size_t length, const TokenOptions& options = {})
      : TokenDataset(std::span(&path, 1), length, options) {}
  TokenDataset(std::span<const std::string> paths, std::size_t length,
               const TokenOptions& options = {})
      : files_(paths, element_kind<Token>(), length, options),
        length_(length),
        vocabulary_(options.vocabulary) {}

  std::size_t size() const { return files_.size(); }
  std::size_t length() const { return length_; }

  void load(std::span<const std::size_t> indices, batch_type& out) const {
    prepare(indices);
    out.resize(indices.size(), length_);
    sample_type window;
    for (std::size_t i = 0; i != indices.size(); ++i) {
      read(indices[i], window);
      std::copy_n(window.data(), window.size(), out.row(i).data());
    }
  }

  void read(std::size_t index, sample_type& out) const {
    const auto [file, byte] = files_.byte_of(index);
    out = {reinterpret_cast<const Token*>(file.bytes().data() + byte), length_ + 1};
    if (vocabulary_ != 0) check(out, file, byte);
  }

  /// Called once per batch (by `load`): throws if a file has changed, and reads windows ahead.
  void prepare(std::span<const std::size_t> indices) const {
    const MappedFile* last = nullptr;
    for (const std::size_t i : indices) {
      const auto [file, byte] = files_.byte_of(i);
      if (std::exchange(last, &file) != &file) file.require_intact();
      if (file.reads_at_random()) file.will_read(byte, (length_ + 1) * sizeof(Token));
    }
  }

 private:
  void check(std::span<const Token> window, const MappedFile& file, std::size_t byte) const {
    // The maximum needs no branch per token; a negative token is larger than all.
    std::uint64_t largest = 0;
    for (const Token token : window) largest = std::max(largest, static_cast<std::uint64_t>(token));
    if (largest < vocabulary_) [[likely]]
      return;
    for (std::size_t i = 0; i != window.size(); ++i) {
      if (static_cast<std::uint64_t>(window[i]) >= vocabulary_)
        detail::fail_token(file.path(), byte + i * sizeof(Token),
                           static_cast<std::int64_t>(window[i]), vocabulary_);
    }
  }

  detail::TokenFiles files_;
  std::size_t length_;
  std::uint64_t vocabulary_;
};

static_assert(Dataset<TokenDataset<std::uint16_t>>);
static_assert(SampleSource<TokenDataset<std::uint16_t>>);

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Weights as Hugging Face's GPT-2 has them: a safetensors file of floats, whose embedding
/// has no padding.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gpt2 {

inline std::size_t count_of(const std::vector<std::size_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies());
}

/// Reads tensors of floats by their names. A file that was saved with the language model's head has
/// "transformer." in front of each.
class HuggingFaceFile {
 public:
  explicit HuggingFaceFile(const std::string& path) : path_(path), file_(path, std::ios::binary) {
    std::uint64_t bytes = 0;
    file_.read(reinterpret_cast<char*>(&bytes), sizeof bytes);
    if (!file_ || bytes > 100'000'000) fail("is no safetensors file");
    std::string text(bytes, '\0');
    file_.read(text.data(), static_cast<std::streamsize>(bytes));
    header_ = nlohmann::json::parse(text, nullptr, false);
    if (!file_ || !header_.is_object()) fail("has no header");
    data_ = sizeof bytes + bytes;
  }

  /// Fills the front of `to` with the tensor, which must have this shape, and the rest with zeros.
  void read(std::string_view name, const std::vector<std::size_t>& shape, std::span<float> to) {
    auto entry = header_.find(name);
    if (entry == header_.end()) entry = header_.find("transformer." + std::string(name));
    if (entry == header_.end()) fail("lacks " + std::string(name));
    const nlohmann::json wanted = {{"dtype", "F32"}, {"shape", shape}};
    for (const auto& [key, value] : wanted.items())
      if (entry->value(key, nlohmann::json()) != value)
        fail("has " + entry->value(key, nlohmann::json()).dump() + " instead of " + value.dump() +
             " as the " + key + " of " + std::string(name));
    const std::size_t count = count_of(shape);
    const auto offsets = entry->value("data_offsets", std::vector<std::uint64_t>());
    if (offsets.size() != 2 || offsets[1] - offsets[0] != count * sizeof(float))
      fail("has offsets that do not fit the shape of " + std::string(name));
    file_.seekg(static_cast<std::streamoff>(data_ + offsets[0]));
    file_.read(reinterpret_cast<char*>(to.first(count).data()),
               static_cast<std::streamsize>(count * sizeof(float)));
    if (!file_) fail("ends inside of " + std::string(name));
    for (float& number : to.subspan(count)) number = 0;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(path_ + " " + what);
  }

  std::string path_;
  std::ifstream file_;
  nlohmann::json header_;
  std::uint64_t data_ = 0;
};

/// A tensor to be written, with the shape that the file says.
struct HuggingFaceTensor {
  std::string name;
  std::vector<std::size_t> shape;
  std::vector<float> numbers;  // those behind the end of the shape are padding
};

/// The file has all tensors, or is what it was before.
inline void write_hugging_face(const std::string& path,
                               std::span<const HuggingFaceTensor> tensors) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  std::size_t begin = 0;
  for (const HuggingFaceTensor& tensor : tensors) {
    if (tensor.numbers.size() < count_of(tensor.shape))
      throw std::runtime_error("cannot write " + path + ": only a part of " + tensor.name +
                               " is here; gather it first");
    const std::size_t end = begin + count_of(tensor.shape) * sizeof(float);
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t bytes = text.size();
  const std::string temporary = path + ".new";
  std::ofstream file(temporary, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  file << text;
  for (const HuggingFaceTensor& tensor : tensors)
    file.write(reinterpret_cast<const char*>(tensor.numbers.data()),
               static_cast<std::streamsize>(count_of(tensor.shape) * sizeof(float)));
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace gpt2

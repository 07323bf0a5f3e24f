// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Weights as Hugging Face's GPT-2 has them: a safetensors file of floats, whose embedding
/// has no padding.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gpt2 {

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

  /// Fills the front of `to` with the tensor, and the rest with zeros.
  void read(std::string_view name, std::span<float> to) {
    auto entry = header_.find(name);
    if (entry == header_.end()) entry = header_.find("transformer." + std::string(name));
    if (entry == header_.end()) fail("lacks " + std::string(name));
    if (entry->at("dtype") != "F32") fail("has other numbers than floats in " + std::string(name));
    const std::uint64_t begin = entry->at("data_offsets").at(0);
    const std::uint64_t bytes = entry->at("data_offsets").at(1).get<std::uint64_t>() - begin;
    if (bytes > to.size_bytes()) fail("has more numbers than the model in " + std::string(name));
    file_.seekg(static_cast<std::streamoff>(data_ + begin));
    file_.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(bytes));
    if (!file_) fail("ends inside of " + std::string(name));
    for (float& number : to.subspan(bytes / sizeof(float))) number = 0;
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

inline void write_hugging_face(const std::string& path,
                               std::span<const HuggingFaceTensor> tensors) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  std::size_t begin = 0;
  const auto count_of = [](const HuggingFaceTensor& tensor) {
    std::size_t count = 1;
    for (const std::size_t extent : tensor.shape) count *= extent;
    return count;
  };
  for (const HuggingFaceTensor& tensor : tensors) {
    const std::size_t end = begin + count_of(tensor) * sizeof(float);
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
               static_cast<std::streamsize>(count_of(tensor) * sizeof(float)));
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0)
    throw std::runtime_error("cannot write " + path);
}

}  // namespace gpt2

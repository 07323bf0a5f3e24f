// SPDX-License-Identifier: Apache-2.0
// Files for tests/checkpoint/python: `exchange write PATH` writes one, `exchange read PATH` reads
// any; both print a line for each tensor: its name as JSON, type, shape and bytes.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/half.hpp"
#include "lockstep/detail/core/json.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::detail;

void print(std::string_view name, std::string_view type, std::span<const std::uint64_t> shape,
           std::span<const std::byte> data) {
  std::string line;
  append_json_string(line, name);
  line += text({" ", type, " ", shape_text(shape), " "});
  for (const std::byte byte : data) {
    line += "0123456789abcdef"[static_cast<unsigned>(byte) >> 4];
    line += "0123456789abcdef"[static_cast<unsigned>(byte) & 15];
  }
  std::puts(line.c_str());
}

template <class T>
std::vector<std::byte> wave(std::size_t count, double k) {
  std::vector<std::byte> bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    const T value =
        static_cast<T>(static_cast<float>(50 * std::sin(0.37 * static_cast<double>(i) + k)));
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof value);
  }
  return bytes;
}

void write(const std::string& path) {
  FileToWrite file;
  std::vector<std::vector<std::byte>> data;
  data.reserve(20);
  const auto add = [&]<class T>(const char* name, std::vector<std::uint64_t> shape, T) {
    std::size_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    data.push_back(wave<T>(count, static_cast<double>(data.size())));
    file.tensors.push_back({name, element_kind<T>(), std::move(shape), data.back()});
  };
  add("u8", {5}, std::uint8_t{});
  add("fc1.weight", {4, 3}, float{});
  add("fc1.bias", {4}, double{});
  add("half", {3}, Half{});
  add("bfloat", {2, 2}, BFloat16{});
  add("i8", {3}, std::int8_t{});
  add("i16", {3}, std::int16_t{});
  add("i32", {3}, std::int32_t{});
  add("i64", {3}, std::int64_t{});
  add("empty", {0, 7}, float{});
  add("scalar", {}, float{});
  add("Größe \"\\\n/€😀", {1}, float{});
  add("lockstep/state/fc1.weight/exp_avg", {4, 3}, float{});
  file.metadata.emplace_back("note", "from \"C++\": é\n");
  file.facts.add("version", 1).add("learning_rate", 0.1).add("note", "\"é\"\n");
  write_file(path, file);
  for (const TensorToWrite& tensor : file.tensors)
    print(tensor.name, file_element(tensor.kind)->name, tensor.shape, tensor.data);
}

void read(const std::string& path) {
  const CheckpointReader reader(path);
  reader.verify();
  for (const StoredTensor& tensor : reader.tensors()) {
    std::vector<std::byte> data(tensor.count * (tensor.element->bits / 8));
    reader.read(tensor, 0, tensor.count, data.data());
    print(tensor.name, tensor.element->name, tensor.shape, data);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::string_view(argv[1]) == "write") {
      write(argv[2]);
    } else if (argc == 3 && std::string_view(argv[1]) == "read") {
      read(argv[2]);
    } else {
      return 2;
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

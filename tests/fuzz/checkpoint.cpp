// SPDX-License-Identifier: Apache-2.0
// A fuzz target (clang's libFuzzer): the bytes are a checkpoint's main file, or two files, of which
// the second is the shard that any index may name. Reading ends with an error in words or with
// tensors that can be read; nothing else, in bounded memory and time.
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/core/checksum.hpp"
#include "lockstep/detail/core/file.hpp"

namespace {

using namespace lockstep::detail;

void write_bytes(const std::string& path, std::string_view bytes) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file || !write_all(file.get(), bytes)) std::abort();
}

/// Puts the right checksum into a header that has the place for one: without it, hardly anything
/// that is made by chance would come past the first check.
std::string with_header_checksum(std::string bytes) {
  constexpr std::string_view before = R"("lockstep":"{\"header\":\")";
  const std::size_t place = bytes.find(before);
  std::uint64_t length = 0;
  if (place == std::string::npos || bytes.size() < place + before.size() + 16) return bytes;
  std::memcpy(&length, bytes.data(), 8);
  if (length > bytes.size() - 8) return bytes;
  bytes.replace(place + before.size(), 16, 16, '0');
  const auto header = std::string_view(bytes).substr(0, 8 + length);
  return bytes.replace(place + before.size(), 16, checksum_text(Checksum().add(header).value()));
}

void read_all_of(const CheckpointReader& reader) {
  std::vector<std::byte> values;
  for (const StoredTensor& tensor : reader.tensors()) {
    if (tensor.element->bits % 8 != 0) continue;
    values.resize(tensor.count * (tensor.element->bits / 8));
    reader.read(tensor, 0, tensor.count, values.data());
    reader.read(tensor, tensor.count / 2, tensor.count - tensor.count / 2, values.data());
    if (reader.find(tensor.name) != &tensor) std::abort();
  }
  for (const ShardFile& shard : reader.shards()) {
    if (shard.name.find('/') != std::string::npos) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const char* const named = std::getenv("TMPDIR");  // tests/fuzz/run removes it
  static const std::string folder = named != nullptr ? named : ".";
  if (size == 0) return 0;
  // The first byte says what to do with the others: is there a shard, and are checksums made right?
  const bool makes_right = (data[0] & 1) != 0;
  std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  constexpr std::string_view seam = "---8<---";
  std::string shard;
  if (const std::size_t cut = bytes.find(seam); cut != std::string::npos) {
    shard = bytes.substr(cut + seam.size());
    bytes.resize(cut);
  }
  if (makes_right) {
    shard = with_header_checksum(std::move(shard));
    bytes = with_header_checksum(std::move(bytes));
  }
  write_bytes(folder + "/main", bytes);
  write_bytes(folder + "/shard", shard);
  try {
    const CheckpointReader reader(folder + "/main");
    read_all_of(reader);
    reader.verify();
  } catch (const lockstep::Error&) {
  }
  // The entry of the facts alone, and what it says once it was read.
  try {
    const Json json = Json::parse(bytes, "fuzz");
    shards_in(JsonEntry(json, "fuzz"));
  } catch (const lockstep::Error&) {
  }
  return 0;
}

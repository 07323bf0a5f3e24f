// SPDX-License-Identifier: Apache-2.0
// Fuzz targets (clang's libFuzzer) in one program; LOCKSTEP_FUZZ names the one that runs. The bytes
// are a checkpoint, a .npy file, a text of JSON, an LMDB file, a file of tokens, frames for the
// store, a packed batch or a command line. Each ends with an error in words, or with values that
// can be used; nothing else.
#include <fcntl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint.hpp"
#include "lockstep/data.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/serialize.hpp"
#include "lockstep/detail/launch/program_options.hpp"
#include "lockstep/detail/store/server.hpp"
#include "lockstep/launch.hpp"
#include "lockstep/lmdb.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::detail;

void require(bool holds) {
  if (!holds) std::abort();
}

/// The bytes as a file, under a name that is used again. tests/fuzz/run removes its folder.
std::string file_of(std::string_view bytes, std::string_view name = "file") {
  static const char* const folder = std::getenv("TMPDIR");
  const std::string path = text({folder != nullptr ? folder : ".", "/", name});
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  require(file && write_all(file.get(), bytes));
  return path;
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

/// A checkpoint's main file, or two files, of which the second is the shard that any index may
/// name. The first byte says whether checksums are made right.
void checkpoint(std::string_view input) {
  if (input.empty()) return;
  const bool makes_right = (input[0] & 1) != 0;
  std::string bytes(input.substr(1));
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
  static_cast<void>(file_of(shard, "shard"));
  const std::string main = file_of(bytes, "main");
  try {
    const CheckpointReader reader(main);
    read_all_of(reader);
    reader.verify();
  } catch (const Error&) {
  }
  // The entry of the facts alone, and what it says once it was read.
  const Json json = Json::parse(bytes, "fuzz");
  shards_in(JsonEntry(json, "fuzz"));
}

void npy(std::string_view bytes) {
  const NpyHeader header = parse_npy(std::as_bytes(std::span(bytes)), "fuzz");
  std::size_t size = element_size(header.kind);
  require(size != 0 && header.begin % size == 0);
  for (const std::size_t extent : header.shape) size = saturating_product(size, extent);
  require(size == bytes.size() - header.begin && npy_shape_text(header.shape).size() >= 2);
}

/// What was read, written again.
void write_json(const Json& json, JsonLine& out) {
  const auto add = [&]<class T>(const T& value) {
    if constexpr (std::same_as<T, Json::Array>) {
      for (const Json& each : value) write_json(each, out);
    } else if constexpr (std::same_as<T, Json::Object>) {
      for (const auto& [name, member] : value) {
        JsonLine inside;
        write_json(member, inside);
        out.add(name, inside);
      }
    } else if constexpr (!std::same_as<T, std::monostate>) {
      out.add("value", value);
    }
  };
  std::visit(add, json.value);
}
void json(std::string_view bytes) {
  JsonLine line;
  write_json(Json::parse(bytes, "fuzz"), line);
  require(line.is_utf8() && is_utf8(line.text()));
}

/// All samples of a data set, each of which is in memory that may be read.
template <class Dataset>
void read_samples(const Dataset& data, auto&& look_at) {
  typename Dataset::sample_type sample;
  for (std::size_t i = 0; i != std::min<std::size_t>(data.size(), 1000); ++i) {
    try {
      data.read(i, sample);
      look_at(sample);
    } catch (const Error&) {
    }
  }
}
void lmdb(std::string_view bytes) {
  const std::string path = file_of(bytes);
  std::size_t sum = 0;
  const auto decode = [&](std::span<const std::byte> record, int&) {
    for (const std::byte each : record) sum += static_cast<std::size_t>(each);
  };
  read_samples(lmdb_dataset<int>(path, decode), [](int) {});
  read_samples(lmdb_dataset<float, std::int32_t>(path), [&](const auto& sample) {
    sum += static_cast<std::size_t>(std::ranges::count(sample.inputs, 1.f));
  });
  const LmdbOptions options{.is_sample = [](std::string_view key) { return key.size() > 2; }};
  read_samples(lmdb_dataset<int>(path, decode, options), [](int) {});
  static volatile std::size_t used = 0;
  used = sum;
}

void tokens(std::string_view bytes) {
  if (bytes.size() < 3) return;
  const auto number = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const TokenOptions options{.stride = number(1), .header_bytes = number(2), .vocabulary = 50};
  const TokenDataset<std::uint16_t> data(file_of(bytes.substr(3)), number(0), options);
  read_samples(data, [&](std::span<const std::uint16_t> window) {
    require(window.size() == data.length() + 1 && std::ranges::max(window) < 50);
  });
}

/// Puts the right tags into frames, without which no request would come past the first check.
std::string with_tags(std::string bytes, store_protocol::FrameKey key) {
  constexpr std::size_t header = 8 + store_protocol::tag_bytes;
  for (std::size_t at = 0; bytes.size() - at >= header;) {
    store_protocol::Reader rest(std::string_view(bytes).substr(at));
    const std::size_t size = rest.u32() + std::size_t{4};
    const std::uint32_t request = rest.u32();
    if (size < header || size > bytes.size() - at) break;
    const std::string frame = key.frame(request, bytes.substr(at + header, size - header));
    bytes.replace(at, size, frame);
    at += size;
  }
  return bytes;
}

/// Frames for the store. The first byte says whether their tags are made right. Every input has
/// another key, since the fuzzer sees what a tag is compared with.
void store(std::string_view input) {
  if (input.empty()) return;
  const bool makes_right = (input[0] & 1) != 0;
  static std::uint64_t inputs = 0;
  store_protocol::FrameKey key(SipKey{++inputs, 0}, "client", "", "");
  std::string received(input.substr(1));
  if (makes_right) received = with_tags(std::move(received), key);
  StoreTable table;
  key.take_frames(received, [&](std::uint32_t request, std::string_view body) {
    require(makes_right);
    const bool served = table.serve({request % 3, request}, body);
    for (const auto& [to, answer] : table.take_answers())
      require(to.client < 3 && !answer->empty());
    return served;
  });
  for (std::uint64_t client = 0; client != 3; ++client) table.forget(client);
  require(table.take_answers().empty());
}

template <class Batch>
void unpack(std::span<const std::uint8_t> bytes) {
  Batch batch;
  try {
    ArchiveReader(bytes).take(batch);
  } catch (const Error&) {
    return;
  }
  ArchiveWriter writer;
  writer.put(batch);
  require(std::ranges::equal(writer.written(), bytes));
}
void archive(std::string_view bytes) {
  const std::span data(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  unpack<LabelledBatch<float, std::int32_t>>(data);
  unpack<TokenBatch<std::uint16_t>>(data);
  unpack<RaggedBatch<float, std::int32_t>>(data);
}

/// Arguments end at a line's end. `--help` and `--version` print and end the program, as they
/// should.
void flags(std::string_view bytes) {
  std::vector<std::string> arguments{"fuzz"};
  for (std::size_t at = 0; at < bytes.size(); at = std::min(bytes.find('\n', at), bytes.size()) + 1)
    arguments.emplace_back(bytes.substr(at, std::min(bytes.find('\n', at), bytes.size()) - at));
  std::vector<char*> pointers;
  for (std::string& each : arguments) {
    each.resize(std::min(each.find('\0'), each.size()));
    pointers.push_back(each.data());
  }
  const LaunchOptions launched = parse_options(static_cast<int>(pointers.size()), pointers.data());
  ProgramOptions options(launched.rest, false);
  options.option("count", 3u);
  options.option("rate", 0.5f);
  options.option("name", "none");
  options.option("fast", false);
  options.close();
}

using Target = void (*)(std::string_view);
Target chosen() {
  constexpr std::pair<std::string_view, Target> targets[] = {
      {"checkpoint", checkpoint}, {"npy", npy},     {"json", json},       {"lmdb", lmdb},
      {"tokens", tokens},         {"store", store}, {"archive", archive}, {"flags", flags}};
  const char* const name = std::getenv("LOCKSTEP_FUZZ");
  const auto* const found = std::ranges::find(targets, name != nullptr ? name : "",
                                              &std::pair<std::string_view, Target>::first);
  require(found != std::end(targets));
  return found->second;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Target target = chosen();
  try {
    target({reinterpret_cast<const char*>(data), size});
  } catch (const Error&) {
  } catch (const HelpAsked&) {
  }
  return 0;
}

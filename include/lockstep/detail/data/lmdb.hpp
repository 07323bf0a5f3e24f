// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reads LMDB records as samples, and writes samples into an LMDB (which needs `-llmdb`).

#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <ranges>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/data/mapped_file.hpp"
#include "lockstep/detail/data/pipeline.hpp"

namespace lockstep {

/// How an LMDB file is read.
struct LmdbOptions {
  bool read_ahead = false;  ///< let the kernel read ahead: for sequential reads or large blocks
  /// Selects the records that are samples, by key: some sets also store their length, for example.
  std::function<bool(std::string_view key)> is_sample{};
};

namespace detail {

/// The key of record `number`: 8 bytes, big-endian, so that keys sort as numbers.
inline std::array<char, 8> lmdb_key(std::uint64_t number) {
  std::array<char, 8> key{};
  for (std::size_t i = 0; i != key.size(); ++i) key[i] = static_cast<char>(number >> (56 - 8 * i));
  return key;
}

/// A meta page as a 64-bit liblmdb writes it: `MDB_page`, then `MDB_meta`.
struct LmdbMeta {
  std::array<std::uint64_t, 2> header;
  std::uint32_t magic, version;
  std::uint64_t address, map_bytes;
  std::uint32_t page_bytes;
  std::array<std::uint32_t, 11> free_pages;
  std::uint32_t value_bytes;
  std::uint16_t flags, depth;
  std::array<std::uint64_t, 3> pages_of_a_kind;
  std::uint64_t entries, root;
  std::uint64_t last_page, transaction;
};
static_assert(sizeof(LmdbMeta) == 152 && std::endian::native == std::endian::little);

/// The records of an LMDB file by number, for any number of threads and forked ranks. 8-byte keys
/// that are the big-endian numbers from 0 (`write_lmdb`) are looked up at first use; records with
/// other keys are numbered in key order at opening. No lock is taken: the disk may be read-only.
///
/// It reads the B+ trees of liblmdb 0.9 itself, because liblmdb trusts its files: a flipped byte
/// makes it read behind the mapping or abort. Here every offset is checked before use.
class LmdbFile {
 public:
  LmdbFile(const std::string& path, const LmdbOptions& options)
      : file_(file_at(path), operation, options.read_ahead), page_bytes_(read_meta(0).page_bytes) {
    const LmdbMeta first = read_meta(0);
    const LmdbMeta second = read_meta(page_bytes_);
    if (second.page_bytes != page_bytes_) fail_page(1, "has another size than the first");
    const LmdbMeta& newest = second.transaction > first.transaction ? second : first;
    transaction_ = newest.transaction;
    pages_ = file_.size() / page_bytes_;
    if (newest.last_page >= pages_) {
      fail(operation,
           {"'", file_.path(), "' is cut off: it has ", file_.size(), " bytes, and its last page, ",
            newest.last_page, ", ends behind them"},
           "copy or download the file again");
    }
    root_ = newest.root;
    if (root_ == ~std::uint64_t{} || newest.entries == 0) return;
    size_ = newest.entries;
    if (size_ > file_.size()) fail_count();
    const bool is_numbered = newest.flags == 0 && !options.is_sample && find(0).data != nullptr &&
                             find(size_ - 1).data != nullptr;
    // Record positions are cached unless the cache would be large compared with the file.
    if (is_numbered && size_ > file_.size() / (8 * sizeof(Record))) return;
    records_.reset(static_cast<Record*>(std::calloc(size_, sizeof(Record))));
    if (is_numbered) return;
    if (records_ == nullptr) throw std::bad_alloc();
    std::size_t pages_left = pages_;
    std::size_t seen = 0;
    std::size_t samples = 0;
    list(root_, pages_left, [&](std::string_view key, Record record) {
      if (seen++ == size_) fail_count();
      if (!options.is_sample || options.is_sample(key)) records_[samples++] = record;
    });
    if (seen != size_) fail_count();
    size_ = samples;
  }

  std::size_t size() const { return size_; }

  /// The mapped record, valid while the data set lives.
  std::span<const std::byte> operator[](std::size_t index) const {
    if (index >= size_) {
      fail(operation, {"record ", index, " of '", file_.path(), "', which has ", size_},
           "draw numbers below size()");
    }
    if (records_ == nullptr) {
      const Record record = look_up(index);
      return {record.data, record.size};
    }
    // Threads may look up a record concurrently: all find the same, and the address is stored last.
    const std::atomic_ref data(records_[index].data);
    const std::atomic_ref size(records_[index].size);
    if (const std::byte* const known = data.load(std::memory_order_acquire))
      return {known, size.load(std::memory_order_relaxed)};
    const Record record = look_up(index);
    size.store(record.size, std::memory_order_relaxed);
    data.store(record.data, std::memory_order_release);
    return {record.data, record.size};
  }

  /// Throws if the file was truncated or modified since it was opened: see `MappedFile`.
  void require_intact() const {
    file_.require_intact();
    require_same_transaction();
  }
  /// Throws if a transaction was committed since the file was opened. Makes no system call.
  void require_same_transaction() const {
    const auto transaction_at = [&](std::size_t offset) {
      return read<std::uint64_t>(file_.bytes(), offset + offsetof(LmdbMeta, transaction));
    };
    if (std::max(transaction_at(0), transaction_at(page_bytes_)) != transaction_) [[unlikely]]
      file_.fail_changed(file_.size());
  }

  /// Prefetches the start of known records together, so that their cache misses overlap.
  void fetch(std::span<const std::size_t> indices) const {
    if (records_ == nullptr) return;
    for (const std::size_t index : indices) {
      if (index < size_) __builtin_prefetch(&records_[index]);
    }
    for (const std::size_t index : indices) {
      if (index >= size_) continue;
      const std::atomic_ref data(records_[index].data);
      __builtin_prefetch(data.load(std::memory_order_relaxed));
    }
  }

  /// Rethrows the current exception as the failure to decode a record.
  [[noreturn, gnu::cold]] void rethrow_decoding(std::size_t index, std::size_t bytes) const {
    rethrow_as(operation, text({"record ", index, " of '", file_.path(), "', ", bytes, " bytes"}),
               "look at this record, and at the function that decodes it");
  }

 private:
  static constexpr std::string_view operation = "lmdb_dataset";
  enum : std::uint16_t { branch = 1, leaf = 2 };           // page flags
  enum : std::uint16_t { own_pages = 1, duplicates = 4 };  // node flags
  static constexpr std::size_t header_bytes = 16;          // of a page
  static constexpr std::size_t node_bytes = 8;             // before the key
  static constexpr std::size_t most_levels = 32;

  struct Record {
    const std::byte* data = nullptr;
    std::size_t size = 0;
  };
  struct Page {
    std::span<const std::byte> bytes;
    std::uint64_t number;

    std::uint16_t u16(std::size_t at) const { return read<std::uint16_t>(bytes, at); }
    bool is_branch() const { return (u16(10) & branch) != 0; }
    std::size_t nodes() const { return (u16(12) - header_bytes) / 2; }
  };
  struct Node {
    std::string_view key;
    std::uint64_t child;  ///< of a branch node
    std::size_t size;     ///< of a leaf node's value
    std::uint16_t flags;
    std::span<const std::byte> rest;  ///< of the page, after the key
  };
  static std::string file_at(const std::string& path) {
    struct stat status{};
    const bool is_folder = ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
    return is_folder ? text({path, "/data.mdb"}) : path;
  }

  template <class T>
  static T read(std::span<const std::byte> bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }

  LmdbMeta read_meta(std::size_t offset) const {
    if (file_.size() < offset + sizeof(LmdbMeta)) {
      fail(operation,
           {"'", file_.path(), "' has ", file_.size(), " bytes, and the meta page at offset ",
            offset, " of an LMDB file ends behind them"},
           "copy or download the file again");
    }
    const auto meta = read<LmdbMeta>(file_.bytes(), offset);
    if (meta.magic != 0xBEEFC0DE) {
      fail(
          operation,
          {"'", file_.path(), "' is no LMDB file of a 64-bit little-endian machine: the four ",
           "bytes at offset ", offset + offsetof(LmdbMeta, magic), " are not its mark, 0xBEEFC0DE"},
          "give an LMDB file, or the folder that holds its data.mdb; bring that of another "
          "machine here by mdb_dump and mdb_load");
    }
    if (meta.version != 1 || !std::has_single_bit(meta.page_bytes) || meta.page_bytes < 256 ||
        meta.page_bytes > 32768) {
      fail(operation,
           {"'", file_.path(), "' is an LMDB file of format ", meta.version, " with pages of ",
            meta.page_bytes, " bytes, and format 1 with 256 to 32768 is read"},
           "copy the file again, or bring it here by mdb_dump and mdb_load");
    }
    return meta;
  }

  Page page(std::uint64_t number) const {
    if (number >= pages_) fail_page(number, "is behind the end of the file");
    const Page page{file_.bytes().subspan(number * page_bytes_, page_bytes_), number};
    if (page.u16(12) <= header_bytes || page.u16(12) > page_bytes_)
      fail_page(number, "has bounds that no page has");
    if ((page.u16(10) & (branch | leaf)) == 0) fail_page(number, "is neither a branch nor a leaf");
    return page;
  }

  Node node(const Page& page, std::size_t i) const {
    const std::size_t at = page.u16(header_bytes + 2 * i);
    if (at + node_bytes > page.bytes.size()) fail_page(page.number, "has a node outside of it");
    const std::size_t size = read<std::uint32_t>(page.bytes, at);
    const std::uint16_t flags = page.u16(at + 4);
    const std::size_t key_bytes = page.u16(at + 6);
    const auto rest = page.bytes.subspan(at + node_bytes);
    if (key_bytes > rest.size()) fail_page(page.number, "has a key that ends behind it");
    return {{reinterpret_cast<const char*>(rest.data()), key_bytes},
            size | std::uint64_t{flags} << 32,
            size,
            flags,
            rest.subspan(key_bytes)};
  }

  /// The value of a leaf node: inside the page, or on overflow pages.
  Record value(const Page& page, const Node& node) const {
    if (node.flags == own_pages && node.rest.size() >= sizeof(std::uint64_t)) {
      const auto first = read<std::uint64_t>(node.rest, 0);
      if (first >= pages_ || node.size > (pages_ - first) * page_bytes_ - header_bytes)
        fail_page(page.number, "has a value that ends behind the file");
      return {file_.bytes().data() + first * page_bytes_ + header_bytes, node.size};
    }
    if ((node.flags & own_pages) != 0 || node.size > node.rest.size())
      fail_page(page.number, "has a value that ends behind it");
    return {node.rest.data(), node.size};
  }

  /// The record with the key of a number; null data if there is none.
  Record find(std::uint64_t record) const {
    const auto bytes = lmdb_key(record);
    const std::string_view key(bytes.data(), bytes.size());
    std::uint64_t number = root_;
    for (std::size_t level = 0; level != most_levels; ++level) {
      const Page here = page(number);
      // Binary search: the last node whose key is not greater. A branch's first node has no key.
      std::size_t at = 0;
      for (std::size_t behind = here.nodes(); behind - at > 1;) {
        const std::size_t middle = at + (behind - at) / 2;
        (node(here, middle).key <= key ? at : behind) = middle;
      }
      const Node found = node(here, at);
      if (!here.is_branch()) return found.key == key ? value(here, found) : Record{};
      number = found.child;
    }
    fail_page(number, "is deeper than a tree can be");
  }

  Record look_up(std::size_t index) const {
    const Record record = find(index);
    if (record.data == nullptr) {
      fail(operation,
           {"'", file_.path(), "' has no key ", index, ", though it has 0 and ", size_ - 1},
           "give LmdbOptions::is_sample, which says by key what is a sample, or write the set "
           "again");
    }
    return record;
  }

  /// Calls `visit(key, record)` for the records below a page in key order; `pages_left` ends loops.
  void list(std::uint64_t root, std::size_t& pages_left, const auto& visit,
            std::size_t depth = 0) const {
    if (depth == most_levels || pages_left-- == 0)
      fail_page(root, "is part of no tree: it leads to itself");
    const Page here = page(root);
    for (std::size_t i = 0; i != here.nodes(); ++i) {
      const Node each = node(here, i);
      if (here.is_branch()) {
        list(each.child, pages_left, visit, depth + 1);
        continue;
      }
      if ((each.flags & duplicates) != 0)
        fail(operation, {"'", file_.path(), "' has several values under one key"},
             "write the set with one record for every key (without MDB_DUPSORT)");
      visit(each.key, value(here, each));
    }
  }

  [[noreturn, gnu::cold]] void fail_page(std::uint64_t number, std::string_view how) const {
    fail_damaged(text({"page ", number, " ", how}));
  }
  [[noreturn, gnu::cold]] void fail_count() const {
    fail_damaged(text({"it has not the ", size_, " records that it names"}));
  }
  [[noreturn, gnu::cold]] void fail_damaged(std::string_view how) const {
    fail(operation, {"'", file_.path(), "' is damaged: ", how},
         "copy or download the file again, or write the set again");
  }

  MappedFile file_;
  std::size_t page_bytes_;
  std::uint64_t pages_ = 0;
  std::uint64_t root_ = 0;
  std::uint64_t transaction_ = 0;  ///< the last one when the file was opened
  std::size_t size_ = 0;
  /// Positions of all listed records, or of those looked up so far; pages are committed on write.
  std::unique_ptr<Record[], void (*)(void*)> records_{nullptr, std::free};
};

/// The header of a record. Its 24 bytes and 8 of key align the inputs, which are read in place.
struct LabelledRecord {
  static constexpr std::array<char, 4> own_mark{'L', 'S', 'R', '1'};

  std::array<char, 4> mark = own_mark;
  ElementKind input{};
  ElementKind label{};
  std::uint16_t zero = 0;
  std::uint64_t width = 0;           ///< the number of inputs
  std::array<std::byte, 8> value{};  ///< the label, in its first bytes

  /// The header of a record with these element types. Throws if the bytes are no such record.
  static LabelledRecord of(std::span<const std::byte> record, ElementKind input,
                           ElementKind label) {
    const auto reject = [](std::initializer_list<TextPart> problem, const char* advice) {
      fail("lmdb_dataset", problem, advice);
    };
    LabelledRecord front;
    if (record.size() >= sizeof front) std::memcpy(&front, record.data(), sizeof front);
    if (record.size() < sizeof front || front.mark != own_mark)
      reject({"it does not begin as the records of write_lmdb do, with 'LSR1'"},
             "give the function that decodes these records: lmdb_dataset<Sample>(path, decode)");
    const auto is_known = [](ElementKind kind) {
      return kind != ElementKind::unsupported && static_cast<std::size_t>(kind) < element_kinds;
    };
    if (!is_known(front.input) || !is_known(front.label))
      reject({"its element types, at its bytes 4 and 5, are none that the library knows"},
             "write the set again, or read it with the version of lockstep that wrote it");
    if (front.input != input || front.label != label)
      reject({"it holds ", element_name(front.input), " inputs and ", element_name(front.label),
              " labels, and ", element_name(input), " and ", element_name(label), " are asked for"},
             "name the types that it holds: lmdb_dataset<X, Y>; `| map(f)` makes others of them");
    const std::size_t room = record.size() - sizeof front;
    if (saturating_product(front.width, element_size(input)) != room)
      reject({"it promises ", front.width, " inputs of ", element_size(input), " bytes, and has ",
              room, " bytes for them"},
             "write the set again");
    if (std::bit_cast<std::uintptr_t>(record.data()) % element_size(input) != 0)
      reject({"its inputs do not lie at a multiple of ", element_size(input), " bytes"},
             "write the set with write_lmdb, which sees to that");
    return front;
  }
};
static_assert(sizeof(LabelledRecord) == 24);

/// Encodes labelled samples as records and decodes them; inputs stay in the mapping.
struct LabelledCodec {
  template <Labelled Sample>
  void operator()(const Sample& sample, std::vector<std::byte>& out) const {
    using X = InputOf<Sample>;
    using Y = LabelOf<Sample>;
    static_assert(Element<X> && Element<Y>,
                  "lockstep: a record of inputs and a label holds numbers of the library's element "
                  "types; give write_lmdb an encoding of these samples: encode(sample, bytes)");
    LabelledRecord front;
    front.input = element_kind<X>();
    front.label = element_kind<Y>();
    front.width = std::ranges::size(sample.inputs);
    std::memcpy(front.value.data(), &sample.label, sizeof(Y));
    const auto bytes = std::as_bytes(std::span(std::ranges::data(sample.inputs), front.width));
    out.resize(sizeof front + bytes.size());
    std::memcpy(out.data(), &front, sizeof front);
    std::copy(bytes.begin(), bytes.end(), out.begin() + sizeof front);
  }

  template <class X, class Y>
  void operator()(std::span<const std::byte> record, LabelledSample<X, Y>& out) const {
    const auto front = LabelledRecord::of(record, element_kind<X>(), element_kind<Y>());
    std::memcpy(&out.label, front.value.data(), sizeof(Y));
    out.inputs = {reinterpret_cast<const X*>(record.data() + sizeof front), front.width};
  }
};

template <class Encode, class Source>
concept EncodesSamples =
    SampleSource<Source> &&
    std::invocable<const Encode&, const typename Source::sample_type&, std::vector<std::byte>&>;

/// Writes `count` records; `encode(number, record)` appends each to an empty vector.
void write_lmdb_records(const std::string& path, std::size_t commit_bytes, std::size_t count,
                        FunctionRef<void(std::size_t, std::vector<std::byte>&)> encode);

}  // namespace detail

/// The records of an LMDB, decoded when they are read by `decode(record, sample)`. A record is a
/// `std::span<const std::byte>` of mapped pages, valid while the data set lives, so that a sample
/// may point into it. Copies share the open file; threads and forked ranks may use one object.
template <class Sample, class Decode = detail::LabelledCodec>
class LmdbDataset : public detail::LoadsSamples<LmdbDataset<Sample, Decode>, Sample> {
 public:
  using sample_type = Sample;
  static constexpr bool changes_by_pass = false;

  explicit LmdbDataset(const std::string& path, Decode decode = {}, const LmdbOptions& options = {})
      : file_(std::make_shared<const detail::LmdbFile>(path, options)),
        decode_(std::move(decode)) {}

  std::size_t size() const { return file_->size(); }

  /// Called once per batch (by `load`): throws if the file has changed, and prefetches the records.
  void prepare(std::span<const std::size_t> indices) const {
    file_->require_intact();
    file_->fetch(indices);
  }

  /// Checks the file for every sample: reading a file that was truncated would raise SIGBUS.
  void read(std::size_t index, Sample& out) const {
    file_->require_intact();
    const std::span<const std::byte> record = (*file_)[index];
    try {
      decode_(record, out);
    } catch (...) {
      file_->require_same_transaction();
      file_->rethrow_decoding(index, record.size());
    }
    file_->require_same_transaction();
  }

 private:
  std::shared_ptr<const detail::LmdbFile> file_;
  [[no_unique_address]] Decode decode_;
};

/// The records at `path`, a file or a folder with data.mdb, decoded by `decode(record, sample)`.
template <class Sample, class Decode>
  requires(!std::convertible_to<Decode, LmdbOptions>)
auto lmdb_dataset(const std::string& path, Decode decode, const LmdbOptions& options = {}) {
  constexpr bool decodes = std::invocable<const Decode&, std::span<const std::byte>, Sample&>;
  static_assert(decodes,
                "lockstep: lmdb_dataset<Sample>(path, decode) calls decode(record, sample) with a "
                "std::span<const std::byte> and a Sample&; give it such a function");
  if constexpr (decodes) {
    return LmdbDataset<Sample, Decode>(path, std::move(decode), options);
  } else {  // one error is enough
    const auto nothing = [](auto&&...) {};
    return LmdbDataset<Sample, decltype(nothing)>(path, nothing, options);
  }
}

/// Samples written by `write_lmdb`, with inputs of type X and labels of type Y, read in place.
template <Element X, Element Y>
auto lmdb_dataset(const std::string& path, const LmdbOptions& options = {}) {
  return LmdbDataset<LabelledSample<X, Y>>(path, {}, options);
}

static_assert(SampleSource<LmdbDataset<LabelledSample<float, std::int32_t>>>);
static_assert(Dataset<LmdbDataset<LabelledSample<float, std::int32_t>>>);

/// Writes all samples of `source`, in order, into a new LMDB at `path`, as records 0, 1, ... for
/// `lmdb_dataset`. `encode(sample, bytes)` appends a sample to an empty vector; without it, samples
/// have inputs and a label. Throws if `path` exists; a failure leaves nothing behind. If another
/// program expects a folder, create it and write `FOLDER/data.mdb`. Pipelines that draw random
/// numbers use seed 0 and epoch 0. A transaction is committed after `commit_bytes`. **Ranks** one.
template <class Source, class Encode = detail::LabelledCodec>
void write_lmdb(const std::string& path, const Source& source, const Encode& encode = {},
                std::size_t commit_bytes = 16_MiB) {
  constexpr bool encodes = detail::EncodesSamples<Encode, Source>;
  static_assert(encodes,
                "lockstep: write_lmdb cannot encode these samples; give it a function that appends "
                "a sample to a std::vector<std::byte>: encode(sample, bytes), and a source with "
                "size(), sample_type and read(index, sample)");
  if constexpr (encodes) {
    constexpr std::size_t at_a_time = 256;
    detail::ChainOf<Source> chain;
    typename Source::sample_type sample;
    std::vector<std::size_t> indices;
    const auto write = [&](std::size_t index, std::vector<std::byte>& record) {
      if (index % at_a_time == 0) {
        indices.resize(std::min(at_a_time, source.size() - index));
        std::iota(indices.begin(), indices.end(), index);
        detail::prepare_samples(source, indices);
      }
      try {
        detail::read_sample(source, index, Pass{}, chain, sample);
        encode(std::as_const(sample), record);
      } catch (...) {
        detail::rethrow_of_sample(index, 0);
      }
    };
    detail::write_lmdb_records(path, commit_bytes, source.size(), write);
  }
}

}  // namespace lockstep

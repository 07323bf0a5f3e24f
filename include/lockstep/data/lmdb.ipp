// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of LMDB files that are read, which needs no liblmdb.

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/mapped_file.hpp"

namespace lockstep::detail {

/// Where a database of an LMDB file begins, and what it is (`MDB_db` of liblmdb 0.9).
struct LmdbTree {
  std::uint32_t pad;  ///< of the first database: the size of a page; of fixed values: their size
  std::uint16_t flags;
  std::uint16_t depth;
  std::uint64_t branch_pages, leaf_pages, overflow_pages, entries;
  std::uint64_t root;

  bool is_empty() const { return root == ~std::uint64_t{}; }
};

/// A meta page as a 64-bit program writes it (`MDB_page` and `MDB_meta`).
struct LmdbMeta {
  std::uint64_t page;
  std::uint64_t flags;
  std::uint32_t magic;
  std::uint32_t version;
  std::uint64_t address;
  std::uint64_t map_bytes;
  LmdbTree free, main;
  std::uint64_t last_page;
  std::uint64_t transaction;
};
static_assert(sizeof(LmdbTree) == 48 && sizeof(LmdbMeta) == 152 &&
              std::endian::native == std::endian::little);

/// Reads the trees of an LMDB file as liblmdb 0.9 writes them. liblmdb itself trusts its files: a
/// flipped byte lets it read behind the mapping or abort, inside of its own search. Here every
/// place and every page number is compared with what there is before it is used.
class LmdbFile {
 public:
  using Visit = FunctionRef<void(std::string_view key, LmdbRecord record)>;

  LmdbFile(const std::string& path, const LmdbOptions& options)
      : mapped(path, options.read_ahead ? Access::usual : Access::random, "lmdb_dataset"),
        page_bytes_(read_meta(0).free.pad) {
    const LmdbMeta first = read_meta(0);
    const LmdbMeta second = read_meta(page_bytes_);
    if (second.free.pad != page_bytes_) fail_page(1, "has another size than the first");
    newest = second.transaction > first.transaction ? second : first;
    pages_ = mapped.size() / page_bytes_;
    if (newest.last_page >= pages_) {
      fail("lmdb_dataset",
           {"'", path, "' is cut off: it has ", mapped.size(), " bytes, and its last page, ",
            newest.last_page, ", ends behind them"},
           "copy or download the file again");
    }
    tree = newest.main;
  }

  /// The number of the last transaction, now.
  std::uint64_t transaction() const {
    return std::max(read<LmdbMeta>(mapped.bytes(), 0).transaction,
                    read<LmdbMeta>(mapped.bytes(), page_bytes_).transaction);
  }

  /// The record of a key, where keys have the usual order; no data where there is none.
  LmdbRecord get(std::string_view key) const {
    std::uint64_t number = tree.root;
    for (std::size_t level = 0; level != most_levels && !tree.is_empty(); ++level) {
      const Page here = page(number);
      // The last node whose key is not above this one. A branch's first has no key.
      std::size_t at = 0;
      for (std::size_t behind = here.count(); behind - at > 1;) {
        const std::size_t middle = at + (behind - at) / 2;
        (node(here, middle).key <= key ? at : behind) = middle;
      }
      const Node found = node(here, at);
      if ((here.flags() & branch) == 0) return found.key == key ? value(here, found) : LmdbRecord{};
      number = found.child;
    }
    if (!tree.is_empty()) fail_page(number, "is deeper than a tree can be");
    return {};
  }

  /// All records in the order of their keys.
  void for_each(Visit visit) const {
    std::size_t left = pages_;
    if (!tree.is_empty()) list(tree.root, left, visit);
  }

  [[noreturn, gnu::cold]] void fail_page(std::uint64_t number, std::string_view how) const {
    fail("lmdb_dataset", {"'", mapped.path(), "' is damaged: page ", number, " ", how},
         "copy or download the file again, or write the set again");
  }

  MappedFile mapped;
  LmdbMeta newest{};
  LmdbTree tree{};  ///< of the main database

 private:
  enum : std::uint16_t { branch = 1, leaf = 2 };           // of pages
  enum : std::uint16_t { own_pages = 1, duplicates = 4 };  // of nodes
  static constexpr std::size_t header_bytes = 16;          // of a page
  static constexpr std::size_t node_bytes = 8;             // before its key
  static constexpr std::size_t most_levels = 32;

  struct Page {
    std::span<const std::byte> bytes;
    std::uint64_t number;

    std::uint16_t word(std::size_t at) const { return read<std::uint16_t>(bytes, at); }
    std::uint16_t flags() const { return word(10); }
    std::size_t count() const { return (word(12) - header_bytes) / 2; }
  };
  struct Node {
    std::string_view key;
    std::uint64_t child;  ///< of a branch
    std::size_t size;     ///< of a leaf: of its value
    std::uint16_t flags;
    std::span<const std::byte> rest;  ///< of the page, behind the key
  };

  /// The caller has seen that it is inside.
  template <class T>
  static T read(std::span<const std::byte> bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }

  LmdbMeta read_meta(std::size_t offset) const {
    if (mapped.size() < offset + sizeof(LmdbMeta)) {
      fail("lmdb_dataset",
           {"'", mapped.path(), "' has ", mapped.size(), " bytes, and the meta page at offset ",
            offset, " of an LMDB file ends behind them"},
           "copy or download the file again");
    }
    const auto meta = read<LmdbMeta>(mapped.bytes(), offset);
    if (meta.magic != 0xBEEFC0DE) {
      fail(
          "lmdb_dataset",
          {"'", mapped.path(), "' is no LMDB file of a 64-bit little-endian machine: the four ",
           "bytes at offset ", offset + 16, " are not its mark, 0xBEEFC0DE"},
          "give an LMDB file, or the folder that holds its data.mdb; bring that of another machine "
          "here by mdb_dump and mdb_load");
    }
    if (meta.version != 1 || !std::has_single_bit(meta.free.pad) || meta.free.pad < 256 ||
        meta.free.pad > 32768) {
      fail("lmdb_dataset",
           {"'", mapped.path(), "' is an LMDB file of format ", meta.version, " with pages of ",
            meta.free.pad, " bytes, and format 1 with 256 to 32768 is read"},
           "copy the file again, or bring it here by mdb_dump and mdb_load");
    }
    return meta;
  }

  Page page(std::uint64_t number) const {
    if (number >= pages_) fail_page(number, "is behind the end of the file");
    const Page page{mapped.bytes().subspan(number * page_bytes_, page_bytes_), number};
    if (page.word(12) <= header_bytes || page.word(12) > page_bytes_)
      fail_page(number, "has bounds that no page has");
    if ((page.flags() & (branch | leaf)) == 0) fail_page(number, "is neither a branch nor a leaf");
    return page;
  }

  Node node(const Page& page, std::size_t i) const {
    const std::size_t at = page.word(header_bytes + 2 * i);
    if (at + node_bytes > page.bytes.size()) fail_page(page.number, "has a node outside of it");
    const std::uint16_t low = page.word(at);
    const std::uint16_t high = page.word(at + 2);
    const std::uint16_t flags = page.word(at + 4);
    const std::size_t key_bytes = page.word(at + 6);
    const auto rest = page.bytes.subspan(at + node_bytes);
    if (key_bytes > rest.size()) fail_page(page.number, "has a key that ends behind it");
    return {{reinterpret_cast<const char*>(rest.data()), key_bytes},
            low | std::uint64_t{high} << 16 | std::uint64_t{flags} << 32,
            low | std::size_t{high} << 16,
            flags,
            rest.subspan(key_bytes)};
  }

  /// What a leaf holds for a key: in the page, or on pages of its own.
  LmdbRecord value(const Page& page, const Node& node) const {
    if (node.flags == own_pages && node.rest.size() >= sizeof(std::uint64_t)) {
      const auto first = read<std::uint64_t>(node.rest, 0);
      if (first >= pages_ || node.size > (pages_ - first) * page_bytes_ - header_bytes)
        fail_page(page.number, "has a value that ends behind the file");
      return {mapped.bytes().data() + first * page_bytes_ + header_bytes, node.size};
    }
    if ((node.flags & own_pages) != 0 || node.size > node.rest.size())
      fail_page(page.number, "has a value that ends behind it");
    return {node.rest.data(), node.size};
  }

  /// `left`: a page that leads to one above it would be walked for ever.
  void list(std::uint64_t root, std::size_t& left, Visit visit, std::size_t depth = 0) const {
    if (depth == most_levels || left-- == 0)
      fail_page(root, "is part of no tree: it leads to itself");
    const Page here = page(root);
    for (std::size_t i = 0; i != here.count(); ++i) {
      const Node each = node(here, i);
      if ((here.flags() & branch) != 0) {
        list(each.child, left, visit, depth + 1);
      } else if ((each.flags & duplicates) != 0) {
        fail("lmdb_dataset", {"'", mapped.path(), "' has several values under one key"},
             "write the set with one record for every key (without MDB_DUPSORT)");
      } else {
        visit(each.key, value(here, each));
      }
    }
  }

  std::size_t page_bytes_;
  std::uint64_t pages_ = 0;
};

/// Memory for so many places, all unknown: the system gives pages of it when they are written. None
/// where there is not so much.
LOCKSTEP_INLINE std::shared_ptr<LmdbRecord[]> lmdb_places(std::size_t count) {
  auto* const places = static_cast<LmdbRecord*>(std::calloc(count, sizeof(LmdbRecord)));
  if (places == nullptr) return nullptr;
  return {places, [](LmdbRecord* memory) { std::free(memory); }};
}

LOCKSTEP_INLINE LmdbRecords::LmdbRecords(const std::string& path, const LmdbOptions& options) {
  struct stat status{};
  const bool is_folder = ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  file_ = std::make_shared<const LmdbFile>(is_folder ? text({path, "/data.mdb"}) : path, options);
  size_ = file_->tree.is_empty() ? 0 : file_->tree.entries;
  if (size_ == 0) return;
  const std::size_t bytes = file_->mapped.size();
  const auto fail_count = [&] {
    fail("lmdb_dataset",
         {"'", file_->mapped.path(), "' is damaged: it has not the ", size_,
          " records that it names"},
         "copy or download the file again, or write the set again");
  };
  if (size_ > bytes) fail_count();
  const auto has = [&](std::size_t number) {
    const auto key = lmdb_key(number);
    return file_->get({key.data(), key.size()}).data != nullptr;
  };
  if (file_->tree.flags == 0 && !options.is_sample && has(0) && has(size_ - 1)) {
    if (size_ <= bytes / (8 * sizeof(LmdbRecord))) places_ = lmdb_places(size_);
    return;
  }
  places_ = lmdb_places(size_);
  if (places_ == nullptr) throw std::bad_alloc();
  std::size_t samples = 0;
  std::size_t seen = 0;
  file_->for_each([&](std::string_view key, LmdbRecord record) {
    if (seen++ == size_) fail_count();
    if (!options.is_sample || options.is_sample(key)) places_.get()[samples++] = record;
  });
  if (seen != size_) fail_count();
  size_ = samples;
}

LOCKSTEP_INLINE std::span<const std::byte> LmdbRecords::operator[](std::size_t index) const {
  if (index >= size_) {
    fail("lmdb_dataset", {"record ", index, " of '", file_->mapped.path(), "', which has ", size_},
         "draw numbers below size()");
  }
  if (places_ == nullptr) {
    const LmdbRecord record = look_up(index);
    return {record.data, record.size};
  }
  // Several threads may look up the same record. The address comes last, and all find the same.
  LmdbRecord& place = places_.get()[index];
  const std::atomic_ref data(place.data);
  const std::atomic_ref size(place.size);
  if (const std::byte* const known = data.load(std::memory_order_acquire))
    return {known, size.load(std::memory_order_relaxed)};
  const LmdbRecord record = look_up(index);
  size.store(record.size, std::memory_order_relaxed);
  data.store(record.data, std::memory_order_release);
  return {record.data, record.size};
}

LOCKSTEP_INLINE LmdbRecord LmdbRecords::look_up(std::size_t index) const {
  const auto key = lmdb_key(index);
  const LmdbRecord record = file_->get({key.data(), key.size()});
  if (record.data == nullptr) {
    fail("lmdb_dataset",
         {"'", file_->mapped.path(), "' has no key ", index, ", though it has 0 and ", size_ - 1},
         "give LmdbOptions::is_sample, which says by key what is a sample, or write the set again");
  }
  return record;
}

LOCKSTEP_INLINE void LmdbRecords::require_intact() const {
  file_->mapped.require_intact();
  require_same_transaction();
}

LOCKSTEP_INLINE void LmdbRecords::require_same_transaction() const {
  if (file_->transaction() == file_->newest.transaction) [[likely]]
    return;
  file_->mapped.fail_written();
}

LOCKSTEP_INLINE void LmdbRecords::fetch(std::span<const std::size_t> indices) const {
  const LmdbRecord* const places = places_.get();
  if (places == nullptr) return;
  for (const std::size_t index : indices) {
    if (index < size_) __builtin_prefetch(&places[index]);
  }
  for (const std::size_t index : indices) {
    if (index >= size_) continue;
    const std::atomic_ref data(places_.get()[index].data);
    __builtin_prefetch(data.load(std::memory_order_relaxed));
  }
}

LOCKSTEP_INLINE void LmdbRecords::rethrow_decoding(std::size_t index, std::size_t bytes) const {
  rethrow_as("lmdb_dataset",
             text({"record ", index, " of '", file_->mapped.path(), "', ", bytes, " bytes"}),
             "look at this record, and at the function that decodes it");
}

LOCKSTEP_INLINE LabelledRecord labelled_record(std::span<const std::byte> record, ElementKind input,
                                               ElementKind label) {
  constexpr const char* operation = "lmdb_dataset";
  LabelledRecord front;
  if (record.size() >= sizeof front) std::memcpy(&front, record.data(), sizeof front);
  if (record.size() < sizeof front || front.mark != LabelledRecord::own_mark) {
    fail(operation, {"it does not begin as the records of write_lmdb do, with 'LSR1'"},
         "give the function that decodes these records: lmdb_dataset<Sample>(path, decode)");
  }
  const auto is_known = [](ElementKind kind) {
    return kind != ElementKind::unsupported && static_cast<std::size_t>(kind) < element_kinds;
  };
  if (!is_known(front.input) || !is_known(front.label)) {
    fail(operation, {"its element types, at its bytes 4 and 5, are none that the library knows"},
         "write the set again, or read it with the version of lockstep that wrote it");
  }
  if (front.input != input || front.label != label) {
    fail(operation,
         {"it holds ", element_name(front.input), " inputs and ", element_name(front.label),
          " labels, and ", element_name(input), " and ", element_name(label), " are asked for"},
         "name the types that it holds: lmdb_dataset<X, Y>; `| map(f)` makes others of them");
  }
  const std::size_t inputs = saturating_product(front.width, element_size(input));
  const std::size_t room = record.size() - sizeof front;
  if (inputs != room) {
    fail(operation,
         {"it promises ", front.width, " inputs of ", element_size(input), " bytes, and has ", room,
          " bytes for them"},
         "write the set again");
  }
  if (std::bit_cast<std::uintptr_t>(record.data()) % element_size(input) != 0) {
    fail(operation, {"its inputs do not lie at a multiple of ", element_size(input), " bytes"},
         "write the set with write_lmdb, which sees to that");
  }
  return front;
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lmdb_pages.hpp`.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "lockstep/core/error.hpp"
#include "lockstep/data/lmdb_pages.hpp"

namespace lockstep::detail {

// As liblmdb 0.9 has them on 64-bit machines.
namespace lmdb_format {

inline constexpr std::size_t header_bytes = 16;  // of a page
inline constexpr std::size_t node_bytes = 8;     // of a node, before its key
inline constexpr std::uint16_t branch = 0x01, leaf = 0x02, fixed_leaf = 0x20, sub_page = 0x40;
inline constexpr std::uint16_t kinds = branch | leaf | 0x04 | 0x08 | fixed_leaf | sub_page;
inline constexpr std::uint16_t big_data = 0x01, sub_data = 0x02, duplicates = 0x04;  // of nodes
inline constexpr std::uint16_t sorted_duplicates = 0x04;                             // of a tree
inline constexpr std::uint16_t of_duplicates = 0x8000;  // here only: the values of one key
inline constexpr std::size_t most_levels = 32;

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace lmdb_format

/// A node of a page: a key, and a page below or a value.
struct LmdbPages::Node {
  const std::byte* at;

  std::uint16_t word(std::size_t i) const { return lmdb_format::read<std::uint16_t>(at + 2 * i); }
  std::uint64_t child() const {
    return word(0) | std::uint64_t{word(1)} << 16 | std::uint64_t{word(2)} << 32;
  }
  std::size_t size() const { return word(0) | std::size_t{word(1)} << 16; }  // of the value
  std::uint16_t flags() const { return word(2); }
  std::string_view key() const {
    return {reinterpret_cast<const char*>(at + lmdb_format::node_bytes), word(3)};
  }
  const std::byte* value() const { return at + lmdb_format::node_bytes + word(3); }
};

/// A page, or a part of one that has the form of a page.
struct LmdbPages::Page {
  std::span<const std::byte> bytes;

  std::uint16_t word(std::size_t at) const {
    return lmdb_format::read<std::uint16_t>(bytes.data() + at);
  }
  std::uint16_t kind() const { return word(10) & lmdb_format::kinds; }
  bool is_branch() const { return kind() == lmdb_format::branch; }
  std::size_t lower() const { return word(12); }
  std::size_t upper() const { return word(14); }
  std::size_t count() const { return (lower() - lmdb_format::header_bytes) / 2; }
  std::size_t place(std::size_t i) const { return word(lmdb_format::header_bytes + 2 * i); }
  Node node(std::size_t i) const { return {bytes.data() + place(i)}; }
};

LOCKSTEP_INLINE LmdbPages::LmdbPages(const std::string& file, const LmdbHeader& header)
    : mapped_(file, Access::random, "lmdb_dataset"),
      page_bytes_(header.page_bytes),
      pages_(header.used_bytes / header.page_bytes),
      checked_(static_cast<unsigned char*>(std::calloc(pages_, 1)), std::free) {
  if (checked_ == nullptr) throw std::bad_alloc();
  if (mapped_.size() < header.used_bytes) fail_page(pages_ - 1, "was cut off");
}

LOCKSTEP_INLINE void LmdbPages::fail_page(std::uint64_t number, std::string_view how) const {
  fail("lmdb_dataset", {"'", mapped_.path(), "' is damaged: page ", number, " ", how},
       "copy or download the file again, or write the set again");
}

LOCKSTEP_INLINE std::optional<LmdbTree> LmdbPages::find(std::string_view database) {
  // liblmdb reads the meta page of the later transaction; the main database is its second.
  constexpr std::size_t trees = lmdb_format::header_bytes + 24;
  constexpr std::size_t transaction = trees + 2 * sizeof(LmdbTree) + 8;
  const std::byte* meta = mapped_.bytes().data();
  const auto number = [](const std::byte* page) {
    return lmdb_format::read<std::uint64_t>(page + transaction);
  };
  if (number(meta + page_bytes_) > number(meta)) meta += page_bytes_;
  const auto main = lmdb_format::read<LmdbTree>(meta + trees + sizeof(LmdbTree));
  if (database.empty()) return main;
  if (main.is_empty()) return std::nullopt;
  if (main.flags != 0) {
    fail("lmdb_dataset",
         {"'", mapped_.path(), "' has no named databases: its main one has the flags ", main.flags},
         "leave LmdbOptions::database out");
  }
  const Page leaf = walk(main, Child::of_key, database);
  for (std::size_t i = 0; i != leaf.count(); ++i) {
    const Node node = leaf.node(i);
    if (node.key() == database && node.flags() == lmdb_format::sub_data)
      return lmdb_format::read<LmdbTree>(node.value());
  }
  return std::nullopt;
}

LOCKSTEP_INLINE void LmdbPages::check(const Page& page, const LmdbTree& tree,
                                      std::uint64_t number) const {
  using namespace lmdb_format;
  const auto require = [&](bool fits, std::string_view how) {
    if (!fits) fail_page(number, how);
  };
  const std::size_t end = page.bytes.size();
  require(end >= header_bytes && page.lower() >= header_bytes && page.lower() % 2 == 0 &&
              page.lower() <= page.upper() && page.upper() <= end,
          "has bounds that no page has");
  const std::uint16_t kind = page.kind() & ~sub_page;
  if (kind == (leaf | fixed_leaf)) {
    // Values of one size, which both a sub-page and the database of duplicates say.
    const std::size_t size = (page.kind() & sub_page) != 0 ? page.word(8) : tree.pad;
    require(tree.flags == of_duplicates && page.count() != 0 && size <= end &&
                header_bytes + page.count() * size <= end,
            "holds more than fits into it");
    return;
  }
  require(kind == branch || kind == leaf, "is neither a branch nor a leaf");
  require(page.count() >= (kind == branch ? 2 : 1), "has too few nodes");
  const bool has_duplicates = (tree.flags & sorted_duplicates) != 0;
  for (std::size_t i = 0; i != page.count(); ++i) {
    const std::size_t place = page.place(i);
    require(place >= page.upper() && place + node_bytes <= end, "has a node outside of it");
    const Node node = page.node(i);
    const std::size_t value = place + node_bytes + node.key().size();
    require(value <= end, "has a key that ends behind it");
    if (kind == branch) {
      require(node.child() < pages_, "leads behind the end of the file");
    } else if (node.flags() == big_data) {
      require(value + 8 <= end, "has a value that ends behind it");
      const auto first = read<std::uint64_t>(node.value());
      const std::size_t used = (header_bytes + node.size() + page_bytes_ - 1) / page_bytes_;
      require(first < pages_ && used <= pages_ - first, "has a value that ends behind the file");
    } else {
      require(node.size() <= end - value, "has a value that ends behind it");
      const bool is_tree = (node.flags() & sub_data) != 0;
      require((node.flags() & ~(sub_data | duplicates)) == 0 &&
                  (has_duplicates || (node.flags() & duplicates) == 0) &&
                  (!is_tree || node.size() == sizeof(LmdbTree)),
              "has a value of an unknown kind");
    }
    // In a tree with the usual order every search then goes the same way. The first key of a branch
    // is not looked at.
    const std::size_t first = kind == branch ? 1 : 0;
    require(tree.flags != 0 || i <= first || page.node(i - 1).key() < node.key(),
            "has keys in another order");
  }
}

LOCKSTEP_INLINE LmdbPages::Page LmdbPages::page(std::uint64_t number, const LmdbTree& tree) {
  if (number >= pages_) fail_page(number, "is behind the end of the file");
  const Page page{mapped_.bytes().subspan(number * page_bytes_, page_bytes_)};
  const std::atomic_ref checked(checked_.get()[number]);
  // A damaged file may use a page in two trees.
  const auto mark = static_cast<unsigned char>(tree.flags == 0                            ? 1
                                               : tree.flags == lmdb_format::of_duplicates ? 2
                                                                                          : 3);
  // Trees of duplicates differ in the size of their values: each looks for itself.
  if (mark != 2 && checked.load(std::memory_order_relaxed) == mark) return page;
  if ((page.kind() & lmdb_format::sub_page) != 0) fail_page(number, "is neither branch nor leaf");
  check(page, tree, number);
  checked.store(mark, std::memory_order_relaxed);
  return page;
}

LOCKSTEP_INLINE LmdbPages::Page LmdbPages::walk(const LmdbTree& tree, Child child,
                                                std::string_view key) {
  std::uint64_t number = tree.root;
  for (std::size_t level = 0; level != lmdb_format::most_levels; ++level) {
    const Page here = page(number, tree);
    if (!here.is_branch()) return here;
    std::size_t next = child == Child::last ? here.count() - 1 : 0;
    if (child == Child::of_key) {
      std::size_t behind = here.count();  // the last child whose first key is not above the key
      while (behind - next > 1) {
        const std::size_t middle = next + (behind - next) / 2;
        (here.node(middle).key() <= key ? next : behind) = middle;
      }
    }
    number = here.node(next).child();
  }
  fail_page(number, "is deeper than a tree can be");
}

LOCKSTEP_INLINE void LmdbPages::check_path(const LmdbTree& tree, std::string_view key) {
  if (!tree.is_empty()) walk(tree, Child::of_key, key);
}

LOCKSTEP_INLINE void LmdbPages::check_ends(const LmdbTree& tree) {
  if (tree.is_empty()) return;
  walk(tree, Child::first, {});
  walk(tree, Child::last, {});
}

LOCKSTEP_INLINE void LmdbPages::check_all(const LmdbTree& tree) {
  std::size_t left = pages_;  // a page that leads to one above it would be walked for ever
  if (!tree.is_empty()) check_subtree(tree.root, tree, 0, left);
}

LOCKSTEP_INLINE void LmdbPages::check_subtree(std::uint64_t number, const LmdbTree& tree,
                                              std::size_t depth, std::size_t& left) {
  if (depth == lmdb_format::most_levels || left-- == 0)
    fail_page(number, "is part of no tree: it leads to itself");
  const Page here = page(number, tree);
  if (here.is_branch()) {
    for (std::size_t i = 0; i != here.count(); ++i)
      check_subtree(here.node(i).child(), tree, depth + 1, left);
  } else if ((tree.flags & lmdb_format::sorted_duplicates) != 0) {
    check_duplicates(here, tree, left);
  }
}

LOCKSTEP_INLINE void LmdbPages::check_duplicates(const Page& leaf, const LmdbTree& tree,
                                                 std::size_t& left) {
  using namespace lmdb_format;
  const auto number =
      static_cast<std::uint64_t>(leaf.bytes.data() - mapped_.bytes().data()) / page_bytes_;
  for (std::size_t i = 0; i != leaf.count(); ++i) {
    const Node node = leaf.node(i);
    if ((node.flags() & duplicates) == 0) continue;
    // The values of one key: a tree of their own, or within the leaf.
    LmdbTree values = tree;
    if ((node.flags() & sub_data) != 0) values = read<LmdbTree>(node.value());
    values.flags = of_duplicates;
    if ((node.flags() & sub_data) != 0) {
      check_subtree(values.root, values, 0, left);
    } else {
      const Page within{{node.value(), node.size()}};
      if (node.size() < header_bytes || (within.kind() & sub_page) == 0 ||
          (within.kind() & branch) != 0)
        fail_page(number, "has values of an unknown kind");
      check(within, values, number);
    }
  }
}

}  // namespace lockstep::detail

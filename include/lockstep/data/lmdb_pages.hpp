// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The pages of an LMDB file, checked before liblmdb follows what they say. liblmdb trusts
/// its files: a flipped byte lets it read behind the mapping or abort.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/lmdb_header.hpp"
#include "lockstep/data/mapped_file.hpp"

namespace lockstep::detail {

/// Where a database of an LMDB file begins, and what it is (`MDB_db` of liblmdb 0.9).
struct LmdbTree {
  std::uint32_t pad;
  std::uint16_t flags;
  std::uint16_t depth;
  std::uint64_t branch_pages, leaf_pages, overflow_pages, entries;
  std::uint64_t root;

  bool is_empty() const { return root == ~std::uint64_t{}; }
};
static_assert(sizeof(LmdbTree) == 48);

/// Checks the pages that liblmdb will look at. All that it then reads lies within the file: keys
/// and values too, so nothing that it returns needs another look. A page is checked once. It lasts
/// as long as its file stays as it is.
class LmdbPages {
 public:
  LmdbPages(const std::string& file, const LmdbHeader& header);

  /// The database of this name, or the main one; nothing where there is none.
  std::optional<LmdbTree> find(std::string_view database);

  /// Checks the pages on the way to a key, to the first record and to the last one. The tree must
  /// have keys in the usual order.
  void check_path(const LmdbTree& tree, std::string_view key);
  void check_ends(const LmdbTree& tree);
  /// Checks all pages of a database.
  void check_all(const LmdbTree& tree);

 private:
  enum class Child : std::uint8_t { first, last, of_key };
  struct Node;
  struct Page;

  /// The leaf that a way ends at.
  Page walk(const LmdbTree& tree, Child child, std::string_view key);
  Page page(std::uint64_t number, const LmdbTree& tree);
  void check_subtree(std::uint64_t number, const LmdbTree& tree, std::size_t depth,
                     std::size_t& left);
  void check_duplicates(const Page& leaf, const LmdbTree& tree, std::size_t& left);
  void check(const Page& page, const LmdbTree& tree, std::uint64_t number) const;
  [[noreturn, gnu::cold]] void fail_page(std::uint64_t number, std::string_view how) const;

  MappedFile mapped_;
  std::size_t page_bytes_;
  std::uint64_t pages_;
  /// One for each page: is it checked? The system gives memory for those that are written.
  std::shared_ptr<unsigned char[]> checked_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/lmdb_pages.ipp"
#endif

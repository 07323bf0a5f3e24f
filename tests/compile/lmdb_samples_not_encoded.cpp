// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: write_lmdb cannot encode these samples; give it a function that appends a sample to a std::vector<std::byte>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/data/lmdb.hpp"

using namespace lockstep;

struct Words {
  using sample_type = std::string;
  std::size_t size() const { return 0; }
  void read(std::size_t, std::string&) const {}
};

#ifdef REJECT
void use() { write_lmdb("words.lmdb", Words{}); }
#else
void encode(const std::string&, std::vector<std::byte>&);
void use() { write_lmdb("words.lmdb", Words{}, encode); }
#endif

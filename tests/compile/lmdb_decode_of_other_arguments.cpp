// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: lmdb_dataset<Sample>(path, decode) calls decode(record, sample) with a std::span<const std::byte> and a Sample&; give it such a function
#include <cstddef>
#include <span>
#include <string>

#include "lockstep/detail/data/lmdb.hpp"

using namespace lockstep;

#ifdef REJECT
void decode(const std::string&, std::string&);
#else
void decode(std::span<const std::byte>, std::string&);
#endif

void use(std::string& sample) { lmdb_dataset<std::string>("words.lmdb", decode).read(0, sample); }

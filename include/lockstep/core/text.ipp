// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `text.hpp`.

#include "lockstep/core/text.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void Word::append_to(std::string& out) const {
  if (!is_number_) {
    out.append(text_, number_);
    return;
  }
  char digits[21];
  char* first = digits + sizeof digits;
  std::uint64_t rest = number_;
  do {
    *--first = static_cast<char>('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  if (is_negative_) *--first = '-';
  out.append(first, digits + sizeof digits);
}

LOCKSTEP_INLINE std::string printable(std::string_view text, std::string_view kept) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte >= 0x20 && byte != 0x7f) || kept.find(c) != std::string_view::npos) {
      out += c;
      continue;
    }
    constexpr char digits[] = "0123456789abcdef";
    out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
  }
  return out;
}

LOCKSTEP_INLINE std::string text(std::initializer_list<Word> words) {
  std::string sentence;
  for (const Word& word : words) word.append_to(sentence);
  return sentence;
}

}  // namespace lockstep::detail

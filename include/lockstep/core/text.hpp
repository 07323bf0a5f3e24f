// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Joins words and numbers to a sentence by one function, because every `operator+` on
/// strings costs compile time.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// A part of a sentence: text, an integer, or a strong integer such as a rank.
class Word {
 public:
  constexpr Word(const char* text) : Word(std::string_view(text)) {}
  constexpr Word(std::string_view text) : text_(text.data()), number_(text.size()) {}
  Word(const std::string& text) : text_(text.data()), number_(text.size()) {}
  constexpr Word(std::unsigned_integral auto number) : number_(number), is_number_(true) {}
  constexpr Word(std::signed_integral auto number)
      : number_(number < 0 ? -static_cast<std::uint64_t>(number)
                           : static_cast<std::uint64_t>(number)),
        is_number_(true),
        is_negative_(number < 0) {}
  Word(char) = delete;
  Word(bool) = delete;
  template <class Meaning, class Integer>
  constexpr Word(const Strong<Meaning, Integer>& strong) : Word(strong.value()) {}

  void append_to(std::string& out) const;

 private:
  const char* text_ = nullptr;
  std::uint64_t number_;  // or the size of the text
  bool is_number_ = false;
  bool is_negative_ = false;
};

/// The text with its control characters as `\x00`, so that names which differ in these look
/// different; `kept` are those that stay.
std::string printable(std::string_view text, std::string_view kept = {});

/// `text({"rank ", rank, " of ", 4})` is "rank 2 of 4".
std::string text(std::initializer_list<Word> words);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/text.ipp"
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Text: sentences of words and numbers, joined by one function because every `operator+` on
/// strings costs compile time; lists of names; numbers for people, the same in every locale;
/// numbers and addresses that are read, or an error.

#include <initializer_list>

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

/// The first few of many, so that messages stay readable with a thousand ranks.
std::string listed(const std::vector<std::string>& names);

/// `rank 2`, or `ranks 0, 1, 3`.
std::string listed_ranks(const std::vector<std::string>& ranks);

/// `name` is the variable or option that has this text.
std::size_t parse_number(std::string_view name, std::string_view text);

std::uint16_t parse_port(std::string_view name, std::string_view text);

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

/// `host:port`, `127.0.0.1:29500`, `[::1]:29500`. `localhost` becomes 127.0.0.1, because ranks must
/// not differ in which of its addresses they mean.
Endpoint parse_endpoint(std::string_view name, std::string_view text);

}  // namespace lockstep::detail

namespace lockstep {

/// A number with a fixed number of decimals.
std::string fixed_text(double value, int decimals);

/// A loss or a score: `0.4123`, and `3.100e-05` where four decimals would say too little.
std::string value_text(double value);

namespace detail {

/// A rate: `54321`, and `3.2` for small ones.
std::string rate_text(double value);

/// A time by the second: `0:12`, `59:59`, `1:02:03`.
std::string clock_text(double seconds);

/// How long something took: `12.3 s`, above a minute by the second.
std::string duration_text(double seconds);

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Text for messages, by one function (`operator+` costs compile time), and strict parsers.

#include <charconv>
#include <initializer_list>

#include "lockstep/detail/core/strong.hpp"

namespace lockstep {

/// A number with a fixed number of decimals.
std::string fixed_text(double value, int decimals);

/// A loss or a score: `0.4123`; `3.100e-05` below 0.001 and from 100000 on.
std::string value_text(double value);

namespace detail {

/// One argument of `text`: a string, an integer, or a strong integer such as a rank.
class TextPart {
 public:
  constexpr TextPart(const char* text) : TextPart(std::string_view(text)) {}
  constexpr TextPart(std::string_view text) : text_(text.data()), number_(text.size()) {}
  TextPart(const std::string& text) : text_(text.data()), number_(text.size()) {}
  constexpr TextPart(std::unsigned_integral auto number) : number_(number), is_number_(true) {}
  constexpr TextPart(std::signed_integral auto number)
      : number_(number < 0 ? -static_cast<std::uint64_t>(number)
                           : static_cast<std::uint64_t>(number)),
        is_number_(true),
        is_negative_(number < 0) {}
  TextPart(char) = delete;
  TextPart(bool) = delete;
  template <class Meaning, class Integer>
  constexpr TextPart(const Strong<Meaning, Integer>& strong) : TextPart(strong.value()) {}

  void append_to(std::string& out) const;

 private:
  const char* text_ = nullptr;
  std::uint64_t number_;  // the size, for text
  bool is_number_ = false;
  bool is_negative_ = false;
};

/// The text with control characters, except those in `kept`, written as `\x00`.
std::string printable(std::string_view text, std::string_view kept = {});

/// `text({"rank ", rank, " of ", 4})` is "rank 2 of 4".
std::string text(std::initializer_list<TextPart> parts);

/// Texts or integers with commas between them.
std::string joined(const auto& parts) {
  std::string all;
  for (const auto& part : parts) all += text({all.empty() ? "" : ", ", part});
  return all;
}

/// The first 16 names, so that messages stay readable with a thousand ranks.
std::string listed(const std::vector<std::string>& names);

inline std::string listed_ranks(const std::vector<std::string>& ranks) {
  return text({ranks.size() == 1 ? "rank " : "ranks ", listed(ranks)});
}

/// The shortest digits that are read back as the same number.
std::string number_text(float number);
std::string number_text(double number);
std::string number_text(std::integral auto number) { return text({number}); }

/// False unless the whole text is a finite number in the range of its type.
template <class Number>
bool read_number(std::string_view text, Number& number) {
  const char* const last = text.data() + text.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(text.data(), last, number);
  // x - x is NaN for NaN and infinities.
  return error == std::errc{} && end == last && number - number == 0;
}

/// Parsers throw an `Error` that calls the text by `name`, the variable or option it came from.
std::size_t parse_number(std::string_view name, std::string_view text);

/// Throws: `--keep is 'x'`.
[[noreturn, gnu::cold]] void fail_value(std::string_view name, std::string_view value,
                                        std::string_view advice);

std::uint16_t parse_port(std::string_view name, std::string_view text);

struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};

/// `host:port` or `[::1]:29500`. `localhost` becomes 127.0.0.1, so that all ranks use one address.
Endpoint parse_endpoint(std::string_view name, std::string_view text);

/// A rate: `54321`; `3.2` below 100.
inline std::string rate_text(double value) { return fixed_text(value, value < 100 ? 1 : 0); }

/// Time in whole seconds: `0:12`, `59:59`, `1:02:03`.
std::string clock_text(double seconds);

/// A duration: `12.3 s`; as `clock_text` from a minute on.
inline std::string duration_text(double seconds) {
  return seconds < 59.95 ? fixed_text(seconds, 1) + " s" : clock_text(seconds);
}

}  // namespace detail

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `flags.hpp`.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/flags.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string flag_name(std::string_view argument) {
  std::string name(argument.substr(0, argument.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

LOCKSTEP_INLINE const Flag* find_flag(std::string_view name, std::span<const Flag> flags) {
  for (const Flag& flag : flags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

/// How many letters must be changed, added, left out or swapped with the next to make one word of
/// another (optimal string alignment).
LOCKSTEP_INLINE std::size_t letters_apart(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<std::size_t> cost((a.size() + 1) * width);
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      std::size_t& least = cost[i * width + j];
      if (i == 0 || j == 0) {
        least = i + j;
        continue;
      }
      const std::size_t kept = cost[(i - 1) * width + j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      least = std::min({cost[(i - 1) * width + j] + 1, cost[i * width + j - 1] + 1, kept});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        least = std::min(least, cost[(i - 2) * width + j - 2] + 1);
      }
    }
  }
  return cost.back();
}

/// The names that other launchers have for an option of lockstep's.
struct OtherName {
  std::string_view theirs;
  std::string_view ours;
};
inline constexpr OtherName other_names[] = {
    {"np", "--ranks"},
    {"nproc", "--ranks"},
    {"ntasks", "--ranks"},
    {"nproc-per-node", "--ranks"},
    {"num-ranks", "--ranks"},
    {"world-size", "--ranks"},
    {"rdzv-endpoint", "--rendezvous"},
    {"rdzv", "--rendezvous"},
    {"master-addr", "--rendezvous"},
    {"master-port", "--rendezvous"},
};

LOCKSTEP_INLINE std::string_view meant_flag(std::string_view name, std::span<const Flag> flags) {
  const auto word = [](std::string_view dashed) {
    return dashed.substr(std::min(dashed.find_first_not_of('-'), dashed.size()));
  };
  const std::string_view written = word(name);
  if (written.size() == name.size() || written.empty()) return {};
  for (const OtherName& other : other_names) {
    if (written == other.theirs && find_flag(other.ours, flags) != nullptr) return other.ours;
  }
  for (const Flag& flag : flags) {
    const std::string_view known = word(flag.name);
    const std::size_t apart = letters_apart(written, known);
    // Of a short word, most neighbours are words of their own: `--date`, `--speed`. A letter too
    // few or too many at its end is a slip all the same. Hardly anybody mistakes the first letter.
    const bool is_slip =
        known.size() > 4 ? apart <= (known.size() > 8 ? 2u : 1u) && written[0] == known[0]
                         : apart <= 1 && (written.starts_with(known) || known.starts_with(written));
    if (is_slip) return flag.name;
  }
  return {};
}

LOCKSTEP_INLINE CutArguments cut_arguments(std::span<const std::string_view> arguments,
                                           std::span<const Flag> flags,
                                           std::span<const Flag> others) {
  CutArguments cut;
  std::vector<std::string_view> seen;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (i != 0 && argument == "--") {
      cut.rest.insert(cut.rest.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i),
                      arguments.end());
      return cut;
    }
    const std::string name = flag_name(argument);
    const Flag* const ours = i == 0 ? nullptr : find_flag(name, flags);
    const Flag* const flag = i == 0 || ours != nullptr ? ours : find_flag(name, others);
    if (flag == nullptr) {
      std::string_view meant = i == 0 ? std::string_view() : meant_flag(name, flags);
      if (i != 0 && meant.empty()) meant = meant_flag(name, others);
      if (!meant.empty()) {
        fail("launch", {"there is no option ", argument.substr(0, argument.find('='))},
             text({"did you mean ", meant, "? An option of the program's own goes behind --"}));
      }
      cut.rest.emplace_back(argument);
      continue;
    }
    if (std::find(seen.begin(), seen.end(), flag->name) != seen.end()) {
      fail("launch", {flag->name, " is given twice"}, "give it once");
    }
    seen.push_back(flag->name);
    const std::size_t equals = argument.find('=');
    const bool is_joined = equals != std::string_view::npos;
    if (flag->value.empty() && is_joined) {
      fail("launch", {flag->name, " takes no value"}, "leave the value out");
    }
    const bool takes_next = !flag->value.empty() && !is_joined;
    if (takes_next && i + 1 == arguments.size()) {
      fail("launch", {flag->name, " has no value"},
           text({"give it one, as in ", flag->name, " ", flag->value == "N" ? "4" : flag->value}));
    }
    if (ours != nullptr) {
      const std::string_view joined = is_joined ? argument.substr(equals + 1) : std::string_view();
      cut.given.push_back({flag->name, takes_next ? arguments[i + 1] : joined});
    } else {
      cut.rest.emplace_back(argument);
      if (takes_next) cut.rest.emplace_back(arguments[i + 1]);
    }
    if (takes_next) ++i;
  }
  return cut;
}

LOCKSTEP_INLINE bool asks_for(std::span<const std::string_view> arguments, std::string_view name) {
  for (std::size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    if (arguments[i] == name) return true;
  }
  return false;
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `program_options.hpp`.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/program_options.hpp"
#include "lockstep/version.hpp"

namespace lockstep {

namespace detail {

template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number number{};
  const char* const last = text.data() + text.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (error != std::errc{} || end != last) return std::nullopt;
  return number;
}

LOCKSTEP_INLINE std::optional<std::int64_t> whole_number(std::string_view text, std::int64_t least,
                                                         std::int64_t most) {
  const auto number = number_of<std::int64_t>(text);
  return number && *number >= least && *number <= most ? number : std::nullopt;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> whole_number(std::string_view text,
                                                          std::uint64_t least, std::uint64_t most) {
  const auto number = number_of<std::uint64_t>(text);
  return number && *number >= least && *number <= most ? number : std::nullopt;
}

LOCKSTEP_INLINE std::optional<double> real_number(std::string_view text) {
  const auto number = number_of<double>(text);
  return number && std::isfinite(*number) ? number : std::nullopt;
}

LOCKSTEP_INLINE std::string real_text(double number) {
  char digits[32];
  return {digits, std::to_chars(digits, std::end(digits), number).ptr};
}

/// An option's name as the command line spells it.
LOCKSTEP_INLINE std::string dashed(std::string_view name) {
  std::string dashed = text({"--", name});
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  return dashed;
}

LOCKSTEP_INLINE std::vector<Flag> flags_of(const std::vector<ProgramOptions::Asked>& asked) {
  std::vector<Flag> flags;
  flags.reserve(asked.size());
  for (const auto& option : asked) flags.push_back({option.name, option.value, option.help});
  return flags;
}

LOCKSTEP_INLINE void add_flag_lines(std::string& lines, std::span<const Flag> flags) {
  for (const Flag& flag : flags) {
    std::string left = text({"  ", flag.name, flag.value.empty() ? "" : " ", flag.value});
    left.resize(std::max<std::size_t>(left.size() + 2, 26), ' ');
    left += flag.help;
    lines += text({left.substr(0, left.find_last_not_of(' ') + 1), "\n"});
  }
}

LOCKSTEP_INLINE std::string help_text(std::string_view program, std::span<const Flag> others,
                                      const std::vector<ProgramOptions::Asked>& asked,
                                      std::string_view note) {
  program.remove_prefix(program.find_last_of('/') + 1);
  std::string lines = text({"usage: ", program, " [OPTIONS] [ARGUMENTS]\n"});
  if (!asked.empty()) {
    lines += "\nOptions of this program:\n";
    add_flag_lines(lines, flags_of(asked));
  }
  if (!note.empty()) lines += text({"\n", note, "\n"});
  lines += text({"\nOptions of lockstep ", version, ", which starts the ranks of this program:\n"});
  add_flag_lines(lines, others);
  add_flag_lines(lines, launch_flags);
  return lines +
         "\nAll other arguments are the program's own, and so is everything behind --.\n"
         "torchrun, mpirun and srun may start the ranks instead.\n";
}

}  // namespace detail

LOCKSTEP_INLINE ProgramOptions::ProgramOptions(const std::vector<std::string>& words, bool speaks,
                                               bool asks_for_help)
    : left_(words), speaks_(speaks), asks_for_help_(asks_for_help), is_launched_(true) {
  const auto first = left_.begin() + (left_.empty() ? 0 : 1);
  const auto dashes = std::find(first, left_.end(), "--");
  behind_ = static_cast<std::size_t>(dashes - left_.begin());
  if (dashes != left_.end()) left_.erase(dashes);
}

LOCKSTEP_INLINE ProgramOptions::ProgramOptions(int argc, char** argv)
    : ProgramOptions(std::vector<std::string>(argv, argv + argc), true) {
  is_launched_ = false;
  for (std::size_t i = 1; i < behind_; ++i) {
    if (left_[i] != "--help") continue;
    asks_for_help_ = true;
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(i--));
    --behind_;
  }
}

LOCKSTEP_INLINE bool ProgramOptions::finish() {
  if (!asks_for_help_) {
    close();
    return false;
  }
  std::string_view program = left_.empty() ? "program" : std::string_view(left_[0]);
  program.remove_prefix(program.find_last_of('/') + 1);
  std::string lines = detail::text({"usage: ", program, " [OPTIONS]\n\nOptions:\n"});
  detail::add_flag_lines(lines, detail::flags_of(asked_));
  const detail::Flag help{"--help", "", "print this text"};
  detail::add_flag_lines(lines, {&help, 1});
  std::fputs(lines.c_str(), stdout);
  std::fflush(stdout);
  return true;
}

LOCKSTEP_INLINE void ProgramOptions::refuse(std::initializer_list<detail::Word> problem,
                                            std::string_view advice) {
  const Error error("launch", detail::text(problem), advice);
  // All ranks have the same command line, and one of them says what is wrong with it.
  throw speaks_ ? error : error.as_consequence();
}

LOCKSTEP_INLINE void ProgramOptions::refuse_value(std::string_view name, std::string_view value,
                                                  std::string_view advice) {
  refuse({detail::dashed(name), " is '", value, "'"}, advice);
}

LOCKSTEP_INLINE std::optional<std::string_view> ProgramOptions::ask(std::string_view name,
                                                                    std::string_view value,
                                                                    std::string_view otherwise,
                                                                    std::string_view help,
                                                                    const bool& /*is_noted*/) {
  const std::string dashed = detail::dashed(name);
  const auto is_asked = [&](const Asked& option) { return option.name == dashed; };
  auto known = std::find_if(asked_.begin(), asked_.end(), is_asked);
  if (known == asked_.end()) {
    if (name.empty() || name[0] == '-' || name.find_first_of("= ") != std::string_view::npos) {
      refuse({"an option cannot be called '", name, "'"},
             "name it without dashes, as in option(\"epochs\", 8)");
    }
    if (detail::find_flag(dashed, reserved_) != nullptr || dashed == "--help" ||
        (is_launched_ && detail::find_flag(dashed, detail::launch_flags) != nullptr)) {
      refuse({"the program asks for ", dashed, ", which is an option of lockstep's own"},
             "give the program's another name");
    }
    if (is_closed_) {
      refuse({"the program asks for ", dashed, " when ranks are already at work"},
             "ask for all options first: before the job's first operation, and before the session "
             "makes its first group");
    }
    std::string text(help);
    if (!otherwise.empty()) text += detail::text({text.empty() ? "(" : " (", otherwise, ")"});
    asked_.push_back({dashed, std::string(value), std::move(text)});
    known = asked_.end() - 1;
    known->given = find(dashed, !value.empty(), otherwise);
  }
  const std::optional<std::string>& given = known->given;
  return given ? std::optional<std::string_view>(*given) : std::nullopt;
}

LOCKSTEP_INLINE std::optional<std::string> ProgramOptions::find(const std::string& name,
                                                                bool has_value,
                                                                std::string_view otherwise) {
  std::optional<std::string> given;
  for (std::size_t i = 1; i < left_.size(); ++i) {
    if (detail::flag_name(left_[i]) != name) continue;
    if (given) refuse({name, " is given twice"}, "give it once");
    const std::size_t equals = left_[i].find('=');
    std::size_t words = 1;
    if (equals != std::string::npos) {
      given = left_[i].substr(equals + 1);
    } else if (!has_value) {
      given = "true";
    } else if (i + 1 == left_.size() || i + 1 == behind_ || left_[i + 1].starts_with("--")) {
      const std::string_view example = otherwise.empty() ? "VALUE" : otherwise;
      refuse({name, " has no value"}, detail::text({"give it one, as in ", name, " ", example}));
    } else {
      given = left_[i + 1];
      words = 2;
    }
    const auto first = left_.begin() + static_cast<std::ptrdiff_t>(i);
    left_.erase(first, first + static_cast<std::ptrdiff_t>(words));
    if (i < behind_) behind_ -= words;
    --i;
  }
  return given;
}

LOCKSTEP_INLINE std::vector<std::string> ProgramOptions::take(std::span<const detail::Flag> flags) {
  if (takers_++ == 0) reserved_.assign(flags.begin(), flags.end());
  if (taken_.empty() && !left_.empty()) taken_.push_back(left_[0]);
  const std::vector<std::string_view> front(left_.begin(),
                                            left_.begin() + static_cast<std::ptrdiff_t>(behind_));
  detail::CutArguments cut = detail::cut_arguments(front, flags);
  for (const auto& [name, value] : cut.given) {
    const bool has_value = !detail::find_flag(name, flags)->value.empty();
    taken_.push_back(detail::text({name, has_value ? "=" : "", value}));
  }
  std::vector<std::string> left = std::move(cut.rest);
  const std::size_t behind = left.size();
  left.insert(left.end(), left_.begin() + static_cast<std::ptrdiff_t>(behind_), left_.end());
  left_ = std::move(left);
  behind_ = behind;
  return taken_;
}

LOCKSTEP_INLINE void ProgramOptions::end(Readers readers) {
  is_closed_ = true;
  if (asks_for_help_) {
    if (std::uncaught_exceptions() == 0) throw detail::HelpAsked();
    return;  // a destructor calls, on the way out
  }
  is_checked_ = readers == Readers::all;
  if (is_read_ && asked_.empty()) return;  // the program knows what its words mean
  for (std::size_t i = 1; i < left_.size(); ++i) {
    const bool is_option = i < behind_ && left_[i].size() > 2 && left_[i].starts_with("--");
    if (readers == Readers::some && is_option) {
      // A job that is made later reads it.
      const std::string name = detail::flag_name(left_[i]);
      const auto* flag = detail::find_flag(name, detail::ProgramTraits::get().flags);
      if (flag != nullptr) {
        if (!flag->value.empty() && left_[i].find('=') == std::string::npos) ++i;
        continue;
      }
    }
    if (is_option) refuse_unknown(left_[i]);
    // Programs with a session alone often read words late, or read `argv` themselves.
    const bool has_readers = is_left_ || !asked_.empty();
    if (readers == Readers::all && has_readers && !is_read_) {
      refuse({"nothing in this program reads '", left_[i], "'"},
             "leave it out; --help prints the options. A program that reads its own arguments "
             "calls arguments() of its session or job first");
    }
  }
}

LOCKSTEP_INLINE void ProgramOptions::refuse_unknown(const std::string& word) {
  std::vector<detail::Flag> known = detail::flags_of(asked_);
  std::string names;
  for (const detail::Flag& flag : known)
    names += detail::text({names.empty() ? "" : ", ", flag.name});
  known.insert(known.end(), reserved_.begin(), reserved_.end());
  const std::string name = detail::flag_name(word);
  const std::string_view meant = detail::meant_flag(name, known);
  const std::string_view written = std::string_view(word).substr(0, word.find('='));
  if (!meant.empty()) {
    refuse({"there is no option ", written}, detail::text({"did you mean ", meant, "?"}));
  }
  if (!names.empty()) {
    refuse({"there is no option ", written},
           detail::text({"this program has ", names, "; --help prints all"}));
  }
  refuse({"there is no option ", written},
         "this program has none of its own, and --help prints those of lockstep. A program that "
         "reads its own arguments calls arguments() of its session or job first");
}

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Options of the command line: those that lockstep takes, and those of the program's own,
/// `job.option("epochs", 8)`.

#include <charconv>
#include <exception>
#include <iterator>
#include <limits>
#include <system_error>

#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep {

namespace detail {

/// An option that lockstep takes.
struct Flag {
  std::string_view name;   // with its dashes
  std::string_view value;  // the word for its value; empty where it has none
  std::string_view help;
};

/// The options of every launched program.
inline constexpr Flag launch_flags[] = {
    {"--ranks", "N", "ranks on this host; with ParallelStrategy<DP>, replicas in this process"},
    {"--rendezvous", "HOST:PORT",
     "under mpirun and srun: the host of rank 0 and a free port there"},
    {"--timeout", "SECONDS", "how long ranks wait for each other (300); also LOCKSTEP_TIMEOUT"},
    {"--max-restarts", "N", "start all ranks again after a failure, up to N times (0)"},
    {"--progress", "STYLE", "auto, bar, lines or none (auto); also LOCKSTEP_PROGRESS"},
    {"--local-rank", "N", "passed by some launchers; compared with what they say otherwise"},
    {"--help", "", "print this text"},
    {"--version", "", "print the version of lockstep"},
};

/// An option that the program has asked for.
struct AskedOption {
  std::string name;   // with its dashes
  std::string value;  // the word for its value; empty where it has none
  std::string help;
  std::optional<std::string> given{};
};

/// The answer to `--help`. `others` are options of lockstep beside the launcher's.
std::string help_text(std::string_view program, std::span<const Flag> others,
                      const std::vector<AskedOption>& asked, std::string_view note = {});

/// A command line in its parts.
struct CutArguments {
  struct Given {
    std::string_view name;  // as its flag has it
    std::string_view value;
  };
  std::vector<Given> given;
  std::vector<std::string> rest;  // the program's name first
};

/// Takes `flags` out of a program's arguments: `--ranks 4` and `--ranks=4` alike, and underscores
/// for hyphens. Everything else stays, with `others`, which another part of lockstep takes later,
/// and everything from `--` on. An option that is given twice is an error; so is one that looks
/// like a misspelt option of either list.
CutArguments cut_arguments(std::span<const std::string_view> arguments, std::span<const Flag> flags,
                           std::span<const Flag> others = {});

/// The option that somebody who wrote `name` has meant, or nothing.
std::string_view meant_flag(std::string_view name, std::span<const Flag> flags);

/// An argument's name as flags are spelt: without a value, and with hyphens.
std::string flag_name(std::string_view argument);

const Flag* find_flag(std::string_view name, std::span<const Flag> flags);

struct LaunchOptions {
  std::optional<std::size_t> ranks;  // on this host
  /// How many of them are threads of one process: all of them; nothing where each is a process.
  std::optional<std::size_t> threads;
  std::optional<Endpoint> rendezvous;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<ProgressStyle> progress;
  std::optional<std::size_t> local_rank;
  /// How often all ranks are started again after a failure.
  std::size_t max_restarts = 0;
  /// The number of the `launch` call in its process, from 1.
  std::size_t launch_number = 1;
  /// The program's own, its name first.
  std::vector<std::string> rest;
};

/// `job_flags` are options that stay among the rest, for the job.
LaunchOptions parse_options(int argc, char** argv, std::span<const Flag> job_flags = {});

/// Thrown on the ranks of a program that runs only so that `--help` learns its options, when it has
/// asked for all of them. It is no failure, and handlers of errors let it pass.
class HelpAsked : public std::exception {
 public:
  const char* what() const noexcept override { return "--help"; }

 private:
  HarmlessMark mark_;
};

/// What the whole program is known to read before `main` begins.
struct ProgramTraits {
  bool has_options = false;       ///< some function of it calls `option`
  std::span<const Flag> flags{};  ///< those that its jobs read

  static ProgramTraits& get() {
    static ProgramTraits traits;
    return traits;
  }
};

/// Whoever uses this variable says that the program asks for options. Its initialiser runs before
/// `main`, so `--help` runs no function of a program that has no options to tell.
template <class>
inline const bool program_has_options = ProgramTraits::get().has_options = true;

template <class T>
concept OptionText = std::convertible_to<T, std::string_view>;
/// An option is a number, a bool (`--verbose`), or a text.
template <class T>
concept OptionType =
    OptionText<T> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t> &&
     !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t>);

/// The shortest text that reads as this number.
template <class Number>
std::string number_text(Number number) {
  char digits[64];
  return {digits, std::to_chars(digits, std::end(digits), number).ptr};
}

/// The number that a text is, if it is one, of its type's range.
template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number number{};
  const char* const last = text.data() + text.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(text.data(), last, number);
  // The difference of a number that is not finite is not a number.
  if (error != std::errc{} || end != last || number - number != 0) return std::nullopt;
  return number;
}

}  // namespace detail

/// The command line of a program without what lockstep takes of it. `launch` makes one for each
/// rank, behind `session.option` and `job.option`; a program that launches nothing makes its own:
///
///     ProgramOptions options(argc, argv);
///     const auto replicas = options.option("replicas", 0u, "0: one for each core");
///     if (options.finish()) return 0;  // --help
class ProgramOptions {
 public:
  /// Who asks what is left: a first use of the session, which jobs may follow, or all that follow.
  enum class Readers : std::uint8_t { some, all };

  ProgramOptions() = default;
  /// Of a program that launches nothing.
  ProgramOptions(int argc, char** argv);
  /// `words` are the program's name, what the launcher has left, and `--` where it was given.
  /// `speaks` is false on ranks whose errors others print as well.
  ProgramOptions(const std::vector<std::string>& words, bool speaks, bool asks_for_help = false);

  /// The value of `--name VALUE` or `--name=VALUE`, or `otherwise`. Its type is that of
  /// `otherwise`: a number, which is checked against the type's range; a bool, `--name` or
  /// `--name=false`; a text, which is a `std::string`. `help` is shown by `--help`. An error names
  /// the option, its value and what is expected.
  template <class T>
  auto option(std::string_view name, T otherwise, std::string_view help = {}) {
    static_assert(detail::OptionType<T>,
                  "lockstep: an option is a number, a bool or a text; give it a default value of "
                  "such a type: option(\"epochs\", 8)");
    if constexpr (detail::OptionText<T>) {
      const std::string_view text = otherwise;
      return std::string(
          ask(name, "TEXT", text, help, detail::program_has_options<T>).value_or(text));
    } else if constexpr (std::same_as<T, bool>) {
      const auto text =
          ask(name, "", otherwise ? "true" : "", help, detail::program_has_options<T>);
      if (!text) return otherwise;
      if (*text != "true" && *text != "false") refuse_value(name, *text, "give it true or false");
      return *text == "true";
    } else if constexpr (detail::OptionType<T>) {
      constexpr bool is_whole = std::integral<T>;
      const auto text = ask(name, is_whole ? "N" : "X", detail::number_text(otherwise), help,
                            detail::program_has_options<T>);
      if (!text) return otherwise;
      const auto number = detail::number_of<T>(*text);
      if (number) return *number;
      if constexpr (is_whole) {
        using Limits = std::numeric_limits<T>;
        refuse_value(
            name, *text,
            detail::text({"give it a whole number from ", Limits::min(), " to ", Limits::max()}));
      }
      refuse_value(name, *text, "give it a number");
    } else {
      return otherwise;
    }
  }

  /// The words that no option has taken, the program's name first.
  const std::vector<std::string>& arguments() const {
    is_read_ = true;
    return left_;
  }

  /// Ends the asking in a program that launches nothing: what nobody has asked for is an error.
  /// True where `--help` was given and is answered.
  bool finish();

  /// Ends the asking: what nobody has asked for is an error. A program that has asked for no option
  /// and has called `arguments` reads its own words, and nothing is.
  void close(Readers readers = Readers::all) {
    if (!is_closed_ || asks_for_help_ || (!is_checked_ && readers == Readers::all)) end(readers);
  }
  /// From now on a job ends the asking, at its first operation.
  void leave_to_job() { is_left_ = true; }
  bool is_left_to_job() const { return is_left_; }

  /// Takes a job's options out of the words. Returns the program's name and all that jobs have
  /// taken by now. No option of the program may have one of their names then.
  std::vector<std::string> take(std::span<const detail::Flag> flags);
  /// How many jobs have taken theirs.
  std::size_t takers() const { return takers_; }

  bool asks_for_help() const { return asks_for_help_; }
  const std::vector<detail::AskedOption>& asked() const { return asked_; }
  /// Is this the rank whose errors are printed?
  bool speaks() const { return speaks_; }

 private:
  std::optional<std::string_view> ask(std::string_view name, std::string_view value,
                                      std::string_view otherwise, std::string_view help,
                                      const bool& is_noted);
  std::optional<std::string> find(const std::string& name, bool has_value,
                                  std::string_view otherwise);
  void end(Readers readers);
  [[noreturn]] void refuse(std::initializer_list<detail::Word> problem, std::string_view advice);
  [[noreturn]] void refuse_value(std::string_view name, std::string_view value,
                                 std::string_view advice);
  [[noreturn]] void refuse_unknown(const std::string& word);

  std::vector<std::string> left_;   // without `--`
  std::size_t behind_ = 0;          // where the words begin that stood behind `--`
  std::vector<std::string> taken_;  // by jobs
  std::vector<detail::AskedOption> asked_;
  std::vector<detail::Flag> reserved_;
  std::size_t takers_ = 0;
  bool speaks_ = true;
  bool asks_for_help_ = false;
  bool is_closed_ = false;
  bool is_checked_ = false;  // all words were
  bool is_left_ = false;
  bool is_launched_ = false;
  mutable bool is_read_ = false;
};

}  // namespace lockstep

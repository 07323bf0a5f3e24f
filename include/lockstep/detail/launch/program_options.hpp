// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Command-line options: lockstep's, and the program's own, `job.option("epochs", 8)`.

#include <iterator>
#include <limits>

#include "lockstep/detail/core/scope_guard.hpp"
#include "lockstep/detail/core/terminal.hpp"
#include "lockstep/detail/core/text.hpp"

namespace lockstep {

namespace detail {

struct Flag {
  std::string_view name;   // with its dashes
  std::string_view value;  // a placeholder for its value; empty where it has none
  std::string_view help;
};

inline constexpr Flag launch_flags[] = {
    {"--ranks", "N",
     "ranks on this host, or gpu, cpu or auto: one for each (ParallelStrategy<DP>: replicas)"},
    {"--devices", "0,2,5", "the GPUs of this host's ranks, in their order; also LOCKSTEP_DEVICES"},
    {"--rendezvous", "HOST:PORT",
     "under mpirun and srun: the host of rank 0 and a free port there"},
    {"--timeout", "SECONDS", "how long ranks wait for each other (300); also LOCKSTEP_TIMEOUT"},
    {"--max-restarts", "N", "start all ranks again after a failure, up to N times (0)"},
    {"--flight-recorder", "DIR",
     "after a fault or SIGUSR2, ranks write their last collectives there; also "
     "LOCKSTEP_FLIGHT_RECORDER"},
    {"--progress", "STYLE", "auto, bar, lines or none (auto); also LOCKSTEP_PROGRESS"},
    {"--local-rank", "N", "passed by some launchers; compared with what they say otherwise"},
    {"--help", "", "print this text"},
    {"--version", "", "print the version of lockstep"},
};

/// An option that the program has asked for; fields as in `Flag`.
struct AskedOption {
  std::string name;
  std::string value;
  std::string help;
  std::optional<std::string> given{};
};

/// The output of `--help`. `others` are options of lockstep other than the launcher's.
std::string help_text(std::string_view program, std::span<const Flag> others,
                      const std::vector<AskedOption>& asked, std::string_view note = {});

struct CutArguments {
  /// The names of flags, and their values.
  std::vector<std::pair<std::string_view, std::string_view>> given;
  std::vector<std::string> rest;  // the program's name first
};

/// Extracts `flags` (`--ranks 4`, `--ranks=4`, with `_` or `-`); the rest keeps `others`, for the
/// job, and everything from `--` on. Duplicates and likely misspellings of either list are errors.
CutArguments cut_arguments(std::span<const std::string_view> arguments, std::span<const Flag> flags,
                           std::span<const Flag> others = {});

/// The option of which `name` is a likely misspelling or another launcher's name; empty if none.
std::string_view meant_flag(std::string_view name, std::span<const Flag> flags);

/// An argument's name without its value, and with hyphens.
std::string flag_name(std::string_view argument);

const Flag* find_flag(std::string_view name, std::span<const Flag> flags);

/// Parses a number, `gpu`, `cpu` or `auto`. `devices` are the chosen GPUs, empty for all. Returns
/// also what has a rank each where it is a word: "GPU".
std::pair<std::size_t, std::string_view> parse_ranks(std::string_view name, std::string_view value,
                                                     std::span<const std::size_t> devices = {});

struct LaunchOptions {
  std::optional<std::size_t> ranks;    // on this host
  std::vector<std::size_t> devices;    // of the ranks on this host; empty: the first ones
  std::string counted;                 // what `--ranks` has come to, where it is a word
  std::optional<std::size_t> threads;  // `ranks`, if they are threads of one process
  std::optional<Endpoint> rendezvous;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<ProgressStyle> progress;
  std::optional<std::size_t> local_rank;
  std::size_t max_restarts = 0;
  std::size_t launch_number = 1;  // of the `launch` call in this process
  std::vector<std::string> rest;  // the program's name and its own arguments
};

/// `job_flags` are options that stay in `rest`, for the job.
LaunchOptions parse_options(int argc, char** argv, std::span<const Flag> job_flags = {});

/// Ends a program that runs only for `--help`, once it has asked for all options. It is no failure.
class HelpAsked : public std::exception {
 public:
  const char* what() const noexcept override { return "--help"; }

 private:
  HarmlessMark mark_;
};

/// The options of the program's jobs, known before `main`.
inline constinit std::span<const Flag> program_job_flags{};

/// Does some function of the program call `option`? `--help` does not run a program without any.
inline constinit bool program_calls_option = false;
/// A use of this variable records it before `main`.
template <class>
inline const bool program_has_options = program_calls_option = true;

template <class T>
concept OptionText = std::convertible_to<T, std::string_view>;
/// A number, a bool (`--verbose`), or a text.
template <class T>
concept OptionType =
    OptionText<T> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t> &&
     !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t>);

/// The type that a number of type T is printed and read as.
template <class T>
using WideNumber =
    std::conditional_t<std::floating_point<T>,
                       std::conditional_t<std::same_as<T, float>, float, double>,
                       std::conditional_t<std::signed_integral<T>, std::int64_t, std::uint64_t>>;

}  // namespace detail

/// The command line without lockstep's options. `launch` makes one for each rank, behind
/// `session.option` and `job.option`; a program that launches nothing makes its own:
///
///     ProgramOptions options(argc, argv);
///     const auto replicas = options.option("replicas", 0u, "0: one for each core");
///     if (options.finish()) return 0;  // --help
class ProgramOptions {
 public:
  /// `some`: jobs that are made later may still read options. `all`: none will.
  enum class Readers : std::uint8_t { some, all };

  ProgramOptions() = default;
  /// For a program that launches nothing.
  ProgramOptions(int argc, char** argv);
  /// The program's name, what the launcher left and `--`. `speaks`: this rank prints its errors.
  ProgramOptions(const std::vector<std::string>& arguments, bool speaks,
                 bool asks_for_help = false);

  /// The value of `--name VALUE` or `--name=VALUE`, or `otherwise`, whose type decides: a number,
  /// checked against the type's range; a bool, `--name` or `--name=false`; or a text, as
  /// `std::string`. Errors name the option, its value and what is expected; `--help` shows `help`.
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
      if (*text != "true" && *text != "false") reject_value(name, *text, "give it true or false");
      return *text == "true";
    } else if constexpr (detail::OptionType<T>) {
      constexpr bool is_whole = std::integral<T>;
      auto number = static_cast<detail::WideNumber<T>>(otherwise);
      const auto text = ask(name, is_whole ? "N" : "X", detail::number_text(number), help,
                            detail::program_has_options<T>);
      const bool is_number = !text || detail::read_number(*text, number);
      if constexpr (is_whole) {
        if (is_number && std::in_range<T>(number)) return static_cast<T>(number);
        using Limits = std::numeric_limits<T>;
        reject_value(
            name, *text,
            detail::text({"give it a whole number from ", Limits::min(), " to ", Limits::max()}));
      }
      if (is_number) return static_cast<T>(number);
      reject_value(name, *text, "give it a number");
    } else {
      return otherwise;
    }
  }

  /// The program's name and the arguments that no option has taken.
  const std::vector<std::string>& arguments() const {
    is_read_ = true;
    return left_;
  }

  /// For a program that launches nothing: `close`, or true after printing what `--help` asked for.
  bool finish();

  /// Unread arguments are now errors, unless the program has no options and has called `arguments`.
  void close(Readers readers = Readers::all) {
    if (!is_closed_ || asks_for_help_ || (!is_checked_ && readers == Readers::all)) end(readers);
  }
  /// From now on the job's first operation calls `close`.
  void leave_to_job() { is_left_ = true; }
  bool is_left_to_job() const { return is_left_; }

  /// Extracts and reserves a job's options. Returns the program's name and all that jobs took.
  std::vector<std::string> take(std::span<const detail::Flag> flags);
  std::size_t takers() const { return takers_; }

  bool asks_for_help() const { return asks_for_help_; }
  const std::vector<detail::AskedOption>& asked() const { return asked_; }
  bool speaks() const { return speaks_; }

 private:
  std::optional<std::string_view> ask(std::string_view name, std::string_view value,
                                      std::string_view otherwise, std::string_view help,
                                      const bool& is_noted);
  std::optional<std::string> find(const std::string& name, bool has_value,
                                  std::string_view otherwise);
  void end(Readers readers);
  [[noreturn]] void reject(std::initializer_list<detail::TextPart> problem,
                           std::string_view advice);
  [[noreturn]] void reject_value(std::string_view name, std::string_view value,
                                 std::string_view advice);
  [[noreturn]] void reject_unknown(const std::string& argument);

  std::vector<std::string> left_;   // without `--`
  std::size_t behind_ = 0;          // the index of the first argument after `--`
  std::vector<std::string> taken_;  // by jobs
  std::vector<detail::AskedOption> asked_;
  std::vector<detail::Flag> reserved_;
  std::size_t takers_ = 0;
  bool speaks_ = true;
  bool asks_for_help_ = false;
  bool is_closed_ = false;
  bool is_checked_ = false;  // all arguments, by `Readers::all`
  bool is_left_ = false;
  bool is_launched_ = false;
  mutable bool is_read_ = false;
};

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder.

#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <system_error>
#include <tuple>

#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/core/terminal.hpp"
#include "lockstep/detail/core/thread.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::pair<std::uint64_t, std::chrono::nanoseconds> read_clocks() {
  return {ticks_now(), std::chrono::steady_clock::now().time_since_epoch()};
}
/// At the program's start, as the scale's first point.
inline const auto first_reading = read_clocks();

LOCKSTEP_INLINE TickScale::TickScale() : ticks_(first_reading.first), time_(first_reading.second) {
  auto [ticks, time] = first_reading;
  while (time - time_ < std::chrono::milliseconds(10))  // for a precise rate
    std::tie(ticks, time) = read_clocks();
  period_ = static_cast<double>((time - time_).count()) / static_cast<double>(ticks - ticks_);
}

LOCKSTEP_INLINE void TextPart::append_to(std::string& out) const {
  if (!is_number_) {
    out.append(text_, number_);
    return;
  }
  char digits[20];
  if (is_negative_) out += '-';
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number_).ptr);
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

LOCKSTEP_INLINE std::string text(std::initializer_list<TextPart> parts) {
  std::string all;
  for (const TextPart& part : parts) part.append_to(all);
  return all;
}

LOCKSTEP_INLINE std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t shown = 16;
  std::string list;
  for (std::size_t i = 0; i < names.size() && i < shown; ++i)
    list += text({i == 0 ? "" : ", ", names[i]});
  if (names.size() > shown) list += text({" and ", names.size() - shown, " more"});
  return list;
}

template <class Number>
std::string digits_of(Number number) {
  char digits[64];
  return {digits, std::to_chars(digits, std::end(digits), number).ptr};
}
LOCKSTEP_INLINE std::string number_text(float number) { return digits_of(number); }
LOCKSTEP_INLINE std::string number_text(double number) { return digits_of(number); }

LOCKSTEP_INLINE void fail_value(std::string_view name, std::string_view value,
                                std::string_view advice) {
  fail("launch", {name, " is '", value, "'"}, advice);
}

LOCKSTEP_INLINE std::size_t parse_number(std::string_view name, std::string_view text) {
  std::size_t number = 0;
  if (!read_number(text, number)) fail_value(name, text, "give it a number, in digits only");
  return number;
}

LOCKSTEP_INLINE std::uint16_t parse_port(std::string_view name, std::string_view text) {
  const std::size_t port = parse_number(name, text);
  if (port == 0 || port > 65535) fail_value(name, text, "give it a port, from 1 to 65535");
  return static_cast<std::uint16_t>(port);
}

LOCKSTEP_INLINE std::chrono::milliseconds parse_seconds(std::string_view name,
                                                        std::string_view text) {
  double seconds = 0;
  if (!read_number(text, seconds) || !(seconds > 0) || seconds > 1e9) {
    fail_value(name, text, "give it a number of seconds above 0");
  }
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

LOCKSTEP_INLINE Endpoint parse_endpoint(std::string_view name, std::string_view text) {
  const std::size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (colon == std::string_view::npos || host.empty() ||
      (!bracketed && host.find(':') != std::string_view::npos)) {
    fail_value(name, text, "give it as host:port, IPv6 addresses in brackets");
  }
  return {host == "localhost" ? "127.0.0.1" : std::string(host),
          parse_port(name, text.substr(colon + 1))};
}

LOCKSTEP_INLINE std::string clock_text(double seconds) {
  if (!(seconds < 1e9)) return "?";
  const auto total = static_cast<std::uint64_t>(seconds > 0 ? std::llround(seconds) : 0);
  const std::uint64_t minutes = total / 60;
  const std::string rest = detail::text({100 + total % 60}).substr(1);
  if (minutes < 60) return detail::text({minutes, ":", rest});
  return detail::text({minutes / 60, ":", detail::text({100 + minutes % 60}).substr(1), ":", rest});
}

LOCKSTEP_INLINE std::string error_message(std::string_view operation, std::string_view problem,
                                          std::string_view advice, std::optional<Rank> rank) {
  std::string message = "lockstep: ";
  if (rank) message += text({"rank ", *rank, operation.empty() ? ": " : ", "});
  if (operation.empty()) {
    message += problem;
  } else {
    message += text({operation, ": ", problem, "; ", advice});
  }
  // Control characters in names would garble a message; newlines are in other libraries' messages.
  return printable(message, "\n\t");
}

LOCKSTEP_INLINE void fail(std::string_view operation, std::initializer_list<TextPart> problem,
                          std::string_view advice, std::optional<Rank> rank) {
  throw Error(operation, text(problem), advice, rank);
}

LOCKSTEP_INLINE void fail_check(std::string_view advice, const char* file, int line) {
  throw Error(text({file, ":", line}), "a condition does not hold", advice);
}

LOCKSTEP_INLINE std::string signal_name(int signal) {
  switch (signal) {
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return text({"signal ", signal});
  }
}

LOCKSTEP_INLINE Error error_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {"", error.what(), ""};
  } catch (...) {
    return {"", "an exception that is no std::exception", ""};
  }
}

LOCKSTEP_INLINE void print_error(const Error& error) {
  std::fputs(text({error.what(), "\n"}).c_str(), stderr);
}

/// Calls `f` with the number of `LateFailures` in this process and the failures that none took.
LOCKSTEP_INLINE void with_late_failures(FunctionRef<void(std::size_t&, std::vector<Error>&)> f) {
  static std::mutex mutex;
  static std::size_t listeners = 0;
  // Never destroyed, because destructors of static objects report failures too.
  static std::vector<Error>& failures = *new std::vector<Error>;
  const std::lock_guard lock(mutex);
  f(listeners, failures);
}

LOCKSTEP_INLINE void report_late_failure(const std::exception_ptr& thrown,
                                         std::optional<Rank> rank) noexcept try {
  const Error failure = with_rank(error_of(thrown), rank);
  with_late_failures([&](std::size_t listeners, std::vector<Error>& failures) {
    if (listeners == 0) return print_error(failure);
    failures.push_back(failure);
  });
} catch (...) {
  std::fputs("lockstep: a failure at the end of a job, and no memory to say which\n", stderr);
}

LOCKSTEP_INLINE LateFailures::LateFailures() {
  with_late_failures([](std::size_t& listeners, auto&) { ++listeners; });
}

LOCKSTEP_INLINE LateFailures::~LateFailures() {
  with_late_failures([](std::size_t& listeners, std::vector<Error>& failures) {
    if (--listeners != 0) return;
    for (const Error& failure : std::exchange(failures, {})) print_error(failure);
  });
}

LOCKSTEP_INLINE std::optional<Error> LateFailures::take() {
  std::optional<Error> first;
  with_late_failures([&](std::size_t, std::vector<Error>& failures) {
    if (failures.empty()) return;
    first = std::move(failures.front());
    failures.erase(failures.begin());
  });
  return first;
}

LOCKSTEP_INLINE void sleep_for(std::chrono::nanoseconds time) {
  const auto second = std::chrono::duration_cast<std::chrono::seconds>(time);
  timespec left{second.count(), (time - second).count()};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

LOCKSTEP_INLINE std::vector<std::size_t> allowed_cpus() {
  std::array<cpu_set_t, 8> sets{};  // room for 8192 cores
  std::vector<std::size_t> cpus;
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return cpus;
  for (std::size_t cpu = 0; cpu != sizeof sets * 8; ++cpu)
    if (CPU_ISSET_S(cpu, sizeof sets, sets.data())) cpus.push_back(cpu);
  return cpus;
}

LOCKSTEP_INLINE std::size_t core_count() { return std::max<std::size_t>(allowed_cpus().size(), 1); }

LOCKSTEP_INLINE std::size_t count_paths(const char* pattern) {
  glob_t found{};
  ::glob(pattern, GLOB_NOSORT, nullptr, &found);
  const std::size_t count = found.gl_pathc;
  ::globfree(&found);
  return count;
}

LOCKSTEP_INLINE bool has_other_threads() { return count_paths("/proc/self/task/*") != 1; }

LOCKSTEP_INLINE bool has_free_core(std::size_t busy) {
  const std::size_t mine = core_count();
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const std::size_t all = online > 0 ? std::max(static_cast<std::size_t>(online), mine) : mine;
  return mine > (busy * mine + all - 1) / all;
}

LOCKSTEP_INLINE void fail_to_start(const char* what, const char* problem) {
  fail("starting a thread", {what, " cannot be started: ", problem},
       "raise the limit on processes and threads (`ulimit -u`, or the pids limit of the container "
       "or cgroup), or let fewer run here");
}

LOCKSTEP_INLINE void Thread::start(ThreadName name, Signals signals, void* body,
                                   void* (*run)(void*)) {
  const auto create = [&] { return ::pthread_create(&thread_, nullptr, run, body); };
  const int error = signals == Signals::blocked ? without_signals(create) : create();
  if (error != 0) fail_to_start(name.description, std::strerror(error));
  is_running_ = true;
  ::pthread_setname_np(thread_, name.short_name);
}

LOCKSTEP_INLINE void TaskQueue::post(Task& task) {
  const std::lock_guard lock(mutex_);
  // The thread comes first: a task must not stay in the queue if its thread cannot be started.
  if (!thread_.is_running()) [[unlikely]] {
    thread_ = Thread(
        name_, [this] { run(); }, [](const std::exception_ptr&) {});  // tasks store their errors
  }
  (first_ == nullptr ? first_ : last_->next) = &task;
  last_ = &task;
  changed_.notify_all();
}

LOCKSTEP_INLINE void TaskQueue::wait_quietly(const Task& task) const noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return task.is_over; });
}

LOCKSTEP_INLINE void TaskQueue::drain() const noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return first_ == nullptr; });
}

LOCKSTEP_INLINE void TaskQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || first_ != nullptr; });
    if (first_ == nullptr) return;
    Task& task = *first_;
    lock.unlock();
    std::exception_ptr error;
    try {
      task.run(task);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    first_ = task.next;
    task.error = error;
    task.is_over = true;  // from here on its owner may destroy it
    changed_.notify_all();
  }
}

LOCKSTEP_INLINE std::string seconds_text(std::chrono::milliseconds limit) {
  if (limit.count() % 1000 == 0) return text({limit.count() / 1000, " s"});
  std::string fraction = text({1000 + limit.count() % 1000});
  fraction.erase(fraction.find_last_not_of('0') + 1);
  return text({limit.count() / 1000, ".", fraction.substr(1), " s"});
}

LOCKSTEP_INLINE std::string folder_of(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(path.substr(0, slash == 0 ? 1 : slash));
}

/// Advice for some errno values; `FOLDER` stands for the folder of the file.
using FileAdvice = std::pair<std::array<int, 3>, std::string_view>;

/// Throws with the first matching advice; the last entry is for all other errors.
[[noreturn]] LOCKSTEP_INLINE void fail_file(std::string_view operation, std::string_view path,
                                            std::string_view problem, int error,
                                            std::span<const FileAdvice> all) {
  const auto fits = [&](const FileAdvice& one) {
    return std::ranges::count(one.first, error) != 0;
  };
  std::string advice(std::ranges::find_if(all.first(all.size() - 1), fits)->second);
  if (const std::size_t at = advice.find("FOLDER"); at != std::string::npos)
    advice.replace(at, 6, folder_of(path));
  fail(operation, {"'", path, "' cannot be ", problem, ": ", error_text(error)}, advice);
}

LOCKSTEP_INLINE void fail_writing(std::string_view operation, std::string_view path, int error) {
  static constexpr FileAdvice advice[] = {
      {{ENOSPC, EDQUOT},
       "make room there, or save to another folder; what was saved before is untouched"},
      {{EROFS}, "mount 'FOLDER' so that it may be written, or save to another folder"},
      {{ENOENT}, "make the folder first: mkdir -p 'FOLDER'"},
      {{ENOTDIR}, "'FOLDER' is no folder: name one"},
      {{EISDIR}, "name a file, not a folder"},
      {{EACCES, EPERM}, "let this user write in 'FOLDER', or save to another folder"},
      {{EIO, ESTALE},
       "the disk or the network behind it fails: see the kernel's log, and save elsewhere"},
      {{EFBIG}, "raise the limit on sizes of files (ulimit -f), or save to another file system"},
      {{EMFILE, ENFILE}, "raise the limit on open files (ulimit -n)"},
      {{ENAMETOOLONG}, "give it a shorter name"},
      {{}, "save to another folder"}};
  fail_file(operation, path, "written", error, advice);
}

LOCKSTEP_INLINE void fail_reading(std::string_view operation, std::string_view path, int error) {
  static constexpr FileAdvice advice[] = {
      {{ENOENT, ENOTDIR, ENAMETOOLONG}, "check the path"},
      {{EISDIR}, "name a file, not a folder"},
      {{EACCES, EPERM}, "let this user read it"},
      {{EMFILE, ENFILE}, "raise the limit on open files (ulimit -n)"},
      {{}, "the disk or the network behind it fails: see the kernel's log, take another file"}};
  fail_file(operation, path, "read", error, advice);
}

LOCKSTEP_INLINE void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

LOCKSTEP_INLINE std::string utc_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[64];
  return {text, std::strftime(text, sizeof text, format, &utc)};
}

LOCKSTEP_INLINE std::string checksum_text(std::uint64_t checksum) {
  std::string text(16, '0');
  for (char& digit : text) {
    digit = "0123456789abcdef"[checksum >> 60];
    checksum <<= 4;
  }
  return text;
}

LOCKSTEP_INLINE std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

LOCKSTEP_INLINE std::string own_program() {
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  return {path, size > 0 ? static_cast<std::size_t>(size) : 0};
}

LOCKSTEP_INLINE std::string error_text(int error) { return std::system_category().message(error); }

LOCKSTEP_INLINE Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    fail("launch", {"no pipe could be made: ", error_text(errno)},
         "raise the limit on open files (ulimit -n)");
  }
  return {Descriptor(fds[0]), Descriptor(fds[1])};
}

LOCKSTEP_INLINE Descriptor inherited_pipe(int fd) {
  struct stat status{};
  if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode)) return {};
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Descriptor(fd);
}

LOCKSTEP_INLINE void make_nonblocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

LOCKSTEP_INLINE bool wait_ready(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
    if (ready < 0 && errno != EINTR) return true;
  }
}

LOCKSTEP_INLINE bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

LOCKSTEP_INLINE std::string read_all(int fd) {
  std::string bytes;
  char buffer[4096];
  for (;;) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return bytes;
    bytes.append(buffer, static_cast<std::size_t>(n));
  }
}

LOCKSTEP_INLINE std::string read_file(const char* path) {
  const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  return file ? read_all(file.get()) : std::string();
}

LOCKSTEP_INLINE std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t done = 0; done < count;) {
    const ssize_t n = ::getrandom(bytes.data() + done, count - done, 0);
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno != EINTR) {
      fail("launch", {"the system has no random numbers: ", error_text(errno)},
           "allow getrandom() where this runs");
    }
  }
  return bytes;
}

LOCKSTEP_INLINE std::string random_id() {
  std::uint64_t words[2];
  std::memcpy(words, random_bytes(sizeof words).data(), sizeof words);
  return checksum_text(words[0]) + checksum_text(words[1]);
}

LOCKSTEP_INLINE std::size_t open_files() {
  const std::size_t count = count_paths("/proc/self/fd/*");
  if (count == 0) return 64;  // without /proc: more than a program has at its start
  return count - 1;           // without the descriptor of the folder itself
}

LOCKSTEP_INLINE std::size_t prefer_open_files(std::size_t more) {
  const std::size_t now = open_files();
  const auto needed = static_cast<rlim_t>(now + more);
  rlimit limits{};
  if (::getrlimit(RLIMIT_NOFILE, &limits) != 0) return more;
  if (limits.rlim_cur < needed && limits.rlim_cur < limits.rlim_max) {
    const rlimit raised{std::min(needed, limits.rlim_max), limits.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limits = raised;
  }
  const rlim_t left = limits.rlim_cur > now ? limits.rlim_cur - static_cast<rlim_t>(now) : 0;
  return static_cast<std::size_t>(std::min(left, static_cast<rlim_t>(1) << 30));
}

LOCKSTEP_INLINE std::size_t allow_open_files(std::size_t more, const char* whose,
                                             std::size_t ranks) {
  const std::size_t allowed = prefer_open_files(more);
  if (allowed >= more) return allowed;
  const std::size_t now = open_files();
  fail("launch",
       {whose, " ", ranks, ranks == 1 ? " rank" : " ranks", " needs ", now + more,
        " open files, and this process may have ", now + allowed},
       text({"raise the hard limit to at least ", now + more,
             " where the job starts: ulimit -Hn, LimitNOFILE= of a systemd unit, --ulimit nofile= "
             "of a container"}));
}

LOCKSTEP_INLINE ProgressStyle parse_progress(std::string_view name, std::string_view text) {
  for (std::size_t i = 0; i < std::size(progress_names); ++i) {
    if (text == progress_names[i]) return static_cast<ProgressStyle>(i);
  }
  fail_value(name, text, "give it auto, bar, lines or none");
}

LOCKSTEP_INLINE ProgressStyle progress_style() {
  if (chosen_progress_style) return *chosen_progress_style;
  const char* text = std::getenv(progress_variable);
  return text != nullptr ? parse_progress(progress_variable, text) : ProgressStyle::automatic;
}

LOCKSTEP_INLINE std::optional<std::size_t> terminal_columns(int descriptor) {
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

LOCKSTEP_INLINE Terminal detect_terminal(std::FILE* file, ProgressStyle style) {
  Terminal found;
  found.file = file;
  found.is_quiet = style == ProgressStyle::none;
  if (style == ProgressStyle::lines || found.is_quiet) return found;
  const bool is_forced = style == ProgressStyle::bar;
  const std::string_view term = std::getenv("TERM") != nullptr ? std::getenv("TERM") : "dumb";
  if ((term.empty() || term == "dumb") && !is_forced) return found;

  const int fd = ::fileno(file);
  struct stat status{};
  const char* given = fd == STDOUT_FILENO ? std::getenv(columns_variable) : nullptr;
  // The variable is also set where a rank's stdout was redirected to a file.
  if (given != nullptr && ::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode)) {
    if (*given >= '0' && *given <= '9') found.columns = std::strtoul(given, nullptr, 10);
    found.is_terminal = true;
  } else if (::isatty(fd) == 1 && (is_forced || std::getenv("OMPI_COMM_WORLD_RANK") == nullptr)) {
    found.columns = terminal_columns(fd).value_or(found.columns);
    found.is_terminal = found.is_own = true;
  }
  found.is_terminal = found.is_terminal || is_forced;
  const char* no_color = std::getenv("NO_COLOR");
  found.color = found.is_terminal && (no_color == nullptr || *no_color == '\0');
  return found;
}

LOCKSTEP_INLINE std::size_t utf8_size(std::string_view text) {
  const auto byte = [text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const std::size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // Some lead bytes restrict the second byte.
  const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i != size; ++i)
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  return size;
}

LOCKSTEP_INLINE bool append_json_string(std::string& out, std::string_view text) {
  bool is_utf8 = true;
  out += '"';
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t size = utf8_size(text);
    if (size == 0) {
      out += "\xef\xbf\xbd";
      is_utf8 = false;
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (size == 1 && static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += static_cast<char>('0' + (c >> 4));
      out += "0123456789abcdef"[c & 15];
    } else {
      out += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  out += '"';
  return is_utf8;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::string fixed_text(double value, int decimals) {
  char digits[400];  // the largest double has 309 before the point
  const auto end =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::fixed, decimals);
  return {digits, end.ptr};
}

LOCKSTEP_INLINE std::string value_text(double value) {
  const double size = std::abs(value);
  if (!(size < 1e5) || (size < 1e-3 && size > 0)) {
    char digits[32];
    const auto end =
        std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific, 3);
    return {digits, end.ptr};
  }
  return fixed_text(value, 4);
}

LOCKSTEP_INLINE Error::Error(std::string_view operation, std::string_view problem,
                             std::string_view advice, std::optional<Rank> rank)
    : std::runtime_error(detail::error_message(operation, problem, advice, rank)),
      operation_(operation),
      problem_(problem),
      advice_(advice),
      rank_(rank) {}

LOCKSTEP_INLINE Stopped::Stopped(int signal, std::string_view saved)
    : signal_(signal),
      saved_(saved),
      message_(detail::text(
          {"lockstep: stopped on request",
           signal == 0 ? std::string() : detail::text({" (", detail::signal_name(signal), ")"}),
           saved.empty() ? "; no checkpoint was wanted, so nothing is saved"
                         : "; the state is saved: ",
           saved, saved.empty() ? "" : "; start the job again with --resume to go on"})) {}

LOCKSTEP_INLINE JsonLine& JsonLine::add(const JsonLine& others) {
  if (!members_.empty() && !others.empty()) members_ += ',';
  members_ += others.members_;
  is_utf8_ = is_utf8_ && others.is_utf8_;
  return *this;
}

LOCKSTEP_INLINE JsonLine& JsonLine::add_exact(std::string_view name, double value) {
  if (std::isfinite(value)) return add(name, value);
  return add(name, std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
}

}  // namespace lockstep

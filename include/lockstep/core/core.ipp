// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder.

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/checksum.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/worker.hpp"

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

LOCKSTEP_INLINE std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t shown = 16;
  std::string list;
  for (std::size_t i = 0; i < names.size() && i < shown; ++i) {
    if (i > 0) list += ", ";
    list += names[i];
  }
  if (names.size() > shown) list += text({" and ", names.size() - shown, " more"});
  return list;
}

LOCKSTEP_INLINE std::string listed_ranks(const std::vector<std::string>& ranks) {
  return text({ranks.size() == 1 ? "rank " : "ranks ", listed(ranks)});
}

[[noreturn]] LOCKSTEP_INLINE void fail_value(std::string_view name, std::string_view value,
                                             std::string_view advice) {
  fail("launch", {name, " is '", value, "'"}, advice);
}

LOCKSTEP_INLINE std::size_t parse_number(std::string_view name, std::string_view text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    fail_value(name, text, "give it a number, in digits only");
  }
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
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc{} || end != text.data() + text.size() || !(seconds > 0) || seconds > 1e9) {
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

namespace detail {

LOCKSTEP_INLINE std::string rate_text(double value) {
  return fixed_text(value, value < 100 ? 1 : 0);
}

LOCKSTEP_INLINE std::string clock_text(double seconds) {
  if (!(seconds < 1e9)) return "?";
  const auto total = static_cast<std::uint64_t>(seconds > 0 ? std::llround(seconds) : 0);
  const std::uint64_t minutes = total / 60;
  const std::string rest = detail::text({100 + total % 60}).substr(1);
  if (minutes < 60) return detail::text({minutes, ":", rest});
  return detail::text({minutes / 60, ":", detail::text({100 + minutes % 60}).substr(1), ":", rest});
}

LOCKSTEP_INLINE std::string duration_text(double seconds) {
  return seconds < 59.95 ? fixed_text(seconds, 1) + " s" : clock_text(seconds);
}

LOCKSTEP_INLINE std::string error_sentence(std::string_view operation, std::string_view problem,
                                           std::string_view advice, std::optional<Rank> rank) {
  // What a name of a file or a tensor contains must not end the text. Messages of other libraries
  // have several lines.
  return printable(text({"lockstep: ", rank ? text({"rank ", *rank, ", "}) : std::string(),
                         operation, ": ", problem, "; ", advice}),
                   "\n\t");
}

LOCKSTEP_INLINE void fail(std::string_view operation, std::initializer_list<Word> problem,
                          std::string_view advice, std::optional<Rank> rank) {
  throw Error(operation, text(problem), advice, rank);
}

LOCKSTEP_INLINE void fail_check(std::string_view advice, const char* file, int line) {
  throw Error(text({file, ":", line}), "a condition does not hold", advice);
}

}  // namespace detail

LOCKSTEP_INLINE Error::Error(std::string_view operation, std::string_view problem,
                             std::string_view advice, std::optional<Rank> rank)
    : std::runtime_error(detail::error_sentence(operation, problem, advice, rank)),
      operation_(operation),
      problem_(problem),
      advice_(advice),
      rank_(rank) {}

LOCKSTEP_INLINE Error::Error(const Error& other) = default;
LOCKSTEP_INLINE Error::~Error() = default;

LOCKSTEP_INLINE Error Error::on(Rank rank) const {
  Error error(operation_, problem_, advice_, rank);
  error.consequence_ = consequence_;
  return error;
}

LOCKSTEP_INLINE Error Error::as_consequence() const {
  Error error = *this;
  error.consequence_ = true;
  return error;
}

namespace detail {

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

}  // namespace detail

LOCKSTEP_INLINE Stopped::Stopped(int signal, std::string_view saved)
    : signal_(signal),
      saved_(saved),
      words_(detail::text(
          {"lockstep: stopped on request",
           signal == 0 ? std::string() : detail::text({" (", detail::signal_name(signal), ")"}),
           saved.empty() ? "; no checkpoint was wanted, so nothing is saved"
                         : "; the state is saved: ",
           saved, saved.empty() ? "" : "; start the job again with --resume to go on"})) {}

LOCKSTEP_INLINE Stopped::~Stopped() = default;

LOCKSTEP_INLINE const char* Stopped::what() const noexcept { return words_.c_str(); }

}  // namespace lockstep

namespace lockstep::detail {

/// The failures that were told and not taken, for all `LateFailures` of this process.
struct ToldFailures {
  std::mutex mutex;
  std::size_t listeners = 0;
  std::vector<LateFailure> told;
};

LOCKSTEP_INLINE ToldFailures& told_failures() {
  // Never destroyed: objects of static storage tell of failures as late as that.
  static ToldFailures& all = *new ToldFailures;
  return all;
}

/// Prints a failure in one piece, with its rank.
LOCKSTEP_INLINE void print_late_failure(const LateFailure& failure) {
  const std::string whose = failure.rank ? text({"rank ", *failure.rank, ": "}) : std::string();
  std::string line;
  try {
    std::rethrow_exception(failure.thrown);
  } catch (const Error& error) {
    line = error.rank() || !failure.rank ? error.what() : error.on(*failure.rank).what();
  } catch (const std::exception& error) {
    line = text({"lockstep: ", whose, error.what()});
  } catch (...) {
    line = text({"lockstep: ", whose, "an exception that is no std::exception"});
  }
  std::fputs(text({line, "\n"}).c_str(), stderr);
}

LOCKSTEP_INLINE void tell_late_failure(const LateFailure& failure) noexcept {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (all.listeners != 0) {
    all.told.push_back(failure);
  } else {
    print_late_failure(failure);
  }
}

LOCKSTEP_INLINE LateFailures::LateFailures() {
  const std::lock_guard lock(told_failures().mutex);
  ++told_failures().listeners;
}

LOCKSTEP_INLINE LateFailures::~LateFailures() {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (--all.listeners != 0) return;
  for (const LateFailure& failure : all.told) print_late_failure(failure);
  all.told.clear();
}

LOCKSTEP_INLINE std::optional<LateFailure> LateFailures::take() {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (all.told.empty()) return std::nullopt;
  LateFailure first = all.told.front();
  all.told.erase(all.told.begin());
  return first;
}

LOCKSTEP_INLINE void sleep_for(std::chrono::nanoseconds time) {
  const auto second = std::chrono::duration_cast<std::chrono::seconds>(time);
  timespec left{second.count(), (time - second).count()};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

LOCKSTEP_INLINE std::size_t core_count() {
  std::array<cpu_set_t, 8> sets{};  // room for 8192 cores
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return 1;
  return static_cast<std::size_t>(CPU_COUNT_S(sizeof sets, sets.data()));
}

LOCKSTEP_INLINE bool has_other_threads() {
  glob_t found{};
  const bool is_alone =
      ::glob("/proc/self/task/*", GLOB_NOSORT, nullptr, &found) == 0 && found.gl_pathc == 1;
  ::globfree(&found);
  return !is_alone;
}

LOCKSTEP_INLINE bool has_free_core(std::size_t busy) {
  const std::size_t mine = core_count();
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const std::size_t all = online > 0 ? std::max(static_cast<std::size_t>(online), mine) : mine;
  return mine > (busy * mine + all - 1) / all;
}

LOCKSTEP_INLINE void fail_to_start(const char* words, const char* problem) {
  fail("starting a thread", {words, " cannot be started: ", problem},
       "raise the limit on processes and threads (`ulimit -u`, or the pids limit of the container "
       "or cgroup), or let fewer run here");
}

LOCKSTEP_INLINE void Thread::start(ThreadName name, Signals signals, void* body,
                                   void* (*run)(void*)) {
  const auto create = [&] { return ::pthread_create(&thread_, nullptr, run, body); };
  const int error = signals == Signals::blocked ? without_signals(create) : create();
  if (error != 0) fail_to_start(name.words, std::strerror(error));
  is_running_ = true;
  ::pthread_setname_np(thread_, name.short_name);
}

/// Calls `f(std::type_identity<T>{})` with the floating type behind a kind.
template <class F>
void with_floating(ElementKind kind, const F& f) {
  if (kind == ElementKind::f64) return f(std::type_identity<double>{});
  if (kind == ElementKind::f32) return f(std::type_identity<float>{});
  if (kind == ElementKind::f16) return f(std::type_identity<Half>{});
  if (kind == ElementKind::bf16) return f(std::type_identity<BFloat16>{});
  throw Error("convert", "elements of " + std::string(element_name(kind)) + " are not floating",
              "keep their type");
}

LOCKSTEP_INLINE void convert_elements(std::byte* to, ElementKind to_kind, const std::byte* from,
                                      ElementKind from_kind, std::size_t count) {
  if (to_kind == from_kind) {
    if (count != 0) std::memmove(to, from, count * element_size(to_kind));
    return;
  }
  with_floating(to_kind, [&]<class To>(std::type_identity<To>) {
    with_floating(from_kind, [&]<class From>(std::type_identity<From>) {
      if constexpr (!std::is_same_v<To, From>) {
        // Through memory of its own: compilers take pointers to two types for two memories.
        constexpr std::size_t most = 512;
        From some[most];
        for (std::size_t at = 0; at < count; at += most) {
          const std::size_t n = std::min(most, count - at);
          std::memcpy(some, from + at * sizeof(From), n * sizeof(From));
          To converted[most];
          convert(converted, some, n);
          std::memcpy(to + at * sizeof(To), converted, n * sizeof(To));
        }
      }
    });
  });
}

LOCKSTEP_INLINE TaskQueue::~TaskQueue() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

LOCKSTEP_INLINE void TaskQueue::post(Task& task) {
  const std::lock_guard lock(mutex_);
  // A task whose thread cannot be started is never run, so it must not be linked either.
  if (!thread_.is_running()) [[unlikely]] {
    thread_ =
        Thread(name_, [this] { run(); }, [](const std::exception_ptr&) {});  // tasks keep errors
  }
  (first_ == nullptr ? first_ : last_->next) = &task;
  last_ = &task;
  changed_.notify_all();
}

LOCKSTEP_INLINE bool TaskQueue::test(const Task& task) const {
  const std::lock_guard lock(mutex_);
  if (task.error) std::rethrow_exception(task.error);
  return task.is_over;
}

LOCKSTEP_INLINE void TaskQueue::wait(const Task& task) const {
  settle(task);
  if (task.error) std::rethrow_exception(task.error);
}

LOCKSTEP_INLINE void TaskQueue::settle(const Task& task) const noexcept {
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
    task.is_over = true;  // from here on its owner may end it
    changed_.notify_all();
  }
}

LOCKSTEP_INLINE void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> has_failed = false;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks && !has_failed; i = next++) f(i);
  };
  const auto report = [&](std::exception_ptr error) {
    if (!has_failed.exchange(true)) failure = std::move(error);
  };
  {
    constexpr std::size_t most_threads = 4;
    std::vector<Thread> threads;
    try {
      while (threads.size() + 1 < std::min({most_threads, core_count(), tasks}))
        threads.emplace_back(ThreadName{"lockstep shares", "a helper"}, work, report);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): fewer threads do the same work
    }
    try {
      work();
    } catch (...) {
      report(std::current_exception());
    }
  }
  if (failure) std::rethrow_exception(failure);
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

LOCKSTEP_INLINE std::string_view name_in_folder(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

/// A system call that has failed on a file.
struct FileFault {
  std::string_view operation;
  std::string_view path;
  int error;

  [[noreturn]] void refuse(std::string_view problem, std::string_view advice) const {
    fail(operation, {"'", path, "' ", problem, error_text(error)}, advice);
  }
};

LOCKSTEP_INLINE void fail_writing(std::string_view operation, std::string_view path, int error) {
  const std::string folder = folder_of(path);
  const FileFault file{operation, path, error};
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      file.refuse("cannot be written: ",
                  "make room there, or save to another folder; what was saved before is untouched");
    case EROFS:
      file.refuse(
          "cannot be written: ",
          text({"mount '", folder, "' so that it may be written, or save to another folder"}));
    case ENOENT:
      file.refuse("cannot be written: ", text({"make the folder first: mkdir -p '", folder, "'"}));
    case ENOTDIR:
      file.refuse("cannot be written: ", text({"'", folder, "' is no folder: name one"}));
    case EISDIR:
      file.refuse("cannot be written: ", "name a file, not a folder");
    case EACCES:
    case EPERM:
      file.refuse("cannot be written: ",
                  text({"let this user write in '", folder, "', or save to another folder"}));
    case EIO:
    case ESTALE:
      file.refuse(
          "cannot be written: ",
          "the disk or the network behind it fails: see the kernel's log, and save elsewhere");
    case EFBIG:
      file.refuse("cannot be written: ",
                  "raise the limit on sizes of files (ulimit -f), or save to another file system");
    case EMFILE:
    case ENFILE:
      file.refuse("cannot be written: ", "raise the limit on open files (ulimit -n)");
    case ENAMETOOLONG:
      file.refuse("cannot be written: ", "give it a shorter name");
    default:
      file.refuse("cannot be written: ", "save to another folder");
  }
}

LOCKSTEP_INLINE void fail_reading(std::string_view operation, std::string_view path, int error) {
  const FileFault file{operation, path, error};
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
      file.refuse("cannot be read: ", "check the path");
    case EISDIR:
      file.refuse("cannot be read: ", "name a file, not a folder");
    case EACCES:
    case EPERM:
      file.refuse("cannot be read: ", "let this user read it");
    case EMFILE:
    case ENFILE:
      file.refuse("cannot be read: ", "raise the limit on open files (ulimit -n)");
    default:
      file.refuse(
          "cannot be read: ",
          "the disk or the network behind it fails: see the kernel's log, take another file");
  }
}

LOCKSTEP_INLINE void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
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
  std::string text;
  for (char c : random_bytes(16)) {
    text += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

/// The names of the temporaries that are being written.
struct TemporaryNames {
  std::mutex mutex;
  std::vector<std::string> names;

  static TemporaryNames& of_process() {
    static TemporaryNames names;
    return names;
  }
  void add(const std::string& name) {
    const std::lock_guard lock(mutex);
    names.push_back(name);
  }
  void forget(const std::string& name) {
    const std::lock_guard lock(mutex);
    std::erase(names, name);
  }
};

LOCKSTEP_INLINE void remove_temporary_files() {
  TemporaryNames& all = TemporaryNames::of_process();
  const std::lock_guard lock(all.mutex);
  for (const std::string& name : all.names) ::unlink(name.c_str());
}

LOCKSTEP_INLINE std::string random_token() { return random_id().substr(16); }

LOCKSTEP_INLINE TemporaryFile::TemporaryFile(std::string_view operation, const std::string& path,
                                             std::uint64_t bytes)
    : operation_(operation),
      path_(path),
      temporary_(text({path, temporary_infix, random_token()})) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  file_ = Descriptor(::open(temporary_.c_str(), flags, 0666));
  if (!file_) fail_writing(operation_, path_, errno);
  TemporaryNames::of_process().add(temporary_);
  // Says at once if there is no room; some file systems cannot.
  while (bytes != 0 && ::fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes)) != 0 &&
         errno != EOPNOTSUPP && errno != ENOSYS) {
    if (errno != EINTR) fail_now(errno);
  }
}

LOCKSTEP_INLINE void TemporaryFile::append(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (pending_count_ == pending_.size()) flush();
  pending_[pending_count_++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  pending_bytes_ += bytes.size();
  if (pending_bytes_ >= write_chunk_bytes) flush();
}

LOCKSTEP_INLINE void TemporaryFile::seek(std::uint64_t place) {
  flush();
  place_ = place;
}

LOCKSTEP_INLINE void TemporaryFile::flush() {
  iovec* first = pending_.data();
  auto count = static_cast<int>(pending_count_);
  while (count != 0) {
    const ssize_t n = ::pwritev(file_.get(), first, count, static_cast<off_t>(place_));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_now(n < 0 ? errno : ENOSPC);
    note_storage_progress();
    place_ += static_cast<std::uint64_t>(n);
    auto written = static_cast<std::size_t>(n);
    while (count != 0 && written >= first->iov_len) {
      written -= first->iov_len;
      ++first;
      --count;
    }
    if (written != 0) {
      first->iov_base = static_cast<std::byte*>(first->iov_base) + written;
      first->iov_len -= written;
    }
  }
  pending_count_ = 0;
  pending_bytes_ = 0;
  start_writeback();
}

LOCKSTEP_INLINE void TemporaryFile::commit() {
  flush();
  if (::fsync(file_.get()) != 0) fail_now(errno);
  note_storage_progress();
  // While the file that is replaced is open, its blocks are not given back: that may take longer
  // than the writing (ext4 with `discard`), and is none of what has to be on the disk now.
  const Descriptor replaced(::open(path_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_now(errno);
  TemporaryNames::of_process().forget(temporary_);
  temporary_.clear();
  const std::string folder = folder_of(path_);
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A file system that has nothing to sync for a folder says EINVAL.
  if (!opened || (::fsync(opened.get()) != 0 && errno != EINVAL))
    fail_writing(operation_, path_, errno);
}

/// The disk begins while the rest is still being copied. An error would be seen by fsync.
LOCKSTEP_INLINE void TemporaryFile::start_writeback() {
  if (place_ < started_ + 64 * write_chunk_bytes) return;
  ::sync_file_range(file_.get(), static_cast<off_t>(started_),
                    static_cast<off_t>(place_ - started_), SYNC_FILE_RANGE_WRITE);
  started_ = place_;
}

LOCKSTEP_INLINE void TemporaryFile::remove() {
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  TemporaryNames::of_process().forget(temporary_);
}

/// A destructor does not run where the constructor fails.
LOCKSTEP_INLINE void TemporaryFile::fail_now(int error) {
  remove();
  fail_writing(operation_, path_, error);
}

LOCKSTEP_INLINE bool make_folder(std::string_view operation, const std::string& folder) {
  bool is_made = false;
  for (std::size_t end = 0; end != folder.size();) {
    end = std::min(folder.find('/', end + 1), folder.size());
    const std::string part = folder.substr(0, end);
    is_made = ::mkdir(part.c_str(), 0777) == 0;
    const int error = errno;
    struct stat status{};
    if (is_made || error == EEXIST || error == EROFS || error == EACCES || error == EPERM) {
      // Folders above it may be closed to us; what counts is that they are there.
      if (is_made || (::stat(part.c_str(), &status) == 0 && S_ISDIR(status.st_mode))) continue;
    }
    fail(operation,
         {"the folder '", folder, "' cannot be made: ",
          error == EEXIST ? text({"'", part, "' is no folder"}) : error_text(error)},
         "name a folder that exists or may be made");
  }
  return is_made;
}

LOCKSTEP_INLINE std::string owner_text() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  char program[4096];
  const ssize_t size = ::readlink("/proc/self/exe", program, sizeof program);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char time[32];
  std::strftime(time, sizeof time, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text({"process ", ::getpid(), " on ", host, ", ",
               std::string_view(program, size > 0 ? static_cast<std::size_t>(size) : 0), ", since ",
               time});
}

LOCKSTEP_INLINE std::size_t open_files() {
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return 64;  // without /proc: more than a program has at its start
  std::size_t count = 0;
  while (const dirent* const entry = ::readdir(folder)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(folder);
  return count - 1;  // without the folder itself
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

inline constexpr std::string_view progress_words[] = {"auto", "bar", "lines", "none"};

LOCKSTEP_INLINE std::string_view progress_text(ProgressStyle style) {
  return progress_words[static_cast<std::size_t>(style)];
}

LOCKSTEP_INLINE ProgressStyle parse_progress(std::string_view name, std::string_view text) {
  for (std::size_t i = 0; i < std::size(progress_words); ++i) {
    if (text == progress_words[i]) return static_cast<ProgressStyle>(i);
  }
  fail("launch", {name, " is '", text, "'"}, "give it auto, bar, lines or none");
}

LOCKSTEP_INLINE std::optional<ProgressStyle>& told_progress_style() {
  static std::optional<ProgressStyle> style;
  return style;
}
LOCKSTEP_INLINE void set_progress_style(std::optional<ProgressStyle> style) {
  told_progress_style() = style;
}

LOCKSTEP_INLINE ProgressStyle progress_style() {
  if (const auto told = told_progress_style()) return *told;
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
  const char* told = fd == STDOUT_FILENO ? std::getenv(columns_variable) : nullptr;
  // A rank whose stdout was redirected to a file still has the variable.
  if (told != nullptr && ::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode)) {
    if (*told >= '0' && *told <= '9') found.columns = std::strtoul(told, nullptr, 10);
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

}  // namespace lockstep::detail

// Checksums.

namespace lockstep::detail {

/// Eight bytes as a number, the first the lowest, whatever the machine's own order is.
LOCKSTEP_INLINE std::uint64_t little_endian_word(const std::byte* bytes) {
  std::uint64_t word = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&word, bytes, sizeof word);
  } else {
    for (int i = 7; i >= 0; --i) word = word << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  }
  return word;
}

LOCKSTEP_INLINE void Checksum::add_block(Lanes& lanes, const std::byte* block) {
  // Each line is a bijection. The first two let every bit change at least one more; the product of
  // the last spreads what has changed, and one for two words is what it may cost.
  const auto step = [](std::uint64_t lane, std::uint64_t first, std::uint64_t second) {
    lane ^= first;
    lane ^= lane >> 29;
    lane += lane << 21;
    lane ^= second;
    return (lane ^ (lane >> 32)) * golden_step;
  };
  [&]<std::size_t... Lane>(std::index_sequence<Lane...>) {
    ((lanes[Lane] = step(lanes[Lane], little_endian_word(block + 8 * Lane),
                         little_endian_word(block + block_bytes / 2 + 8 * Lane))),
     ...);
  }(std::make_index_sequence<lane_count>());
}

LOCKSTEP_INLINE Checksum& Checksum::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) return *this;
  const std::size_t held = length_ % block_bytes;
  length_ += bytes.size();
  if (held != 0) {
    const std::size_t more = std::min(block_bytes - held, bytes.size());
    std::memcpy(rest_.data() + held, bytes.data(), more);
    bytes = bytes.subspan(more);
    if (held + more != block_bytes) return *this;
    add_block(lanes_, rest_.data());
  }
  Lanes lanes = lanes_;  // a copy, which the compiler keeps in registers
  const std::byte* block = bytes.data();
  const std::byte* const end = block + bytes.size() / block_bytes * block_bytes;
  for (; block != end; block += block_bytes) add_block(lanes, block);
  lanes_ = lanes;
  if (bytes.size() % block_bytes != 0) std::memcpy(rest_.data(), end, bytes.size() % block_bytes);
  return *this;
}

LOCKSTEP_INLINE std::uint64_t Checksum::value() const {
  Lanes lanes = lanes_;
  if (const std::size_t held = length_ % block_bytes; held != 0) {
    std::array<std::byte, block_bytes> last{};  // filled up with zeros; the length tells them apart
    std::memcpy(last.data(), rest_.data(), held);
    add_block(lanes, last.data());
  }
  std::uint64_t value = mix_bits(length_);
  for (const std::uint64_t lane : lanes) value = mix_bits((value ^ lane) + golden_step);
  return value;
}

LOCKSTEP_INLINE std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return Checksum().add(bytes).value();
}

LOCKSTEP_INLINE std::string checksum_text(std::uint64_t checksum) {
  std::string text(16, '0');
  for (char& digit : text) {
    digit = "0123456789abcdef"[checksum >> 60];
    checksum <<= 4;
  }
  return text;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checksum_from(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  std::uint64_t checksum = 0;
  for (const char digit : text) {
    const std::size_t value = std::string_view("0123456789abcdef").find(digit);
    if (value == std::string_view::npos) return std::nullopt;
    checksum = checksum << 4 | value;
  }
  return checksum;
}

}  // namespace lockstep::detail

// JSON.

namespace lockstep::detail {

LOCKSTEP_INLINE std::size_t utf8_size(std::string_view text) {
  const auto byte = [text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [byte](std::size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const bool second = follows(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf);
    return second && follows(2) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const bool second = follows(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf);
    return second && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

LOCKSTEP_INLINE bool is_utf8(std::string_view text) {
  std::size_t size = 1;
  for (; !text.empty() && size != 0; text.remove_prefix(size)) size = utf8_size(text);
  return size != 0;
}

LOCKSTEP_INLINE void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t size = utf8_size(text);
    if (size == 0) {
      out += "\xef\xbf\xbd";
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
}

LOCKSTEP_INLINE void append_digits(std::string& out, auto number) {
  char digits[64];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}
LOCKSTEP_INLINE void append_json_number(std::string& out, float value) {
  std::isfinite(value) ? append_digits(out, value) : void(out += "null");
}
LOCKSTEP_INLINE void append_json_number(std::string& out, double value) {
  std::isfinite(value) ? append_digits(out, value) : void(out += "null");
}

// The reader.

LOCKSTEP_INLINE void JsonCursor::fail(std::string_view problem) const {
  detail::fail("checkpoint", {whose_, ": ", problem, " at byte ", place_},
               "the file is damaged or no such file: copy it again, or take another");
}

LOCKSTEP_INLINE char JsonCursor::peek() {
  place_ = std::min(text_.find_first_not_of(" \n\r\t", place_), text_.size());
  return place_ < text_.size() ? text_[place_] : '\0';
}

LOCKSTEP_INLINE void JsonCursor::expect(char c, std::string_view problem) {
  if (peek() != c) fail(problem);
  ++place_;
}

LOCKSTEP_INLINE void JsonCursor::open(char bracket, std::string_view problem) {
  expect(bracket, problem);
  is_first_ = true;
}

LOCKSTEP_INLINE bool JsonCursor::next(char close) {
  const bool is_first = std::exchange(is_first_, false);
  if (peek() == close) {
    ++place_;
    return false;
  }
  if (!is_first) expect(',', "a comma or a closing bracket is missing");
  return true;
}

LOCKSTEP_INLINE bool JsonCursor::next_member(std::string& name) {
  if (!next('}')) return false;
  if (peek() != '"') fail("a member's name is missing");
  name = string();
  expect(':', "a colon is missing");
  return true;
}

LOCKSTEP_INLINE void JsonCursor::finish() {
  peek();
  if (place_ != text_.size()) fail("something follows the end");
}

LOCKSTEP_INLINE void JsonCursor::word(std::string_view word) {
  peek();
  if (!text_.substr(place_).starts_with(word)) fail("a value should be here");
  place_ += word.size();
}

/// The four digits of `\u`.
LOCKSTEP_INLINE unsigned JsonCursor::escaped_unit() {
  unsigned unit = 0;
  if (text_.size() - place_ < 4) fail("the text ends within an escape");
  const char* const end = text_.data() + place_ + 4;
  const auto [stop, error] = std::from_chars(text_.data() + place_, end, unit, 16);
  if (error != std::errc() || stop != end) fail("an escape is no four digits");
  place_ += 4;
  return unit;
}

LOCKSTEP_INLINE void JsonCursor::append_escaped(std::string& out) {
  constexpr std::string_view escapes = "\"\\/bfnrt";
  constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  const char c = place_ < text_.size() ? text_[place_++] : '\0';
  if (const std::size_t known = escapes.find(c); known != std::string_view::npos) {
    out += meanings[known];
    return;
  }
  if (c != 'u') fail("an escape is unknown");
  unsigned code = escaped_unit();
  if (code >= 0xd800 && code < 0xe000) {  // two surrogates are one character
    const bool has_low = code < 0xdc00 && text_.substr(place_).starts_with("\\u");
    place_ += has_low ? 2 : 0;
    const unsigned low = has_low ? escaped_unit() : 0;
    if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair stands alone");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  // The lead byte says how many follow, each with six bits.
  const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr unsigned leads[] = {0, 0xc0, 0xe0, 0xf0};
  out += static_cast<char>(leads[more] | code >> (6 * more));
  for (int i = more; i-- > 0;) out += static_cast<char>(0x80 | (code >> (6 * i) & 0x3f));
}

LOCKSTEP_INLINE std::string JsonCursor::string() {
  expect('"', "a text should begin");
  std::string out;
  for (;;) {
    // Plain characters are taken together.
    std::size_t end = place_;
    while (end < text_.size()) {
      const auto c = static_cast<unsigned char>(text_[end]);
      if (c == '"' || c == '\\' || c < 0x20 || c >= 0x80) break;
      ++end;
    }
    out.append(text_, place_, end - place_);
    place_ = end;
    if (place_ == text_.size()) fail("a text has no end");
    const char c = text_[place_];
    if (static_cast<unsigned char>(c) < 0x20) fail("a text holds a control character");
    if (c == '"' || c == '\\') {
      ++place_;
      if (c == '"') return out;
      append_escaped(out);
      continue;
    }
    const std::size_t size = utf8_size(text_.substr(place_));
    if (size == 0) fail("a text is not UTF-8");
    out.append(text_, place_, size);
    place_ += size;
  }
}

LOCKSTEP_INLINE JsonCursor::Number JsonCursor::number() {
  peek();
  std::size_t end = place_;
  const auto digits = [&] {
    const std::size_t begin = end;
    end = std::min(text_.find_first_not_of("0123456789", end), text_.size());
    return end - begin;
  };
  const auto skip = [&](std::string_view any) {
    const bool is_here = end < text_.size() && any.find(text_[end]) != std::string_view::npos;
    end += is_here ? 1 : 0;
    return is_here;
  };
  const bool is_negative = skip("-");
  const std::size_t first = end;
  const std::size_t whole = digits();
  if (whole == 0) fail("a number should be here");
  if (whole > 1 && text_[first] == '0') fail("a number begins with a zero");
  bool is_exact = true;
  if (skip(".")) {
    is_exact = false;
    if (digits() == 0) fail("a number ends with its point");
  }
  if (skip("eE")) {
    is_exact = false;
    skip("+-");
    if (digits() == 0) fail("a number has no exponent");
  }
  const auto parse = [&](auto value) {
    if (std::from_chars(text_.data() + place_, text_.data() + end, value).ec != std::errc())
      fail("a number is out of range");
    place_ = end;
    return value;
  };
  const bool is_minus_zero = is_negative && whole == 1 && text_[first] == '0';
  if (!is_exact || is_minus_zero) return parse(double{});
  if (is_negative) return parse(std::int64_t{});
  return parse(std::uint64_t{});
}

LOCKSTEP_INLINE std::uint64_t JsonCursor::natural() {
  const char c = peek();
  if (c < '0' || c > '9') fail("a whole number should be here");
  const Number value = number();
  if (value.index() != 0) fail("a number is not whole");
  return std::get<0>(value);
}

// Values.

LOCKSTEP_INLINE Json::Json(double value) : value_(value) {
  if (std::isnan(value)) value_ = std::string("nan");
  if (std::isinf(value)) value_ = std::string(value < 0 ? "-inf" : "inf");
}

LOCKSTEP_INLINE Json& Json::set(std::string_view name, Json value) {
  for (Member& member : std::get<Object>(value_)) {
    if (member.first != name) continue;
    member.second = std::move(value);
    return *this;
  }
  return add(std::string(name), std::move(value));
}

LOCKSTEP_INLINE Json& Json::add(std::string name, Json value) {
  std::get<Object>(value_).emplace_back(std::move(name), std::move(value));
  return *this;
}

LOCKSTEP_INLINE Json& Json::push(Json value) {
  std::get<Array>(value_).push_back(std::move(value));
  return *this;
}

LOCKSTEP_INLINE Json Json::take(std::string_view name) {
  Json value;
  std::erase_if(std::get<Object>(value_), [&](Member& member) {
    if (member.first != name) return false;
    value = std::move(member.second);
    return true;
  });
  return value;
}

LOCKSTEP_INLINE const Json* Json::find(std::string_view name) const {
  const auto* const members = get_if<Object>();
  for (std::size_t i = 0; members != nullptr && i != members->size(); ++i)
    if ((*members)[i].first == name) return &(*members)[i].second;
  return nullptr;
}

LOCKSTEP_INLINE std::string_view Json::kind() const {
  constexpr std::string_view kinds[] = {"null",
                                        "true or false",
                                        "a whole number",
                                        "a negative number",
                                        "a number with a fraction or an exponent",
                                        "a text",
                                        "an array",
                                        "an object"};
  return kinds[value_.index()];
}

LOCKSTEP_INLINE std::string Json::text() const {
  std::string out;
  append_to(out);
  return out;
}

LOCKSTEP_INLINE void Json::append_to(std::string& out) const {
  if (const auto* const boolean = get_if<bool>()) {
    out += *boolean ? "true" : "false";
  } else if (const auto* const natural = get_if<std::uint64_t>()) {
    append_digits(out, *natural);
  } else if (const auto* const integer = get_if<std::int64_t>()) {
    append_digits(out, *integer);
  } else if (const auto* const real = get_if<double>()) {
    const std::size_t begin = out.size();
    append_digits(out, *real);
    // Without a point it would come back as an integer.
    if (out.find_first_of(".e", begin) == std::string::npos) out += ".0";
  } else if (const auto* const text = get_if<std::string>()) {
    append_json_string(out, *text);
  } else if (const auto* const items = get_if<Array>()) {
    char before = '[';
    for (const Json& item : *items) {
      out += std::exchange(before, ',');
      item.append_to(out);
    }
    out += items->empty() ? "[]" : "]";
  } else if (const auto* const members = get_if<Object>()) {
    char before = '{';
    for (const Member& member : *members) {
      out += std::exchange(before, ',');
      append_json_string(out, member.first);
      out += ':';
      member.second.append_to(out);
    }
    out += members->empty() ? "{}" : "}";
  } else {
    out += "null";
  }
}

LOCKSTEP_INLINE bool has_name_twice(const Json::Object& members) {
  std::vector<std::string_view> names;
  for (const Json::Member& member : members) names.push_back(member.first);
  std::ranges::sort(names);
  return std::ranges::adjacent_find(names) != names.end();
}

LOCKSTEP_INLINE Json Json::parse_value(JsonCursor& cursor, int depth, std::size_t& left) {
  if (depth > most_depth) cursor.fail("brackets are too deep");
  if (left-- == 0) cursor.fail("there are too many values");
  const auto word = [&](std::string_view name, Json value) {
    cursor.word(name);
    return value;
  };
  switch (cursor.peek()) {
    case '{': {
      Json object = Json::object();
      cursor.open_object();
      for (std::string name; cursor.next_member(name);)
        object.add(name, parse_value(cursor, depth + 1, left));
      if (has_name_twice(*object.get_if<Object>()))
        cursor.fail("an object has a name twice and ends");
      return object;
    }
    case '[': {
      Json array = Json::array();
      cursor.open_array();
      while (cursor.next_item()) array.push(parse_value(cursor, depth + 1, left));
      return array;
    }
    case '"':
      return Json(cursor.string());
    case 't':
      return word("true", Json(true));
    case 'f':
      return word("false", Json(false));
    case 'n':
      return word("null", Json());
    default:
      return std::visit([](auto number) { return Json(Value(number)); }, cursor.number());
  }
}

LOCKSTEP_INLINE Json Json::parse(std::string_view text, std::string whose, std::size_t most) {
  JsonCursor cursor(text, std::move(whose));
  Json value = parse_value(cursor, 1, most);
  cursor.finish();
  return value;
}

LOCKSTEP_INLINE void JsonEntry::fail(std::string_view problem) const {
  detail::fail("checkpoint",
               {"'", file_, "': ", name_.empty() ? "its 'lockstep' entry" : name_, " ", problem},
               "the file is damaged, or another version has made it: take another checkpoint");
}

LOCKSTEP_INLINE void JsonEntry::fail_kind(std::string_view expected) const {
  fail(detail::text({"is ", json_->kind(), " instead of ", expected}));
}

LOCKSTEP_INLINE JsonEntry JsonEntry::of(const Json::Member& member) const {
  return {member.second, file_, detail::text({name_, name_.empty() ? "" : ".", member.first})};
}

LOCKSTEP_INLINE std::optional<JsonEntry> JsonEntry::find(std::string_view name) const {
  for (const Json::Member& member : members())
    if (member.first == name) return of(member);
  return std::nullopt;
}

LOCKSTEP_INLINE JsonEntry JsonEntry::at(std::string_view name) const {
  if (const auto found = find(name)) return *found;
  fail(detail::text({"has no '", name, "'"}));
}

LOCKSTEP_INLINE JsonEntry JsonEntry::item(std::size_t i) const {
  if (i >= items().size()) fail(detail::text({"has no item ", i}));
  return {items()[i], file_, detail::text({name_, "[", i, "]"})};
}

LOCKSTEP_INLINE std::int64_t JsonEntry::integer() const {
  if (const auto* const negative = json_->get_if<std::int64_t>()) return *negative;
  if (!std::in_range<std::int64_t>(natural())) fail("is too large a number");
  return static_cast<std::int64_t>(natural());
}

LOCKSTEP_INLINE double JsonEntry::real() const {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (const auto* const real = json_->get_if<double>()) return *real;
  if (const auto* const whole = json_->get_if<std::uint64_t>()) return static_cast<double>(*whole);
  if (const auto* const less = json_->get_if<std::int64_t>()) return static_cast<double>(*less);
  if (const auto* const text = json_->get_if<std::string>()) {
    if (*text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (*text == "inf") return infinity;
    if (*text == "-inf") return -infinity;
  }
  fail_kind("a number");
}

LOCKSTEP_INLINE std::uint64_t JsonEntry::checksum() const {
  const auto value = checksum_from(text());
  if (!value) fail("is no text of 16 hexadecimal digits");
  return *value;
}

LOCKSTEP_INLINE std::vector<std::uint64_t> JsonEntry::naturals() const {
  std::vector<std::uint64_t> values;
  for (std::size_t i = 0; i != items().size(); ++i) values.push_back(item(i).natural());
  return values;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE void JsonLine::add_name(std::string_view name) {
  if (!members_.empty()) members_ += ',';
  detail::append_json_string(members_, name);
  members_ += ':';
}

LOCKSTEP_INLINE JsonLine& JsonLine::add(const JsonLine& others) {
  if (!members_.empty() && !others.members_.empty()) members_ += ',';
  members_ += others.members_;
  return *this;
}

}  // namespace lockstep

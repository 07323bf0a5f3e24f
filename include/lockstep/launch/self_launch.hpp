// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `./trainer --ranks 4`: the program starts itself four times and becomes the launcher.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/file.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/grace.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/openmp.hpp"
#include "lockstep/launch/options.hpp"
#include "lockstep/launch/shared_gpus.hpp"
#include "lockstep/launch/store_server.hpp"
#include "lockstep/launch/supervisor.hpp"

namespace lockstep::detail {

/// The path of this program, so that `ps` shows ranks by its name. If another file has taken the
/// path since (a rebuild), it is the kernel's link to the running one.
inline std::string own_program() {
  constexpr const char* link = "/proc/self/exe";
  std::string path(4096, '\0');
  const ssize_t size = ::readlink(link, path.data(), path.size());
  path.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  struct stat running{};
  struct stat found{};
  const bool same = ::stat(link, &running) == 0 && ::stat(path.c_str(), &found) == 0 &&
                    running.st_dev == found.st_dev && running.st_ino == found.st_ino;
  return same ? path : link;
}

/// This process's environment without the variables of a rank and the secret.
inline std::vector<std::string> inherited_environment() {
  constexpr std::string_view ours[] = {
      "LOCKSTEP_RANK",      "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK",
      "LOCKSTEP_STORE",     "LOCKSTEP_SECRET",     "LOCKSTEP_LOCAL_WORLD_SIZE",
      "LOCKSTEP_SECRET_FD", "LOCKSTEP_JOB",        "LOCKSTEP_TIMEOUT",
      "LOCKSTEP_REPORT_FD", "LOCKSTEP_THREADS",    "LOCKSTEP_LAUNCH",
      "LOCKSTEP_RESTART",   columns_variable,      progress_variable};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const std::string_view name = text.substr(0, text.find('='));
    bool is_ours = false;
    for (std::string_view own : ours) is_ours = is_ours || own == name;
    if (!is_ours) variables.emplace_back(text);
  }
  return variables;
}

/// Adds a text to a list: `name=value`, for an environment.
inline void add(std::vector<std::string>& list, std::initializer_list<Word> words) {
  list.push_back(text(words));
}

/// The pointers that execve wants.
inline std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  list.reserve(texts.size() + 1);
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

/// Opens those of the descriptors 0, 1 and 2 that are closed, so that no pipe gets their number.
inline void keep_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd < 3) fd = ::open("/dev/null", O_RDWR);
  if (fd >= 0) ::close(fd);
}

/// How one start of the ranks has ended.
struct Attempt {
  int status = 0;
  bool is_failure = false;  // one after which the ranks may be started again
  std::string why;
};

/// Starts the ranks of the program, for the `number`th time after the first, and stays until all
/// have ended. Every start has a store, a secret and a job id of its own: nobody who is late meets
/// the ranks of another one.
inline Attempt run_attempt(LaunchOptions& options, std::chrono::milliseconds timeout,
                           std::size_t number) {
  const std::size_t ranks = options.ranks.value_or(1);
  const std::size_t processes = options.threads ? 1 : ranks;
  // For each rank two pipes of output, one for its failure and one for the secret, both ends while
  // it starts, its pidfd, and its connection to the store.
  allow_open_files(10 * processes + ranks + 128, "the launcher of a job of", ranks);
  const std::string secret = random_id();
  const std::string job = random_id();
  StoreServer server(secret, "127.0.0.1", 0, ranks);

  std::vector<std::string> common = inherited_environment();
  const std::string milliseconds = text({1000 + timeout.count() % 1000});
  add(common, {"LOCKSTEP_WORLD_SIZE=", processes});
  add(common, {"LOCKSTEP_LOCAL_WORLD_SIZE=", processes});
  if (options.threads) add(common, {"LOCKSTEP_THREADS=", *options.threads});
  add(common, {"LOCKSTEP_LAUNCH=", options.launch_number});
  add(common, {"LOCKSTEP_RESTART=", number});
  add(common, {progress_variable, "=", progress_text(progress_style())});
  add(common, {"LOCKSTEP_STORE=", endpoint_text("127.0.0.1", server.port())});
  add(common, {"LOCKSTEP_TIMEOUT=", timeout.count() / 1000, ".", milliseconds.c_str() + 1});
  add(common, {"LOCKSTEP_JOB=", job});
  if (!is_openmp_decided()) add(common, {openmp_variable, "=", openmp_share(ranks)});
  const Terminal terminal = detect_terminal(stdout);
  const std::string program = own_program();
  const std::vector<char*> arguments = pointers(options.rest);

  Outcome outcome;
  {
    Supervisor supervisor(Failures::printed, on_request(options.rest));
    for (std::size_t process = 0; process < processes; ++process) {
      const Rank rank{process};
      Pipe told = make_pipe();
      Pipe report = make_pipe();
      write_all(told.write.get(), secret);
      told.write.close();
      std::vector<std::string> variables = common;
      add(variables, {"LOCKSTEP_RANK=", process});
      add(variables, {"LOCKSTEP_LOCAL_RANK=", process});
      add(variables, {"LOCKSTEP_SECRET_FD=", told.read.get()});
      add(variables, {"LOCKSTEP_REPORT_FD=", report.write.get()});
      if (terminal.is_terminal) {
        const std::size_t taken = std::min(line_prefix(rank).size(), terminal.columns);
        add(variables, {columns_variable, "=", terminal.columns - taken});
      }
      SharedGpuVariables::add(variables, job, rank);
      const std::vector<char*> environment = pointers(variables);
      const std::string cannot_start =
          Failure{"launch", "the program cannot be executed", "look at its file", rank, false}
              .bytes();
      // The store's thread runs already: after fork, only async-signal-safe functions may be
      // called.
      supervisor.start(rank, std::move(report.read), [&] {
        ::fcntl(told.read.get(), F_SETFD, 0);
        ::fcntl(report.write.get(), F_SETFD, 0);
        ::execve(program.c_str(), arguments.data(), environment.data());
        write_all(report.write.get(), cannot_start);
      });
    }
    outcome = supervisor.run();
  }
  write_all(2, summary(outcome));
  return {outcome.shell_status(), outcome.kind() == EndKind::failed, outcome.words()};
}

/// Starts the ranks of the program, again after failures, as often as the options allow.
/// Returns the exit status: 0; that of the rank that failed first; `stopped_status` if all ranks
/// have saved their state because they were asked to stop; or 128 + the signal that ended the job.
inline int launch_ranks(LaunchOptions options, std::chrono::milliseconds timeout) {
  if (options.rendezvous) {
    fail("launch", {"--rendezvous is given, and --ranks starts ranks on this host only"},
         "leave it out, or start a job of several hosts with torchrun, srun or mpirun");
  }
  keep_standard_streams();
  say_openmp_share(options.ranks.value_or(1));
  for (std::size_t restarts = 0;;) {
    const Attempt attempt = run_attempt(options, timeout, restarts);
    if (attempt.status == stopped_status) write_all(2, stopped_words);
    if (!attempt.is_failure || options.max_restarts == 0) return attempt.status;
    if (restarts == options.max_restarts) {
      write_all(
          2, text({"lockstep: ", attempt.why, "; it was started again ", restarts,
                   restarts == 1 ? " time" : " times", ", as often as --max-restarts allows\n"}));
      return attempt.status;
    }
    ++restarts;
    write_all(2,
              text({"lockstep: ", attempt.why, "; restart ", restarts, " of ", options.max_restarts,
                    on_request(options.rest) == OnRequest::save
                        ? ", from the newest valid checkpoint\n"
                        : "; there is no --checkpoint, so training starts anew\n"}));
  }
}

}  // namespace lockstep::detail

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

#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/grace.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/nodes.hpp"
#include "lockstep/launch/open_files.hpp"
#include "lockstep/launch/openmp.hpp"
#include "lockstep/launch/options.hpp"
#include "lockstep/launch/shared_gpus.hpp"
#include "lockstep/launch/store_server.hpp"
#include "lockstep/launch/supervisor.hpp"
#include "lockstep/launch/terminal.hpp"

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

/// How long node 0 keeps the store open after a failure, so that the other nodes can read it.
inline constexpr std::chrono::milliseconds farewell{300};

/// How one start of the ranks has ended.
struct Attempt {
  int status = 0;
  bool is_failure = false;  // one after which the ranks may be started again
  std::string why;
};

/// Starts this node's ranks of the program, for the `number`th time after the first, and stays
/// until all have ended. Every start has a store and a secret of its own: nobody who is late meets
/// the ranks of another one.
inline Attempt run_attempt(LaunchOptions& options, std::chrono::milliseconds timeout,
                           std::size_t number) {
  const std::size_t ranks = options.ranks.value_or(1);
  const std::size_t processes = options.threads ? 1 : ranks;
  const bool alone = options.nodes == 1;
  const bool may_restart = number < options.max_restarts;
  Endpoint meeting = options.rendezvous.value_or(Endpoint{"127.0.0.1", 0});
  // A single launcher makes up a secret and a job id. Several launchers use LOCKSTEP_SECRET, or a
  // secret derived from the port, and the ranks agree on an id when they meet.
  const std::string nodes = number == 0 ? "nodes" : text({"nodes restart ", number});
  const std::string secret =
      alone ? random_id() : derived_secret(nodes, meeting.port, environment().secret());
  std::optional<StoreServer> server;
  std::optional<NodeWatch> others;
  // For each rank here two pipes of output, one for its failure and one for the secret, both ends
  // while it starts, and its pidfd.
  const bool is_first = options.node_rank == 0;
  const std::size_t clients = is_first ? options.nodes * (ranks + 1) : 0;  // launchers are some too
  allow_open_files(10 * processes + clients + 128, "the launcher of a job of",
                   options.nodes * ranks);
  if (is_first) {
    server.emplace(secret, is_loopback(meeting.host) ? meeting.host : "", meeting.port, clients);
    meeting.port = server->port();
    if (!is_loopback(meeting.host)) meeting.host = "127.0.0.1";
  }
  const auto linger = [&](std::chrono::milliseconds limit) {
    if (!alone && server) server->wait_until_unused(Deadline::after(limit));
  };
  try {
    if (!alone) {
      others.emplace(meeting, secret,
                     NodePlace{options.node_rank, options.nodes, ranks, options.max_restarts},
                     timeout);
    }
  } catch (const Error&) {
    linger(farewell);  // so that the others can read why
    throw;
  }

  std::vector<std::string> common = inherited_environment();
  const std::string milliseconds = text({1000 + timeout.count() % 1000});
  const std::string job = alone ? random_id() : "";
  add(common, {"LOCKSTEP_WORLD_SIZE=", options.nodes * processes});
  add(common, {"LOCKSTEP_LOCAL_WORLD_SIZE=", processes});
  if (options.threads) add(common, {"LOCKSTEP_THREADS=", *options.threads});
  add(common, {"LOCKSTEP_LAUNCH=", options.launch_number});
  add(common, {"LOCKSTEP_RESTART=", number});
  add(common, {progress_variable, "=", progress_text(progress_style())});
  add(common, {"LOCKSTEP_STORE=", endpoint_text(meeting.host, meeting.port)});
  add(common, {"LOCKSTEP_TIMEOUT=", timeout.count() / 1000, ".", milliseconds.c_str() + 1});
  if (alone) add(common, {"LOCKSTEP_JOB=", job});
  if (!is_openmp_decided()) add(common, {openmp_variable, "=", openmp_share(ranks)});
  const Terminal terminal = detect_terminal(stdout);
  const std::string program = own_program();
  const std::vector<char*> arguments = pointers(options.rest);

  Outcome outcome;
  {
    Supervisor supervisor(Failures::printed, on_request(options.rest));
    for (std::size_t local = 0; local < processes; ++local) {
      const std::size_t process = options.node_rank * processes + local;
      const Rank rank{process * options.threads.value_or(1)};  // the first of the process
      Pipe told = make_pipe();
      Pipe report = make_pipe();
      write_all(told.write.get(), secret);
      told.write.close();
      std::vector<std::string> variables = common;
      add(variables, {"LOCKSTEP_RANK=", process});
      add(variables, {"LOCKSTEP_LOCAL_RANK=", local});
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
    const auto announce = [&](const EndReason& why) { others->announce(why); };
    if (others) {
      supervisor.connect(others->take_news(), announce);
      others->start();
    }
    outcome = supervisor.run();
  }
  write_all(2, summary(outcome));
  EndReason end{outcome.kind(), outcome.words()};
  if (others) end = others->leave(outcome, may_restart);
  Attempt attempt{outcome.shell_status(), end.kind == EndKind::failed,
                  end.kind == outcome.kind() ? outcome.words() : end.words};
  if (end.kind == EndKind::stopped) attempt.status = stopped_status;
  if (end.kind != outcome.kind() && end.kind != EndKind::stopped) {
    if (!attempt.is_failure || !may_restart) write_all(2, text({"lockstep: ", end.words, "\n"}));
    if (attempt.status == 0 || attempt.status == stopped_status) attempt.status = 1;
  }
  others.reset();
  const bool is_awaited = attempt.status == 0 || attempt.status == stopped_status ||
                          (attempt.is_failure && may_restart);
  linger(is_awaited ? timeout : farewell);
  return attempt;
}

/// Starts this node's ranks of the program, again after failures, as often as the options allow.
/// Returns the exit status: 0; that of the rank that failed first; `stopped_status` if all ranks
/// have saved their state because they were asked to stop; or 128 + the signal that ended the job.
inline int launch_ranks(LaunchOptions options, std::chrono::milliseconds timeout) {
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder: ranks as threads, and the launcher, `./trainer --ranks 4`.

#include <iostream>
#include <system_error>

#include "lockstep/detail/launch/host.hpp"
#include "lockstep/detail/launch/join.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/launch/supervisor.hpp"
#include "lockstep/version.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

LOCKSTEP_INLINE std::string flag_name(std::string_view argument) {
  std::string name(argument.substr(0, argument.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

template <class Arguments>
bool is_given(const Arguments& arguments, std::string_view name) {
  for (std::size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    if (flag_name(arguments[i]) == name) return true;
  }
  return false;
}

/// Do ranks with these arguments save their state on SIGTERM?
LOCKSTEP_INLINE bool saves_on_request(const std::vector<std::string>& arguments) {
  return is_given(arguments, "--checkpoint");
}

LOCKSTEP_INLINE const Flag* find_flag(std::string_view name, std::span<const Flag> flags) {
  const auto found = std::ranges::find(flags, name, &Flag::name);
  return found == flags.end() ? nullptr : &*found;
}

/// The optimal string alignment distance: letters changed, added, removed or swapped with the next.
LOCKSTEP_INLINE std::size_t edit_distance(std::string_view a, std::string_view b) {
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

inline constexpr std::pair<std::string_view, std::string_view> names_elsewhere[] = {
    {"np", "--ranks"},
    {"nproc", "--ranks"},
    {"ntasks", "--ranks"},
    {"nproc-per-node", "--ranks"},
    {"num-ranks", "--ranks"},
    {"world-size", "--ranks"},
    {"device-ids", "--devices"},
    {"gpus", "--devices"},
    {"rdzv", "--rendezvous"},
    {"rdzv-endpoint", "--rendezvous"},
    {"master-addr", "--rendezvous"},
    {"master-port", "--rendezvous"}};

LOCKSTEP_INLINE std::string_view meant_flag(std::string_view name, std::span<const Flag> flags) {
  const auto word = [](std::string_view dashed) {
    return dashed.substr(std::min(dashed.find_first_not_of('-'), dashed.size()));
  };
  const std::string_view written = word(name);
  if (written.size() == name.size() || written.empty()) return {};
  for (const auto& [other, ours] : names_elsewhere) {
    if (written == other && find_flag(ours, flags) != nullptr) return ours;
  }
  // Many programs have a device of their own.
  if (written == "device") return {};
  for (const Flag& flag : flags) {
    const std::string_view known = word(flag.name);
    const std::size_t distance = edit_distance(written, known);
    // A short word's neighbours are often words (`--date`), unless they differ at its end.
    const bool is_slip =
        known.size() > 4
            ? distance <= (known.size() > 8 ? 2u : 1u) && written[0] == known[0]
            : distance <= 1 && (written.starts_with(known) || known.starts_with(written));
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
      for (; i < arguments.size(); ++i) cut.rest.emplace_back(arguments[i]);
      break;
    }
    const std::string name = i == 0 ? "" : flag_name(argument);
    const Flag* const ours = find_flag(name, flags);
    const Flag* const flag = ours != nullptr ? ours : find_flag(name, others);
    if (flag == nullptr) {
      std::string_view meant = meant_flag(name, flags);
      if (meant.empty()) meant = meant_flag(name, others);
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
    if (ours == nullptr) cut.rest.emplace_back(argument);
    const std::string_view value = takes_next  ? arguments[++i]
                                   : is_joined ? argument.substr(equals + 1)
                                               : std::string_view();
    if (ours != nullptr) cut.given.emplace_back(flag->name, value);
    if (ours == nullptr && takes_next) cut.rest.emplace_back(value);
  }
  return cut;
}

LOCKSTEP_INLINE std::pair<std::size_t, std::string_view> parse_ranks(
    std::string_view name, std::string_view value, std::span<const std::size_t> devices) {
  if (!value.empty() && value.find_first_not_of("0123456789") == std::string_view::npos)
    return {parse_number(name, value), ""};
  if (value == "cpu") return {core_count(), "CPU"};
  if (value != "gpu" && value != "auto") {
    fail_value(name, value,
               "give it a number, or gpu, cpu or auto: one for each GPU, for each CPU, or for each "
               "GPU and without any for each group of CPUs that share a cache");
  }
  std::size_t gpus = devices.size();
  if (gpus == 0) gpus = count_gpus("", std::getenv("CUDA_VISIBLE_DEVICES"));
  const char* const logical = std::getenv("LOCKSTEP_LOGICAL_GPUS");  // of tests
  if (gpus != 0 && devices.empty() && logical != nullptr && *logical != '\0')
    gpus = parse_number("LOCKSTEP_LOGICAL_GPUS", logical);
  if (gpus != 0) return {gpus, "GPU"};
  if (value == "auto")
    return {count_core_groups("", allowed_cpus()), "group of CPUs that share a cache"};
  fail("launch", {name, " is gpu, and this host shows no GPU", visible_devices_text()},
       text({"start it where nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides none, or say ",
             name, " auto, ", name, " cpu or a number"}));
}

/// Prints what a word for a number of ranks has come to, once.
LOCKSTEP_INLINE void say_ranks(std::string_view counted) {
  static bool is_said = false;
  if (!counted.empty() && !std::exchange(is_said, true)) write_all(2, counted);
}

LOCKSTEP_INLINE LaunchOptions parse_options(int argc, char** argv,
                                            std::span<const Flag> job_flags) {
  LaunchOptions options;
  const std::vector<std::string_view> arguments(argv, argv + argc);
  for (const char* const name : {"--nodes", "--nnodes", "--node-rank"}) {
    if (!is_given(arguments, name)) continue;
    fail("launch", {name, " is given, and --ranks starts ranks on this host only"},
         "start a job of several hosts with torchrun, srun or mpirun");
  }
  CutArguments cut = cut_arguments(arguments, launch_flags, job_flags);
  options.rest = std::move(cut.rest);
  // Devices come first: they are what `--ranks gpu` counts.
  options.devices = LaunchEnvironment().devices();
  for (const auto& [name, value] : cut.given)
    if (name == "--devices") options.devices = parse_devices(name, value);
  for (const auto& [name, value] : cut.given) {
    if (name == "--ranks") {
      const auto [count, each] = parse_ranks(name, value, options.devices);
      options.ranks = count;
      if (!each.empty())
        options.counted = text({"lockstep: --ranks ", value, ": ", count,
                                count == 1 ? " rank" : " ranks", ", one for each ", each, "\n"});
    }
    if (name == "--rendezvous") options.rendezvous = parse_endpoint(name, value);
    if (name == "--timeout") options.timeout = parse_seconds(name, value);
    if (name == "--progress") options.progress = parse_progress(name, value);
    // A variable, because ranks that this process starts inherit it.
    if (name == "--flight-recorder")
      ::setenv("LOCKSTEP_FLIGHT_RECORDER", std::string(value).c_str(), 1);
    if (name == "--local-rank") options.local_rank = parse_number("--local_rank", value);
    if (name == "--max-restarts") options.max_restarts = parse_number(name, value);
  }
  if (options.ranks == std::size_t{0}) {
    fail("launch", {"--ranks is 0"}, "a job has at least one rank");
  }
  return options;
}

template <class Flags>
void add_flag_lines(std::string& lines, const Flags& flags) {
  for (const auto& flag : flags) {
    std::string left = text({"  ", flag.name, flag.value.empty() ? "" : " ", flag.value});
    left.resize(std::max<std::size_t>(left.size() + 2, 26), ' ');
    left += flag.help;
    lines += text({left.substr(0, left.find_last_not_of(' ') + 1), "\n"});
  }
}

LOCKSTEP_INLINE std::string usage_text(std::string_view program, std::string_view synopsis,
                                       std::string_view title,
                                       const std::vector<AskedOption>& asked) {
  program.remove_prefix(program.find_last_of('/') + 1);
  std::string lines = text({"usage: ", program, " ", synopsis, "\n"});
  if (!asked.empty()) lines += text({"\n", title, "\n"});
  add_flag_lines(lines, asked);
  return lines;
}

LOCKSTEP_INLINE std::string help_text(std::string_view program, std::span<const Flag> others,
                                      const std::vector<AskedOption>& asked,
                                      std::string_view note) {
  std::string lines =
      usage_text(program, "[OPTIONS] [ARGUMENTS]", "Options of this program:", asked);
  if (!note.empty()) lines += text({"\n", note, "\n"});
  lines += text({"\nOptions of lockstep ", version, ", which starts the ranks of this program:\n"});
  add_flag_lines(lines, others);
  add_flag_lines(lines, launch_flags);
  return lines +
         "\nAll other arguments are the program's own, and so is everything behind --.\n"
         "torchrun, mpirun and srun may start the ranks instead.\n";
}

LOCKSTEP_INLINE std::size_t restart_count() { return LaunchEnvironment().restarts(); }

/// The calls of `launch` in this process, and those in progress.
inline std::atomic<std::size_t> launch_calls = 0;
inline std::atomic<std::size_t> launches_in_progress = 0;

LOCKSTEP_INLINE RankPlacement alone_placement(std::size_t threads = 1,
                                              std::vector<std::size_t> devices = {}) {
  RankPlacement placement("the program", Rank{0}, WorldSize{1});
  placement.local_world = 1;
  placement.ports = {0};
  placement.secret = random_id();
  placement.process_ranks = threads;
  placement.devices = std::move(devices);
  return placement;
}

LOCKSTEP_INLINE Session join_alone(std::chrono::milliseconds timeout) {
  return join_at(alone_placement(1, LaunchEnvironment().devices()), timeout);
}

LOCKSTEP_INLINE std::string host_identity() {
  if (const char* const host = std::getenv("LOCKSTEP_HOST"); host != nullptr && *host != '\0')
    return host;
  const std::string boot = read_file("/proc/sys/kernel/random/boot_id");
  return text({host_name(), " ", std::string_view(boot).substr(0, boot.find('\n'))});
}

/// Rank 0 prints that the job was stopped. Returns the exit status.
LOCKSTEP_INLINE int report_stop(const Stopped& stopped, std::optional<Rank> rank) {
  std::fflush(nullptr);
  if (rank.value_or(Rank{0}) == Rank{0}) std::fputs(text({stopped.what(), "\n"}).c_str(), stderr);
  return stopped_status;
}

/// Reports a failure to lockstep's launcher, if any, otherwise on stderr. Returns the exit status.
LOCKSTEP_INLINE int report_failure(const Error& failure, const Descriptor& launcher) {
  std::fflush(nullptr);
  if (!launcher || !write_all(launcher.get(), to_bytes(failure))) print_error(failure);
  return 1;
}

LOCKSTEP_INLINE int report_failure(const std::exception_ptr& thrown, std::optional<Rank> rank,
                                   const Descriptor& launcher) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Stopped& stopped) {
    return report_stop(stopped, rank);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a failure, which is reported below
  }
  // A launcher knows only one rank of a process.
  return report_failure(with_rank(error_of(thrown), rank), launcher);
}

/// Calls `run(session)`, which returns an exit status. If that is 0, unread arguments are an error.
/// `Stopped` is caught while the session exists, because other ranks may still need its store.
LOCKSTEP_INLINE int run_rank(Session& session, FunctionRef<int(Session&)> run) {
  try {
    const int status = run(session);
    if (status == 0) session.options().close();
    return status;
  } catch (const Stopped& stopped) {
    return report_stop(stopped, session.rank());
  }
}

LOCKSTEP_INLINE Error named_error(const Error& failure, Rank rank) {
  if (!failure.operation().empty()) return with_rank(failure, rank);
  return {"spawn", failure.problem(), "it was thrown by the spawned function", rank};
}

/// The ends of a process's rank threads. `launcher` is told of a failure.
class ThreadEnds {
 public:
  ThreadEnds(std::size_t threads, const Descriptor& launcher)
      : launcher_(launcher), running_(threads) {}

  /// The first nonzero status counts, but a failure overrides a stop.
  void returned(int status) {
    const std::lock_guard lock(mutex_);
    if (status_ == 0 || (status_ == stopped_status && status != 0)) status_ = status;
    --running_;
    changed_.notify_all();
  }
  void threw(Rank rank, const std::exception_ptr& thrown) {
    const std::lock_guard lock(mutex_);
    ends_.push_back({rank, 1, 0, error_of(thrown)});
    thrown_.push_back(thrown);
    --running_;
    changed_.notify_all();
  }

  /// **Host** blocks until all have ended or, after a failure, for `grace`. Have all ended?
  bool await(std::chrono::milliseconds grace) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0 || !ends_.empty(); });
    return changed_.wait_for(lock, grace, [&] { return running_ == 0; });
  }

  /// Valid once all have ended.
  bool has_failed() const { return !ends_.empty() || (status_ != 0 && status_ != stopped_status); }

  /// Reports the first failure and its consequences. Returns the exit status.
  int report() {
    const std::lock_guard lock(mutex_);
    if (ends_.empty()) return status_;
    // A rank that fails because of another often ends before it.
    std::size_t first = 0;
    while (first < ends_.size() && ends_[first].is_consequence()) ++first;
    if (first == ends_.size()) first = 0;
    Outcome outcome;
    outcome.first = ends_[first];
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      if (i != first && ends_[i].is_consequence()) outcome.consequences.push_back(ends_[i]);
    }
    const int status = report_failure(thrown_[first], ends_[first].rank, launcher_);
    write_all(2, summary(outcome));
    return status;
  }

  void rethrow_first() const {
    if (thrown_.empty()) return;
    const Rank rank = ends_.front().rank;
    try {
      std::rethrow_exception(thrown_.front());
    } catch (const Error& error) {
      throw with_rank(error, rank);
    } catch (...) {
      std::throw_with_nested(named_error(error_of(thrown_.front()), rank));
    }
  }

 private:
  const Descriptor& launcher_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_;
  std::vector<RankEnd> ends_;  // of failed ranks, in the order of their reports
  std::vector<std::exception_ptr> thrown_;
  int status_ = 0;
};

/// Calls `run(session)`, which returns an exit status, on `placement.process_ranks` threads, each a
/// rank. One of several processes exits at the latest `grace` after one of its ranks has failed.
LOCKSTEP_INLINE void run_threads(RankPlacement placement, std::chrono::milliseconds timeout,
                                 std::chrono::milliseconds grace, ThreadEnds& ends,
                                 FunctionRef<int(Session&)> run) {
  const std::size_t ranks = placement.process_ranks;
  const std::size_t first = placement.rank.value() * ranks;
  const bool is_whole = placement.world == WorldSize{1} && !placement.hosted;
  if (is_whole) allow_open_files(3 * ranks + 64, "a process of", ranks);
  std::string name;
  const std::unique_ptr<StoreHost> host = meet(placement, name, timeout);
  // Closing the store ends waits for a failed rank, so all ranks connect before any runs.
  std::vector<std::optional<Store>> stores(ranks);
  for (std::optional<Store>& store : stores) {
    if (is_whole) store.emplace(placement.host, placement.ports, placement.secret, timeout);
  }
  const auto failed = [&](Rank rank, const std::exception_ptr& thrown) {
    ends.threw(rank, thrown);
    if (is_whole) host->server.shut_down();
  };
  std::vector<Thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    const Rank rank{first + r};
    Membership member = as_rank(placement, rank, WorldSize{placement.world.value() * ranks});
    member.local_rank = placement.local_rank * ranks + r;
    member.local_world *= ranks;
    member.host = name;
    member.timeout = timeout;
    const auto act = [&, member, r] {
      Session session = rendezvous_at(placement, member, nullptr, std::move(stores[r]));
      ends.returned(run(session));
    };
    const auto threw = [&failed, rank](const std::exception_ptr& thrown) { failed(rank, thrown); };
    try {
      threads.emplace_back(ThreadName{"lockstep rank", "the thread of a rank"}, act, threw,
                           Signals::delivered);
    } catch (...) {  // no thread could be created
      failed(rank, std::current_exception());
      while (++r < ranks) ends.returned(0);
    }
  }
  if (!is_whole && !ends.await(grace)) {
    const int status = ends.report();
    std::fflush(nullptr);
    ::_exit(status);
  }
  threads.clear();
  if (!is_whole && host && !ends.has_failed())
    host->server.wait_until_unused(Deadline::after(timeout));
}

/// The same for a program, or for its options with `asks_for_help`. Returns the exit status.
LOCKSTEP_INLINE int run_threads(const RankPlacement& placement, std::chrono::milliseconds timeout,
                                const std::vector<std::string>& arguments,
                                const Descriptor& launcher, FunctionRef<int(Session&)> run,
                                bool asks_for_help = false) {
  ThreadEnds ends(placement.process_ranks, launcher);
  const auto act = [&](Session& session) {
    session.set_arguments(arguments, asks_for_help);
    return run_rank(session, run);
  };
  run_threads(placement, timeout, termination_grace(saves_on_request(arguments)), ends, act);
  return ends.report();
}

LOCKSTEP_INLINE std::vector<std::string> inherited_environment() {
  constexpr std::string_view ours[] = {
      "LOCKSTEP_RANK",    "LOCKSTEP_WORLD_SIZE",       "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_STORE",
      "LOCKSTEP_SECRET",  "LOCKSTEP_LOCAL_WORLD_SIZE", "LOCKSTEP_SECRET_FD",  "LOCKSTEP_JOB",
      "LOCKSTEP_TIMEOUT", "LOCKSTEP_REPORT_FD",        "LOCKSTEP_THREADS",    "LOCKSTEP_LAUNCH",
      "LOCKSTEP_RESTART", "LOCKSTEP_DEVICES",          columns_variable,      progress_variable};
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const auto* const own =
        std::find(std::begin(ours), std::end(ours), text.substr(0, text.find('=')));
    if (own == std::end(ours)) variables.emplace_back(text);
  }
  return variables;
}

LOCKSTEP_INLINE void add(std::vector<std::string>& list, std::initializer_list<TextPart> parts) {
  list.push_back(text(parts));
}

LOCKSTEP_INLINE std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  list.reserve(texts.size() + 1);
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

/// Opens closed standard streams, so that no pipe gets the descriptor 0, 1 or 2.
LOCKSTEP_INLINE void keep_standard_streams() {
  int fd = 0;
  while (fd >= 0 && fd < 3) fd = ::open("/dev/null", O_RDWR);
  if (fd >= 0) ::close(fd);
}

/// Starts the ranks, as restart `number`; each attempt has its own store, secret and job id.
LOCKSTEP_INLINE Outcome run_attempt(LaunchOptions& options, std::chrono::milliseconds timeout,
                                    std::size_t number) {
  const std::size_t ranks = options.ranks.value_or(1);
  const std::size_t processes = options.threads ? 1 : ranks;
  // Per process: four pipes (both ends while it starts) and a pidfd; per rank: a connection.
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
  add(common, {progress_variable, "=", progress_names[static_cast<std::size_t>(progress_style())]});
  add(common, {"LOCKSTEP_STORE=", endpoint_text("127.0.0.1", server.port())});
  add(common, {"LOCKSTEP_TIMEOUT=", timeout.count() / 1000, ".", milliseconds.c_str() + 1});
  add(common, {"LOCKSTEP_JOB=", job});
  std::string devices;
  for (const std::size_t device : options.devices)
    devices += text({devices.empty() ? "" : ",", device});
  if (!devices.empty()) add(common, {"LOCKSTEP_DEVICES=", devices});
  if (!is_openmp_decided()) add(common, {openmp_variable, "=", openmp_share(ranks)});
  const Terminal terminal = detect_terminal(stdout);
  // Its path, which `ps` shows for ranks; the kernel's link if a rebuild replaced it.
  std::string program = own_program();
  if (program.empty() || program.ends_with(" (deleted)")) program = "/proc/self/exe";
  const std::vector<char*> arguments = pointers(options.rest);

  Outcome outcome;
  {
    Supervisor supervisor(true, saves_on_request(options.rest));
    for (std::size_t process = 0; process < processes; ++process) {
      const Rank rank{process};
      Pipe secret_pipe = make_pipe();
      Pipe report = make_pipe();
      write_all(secret_pipe.write.get(), secret);
      secret_pipe.write.close();
      std::vector<std::string> variables = common;
      add(variables, {"LOCKSTEP_RANK=", process});
      add(variables, {"LOCKSTEP_LOCAL_RANK=", process});
      add(variables, {"LOCKSTEP_SECRET_FD=", secret_pipe.read.get()});
      add(variables, {"LOCKSTEP_REPORT_FD=", report.write.get()});
      if (terminal.is_terminal) {
        const std::size_t taken = std::min(line_prefix(rank).size(), terminal.columns);
        add(variables, {columns_variable, "=", terminal.columns - taken});
      }
      add_shared_gpu_variables(variables, job, rank);
      const std::vector<char*> environment = pointers(variables);
      const std::string cannot_start =
          to_bytes({"launch", "the program cannot be executed", "look at its file", rank});
      // The store's thread runs: after fork, only async-signal-safe functions are allowed.
      supervisor.start(rank, std::move(report.read), [&] {
        ::fcntl(secret_pipe.read.get(), F_SETFD, 0);
        ::fcntl(report.write.get(), F_SETFD, 0);
        ::execve(program.c_str(), arguments.data(), environment.data());
        write_all(report.write.get(), cannot_start);
      });
    }
    outcome = supervisor.run();
  }
  write_all(2, summary(outcome));
  return outcome;
}

/// Starts the ranks, and restarts them after failures as the options allow. Returns the exit
/// status: 0, that of the first failure, `stopped_status` if all have saved, or 128 + the signal.
LOCKSTEP_INLINE int launch_ranks(LaunchOptions options, std::chrono::milliseconds timeout) {
  if (options.rendezvous) {
    fail("launch", {"--rendezvous is given, and --ranks starts ranks on this host only"},
         "leave it out, or start a job of several hosts with torchrun, srun or mpirun");
  }
  keep_standard_streams();
  say_ranks(options.counted);
  say_openmp_share(options.ranks.value_or(1));
  for (std::size_t restarts = 0;; ++restarts) {
    const Outcome outcome = run_attempt(options, timeout, restarts);
    const int status = outcome.shell_status();
    if (status == stopped_status)
      write_all(2, "lockstep: stopped on request; start again with --resume\n");
    if (!outcome.may_restart() || options.max_restarts == 0) return status;
    const bool is_last = restarts == options.max_restarts;
    const std::string next =
        is_last ? text({"; it was started again ", restarts, restarts == 1 ? " time" : " times",
                        ", as often as --max-restarts allows\n"})
                : text({"; restart ", restarts + 1, " of ", options.max_restarts,
                        saves_on_request(options.rest)
                            ? ", from the newest valid checkpoint\n"
                            : "; there is no --checkpoint, so training starts anew\n"});
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): a job that failed has a first failure
    write_all(2, text({"lockstep: ", outcome.first->message(), next}));
    if (is_last) return status;
  }
}

LOCKSTEP_INLINE void spawn_threads(std::size_t ranks, RankFunction f,
                                   std::chrono::milliseconds timeout) {
  const Descriptor launcher;
  ThreadEnds ends(ranks, launcher);
  const auto act = [&](Session& session) {
    f(session.membership(), session.store());
    return 0;
  };
  run_threads(alone_placement(ranks), timeout, timeout, ends, act);
  ends.rethrow_first();
}

/// Runs a forked rank and exits without the parent's atexit handlers and destructors.
[[noreturn]] LOCKSTEP_INLINE void run_forked(const Membership& member, int report, RankFunction f) {
  int status = 0;
  try {
    Store store(member.host, member.port, member.secret, member.timeout);
    f(member, store);
  } catch (...) {
    write_all(report, to_bytes(error_of(std::current_exception())));
    status = 1;
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(status);
}

LOCKSTEP_INLINE void spawn_processes(std::size_t ranks, RankFunction f,
                                     std::chrono::milliseconds timeout) {
  std::cout.flush();
  std::fflush(nullptr);  // otherwise every rank would print what is buffered
  allow_open_files(8 * ranks + 64, "spawn of", ranks);  // pipes, connections, pidfds
  const bool had_threads = has_other_threads();
  const std::string secret = random_id();
  const std::string job = random_id();
  Descriptor listener = listen_on("127.0.0.1", 0);
  const std::uint16_t port = local_port(listener.get());
  Outcome outcome;
  {
    Supervisor supervisor(false, false);
    for (std::size_t r = 0; r < ranks; ++r) {
      Pipe report = make_pipe();
      const Membership member{Rank{r}, WorldSize{ranks}, r,      ranks, "127.0.0.1", port,
                              job,     secret,           timeout};
      supervisor.start(Rank{r}, std::move(report.read), [&] {
        listener.close();
        use_openmp_share(ranks, had_threads);
        run_forked(member, report.write.get(), f);
      });
    }
    // After the forks, so that ranks inherit neither its sockets nor its threads.
    const StoreServer server(secret, std::move(listener));
    outcome = supervisor.run();
  }
  if (outcome.interrupted != 0) {
    ::raise(outcome.interrupted);  // the program's own handler applies
    fail("spawn", {"ended by signal ", outcome.interrupted}, "all ranks were ended");
  }
  if (!outcome.stopped.empty() && !outcome.first) {
    fail("spawn", {"the rank ended too early: exit status ", stopped_status},
         "let it return instead", outcome.stopped.front());
  }
  if (!outcome.first) return;
  const RankEnd& end = *outcome.first;
  if (end.failure) throw named_error(*end.failure, end.rank);
  fail("spawn", {"the rank ended too early: ", end.status_text()},
       "look at what it printed, and at core dumps", end.rank);
}

LOCKSTEP_INLINE void spawn_ranks(bool as_processes, std::size_t ranks, RankFunction f,
                                 std::chrono::milliseconds timeout) {
  if (ranks == 0) fail("spawn", {"a world of zero ranks"}, "spawn at least one");
  (as_processes ? spawn_processes : spawn_threads)(ranks, f, timeout);
}

/// The output of `--help`. A program with options runs on threads until `HelpAsked` ends it.
LOCKSTEP_INLINE std::string help(std::span<const std::string_view> arguments,
                                 std::span<const Flag> flags, FunctionRef<int(Session&)> run,
                                 std::size_t ranks) {
  const std::string_view program = arguments.empty() ? "program" : arguments[0];
  std::vector<AskedOption> asked;
  std::string note;
  if (!program_calls_option) return help_text(program, flags, asked);
  const auto until_asked = [&](Session& session) {
    try {
      run(session);
    } catch (const HelpAsked&) {  // NOLINT(bugprone-empty-catch): this is its end
    } catch (const std::exception& error) {
      if (session.rank() == Rank{0}) {
        note = text({"It may have more, but ended before it had asked for them: ", error.what()});
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): nor is any other failure one of `--help`
    }
    if (session.rank() == Rank{0}) asked = session.options().asked();
    return 1;  // not 0, so that unread arguments are no error
  };
  std::vector<std::string> left{std::string(program)};
  try {
    std::vector<Flag> all(flags.begin(), flags.end());
    all.insert(all.end(), std::begin(launch_flags), std::end(launch_flags));
    left = cut_arguments(arguments, all).rest;
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a slip beside `--help` is none
  }
  try {
    run_threads(alone_placement(ranks), std::chrono::seconds(10), left, Descriptor(), until_asked,
                true);
  } catch (const std::exception& error) {
    note = error.what();
  }
  return help_text(program, flags, asked, note);
}

/// Answers `--help` and `--version`, on rank 0 of the first `launch`. False where neither is given.
LOCKSTEP_INLINE bool answer(std::span<const std::string_view> arguments, std::size_t launch_number,
                            std::span<const Flag> flags, FunctionRef<int(Session&)> run,
                            std::size_t ranks) {
  const bool wants_help = is_given(arguments, "--help");
  if (!wants_help && !is_given(arguments, "--version")) return false;
  // A dummy address, since a placement without one is an error, and this rank connects to nobody.
  const auto where = LaunchEnvironment(Endpoint{"127.0.0.1", 1}).placement();
  if (launch_number != 1 || (where && where->rank != Rank{0})) return true;
  std::fputs(wants_help ? help(arguments, flags, run, ranks).c_str()
                        : text({"lockstep ", version, "\n"}).c_str(),
             stdout);
  std::fflush(stdout);
  return true;
}

/// Turns a failure in a destructor of ranks that have returned into a reported one, with status 1.
LOCKSTEP_INLINE int status_after(int status, LateFailures& late, const Descriptor& launcher) {
  if (status != 0) return status;
  const std::optional<Error> failure = late.take();
  return failure ? report_failure(*failure, launcher) : status;
}

/// The number of rank threads in each process of a job with several.
LOCKSTEP_INLINE std::size_t threads_of(const RankPlacement& placement, const LaunchOptions& options,
                                       std::size_t default_ranks) {
  if (const auto threads = LaunchEnvironment().threads()) return *threads;
  if (options.ranks) return *options.ranks;
  if (default_ranks == dynamic) return 1;
  const std::size_t processes = placement.world.value();
  if (default_ranks % processes == 0) return default_ranks / processes;
  fail("launch",
       {"a world of ", default_ranks, " ranks cannot be divided among ", processes, " processes"},
       "start another number of processes", placement.rank);
}

LOCKSTEP_INLINE void check_launcher(const LaunchOptions& options, const RankPlacement& placement) {
  // Older launchers also pass the local rank as an argument; a wrong one selects a wrong device.
  const bool is_known = placement.local_world != 0 || std::getenv("LOCAL_RANK") != nullptr;
  if (is_known && options.local_rank && *options.local_rank != placement.local_rank) {
    fail("launch",
         {"--local_rank is ", *options.local_rank, " and ", placement.launcher,
          " gives local rank ", placement.local_rank},
         "leave --local_rank out", placement.rank);
  }
  if (options.max_restarts != 0 && !placement.is_alone()) {
    fail("launch", {"--max-restarts was given to a rank that ", placement.launcher, " started"},
         placement.launcher == "torchrun"
             ? "give it to torchrun itself, before the program's name"
             : "leave it out, or let lockstep start the ranks, with --ranks",
         placement.rank);
  }
}

/// Where this process decides how many ranks there are, each has one of the chosen devices.
LOCKSTEP_INLINE void match_devices(LaunchOptions& options, std::size_t default_ranks) {
  const std::size_t listed = options.devices.size();
  if (listed == 0) return;
  const std::size_t wanted =
      options.ranks.value_or(default_ranks == dynamic ? listed : default_ranks);
  if (wanted != listed) {
    fail("launch", {wanted, " ranks are wanted and --devices lists ", listed},
         "give every rank one device, or leave --ranks out");
  }
  if (listed > 1) options.ranks = listed;
}

LOCKSTEP_INLINE int launch_as(RanksAs how, int argc, char** argv,
                              FunctionRef<int(Session&, std::optional<std::size_t>)> run,
                              std::size_t default_ranks, std::span<const Flag> flags) {
  std::optional<Rank> rank;
  Descriptor launcher;
  LateFailures late;
  try {
    std::optional<std::size_t> replicas;
    const auto run_one = [&](Session& session) { return run(session, replicas); };
    const std::size_t by_default =
        default_ranks == dynamic || how == RanksAs::replicas ? 1 : default_ranks;
    // A program may call `launch` several times; a rank skips all calls but the one it is for.
    const std::size_t launch_number = ++launch_calls;
    ++launches_in_progress;
    const std::shared_ptr<void> at_end(nullptr, [](void*) { --launches_in_progress; });
    const std::vector<std::string_view> arguments(argv, argv + argc);
    // Jobs that the program makes from its session have options too.
    if (flags.empty()) flags = program_job_flags;
    if (answer(arguments, launch_number, flags, run_one, by_default)) return 0;
    LaunchOptions options = parse_options(argc, argv, flags);
    options.launch_number = launch_number;
    chosen_progress_style = options.progress;
    progress_style();  // throws for an invalid variable, before any rank
    std::optional<RankPlacement> placement = LaunchEnvironment(options.rendezvous).placement();
    const LaunchEnvironment environment;
    const auto timeout = options.timeout.value_or(environment.timeout().value_or(default_timeout));
    const bool is_alone = !placement || placement->is_alone();
    if (placement) check_launcher(options, *placement);
    if (placement) placement->devices = options.devices;
    if (is_alone && how != RanksAs::replicas) match_devices(options, default_ranks);
    if (environment.launch_number().value_or(launch_number) != launch_number) return 0;
    if (placement) {
      prepare_shared_gpus(placement->job, placement->rank);
      launcher = inherited_pipe(placement->report_fd);
      // Line-buffered, since a full buffer would delay lines and lose those before a crash.
      if (placement->hosted) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    }
    const auto run_on_threads = [&](const RankPlacement& at) {
      return run_threads(at, timeout, options.rest, launcher, run_one);
    };

    if (how == RanksAs::processes) {
      if (!placement && by_default > 1 && !options.ranks) options.ranks = by_default;
      if (options.max_restarts != 0 && !options.ranks) options.ranks = 1;
      if (options.ranks && !is_alone) {
        fail("launch", {"--ranks was given to a rank that ", placement->launcher, " started"},
             "leave the number of ranks to one of the two", placement->rank);
      }
      if (options.ranks) return launch_ranks(std::move(options), timeout);
      rank = placement ? placement->rank : Rank{0};
    } else if (how == RanksAs::threads_of_processes && placement &&
               (placement->hosted || placement->world > WorldSize{1})) {
      placement->process_ranks = threads_of(*placement, options, default_ranks);
      return status_after(run_on_threads(*placement), late, launcher);
    } else {
      if (placement && placement->world > WorldSize{1}) {
        fail("launch",
             {placement->launcher, " started this process as one of ", placement->world,
              " ranks, and the ", how == RanksAs::replicas ? "replicas" : "ranks",
              " of this job are threads of one process"},
             text({"start it once, with --ranks ", placement->world}), placement->rank);
      }
      // By default there is one replica for each device.
      if (!options.ranks) options.ranks = environment.threads();
      if (!options.ranks && how != RanksAs::replicas) options.ranks = by_default;
      if (options.max_restarts != 0) {
        // A failure may end the process of all threads, so a launcher process restarts it.
        options.threads = options.ranks;
        return launch_ranks(std::move(options), timeout);
      }
      if (how != RanksAs::replicas) {
        say_ranks(options.counted);
        return status_after(run_on_threads(alone_placement(*options.ranks, options.devices)), late,
                            launcher);
      }
      replicas = options.ranks;
    }
    Session session =
        join_at(placement ? *placement : alone_placement(1, options.devices), timeout);
    session.set_arguments(options.rest);
    return status_after(run_rank(session, run_one), late, launcher);
  } catch (...) {
    return report_failure(std::current_exception(), rank, launcher);
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE ProgramOptions::ProgramOptions(const std::vector<std::string>& arguments,
                                               bool speaks, bool asks_for_help)
    : left_(arguments), speaks_(speaks), asks_for_help_(asks_for_help), is_launched_(true) {
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
  const std::string_view program = left_.empty() ? "program" : std::string_view(left_[0]);
  std::string lines = detail::usage_text(program, "[OPTIONS]", "Options:", asked_);
  detail::add_flag_lines(lines, std::array{detail::Flag{"--help", "", "print this text"}});
  std::fputs(lines.c_str(), stdout);
  std::fflush(stdout);
  return true;
}

LOCKSTEP_INLINE void ProgramOptions::reject(std::initializer_list<detail::TextPart> problem,
                                            std::string_view advice) {
  const Error error("launch", detail::text(problem), advice);
  // All ranks have the same command line; one of them reports the error.
  throw speaks_ ? error : error.as_consequence();
}

LOCKSTEP_INLINE void ProgramOptions::reject_value(std::string_view name, std::string_view value,
                                                  std::string_view advice) {
  reject({detail::flag_name(detail::text({"--", name})), " is '", value, "'"}, advice);
}

LOCKSTEP_INLINE std::optional<std::string_view> ProgramOptions::ask(std::string_view name,
                                                                    std::string_view value,
                                                                    std::string_view otherwise,
                                                                    std::string_view help,
                                                                    const bool& /*is_noted*/) {
  const std::string dashed = detail::flag_name(detail::text({"--", name}));
  const auto is_asked = [&](const detail::AskedOption& option) { return option.name == dashed; };
  auto known = std::find_if(asked_.begin(), asked_.end(), is_asked);
  if (known == asked_.end()) {
    if (name.empty() || name[0] == '-' || name.find_first_of("= ") != std::string_view::npos) {
      reject({"an option cannot be called '", name, "'"},
             "name it without dashes, as in option(\"epochs\", 8)");
    }
    if (detail::find_flag(dashed, reserved_) != nullptr || dashed == "--help" ||
        (is_launched_ && detail::find_flag(dashed, detail::launch_flags) != nullptr)) {
      reject({"the program asks for ", dashed, ", which is an option of lockstep's own"},
             "give the program's another name");
    }
    if (is_closed_) {
      reject({"the program asks for ", dashed, " when ranks are already at work"},
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
    if (given) reject({name, " is given twice"}, "give it once");
    const std::size_t equals = left_[i].find('=');
    std::size_t taken = 1;
    if (equals != std::string::npos) {
      given = left_[i].substr(equals + 1);
    } else if (!has_value) {
      given = "true";
    } else if (i + 1 == left_.size() || i + 1 == behind_ || left_[i + 1].starts_with("--")) {
      const std::string_view example = otherwise.empty() ? "VALUE" : otherwise;
      reject({name, " has no value"}, detail::text({"give it one, as in ", name, " ", example}));
    } else {
      given = left_[i + 1];
      taken = 2;
    }
    const auto first = left_.begin() + static_cast<std::ptrdiff_t>(i);
    left_.erase(first, first + static_cast<std::ptrdiff_t>(taken));
    if (i < behind_) behind_ -= taken;
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
  const auto begin = left_.begin();
  left_.erase(begin, begin + static_cast<std::ptrdiff_t>(std::exchange(behind_, cut.rest.size())));
  left_.insert(left_.begin(), cut.rest.begin(), cut.rest.end());
  return taken_;
}

LOCKSTEP_INLINE void ProgramOptions::end(Readers readers) {
  is_closed_ = true;
  if (asks_for_help_) {
    if (std::uncaught_exceptions() == 0) throw detail::HelpAsked();
    return;  // called by a destructor during unwinding
  }
  is_checked_ = readers == Readers::all;
  if (is_read_ && asked_.empty()) return;  // the program reads its arguments itself
  for (std::size_t i = 1; i < left_.size(); ++i) {
    const bool is_option = i < behind_ && left_[i].size() > 2 && left_[i].starts_with("--");
    if (readers == Readers::some && is_option) {
      const std::string name = detail::flag_name(left_[i]);
      const auto* flag = detail::find_flag(name, detail::program_job_flags);
      if (flag != nullptr) {
        if (!flag->value.empty() && left_[i].find('=') == std::string::npos) ++i;
        continue;
      }
    }
    if (is_option) reject_unknown(left_[i]);
    // Programs with only a session often read arguments late, or read `argv` themselves.
    const bool has_readers = is_left_ || !asked_.empty();
    if (readers == Readers::all && has_readers && !is_read_) {
      reject({"nothing in this program reads '", left_[i], "'"},
             "leave it out; --help prints the options. A program that reads its own arguments "
             "calls arguments() of its session or job first");
    }
  }
}

LOCKSTEP_INLINE void ProgramOptions::reject_unknown(const std::string& argument) {
  std::vector<detail::Flag> known;
  std::string advice;
  for (const auto& [name, value, help, given] : asked_) {
    known.push_back({name, value, help});
    advice += detail::text({advice.empty() ? "this program has " : ", ", name});
  }
  advice += advice.empty() ? "this program has none of its own, and --help prints those of "
                             "lockstep. A program that reads its own arguments calls arguments() "
                             "of its session or job first"
                           : "; --help prints all";
  known.insert(known.end(), reserved_.begin(), reserved_.end());
  const std::string_view meant = detail::meant_flag(detail::flag_name(argument), known);
  if (!meant.empty()) advice = detail::text({"did you mean ", meant, "?"});
  reject({"there is no option ", std::string_view(argument).substr(0, argument.find('='))}, advice);
}

LOCKSTEP_INLINE Session::~Session() {
  store_.reset();
  if (!host_ || world() == WorldSize{1}) return;
  // After a failure, the other ranks have a moment to read in the store whose it is.
  constexpr std::chrono::milliseconds after_failure{2000};
  const auto limit =
      scope_.is_failure() ? std::min(membership_.timeout, after_failure) : membership_.timeout;
  host_->server.wait_until_unused(detail::Deadline::after(limit));
}

LOCKSTEP_INLINE Session join(std::string_view init_method, Rank rank, WorldSize world,
                             std::chrono::milliseconds timeout) {
  if (init_method == "env://") {
    return detail::join_at(detail::LaunchEnvironment().rendezvous_placement(rank, world), timeout);
  }
  if (init_method.starts_with("file://")) {
    return detail::join_by_file(init_method.substr(7), rank, world, timeout);
  }
  if (init_method.starts_with("tcp://")) {
    const auto store = detail::parse_endpoint("the init method", init_method.substr(6));
    detail::RankPlacement placement("the program", rank, world);
    placement.host = store.host;
    placement.ports = {store.port};
    placement.secret =
        detail::derived_secret("", store.port, detail::LaunchEnvironment().secret(rank));
    return detail::join_at(std::move(placement), timeout);
  }
  detail::fail("join", {"'", init_method, "' is not an init method"},
               "use env://, tcp://host:port or file:///path", rank);
}

LOCKSTEP_INLINE Session join(std::chrono::milliseconds timeout) {
  if (detail::launches_in_progress != 0) {
    throw Error("join", "launch has joined this process to its job already",
                "inside launch use the session that it gives: ProcessGroup group(session)");
  }
  auto placement = detail::LaunchEnvironment().placement();
  if (placement) return detail::join_at(*std::move(placement), timeout);
  // The arguments of a command line end with zeros.
  const std::string command_line = '\0' + detail::read_file("/proc/self/cmdline");
  if (command_line.find(std::string_view("\0--ranks", 8)) != std::string::npos) {
    throw Error("join", "the program was given --ranks, and only launch starts ranks",
                "call launch(argc, argv, f) in main, or start the program with torchrun, mpirun or "
                "srun");
  }
  return detail::join_alone(timeout);
}

}  // namespace lockstep

LOCKSTEP_COLD_END

// SPDX-License-Identifier: Apache-2.0
// A program that launches itself and then behaves as its argument says. tests/launch/run uses it.
// With TRAINER_HAS_THREADS, its ranks are threads of one process on each node; with
// TRAINER_HAS_REPLICAS, it is one process, as jobs of ParallelStrategy<DP> are.
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/launch/environment.hpp"
#include "lockstep/detail/launch/join.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/observe/display.hpp"
#include "lockstep/detail/trainer/process_group.hpp"

using namespace lockstep;

namespace {

[[noreturn]] void sleep_for_ever() {
  for (;;) ::pause();
}

/// Returns once the launcher has taken everything out of a pipe.
void wait_until_read(int pipe) {
  for (int unread = 1; unread > 0 && ::ioctl(pipe, FIONREAD, &unread) == 0;) ::sched_yield();
}

void say_pid() {
  std::printf("pid %d\n", static_cast<int>(::getpid()));
  std::fflush(stdout);
}

/// Destroyed after the communicator has told the others that this rank fails, it holds this rank up
/// until they have ended: their failures are then noticed before its own.
struct SlowToUnwind {
  Session& session;
  bool slow;
  void share_pid() {
    session.store().set("pid of " + std::to_string(session.rank().value()),
                        std::to_string(::getpid()));
  }
  ~SlowToUnwind() {
    if (!slow) return;
    for (std::size_t r = 0; r < session.world().value(); ++r) {
      const pid_t pid = std::stoi(session.store().get("pid of " + std::to_string(r)));
      while (pid != ::getpid() && ::kill(pid, 0) == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
};

/// Sums without end, until rank 1 fails in the way it is told.
void train_until(Session& session, const std::string& how) {
  const bool culprit = session.rank() == Rank{1};
  SlowToUnwind last{session, culprit && how == "throw late"};
  last.share_pid();
  auto comm = make_shm_communicator(session.membership(), session.store());
  auto data = comm.allocate<float>(1000);
  for (int step = 0;; ++step) {
    comm.all_reduce(data);
    if (step < 10 || !culprit) continue;
    if (how == "die") std::raise(SIGKILL);
    throw std::runtime_error("a thing went wrong\nand here is more of it");
  }
}

/// What a process has open, and how many threads and variables it has.
std::string holdings(pid_t process) {
  const auto entries = [&](const char* folder) {
    const std::filesystem::directory_iterator all("/proc/" + std::to_string(process) + folder);
    return std::to_string(std::distance(all, {}));
  };
  return entries("/fd") + " files, " + entries("/task") + " threads";
}

/// The last rank fails as it is told, until the job was started again that often: `flaky 2 die`.
int fail_at_first(Session& session, const std::vector<std::string>& arguments) {
  const std::size_t restarts = detail::restart_count();
  const Membership& m = session.membership();
  session.store().barrier("all are connected", m.rank, m.world);
  if (m.rank == Rank{0}) {
    std::size_t variables = 0;
    while (environ[variables] != nullptr) ++variables;
    std::printf("restart %zu, job %s, %zu variables, launcher has %s\n", restarts, m.job.c_str(),
                variables, holdings(::getppid()).c_str());
    std::fflush(stdout);
  }
  session.store().barrier("that is said", m.rank, m.world);
  if (restarts >= std::stoul(arguments.at(2))) return 0;
  const std::string& how = arguments.at(3);
  if (m.rank.value() + 1 == m.world.value()) {
    if (how == "die") std::raise(SIGKILL);
    if (how == "exit") return 3;
    if (how == "option") throw Error("launch", "--speed is 'x'", "give it a number");
    throw std::runtime_error("out of luck");
  }
  session.store().get("never");
  return 0;
}

/// Trains until it is asked to stop, then saves and stops: at once, or as `how` says.
int train_until_stopped(Session& session, const std::string& how) {
  detail::StopRequest request;
  const Membership& m = session.membership();
  Membership node = m;
  node.rank = Rank{m.local_rank};
  node.world = WorldSize{m.local_world};
  const std::string name = "node from " + std::to_string(m.rank.value() - m.local_rank);
  auto comm = make_shm_communicator(node, session.store(), name);
  session.store().barrier("all train", m.rank, m.world);
  say_pid();
  for (bool is_wanted = false; !is_wanted;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const std::string mine = request.is_made() ? "stop" : "";
    for (const std::string& wish : session.store().gather("wishes", m.rank, m.world, mine)) {
      is_wanted = is_wanted || !wish.empty();
    }
  }
  comm.barrier();  // some are still in it when others unwind
  const bool is_last = m.rank.value() + 1 == m.world.value();
  if (is_last && how == "stop late") {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    session.store().set("late", "yes");  // it is still there
  }
  if (m.rank == Rank{0} && how == "stop badly first") throw std::runtime_error("the disk is full");
  if (is_last && how == "stop badly") throw std::runtime_error("the disk is full");
  if (is_last && how == "stop stuck") sleep_for_ever();
  std::printf("rank %zu has saved\n", m.rank.value());
  request.finished();
  throw Stopped(request.signal(), "state");
}

int behave(Session& session, const std::string& how) {
  if (how == "ones") {
    ProcessGroup group(session);
    std::size_t ones[] = {1};
    group->all_reduce(ones, Sum{});
    if (session.rank() == Rank{0}) std::printf("sum %zu\n", ones[0]);
    return 0;
  }
  if (how == "flaky") return fail_at_first(session, session.arguments());
  if (how.starts_with("stop")) return train_until_stopped(session, how);
  if (how == "join") return static_cast<int>(init_process_group().rank().value());
  const Membership& m = session.membership();
  const std::size_t rank = m.rank.value();
  if (how == "who") {
    std::printf("rank %zu of %zu, local %zu of %zu, job %s\n", rank, m.world.value(), m.local_rank,
                m.local_world, m.job.c_str());
  } else if (how == "devices") {
    std::string text;
    for (const std::size_t device : m.devices) text += " " + std::to_string(device);
    std::printf("devices%s\n", text.c_str());
  } else if (how == "lines") {
    for (int i = 0; i < 1000; ++i) {
      std::FILE* stream = i % 2 == 0 ? stdout : stderr;
      std::fprintf(stream, "line %d of rank %zu ", i, rank);
      std::fflush(stream);  // half a line in the pipe, for the launcher to put together
      if (i % 100 < 2) wait_until_read(::fileno(stream));
      std::fprintf(stream, "ends\n");
      std::fflush(stream);
    }
  } else if (how == "long") {
    if (rank == 0) std::fputs(std::string(200'000, 'x').c_str(), stdout);
    if (rank == 1) std::fputs("no newline", stdout);
  } else if (how == "fail") {
    if (rank == 2) {
      std::fprintf(stderr, "rank two has a reason\n");
      return 3;
    }
    session.store().get("never");
  } else if (how == "throw alone") {  // and the others wait for something else
    if (rank == 3) throw std::runtime_error("out of luck");
    session.store().get("never");
  } else if (how == "throw" || how == "throw late" || how == "die") {
    train_until(session, how);
  } else if (how == "sum") {
    auto comm = make_shm_communicator(session.membership(), session.store());
    auto data = comm.allocate<float>(1000);
    std::fill(data.begin(), data.end(), static_cast<float>(rank + 1));
    comm.all_reduce(data);
    std::printf("the sum is %g\n", static_cast<double>(data.back()));
  } else if (how == "stubborn sleep") {
    std::signal(SIGTERM, SIG_IGN);
    say_pid();
    sleep_for_ever();
  } else if (how == "stubborn") {
    std::signal(SIGTERM, SIG_IGN);
    session.store().barrier("all ignore it", m.rank, m.world);
    if (rank == 0) return 5;
    sleep_for_ever();
  } else if (how == "sleep") {
    say_pid();
    sleep_for_ever();
  } else if (how == "flood") {
    for (;;) std::puts("more than anybody reads");
  } else if (how == "arguments") {
    std::string text;
    for (const std::string& argument : session.arguments()) text += " <" + argument + ">";
    bool is_secret_open = text.find(m.secret) != std::string::npos;
    for (char** variable = environ; *variable != nullptr; ++variable)
      is_secret_open |= std::string_view(*variable).find(m.secret) != std::string_view::npos;
    std::printf("%s%s\n", is_secret_open ? "secret" : "", text.c_str());
  } else if (how == "openmp") {
    const char* const threads = std::getenv("OMP_NUM_THREADS");
    std::printf("threads %s\n", threads != nullptr ? threads : "unset");
  } else if (how == "bar" || how == "bar_dies") {
    ProgressDisplay display(rank == 0 ? detail::detect_terminal(stdout) : detail::Terminal{});
    display.begin_epoch(1, 1, 4);
    session.store().barrier("the bar is there", m.rank, m.world);
    if (how == "bar_dies" && rank == 0) std::raise(SIGKILL);
    if (rank != 0) std::printf("rank %zu has a line\n", rank);
    std::fflush(stdout);
    session.store().barrier("so is the line", m.rank, m.world);
    display.print(display.summary().text());
  } else if (how == "training") {  // long enough for a bar to be drawn again
    ProgressDisplay display(rank == 0 ? detail::detect_terminal(stdout) : detail::Terminal{});
    display.begin_epoch(1, 1, 30);
    for (int step = 0; step < 30; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      display.step(1, 0.5);
      if (rank == 0 && step == 20) std::printf("printed in between\n");
    }
    if (!display.is_quiet()) display.print(display.summary().text());
  } else if (how == "late") {  // the host of the store is done first
    if (rank != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      session.store().set("late", "yes");
    }
  } else {
    std::fprintf(stderr, "trainer: what is '%s'?\n", how.c_str());
    return 2;
  }
  return 0;
}

/// A rank that never joins, but says when the others have and wait for it.
[[noreturn]] void stay_away(const detail::RankPlacement& place) {
  Store store(place.host, place.ports, detail::inherited_secret(place.secret_fd), default_timeout);
  std::vector<std::string> others;
  for (std::size_t r = 0; r < place.world.value(); ++r) {
    if (Rank{r} != place.rank) others.push_back("lockstep/joined/" + std::to_string(r));
  }
  store.wait(others);
  std::puts("the others are inside the rendezvous");
  std::fflush(stdout);
  sleep_for_ever();
}

/// A program that calls no `launch`.
int join_by_itself() {
  try {
    const auto group = init_process_group();
    std::printf("rank %zu of %zu\n", group.rank().value(), group.world_size().value());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* away = std::getenv("TRAINER_STAYS_AWAY");
  const auto place = away != nullptr ? detail::LaunchEnvironment().placement() : std::nullopt;
  if (place) {
    say_pid();
    if (place->rank == Rank{std::stoul(away)}) stay_away(*place);
  }
  const auto run = [](Session& session) {
    const auto& arguments = session.arguments();
    return behave(session, arguments.size() > 1 ? arguments[1] : "who");
  };
  if (std::getenv("TRAINER_JOINS_BY_ITSELF") != nullptr) return join_by_itself();
  if (std::getenv("TRAINER_HAS_REPLICAS") != nullptr) {
    const auto run_replicas = [&](Session& session, std::optional<std::size_t> replicas) {
      std::printf("%zu replicas\n", replicas.value_or(0));
      std::fflush(stdout);
      return run(session);
    };
    return detail::launch_as(detail::RanksAs::replicas, argc, argv, run_replicas, dynamic);
  }
  if (std::getenv("TRAINER_HAS_THREADS") == nullptr) {
    const char* times = std::getenv("TRAINER_LAUNCHES");
    for (int left = times != nullptr ? std::atoi(times) : 1; left > 1; --left) {
      if (const int status = launch(argc, argv, run)) return status;
    }
    return launch(argc, argv, run);
  }
  return launch_threads(argc, argv, run, dynamic, Processes::many);
}

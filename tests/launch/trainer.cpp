// SPDX-License-Identifier: Apache-2.0
// A program that launches itself and then behaves as its argument says. tests/launch/run uses it.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/launch/launch.hpp"
#include "lockstep/observe/progress_display.hpp"

using namespace lockstep;

namespace {

[[noreturn]] void sleep_for_ever() {
  for (;;) ::pause();
}

int behave(Session& session, const std::string& how) {
  const Membership& m = session.membership();
  const std::size_t rank = m.rank.value();
  if (how == "who") {
    std::printf("rank %zu of %zu, local %zu of %zu, job %s\n", rank, m.world.value(), m.local_rank,
                m.local_world, m.job.c_str());
  } else if (how == "lines") {
    for (int i = 0; i < 1000; ++i) {
      std::FILE* stream = i % 2 == 0 ? stdout : stderr;
      std::fprintf(stream, "line %d of rank %zu ", i, rank);
      std::fflush(stream);  // half a line in the pipe, for the launcher to put together
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
  } else if (how == "throw") {
    if (rank == 1) throw std::runtime_error("a thing went wrong");
    session.store().get("never");
  } else if (how == "die") {
    if (rank == 1) std::raise(SIGKILL);
    session.store().get("never");
  } else if (how == "stubborn") {
    std::signal(SIGTERM, SIG_IGN);
    session.store().barrier("all ignore it", m.rank, m.world);
    if (rank == 0) return 5;
    sleep_for_ever();
  } else if (how == "sleep") {
    std::printf("pid %d\n", static_cast<int>(::getpid()));
    std::fflush(stdout);
    sleep_for_ever();
  } else if (how == "flood") {
    for (;;) std::puts("more than anybody reads");
  } else if (how == "arguments") {
    std::string text;
    for (const std::string& argument : session.arguments()) text += " <" + argument + ">";
    std::printf("%s%s\n", std::getenv("LOCKSTEP_SECRET") != nullptr ? "secret" : "", text.c_str());
  } else if (how == "bar" || how == "bar_dies") {
    ProgressDisplay display(rank == 0 ? detect_terminal(stdout) : Terminal{});
    display.begin_epoch(1, 1, 4);
    session.store().barrier("the bar is there", m.rank, m.world);
    if (how == "bar_dies" && rank == 0) std::raise(SIGKILL);
    if (rank != 0) std::printf("rank %zu has a line\n", rank);
    std::fflush(stdout);
    session.store().barrier("so is the line", m.rank, m.world);
    display.end_epoch();
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

}  // namespace

int main(int argc, char** argv) {
  // Dies before it has joined, at a moment that differs from run to run.
  if (const char* victim = std::getenv("TRAINER_DIES_EARLY")) {
    const char* rank = std::getenv("LOCKSTEP_RANK");
    if (rank != nullptr && std::string(rank) == victim) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::microseconds(::getpid() % 16 * 100));
        std::raise(SIGKILL);
      }).detach();
    }
  }
  return launch(argc, argv, [](Session& session) {
    const auto& arguments = session.arguments();
    return behave(session, arguments.size() > 1 ? arguments[1] : "who");
  });
}

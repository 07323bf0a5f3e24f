// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Runs a function on several ranks, as processes or as threads, and says what became of
/// each.

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "require.hpp"

namespace ranks {

using ::require;

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;
using Shared = ShmCommunicator<dynamic>;

enum class As { processes, threads };

/// What a rank ended with: nothing, or the words of its exception, or a signal.
using Ends = std::vector<std::string>;

/// Does a rank say of another one that it died? It has seen its process end, or its connection.
inline bool tells_of_death(const std::string& end) {
  return end.starts_with("lockstep: rank ") &&
         (end.find("'s process ended") != std::string::npos ||
          end.find("its connection ended without a word") != std::string::npos);
}

/// How ranks come to a communicator: one is made before there are ranks, which then join it.
/// `begin` is called once they have been started.
struct SharedMemory {
  explicit SharedMemory(std::size_t world)
      : file(lockstep::detail::shm::Engine::make_file(WorldSize{world})),
        address(lockstep::detail::shm::Engine::address(file)) {}

  void begin() {}
  Shared join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    return Shared(rank, world, lockstep::detail::shm::Engine::open(address), timeout);
  }

  lockstep::detail::Descriptor file;
  std::string address;
};

/// What a rank does, as tests see it: erased, because what runs ranks would be compiled for every
/// test otherwise.
struct RankFunction {
  void* self;
  std::string (*run)(void* self, std::size_t rank);
  void (*begin)(void* self);  // once all ranks have been started
};

template <class Rendezvous, class F>
struct Ranks {
  Rendezvous rendezvous;
  std::size_t world;
  std::chrono::milliseconds timeout;
  F f;

  RankFunction function() {
    return {this, [](void* self, std::size_t r) { return static_cast<Ranks*>(self)->run(r); },
            [](void* self) { static_cast<Ranks*>(self)->rendezvous.begin(); }};
  }
  std::string run(std::size_t rank) {
    try {
      auto comm = rendezvous.join(Rank{rank}, WorldSize{world}, timeout);
      f(comm);
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

/// A zeroed T that forked ranks share with their parent.
template <class T>
class Common {
 public:
  Common()
      : data_(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    require(data_ != MAP_FAILED, "mmap failed");
  }
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;
  ~Common() { munmap(data_, sizeof(T)); }

  T& operator*() const { return *static_cast<T*>(data_); }
  T* operator->() const { return static_cast<T*>(data_); }

 private:
  void* data_;
};

/// Ranks that do not end within the limit are killed, all at once, and named.
inline Ends fork_ranks(std::size_t world, const RankFunction& rank,
                       std::chrono::microseconds limit) {
  struct Child {
    pid_t pid;
    int words;
  };
  std::vector<Child> children;
  std::fflush(nullptr);
  for (std::size_t r = 0; r < world; ++r) {
    int ends[2];
    require(pipe(ends) == 0, "pipe failed");
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const std::string words = rank.run(rank.self, r);
      if (!words.empty() && write(ends[1], words.data(), words.size()) < 0) _exit(2);
      _exit(words.empty() ? 0 : 1);
    }
    close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  rank.begin(rank.self);
  Ends result(world);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  bool over = false;
  for (std::size_t r = 0; r < world; ++r) {
    int status = 0;
    while (waitpid(children[r].pid, &status, WNOHANG) == 0) {
      if (!over && std::chrono::steady_clock::now() > deadline) {
        over = true;
        for (std::size_t w = r; w < world; ++w) kill(children[w].pid, SIGKILL);
      }
      std::this_thread::sleep_for(200us);
    }
    char words[4096];
    const ssize_t n = read(children[r].words, words, sizeof(words));
    close(children[r].words);
    if (n > 0) result[r].assign(words, static_cast<std::size_t>(n));
    if (WIFSIGNALED(status)) {
      result[r] = "signal " + std::to_string(WTERMSIG(status)) +
                  (over ? ": hung, and was killed by the watchdog" : "");
    } else if (result[r].empty() && WEXITSTATUS(status) != 0) {
      // A sanitizer, or Boost.Test after a signal, ends a process so.
      result[r] = "ended with status " + std::to_string(WEXITSTATUS(status)) + " and no words";
    }
  }
  return result;
}

/// Threads cannot be killed: where one does not end within the limit, the process does, and names
/// the test case.
inline Ends start_ranks(std::size_t world, const RankFunction& rank, std::chrono::seconds limit) {
  const Watchdog watchdog(limit);
  Ends result(world);
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < world; ++r)
    threads.emplace_back([&, r] { result[r] = rank.run(rank.self, r); });
  rank.begin(rank.self);
  threads.clear();
  return result;
}

/// Runs the ranks as processes or threads of this one, unless a launcher has started them already.
template <class Rendezvous>
Ends run_ranks(As as, std::size_t world, const RankFunction& rank,
               std::chrono::microseconds limit) {
  if constexpr (requires { Rendezvous::run_here(world, rank); }) {
    return Rendezvous::run_here(world, rank);
  } else if (as == As::processes) {
    return fork_ranks(world, rank, limit);
  } else {
    return start_ranks(world, rank, std::chrono::ceil<std::chrono::seconds>(limit));
  }
}

template <class Rendezvous = SharedMemory>
Ends run_processes(std::size_t world, std::chrono::milliseconds timeout, auto f,
                   std::chrono::microseconds limit = 60s) {
  Ranks<Rendezvous, decltype(f)> ranks{Rendezvous(world), world, timeout, std::move(f)};
  return run_ranks<Rendezvous>(As::processes, world, ranks.function(), limit);
}

template <class Rendezvous = SharedMemory>
Ends run_threads(std::size_t world, std::chrono::milliseconds timeout, auto f,
                 std::chrono::seconds limit = 120s) {
  Ranks<Rendezvous, decltype(f)> ranks{Rendezvous(world), world, timeout, std::move(f)};
  return run_ranks<Rendezvous>(As::threads, world, ranks.function(), limit);
}

template <class Rendezvous = SharedMemory>
Ends run(As as, std::size_t world, auto f, std::chrono::milliseconds timeout = 20s) {
  return as == As::processes ? run_processes<Rendezvous>(world, timeout, std::move(f))
                             : run_threads<Rendezvous>(world, timeout, std::move(f));
}

}  // namespace ranks

// SPDX-License-Identifier: Apache-2.0
#include "compile.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace bench {
namespace {

/// Runs the compiler once and asks the kernel what it took.
Cost compile_once(const std::filesystem::path& source, const std::vector<std::string>& flags) {
  const std::string object = source.string() + ".o";
  std::vector<const char*> words = {"g++", "-std=c++20", "-I" LOCKSTEP_SOURCE_DIR "/include",
                                    "-isystem", LOCKSTEP_CCCL};
  for (const std::string& flag : flags) words.push_back(flag.c_str());
  words.insert(words.end(), {"-c", source.c_str(), "-o", object.c_str(), nullptr});
  const pid_t child = fork();
  if (child == 0) {
    execvp("g++", const_cast<char* const*>(words.data()));
    _exit(127);
  }
  int status = 0;
  rusage usage{};
  if (wait4(child, &status, 0, &usage) != child || status != 0) {
    std::fprintf(stderr, "g++ failed on %s\n", source.c_str());
    std::exit(1);
  }
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return {seconds(usage.ru_utime) + seconds(usage.ru_stime),
          static_cast<double>(usage.ru_maxrss) / 1024};
}

}  // namespace

Cost compile(const std::filesystem::path& source, const std::vector<std::string>& flags,
             std::size_t runs) {
  Cost best = compile_once(source, flags);
  for (std::size_t run = 1; run < runs; ++run) {
    const Cost next = compile_once(source, flags);
    if (next.seconds < best.seconds) best = next;
  }
  return best;
}

}  // namespace bench

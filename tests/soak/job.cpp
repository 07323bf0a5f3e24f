// SPDX-License-Identifier: Apache-2.0
// A training of a random kind; tests/soak/run draws it, disturbs it and compares what it comes to.
//
//   job [--ranks N] [--checkpoint DIR ...] -- kind=NAME shape=3-5-2 samples=60 ...
//
// With plain=N it is one process that trains as N ranks would, by plain loops.
#include <cstdio>
#include <optional>

namespace soak {
std::optional<int> run_shared_memory(int argc, char** argv);
std::optional<int> run_replicated(int argc, char** argv);
std::optional<int> run_networks(int argc, char** argv);
}  // namespace soak

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  for (const auto run : {soak::run_shared_memory, soak::run_replicated, soak::run_networks})
    if (const std::optional<int> status = run(argc, argv)) return *status;
  std::fputs("there is no such kind\n", stderr);
  return 2;
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How busy others kept the machine during a measurement, so that nobody trusts a bad one.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

#include "processes.hpp"

namespace bench {

/// Starts to watch when it is made.
class OthersLoad {
 public:
  /// Core-seconds per second that processes other than this one and its children (those that have
  /// ended) have used since then.
  double cores() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    return std::max(0.0, (others() - before_) / seconds);  // the kernel counts in ticks
  }

  /// Under a table: can it be trusted?
  void print() const {
    std::printf(
        "\nother processes kept %.2f cores busy meanwhile (peers counted once they end); "
        "above 0.1, run it again\n",
        cores());
  }

 private:
  static double others() { return machine() - usage(RUSAGE_SELF) - usage(RUSAGE_CHILDREN); }

  static double machine() {
    std::ifstream stat("/proc/stat");
    std::string name;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, interrupts = 0, soft = 0;
    stat >> name >> user >> nice >> system >> idle >> waiting >> interrupts >> soft;
    return (user + nice + system + interrupts + soft) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }

  static double usage(int who) {
    rusage used{};
    getrusage(who, &used);
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
  }

  Clock::time_point begin_ = Clock::now();
  double before_ = others();
};

}  // namespace bench

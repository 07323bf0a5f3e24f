// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the ranks of this job are threads, each with a model of its own, and this model cannot be copied
#include <memory>

#include "lockstep/detail/trainer/launch_job.hpp"

using namespace lockstep;

struct Net {
  std::unique_ptr<int> memory;
};

/// A job whose ranks are threads, as GPU jobs have them.
struct Threads {
  using model_type = Net;
  template <class Axis>
  using policy = World<2>;
  static constexpr bool is_one_process = false;
  static constexpr bool ranks_are_threads = true;
  static constexpr bool spans_processes = false;
  Threads(Session&, auto, TrainerOptions) {}
  void finish_saves() {}
};

int start(int argc, char** argv) {
  const auto train = [](Threads&) {};
#ifdef REJECT
  return launch<Threads>(argc, argv, Net(), train);
#else
  return launch<Threads>(argc, argv, [](Session&) { return Net(); }, train);
#endif
}

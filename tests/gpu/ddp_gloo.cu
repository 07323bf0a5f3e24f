// SPDX-License-Identifier: Apache-2.0
// DDP on GPUs through Gloo: ddp_gloo --ranks N [CHECK]; with `hosts`, as two hosts of equally many
// ranks that share memory, or a host for each rank of an odd world: ddp_gloo --ranks N CHECK hosts
#include <stdlib.h>

#include "lockstep/gloo.cuh"

#include "gpu/ddp_checks.cuh"

int main(int argc, char** argv) {
  using namespace lockstep;
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  return launch(argc, argv, [](Session& session) {
    const auto& arguments = session.arguments();
    const std::string check = arguments.size() > 1 ? arguments[1] : "all";
    if (arguments.size() > 2 && arguments[2] == "hosts") {
      const std::size_t world = session.world().value();
      const std::size_t on_each = world % 2 == 0 ? world / 2 : 1;
      ::setenv("LOCKSTEP_HOST", std::to_string(session.rank().value() / on_each).c_str(), 1);
      auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                           make_hierarchical_communicator);
      gpu_test::run_checks<false>(comm, check);
    } else {
      auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                           make_gloo_communicator<>);
      gpu_test::run_checks<LOCKSTEP_RUNS_ON_GPU>(comm, check);
    }
  });
}

// SPDX-License-Identifier: Apache-2.0
// DDP on GPUs through Gloo: ddp_gloo --ranks N [CHECK]; with `hosts`, as two hosts that share
// memory inside each: ddp_gloo --ranks N CHECK hosts
#include <stdlib.h>

#include "lockstep/gloo.cuh"

#include "gpu/ddp_checks.cuh"

int main(int argc, char** argv) {
  using namespace lockstep;
  if (visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  return launch(argc, argv, [](Session& session) {
    const auto& arguments = session.arguments();
    const std::string check = arguments.size() > 1 ? arguments[1] : "all";
    if (arguments.size() > 2 && arguments[2] == "hosts") {
      const std::size_t half = (session.world().value() + 1) / 2;
      ::setenv("LOCKSTEP_HOST", std::to_string(session.rank().value() / half).c_str(), 1);
      auto comm = make_staged_hierarchical_communicator(session.membership(), session.store());
      gpu_test::run_checks<false>(comm, check);
    } else {
      auto comm = make_staged_gloo_communicator(session.membership(), session.store());
      gpu_test::run_checks<LOCKSTEP_RUNS_ON_GPU>(comm, check);
    }
  });
}

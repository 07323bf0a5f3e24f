// SPDX-License-Identifier: Apache-2.0
// DDP on GPUs through shared memory: ddp_threads --ranks N [CHECK]
#include "gpu/ddp_checks.cuh"

int main(int argc, char** argv) {
  using namespace lockstep;
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  return launch_threads(argc, argv, [](Session& session) {
    auto comm = make_thread_communicator(session.membership(), session.store());
    const auto& arguments = session.arguments();
    gpu_test::run_checks<true>(comm, arguments.size() > 1 ? arguments[1] : "all");
  });
}

// SPDX-License-Identifier: Apache-2.0
// Hooks, and updates that leave parameters out, on GPUs: hooks_gpu --ranks N shm|nccl [CHECK]
#if LOCKSTEP_HAS_NCCL
#include "lockstep/nccl.cuh"
#endif

#include "gpu/hook_checks.cuh"

namespace {

using namespace lockstep;

void run_checks(Session& session, auto comm) {
  auto host = make_shm_communicator(session.membership(), session.store(), "host");
  const auto& arguments = session.arguments();
  gpu_test::run_hook_checks(comm, host, arguments.size() > 2 ? arguments[2] : "all");
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
#if LOCKSTEP_HAS_NCCL
  for (int i = 1; i < argc; ++i) {
    if (argv[i] != std::string("nccl")) continue;
    return launch(argc, argv, [](Session& session) {
      run_checks(session, make_nccl_communicator(session.membership(), session.store()));
    });
  }
#endif
  return launch_threads(argc, argv, [](Session& session) {
    run_checks(session, make_thread_communicator(session.membership(), session.store()));
  });
}

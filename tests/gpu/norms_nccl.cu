// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nccl.cuh"

#include "gpu/norm_figures.cuh"
#include "gpu/norms.hpp"

int norm_test::run_nccl(int argc, char** argv) {
  return launch(argc, argv, [&](Session& session) {
    auto comm = make_nccl_communicator(session.membership(), session.store());
    run_norm_checks<LOCKSTEP_RUNS_ON_GPU>(comm, check_of(session));
  });
}

int norm_test::run_nodes(int argc, char** argv) {
  const auto run = [](Session& session) {
    auto comm = make_threaded_nccl_communicator(session.membership(), session.store());
    run_norm_checks<false>(comm, session.arguments().at(1).substr(std::string("nodes:").size()));
  };
  return launch_threads(argc, argv, run, dynamic, Processes::many);
}

// SPDX-License-Identifier: Apache-2.0
#include "gpu/norm_figures.cuh"
#include "gpu/norms.hpp"

int norm_test::run_threads(int argc, char** argv) {
  return launch_threads(argc, argv, [&](Session& session) {
    auto comm = make_thread_communicator(session.membership(), session.store());
    run_norm_checks<true>(comm, check_of(session));
  });
}

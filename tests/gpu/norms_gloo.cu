// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "lockstep/gloo.cuh"

#include "gpu/norm_figures.cuh"
#include "gpu/norms.hpp"

int norm_test::run_gloo(int argc, char** argv) {
  return launch(argc, argv, [&](Session& session) {
    auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                         make_gloo_communicator<>);
    run_norm_checks<false>(comm, check_of(session));
  });
}

int norm_test::run_hosts(int argc, char** argv) {
  return launch(argc, argv, [&](Session& session) {
    const std::size_t world = session.world().value();
    const std::size_t on_each = world % 2 == 0 ? world / 2 : 1;
    ::setenv("LOCKSTEP_HOST", std::to_string(session.rank().value() / on_each).c_str(), 1);
    auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                         make_hierarchical_communicator);
    run_norm_checks<false>(comm, check_of(session));
  });
}

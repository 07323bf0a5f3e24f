// SPDX-License-Identifier: Apache-2.0
// What tests/gpu/many measures on a host with several GPUs. It prints lines `many {json}`, which
// that program makes a table of.
//
//   bench_many peers                                   what each GPU reaches of the others
//   bench_many --ranks N [--backend shm] where         which rank has which GPU
//   bench_many --ranks N [--backend shm] all_reduce    verified and timed, against NCCL's own
//   bench_many --ranks N [--backend shm] step          a small and a large network
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "all_reduce.cuh"
#include "lockstep/nccl.cuh"
#include "peers.cuh"
#include "step.cuh"
#include "strategy.hpp"
#include "where.cuh"

namespace {

using namespace lockstep;

void measure(auto& comm, const Session& session) {
  const auto& arguments = session.arguments();
  const std::string part = arguments.size() > 1 ? arguments[1] : "";
  if (part == "where") return many::print_places(comm, session.membership());
  if (part == "all_reduce") return many::measure_all_reduce(comm);
  if (part == "step") return many::measure_steps(comm);
  throw std::runtime_error("bench_many measures peers, where, all_reduce or step, not '" + part +
                           "'");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "peers") {
    try {
      return many::print_peers() ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "bench_many: %s\n", error.what());
      return 1;
    }
  }
  if (wants_shm(argc, argv)) {
    return launch_threads(argc, argv, [](Session& session) {
      ask_backend(session);
      auto comm = make_thread_communicator(session.membership(), session.store());
      measure(comm, session);
    });
  }
  return launch(argc, argv, [](Session& session) {
    ask_backend(session);
    auto comm = make_nccl_communicator(session.membership(), session.store());
    measure(comm, session);
  });
}

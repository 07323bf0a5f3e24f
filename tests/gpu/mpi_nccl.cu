// SPDX-License-Identifier: Apache-2.0
// NCCL inside hosts and MPI between them, on GPUs. Four ranks of one machine play two hosts:
//   mpirun -n 4 sh -c 'LOCKSTEP_HOST=$((OMPI_COMM_WORLD_RANK / 2))
//   NCCL_HOSTID=$OMPI_COMM_WORLD_RANK
//     exec mpi_nccl CHECK'                  collectives, groups, parity, killed
#include <signal.h>

#include <cstdio>
#include <string>
#include <vector>

#include "gpu/ddp_checks.cuh"
#include "gpu/rank_cases.cuh"
#include "lockstep/mpi_nccl.cuh"

namespace {

using namespace lockstep;
using namespace exercise;

/// Messages are left out: not every rank can send to every other.
void collectives(auto& comm) {
  every_operation<float>(comm, false);
  every_operation<double>(comm, false);
  every_operation<BFloat16>(comm, false);
  every_operation<std::int64_t>(comm, false);
  nan_wins<float>(comm);
  for (const bool on_host : {false, true}) {
    exercise::reductions<float>(comm, 0, on_host, Sum{});
    exercise::movements<float>(comm, 0, on_host, false);
  }
  constexpr std::size_t large = (3 << 20) + 5;
  exercise::reductions<float>(comm, large, false, Average{});
  exercise::movements<float>(comm, large, false, false);
  numbers_and_pieces(comm);
}

/// All ranks, a host's, and one of each host.
void groups(auto& comm) {
  const std::size_t world = comm.world_size().value();
  std::vector<std::vector<Rank>> all(3);
  for (std::size_t w = 0; w < world; ++w) all[0].emplace_back(w);
  for (std::size_t w = 0; w < world / 2; ++w) all[1].emplace_back(w);
  all[2] = {Rank{world / 2 - 1}, Rank{world - 1}};
  for (const std::vector<Rank>& members : all) {
    auto group = new_group(comm, members);
    if (!group) continue;
    every_operation<float>(*group, false);
    numbers_and_pieces(*group);
  }
}

void run(Session& session) {
  auto comm = Connection<Cuda, Hierarchical<Nccl, Mpi>>::make<PolicyPack<>>(session);
  const std::string check = session.arguments().empty() ? "" : session.arguments().back();
  if (check == "collectives") collectives(comm);
  if (check == "groups") groups(comm);
  if (check == "parity") gpu_test::check_parity<>(comm);
  if (check == "killed") killed(comm, 100'000);
  comm.barrier();
  if (comm.rank() == Rank{0}) std::printf("ok %s\n", check.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  return launch(argc, argv, run);
}

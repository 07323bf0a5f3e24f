// SPDX-License-Identifier: Apache-2.0
// MPI for GPUs, without a GPU: mpirun starts this program (tests/mpi/run), and what the library
// asks of CUDA is emulated.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <string>

#include "comm/mpi_ranks.hpp"
#include "gpu/emulated/staged.hpp"
#include "lockstep/mpi.cuh"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(gpu_staged_mpi)

namespace {

using FlatRanks = Staged<UnderMpirun<Callers>>;

/// The communicator of a job with these policies. Its ranks are on two hosts, as they believe.
template <class Transport>
auto of_a_job(const char* name) {
  int rank = 0;
  over_mpi::Process::get();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  setenv("LOCKSTEP_HOST", std::to_string(rank / 2).c_str(), 1);
  setenv("LOCKSTEP_SHARE_GPUS", "1", 1);
  static Session session = lockstep::join();
  return detail::make_communicator<CanonicalPolicies<Device<Cuda>, Backend<Transport>>>(session,
                                                                                        name);
}

}  // namespace

BOOST_AUTO_TEST_CASE(collectives_of_device_memory_are_exact) { every_type<FlatRanks>(); }
BOOST_AUTO_TEST_CASE(calls_of_several_pieces_are_exact) {
  pieces<FlatRanks>(2, 3 * whole<double>());
}
BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way) {
  expect_all_fine(run_staged<FlatRanks>(4, [](auto& comm) { in_flight(comm); }));
}

BOOST_AUTO_TEST_CASE(jobs_with_policies_get_them) {
  auto flat = of_a_job<Mpi>("flat");
  auto hierarchy = of_a_job<Hierarchical<Shm, Mpi>>("hierarchy");
  exercise::every_operation<float>(flat);
  exercise::every_operation<float>(hierarchy);
}

BOOST_AUTO_TEST_SUITE_END()

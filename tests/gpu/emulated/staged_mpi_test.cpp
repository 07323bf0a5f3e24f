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

/// What MPI says of itself here.
bool takes_device_memory = false;

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

/// Instead of the library's: what is device memory to this program is the host's, which MPI takes.
extern "C" int MPIX_Query_cuda_support() { return takes_device_memory ? 1 : 0; }

BOOST_AUTO_TEST_CASE(collectives_of_device_memory_are_exact) { every_type<FlatRanks>(); }
BOOST_AUTO_TEST_CASE(calls_of_several_pieces_are_exact) {
  pieces<FlatRanks>(2, 3 * whole<double>());
}
BOOST_AUTO_TEST_CASE(several_reductions_may_be_under_way) {
  expect_all_fine(run_staged<FlatRanks>(4, [](auto& comm) { in_flight(comm); }));
}

// Behind an upload that takes its time, which the message must contain.
BOOST_AUTO_TEST_CASE(messages_of_device_memory_are_given_to_an_mpi_that_takes_them) {
  expect_all_fine(run_staged<FlatRanks>(2, [](auto& comm) {
    emulated::upload_milliseconds = 20;
    const std::span<float> data = comm.template allocate<float>(1000);
    const std::vector<float> values(1000, 7);
    const Rank other{1 - comm.rank().value()};
    for (const bool direct : {false, true}) {
      takes_device_memory = direct;
      emulated::take_tally();
      check_cuda(cudaMemsetAsync(data.data(), 0, data.size_bytes(), comm.gpu().stream()),
                 "cudaMemsetAsync");
      if (comm.rank() == Rank{0}) {
        check_cuda(cudaMemcpyAsync(data.data(), values.data(), data.size_bytes(),
                                   cudaMemcpyHostToDevice, comm.gpu().stream()),
                   "cudaMemcpyAsync");
        comm.send(data, other);
      } else {
        comm.receive(data, other);
      }
      const std::size_t copies = emulated::take_tally().of("cudaMemcpyAsync");
      const std::size_t own = comm.rank() == Rank{0} ? 1 : 0;
      require(copies == own + (direct ? 0 : 1), std::to_string(copies) + " copies");
      comm.synchronize();
      require(data.front() == 7 && data.back() == 7, "another message");
    }
    takes_device_memory = true;
    exercise::every_operation<float>(comm);
    exercise::variable_gathers<float>(comm, 2000, false);
  }));
}

BOOST_AUTO_TEST_CASE(jobs_with_policies_get_them) {
  auto flat = of_a_job<Mpi>("flat");
  auto hierarchy = of_a_job<Hierarchical<Shm, Mpi>>("hierarchy");
  exercise::every_operation<float>(flat);
  exercise::every_operation<float>(hierarchy);
}

BOOST_AUTO_TEST_SUITE_END()

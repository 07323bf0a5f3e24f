// SPDX-License-Identifier: Apache-2.0
// NCCL inside hosts and MPI between them, without a GPU: mpirun starts this program
// (tests/mpi/run), and the host plays GPUs and NCCL.
#if __has_include(<nccl.h>)
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi_ranks.hpp"
#include "gpu/ddp_checks.cuh"
#include "gpu/emulated/machine.hpp"
#include "gpu/emulated/nccl.hpp"
#include "gpu/exercise.cuh"
#include "lockstep/mpi_nccl.cuh"

BOOST_AUTO_TEST_SUITE(gpu_nccl_mpi)

namespace {

using namespace lockstep;
using namespace ranks;

using Policies = CanonicalPolicies<Device<Cuda>, Backend<Hierarchical<Nccl, Mpi>>>;

/// The communicator of a job on two hosts with two GPUs each, as its ranks believe.
auto of_a_job(const char* name) {
  detail::over_mpi::Process::get();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  setenv("LOCKSTEP_HOST", std::to_string(rank / 2).c_str(), 1);
  emulated::nccl::between_processes = true;
  static Session session = lockstep::join();
  BOOST_TEST_REQUIRE(session.world().value() > 1u);
  return detail::make_communicator<Policies>(session, name);
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_collective_is_exact) {
  const emulated::Machine machine(4);
  auto comm = of_a_job("collectives");
  exercise::every_operation<float>(comm);
  exercise::every_operation<std::int16_t>(comm);
  exercise::numbers_and_pieces(comm);
  exercise::reductions<double>(comm, 1'000'003, false, Average{});
}

BOOST_AUTO_TEST_CASE(ddp_trains_as_pytorch_and_as_the_cpu_do) {
  const emulated::Machine machine(4);
  auto comm = of_a_job("training");
  gpu_test::train_reference<2, Clip<0.05>>(comm,
                                           train::reference_case(1, reference("ddp.json")[1]));
  gpu_test::check_cpu<Buckets<BucketLimits{300, 700}>>(comm);
}

// Its GPU has not come to NCCL's part: what is left on the other GPU of its host is no data. This
// case is the last: MPI cannot be used after it.
BOOST_AUTO_TEST_CASE(a_rank_that_leaves_a_call_ends_it_on_all_hosts) {
  const emulated::Machine machine(4);
  auto comm = of_a_job("left");
  const auto all = comm.allocate<float>(400'000);
  const auto piece = comm.allocate<float>(100'000);
  comm.barrier();
  const bool leaves = comm.rank() == Rank{1};
  const std::vector<float> values(all.size());
  std::string said;
  try {
    if (leaves) {
      emulated::upload_milliseconds = 1000;
      check_cuda(cudaMemcpyAsync(all.data(), values.data(), all.size_bytes(),
                                 cudaMemcpyHostToDevice, comm.gpu().stream()),
                 "cudaMemcpyAsync");
    }
    auto work = comm.reduce_scatter_async(all, piece);
    if (leaves) {
      std::this_thread::sleep_for(300ms);  // all have agreed on the call
      throw std::runtime_error("out of luck");
    }
    work.wait();
  } catch (const std::exception& error) {
    said = error.what();
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the upload is over
  BOOST_TEST(said.find(leaves ? "out of luck" : "rank 1") != std::string::npos, "it said: " + said);
}

BOOST_AUTO_TEST_SUITE_END()
#endif

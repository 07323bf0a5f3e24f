// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json again, through MPI. mpirun starts this program (tests/mpi/run).
#include <boost/test/unit_test.hpp>

#include "comm/mpi_ranks.hpp"
#include "lockstep/mpi.hpp"
#include "train/parity.hpp"

using namespace parity;

BOOST_AUTO_TEST_SUITE(mpi_parity)

BOOST_AUTO_TEST_CASE(mpi_trains_as_pytorch_does) {
  check_every_case(run_by_steps<ranks::UnderMpirun<>, SmallBuckets, Backend<Mpi>>);
}

BOOST_AUTO_TEST_CASE(also_without_a_thread_and_by_the_reductions_of_mpi) {
  check_every_case(run_by_steps<ranks::UnderMpirun<Callers, MpiAnyOrder>, SmallBuckets,
                                Backend<MpiAnyOrder>, Progress<Callers>>);
}

BOOST_AUTO_TEST_SUITE_END()

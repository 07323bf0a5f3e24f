// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json again, through MPI. mpirun starts this program (tests/mpi/run).
#include <boost/test/unit_test.hpp>

#include "comm/mpi_ranks.hpp"
#include "lockstep/mpi.hpp"
#include "train/parity.hpp"

using namespace parity;
namespace over_mpi = lockstep::detail::over_mpi;

BOOST_AUTO_TEST_SUITE(mpi_parity)

BOOST_AUTO_TEST_CASE(mpi_trains_as_pytorch_does) {
  check_every_case(run_by_steps<ranks::UnderMpirun<>, SmallBuckets, Backend<Mpi>>);
}

BOOST_AUTO_TEST_CASE(also_without_a_thread_and_by_the_reductions_of_mpi) {
  check_every_case(run_by_steps<ranks::UnderMpirun<Callers, MpiAnyOrder>, SmallBuckets,
                                Backend<MpiAnyOrder>, Progress<Callers>>);
}

namespace {

/// Two hosts on one machine where the ranks can be divided in half, else one for each rank; the
/// store is that of a session, which MPI has told the ranks of.
struct EmulatedHosts : ranks::UnderMpirun<> {
  using UnderMpirun::UnderMpirun;

  static auto join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) {
    const std::size_t on_each = world.value() % 2 == 0 ? world.value() / 2 : 1;
    setenv("LOCKSTEP_HOST", std::to_string(rank.value() / on_each).c_str(), 1);
    static Session session = lockstep::join();  // of all ranks: those that only wait join as well
    Membership member = detail::in_group(session.membership(), rank, world);
    member.timeout = timeout;
    Session ours(member, session.store().share());
    return detail::make_communicator<CanonicalPolicies<Backend<Hierarchical<Shm, Mpi>>>>(ours);
  }
};

}  // namespace

// Every rank must join the session, so that only cases of as many ranks as there are can run.
BOOST_AUTO_TEST_CASE(a_hierarchy_trains_as_pytorch_does) {
  over_mpi::Process::get();
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("ddp.json")) {
    const ReferenceCase c = reference_case(cases++, figures);
    if (c.world != static_cast<std::size_t>(size)) continue;
    BOOST_TEST_CONTEXT(c.name) {
      const Ends ends =
          run_by_steps<EmulatedHosts, SmallBuckets, Backend<Hierarchical<Shm, Mpi>>>(c);
      for (const std::string& end : ends) BOOST_TEST(end == "");
    }
  }
  BOOST_TEST(cases != 0u);
}

BOOST_AUTO_TEST_SUITE_END()

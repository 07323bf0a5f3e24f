// SPDX-License-Identifier: Apache-2.0
#include "mpi.hpp"

#if LOCKSTEP_MPI  // from bench/xmake.lua, which links it as well
#if LOCKSTEP_GLOO
#include "lockstep/gloo.hpp"
#endif
#include "lockstep/mpi.hpp"
#include "models.hpp"
#include "mpirun.hpp"
#include "ways.hpp"
#endif

namespace bench {

#if LOCKSTEP_MPI
namespace {

struct Common {
  Track track;
  std::array<Times, mpi_ways> times;
};

}  // namespace

std::array<Times, mpi_ways> race_through_mpi() {
  const TemporaryFolder folder;
  const SharedFile<Common> common(folder.path() / "common");
  if (!run_by_mpirun(2, 120, folder.path() / "common")) return {};
  return common->times;
}

void run_mpi_rank(const char* file) {
  const SharedFile<Common> common(file);
  Session session = join();
  const auto batch = random_batch<float, int>(32, 784, 10);
  std::vector<Contestant> contestants(mpi_ways);
  ProcessGroup<Backend<Mpi>, World<2>> mpi(session);
  const auto ddp = make_ddp<Network, World<2>, Backend<Mpi>>(*mpi);
  contestants[over_mpi] = contestant("Backend<Mpi>", *ddp, batch);
  ProcessGroup<Backend<Mpi>, World<2>, Progress<Callers>> alone(session);
  const auto callers = make_ddp<Network, World<2>, Backend<Mpi>, Progress<Callers>>(*alone);
  contestants[without_thread] = contestant("Progress<Callers>", *callers, batch);
  ddp->optimizer().lr = callers->optimizer().lr = 0.01;
#if LOCKSTEP_GLOO
  ProcessGroup<Backend<Gloo>, World<2>> gloo(session);
  const auto beside = make_ddp<Network, World<2>, Backend<Gloo>>(*gloo);
  beside->optimizer().lr = 0.01;
  contestants[over_gloo] = contestant("Backend<Gloo>", *beside, batch);
  contestants[over_gloo].has_threads = true;
#endif
  HandWritten<Network> loop;
  contestants[by_hand] = {"MPI_Allreduce", {}, [&](std::size_t, std::size_t iterations) {
                            for (std::size_t i = 0; i < iterations; ++i) {
                              loop.step(batch, [](std::span<float> gradients) {
                                MPI_Allreduce(MPI_IN_PLACE, gradients.data(),
                                              static_cast<int>(gradients.size()), MPI_FLOAT,
                                              MPI_SUM, MPI_COMM_WORLD);
                                for (float& gradient : gradients) gradient /= 2;
                              });
                            }
                          }};
  Stand stand(common->track, session.rank().value(), 2);
  const auto times = stand.race(contestants, 0);
  if (session.rank() != Rank{0}) return;
  for (std::size_t way = 0; way < mpi_ways; ++way) common->times[way] = summary(times[way]);
}
#else
std::array<Times, mpi_ways> race_through_mpi() { return {}; }
void run_mpi_rank(const char*) {}
#endif

}  // namespace bench

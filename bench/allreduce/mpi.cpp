// SPDX-License-Identifier: Apache-2.0
#include "mpi.hpp"

#if LOCKSTEP_MPI  // from bench/xmake.lua, which links it as well
#include "lockstep/mpi.hpp"
#include "mpirun.hpp"
#include "peers.hpp"
#endif

namespace bench {

#if LOCKSTEP_MPI
namespace {

struct Common {
  Track track;
  std::array<MpiRow, sizes.size()> rows;
  std::atomic<std::size_t> without_gloo;
};

template <class F>
auto repeat(F once) {
  return [once](std::size_t count, std::size_t iterations) {
    for (std::size_t i = 0; i < iterations; ++i) once(count);
  };
}

}  // namespace

std::array<MpiRow, sizes.size()> race_through_mpi(std::size_t ranks) {
  const TemporaryFolder folder;
  const SharedFile<Common> common(folder.path() / "common");
  if (!run_by_mpirun(ranks, 120, folder.path() / "common")) return {};
  return common->rows;
}

void run_mpi_rank(const char* file) {
  const SharedFile<Common> common(file);
  lockstep::Session session = lockstep::join();
  lockstep::ProcessGroup<lockstep::Backend<lockstep::Mpi>> group(session);
  lockstep::ProcessGroup<lockstep::Backend<lockstep::MpiAnyOrder>> any(session);
  const std::size_t rank = group.rank().value();
  const std::size_t ranks = group.world_size().value();
  Stand stand(common->track, rank, ranks);
  std::vector<float> memory(sizes.back() / sizeof(float));
  const std::span<float> data = memory;
  const auto gloo_reduce = connect_gloo(std::filesystem::path(file).parent_path(), rank, ranks,
                                        common->without_gloo, stand);
  std::vector<Contestant> contestants(mpi_lanes);
  contestants[mpi] = {"Backend<Mpi>", data, repeat([&](std::size_t n) {
                        group->all_reduce(data.first(n), lockstep::Sum{});
                      })};
  contestants[mpi_any_order] = {"Backend<MpiAnyOrder>", data, repeat([&](std::size_t n) {
                                  any->all_reduce(data.first(n), lockstep::Sum{});
                                })};
  contestants[plain_mpi] = {"MPI_Allreduce", data, repeat([&](std::size_t n) {
                              MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(n),
                                            MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                            })};
  contestants[gloo_beside_mpi] = {"Gloo", data};
  contestants[gloo_beside_mpi].has_threads = true;
  if (gloo_reduce)
    contestants[gloo_beside_mpi].run = repeat([&](std::size_t n) { gloo_reduce(data.first(n)); });
  for (std::size_t s = 0; s < sizes.size(); ++s) {
    const auto times = stand.race(contestants, sizes[s] / sizeof(float));
    if (rank != 0) continue;
    for (std::size_t lane = 0; lane < mpi_lanes; ++lane)
      common->rows[s][lane] = summary(times[lane]);
  }
}
#else
std::array<MpiRow, sizes.size()> race_through_mpi(std::size_t) { return {}; }
void run_mpi_rank(const char*) {}
#endif

}  // namespace bench

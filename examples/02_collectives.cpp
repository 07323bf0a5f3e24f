// SPDX-License-Identifier: Apache-2.0
// Ranks that communicate: `build/examples/collectives --ranks 4`, or by torchrun, mpirun or srun.
//
// Every rank fills a vector, all ranks average it in shared memory, groups of two add up their
// ranks, and rank 0 prints.
#include <cstdio>
#include <numeric>

#include "lockstep/comm.hpp"

using namespace lockstep;

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    auto comm = make_shm_communicator(session.membership(), session.store());
    const std::size_t me = comm.rank().value();
    const std::size_t world = comm.world_size().value();

    // Memory from the communicator is reduced where it lies; a std::vector would be copied first.
    auto gradients = comm.allocate<float>(1'000'000);
    std::fill(gradients.begin(), gradients.end(), static_cast<float>(me));
    auto work = comm.all_reduce_async(gradients, Average{});
    const std::string hello = "rank " + std::to_string(me);  // ... compute while it goes on ...
    work.wait();

    const auto all = all_gather_objects(comm, hello);
    if (me == 0)
      std::printf("%zu ranks, average %.2f, last: %s\n", world, gradients[0], all.back().c_str());

    if (world % 2 == 0) {
      auto pair = join_groups(comm, Grid<dynamic, 2>{comm.world_size()});
      int sum[] = {static_cast<int>(me)};
      pair.all_reduce(sum);
      std::printf("my pair's ranks add up to %d\n", sum[0]);
    }
    comm.barrier();
  });
}

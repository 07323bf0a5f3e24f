// SPDX-License-Identifier: Apache-2.0
// A loop written by hand.
// expect: lockstep: Backend<Nccl> moves GPU memory and this is a CPU job
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = DistributedDataParallel<job::Line, Backend<Nccl>>;
#else
using Job = DistributedDataParallel<job::Line, World<2>>;
#endif

void train(ShmCommunicator<2>& comm, const job::Points& points) {
  DistributedSampler<> sampler(points.size(), comm.world_size(), comm.rank());
  DataLoader loader(points, sampler, {.batch_size = 1});
  Job ddp(comm);
  double sum = 0;
  for (const auto& batch : loader) {
    ddp.no_sync().forward(batch).backward();
    auto averaged = ddp.forward(batch).backward().reduce();
    sum += averaged.grad("slope"_p)();
    const double loss = std::move(averaged).update();
    sum += loss + ddp.param("slope"_p)();
  }
  ddp.optimizer().lr = sum;
}

// SPDX-License-Identifier: Apache-2.0
// What a loop over data does between two steps on CPUs, to be looked at in machine code:
// tests/dispatch/run.
#include "dispatch/net.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/lockstep.hpp"

namespace dispatch::loops {

using Data = InMemoryDataset<float, std::int32_t>;

/// The model on whole batches.
struct DataNet : Net {
  using Batch = Data::batch_type;
  double forward(auto& step, const Batch& x) { return Net::forward(step, x.inputs[0]); }
  void backward(auto& step, const Batch& x) { Net::backward(step, x.inputs[0]); }
};

template <class Job>
using Loop = detail::EpochBatches<Job, Data>;

template <class Remainder, class Order>
using Loader = DataLoader<Data, DistributedSampler<Remainder, Order>>::Iterator;
using Job = Trainer<DataNet, Optimizer<AdamW>>;
using FedJob = Trainer<DataNet, Groups<Grid<dynamic, 2>>, Feed<LeaderOfGroup>>;
using FedByAllJob = Trainer<DataNet, Groups<Grid<dynamic, 2>>, Feed<ScatterThenBroadcast>>;
using JoinJob = Trainer<DataNet, UnevenInputs<Join>, Sharding<Replicated>>;

extern "C" {
void step_loader(Loader<Masked, TorchShuffle>& at) { ++at; }
void step_loader_of_keys(Loader<DropLast, KeyedShuffle>& at) { ++at; }
void step_loader_of_blocks(Loader<Exact, BlockShuffle<4096, 16>>& at) { ++at; }
void step_loader_in_order(Loader<Padding, InOrder>& at) { ++at; }
// Whether a job saves checkpoints is known at run time: these are the loops and steps of jobs that
// do.
void step_loop(Loop<Job>::Iterator& at) { ++at; }
double step_with_checkpoints(Job& job, const Data::batch_type& x) { return job.step(x); }
void step_fed_loop(Loop<FedJob>::Iterator& at) { ++at; }
void step_fed_by_all_loop(Loop<FedByAllJob>::Iterator& at) { ++at; }
double step_fed(FedJob& job, const Data::batch_type& x) { return job.step(x); }
void step_join_loop(Loop<JoinJob>::Iterator& at) { ++at; }
double step_joining(JoinJob& job, const Data::batch_type& x) { return job.step(x); }
}

}  // namespace dispatch::loops

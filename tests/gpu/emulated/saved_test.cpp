// SPDX-License-Identifier: Apache-2.0
// Checkpoints of jobs on GPUs that the host plays: saved while captured steps go on, resumed, and
// brought to the CPU and back.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <type_traits>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/saved.hpp"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/checkpoint_files.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_saved)

namespace {

using namespace lockstep;
using namespace train;
using checkpoints::Folder;
using checkpoints::HostNetwork;
using checkpoints::tensors_of;

// The network and the jobs are those of state_test.cpp, which compiles them already.
using Network = GpuPlainMlp<float, 7, 9, 3>;

auto batch_of(std::size_t s, std::size_t rank, std::size_t rows = 4) {
  return labelled<float>(reference_batch(rows, 7, 3, s % 2, rank));
}

}  // namespace

BOOST_AUTO_TEST_CASE(captured_ranks_with_masters_are_saved_while_they_go_on_and_resumed) {
  const Folder folder;
  const emulated::Machine machine(2);
  thread_ranks::expect_all_fine(thread_ranks::run(2, [&](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job = detail::BasicDdp<
        Network,
        CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, Precision<Mixed<BFloat16>>, CapturedStep,
                          Accumulate<2>, Frozen<"fc2.*">>,
        Comm>;
    checkpoints::check_saved<Job, HostNetwork<7, 9, 3>>(
        comm, folder.path, [&](std::size_t s) { return batch_of(s, comm.rank().value()); });
  }));
}

// The job's own saver and that of its checkpoint folder share the job's copies. Frozen parameters
// are held in 16 bits and converted in place: twice, they would be other numbers.
BOOST_AUTO_TEST_CASE(two_savers_of_a_job_at_the_same_time_write_what_a_blocking_save_writes) {
  const Folder folder;
  const emulated::Machine machine(1);
  thread_ranks::expect_all_fine(thread_ranks::run(1, [&](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Wide = GpuPlainMlp<float, 7, 400, 3>;
    using Job = detail::BasicDdp<Wide,
                                 CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>,
                                                   Precision<Mixed<BFloat16>>, Frozen<"fc2.*">>,
                                 Comm>;
    Job job(comm);
    Saver savers[2];
    std::size_t wrong = 0;
    for (std::size_t round = 0; round < 10; ++round) {
      job.step(batch_of(round, 0));
      const auto path = [&](std::size_t which) {
        return folder / (std::to_string(which) + ".safetensors");
      };
      for (std::size_t i = 0; i < 2; ++i) savers[i].save(job, path(i), {.asynchronous = true});
      for (Saver& saver : savers) saver.finish(job);
      save(job, path(2));
      for (std::size_t i = 0; i < 2; ++i) wrong += tensors_of(path(i)) != tensors_of(path(2));
    }
    thread_ranks::require(wrong == 0, std::to_string(wrong) + " of 20 files have other values");
  }));
}

BOOST_AUTO_TEST_CASE(replicas_on_several_gpus_are_saved_and_resumed) {
  const Folder folder;
  for (const std::size_t gpus : {1, 2}) {
    const emulated::Machine machine(gpus);
    using Job = DataParallel<Network, Device<Cuda>, Optimizer<AdamW>, CapturedStep, Accumulate<2>>;
    const std::string end = folder / "end.safetensors";
    const std::string middle = folder / "middle.safetensors";
    const auto train = [](Job& job, std::size_t begin, std::size_t count) {
      for (std::size_t s = begin; s < begin + count; ++s) job.step(batch_of(s, 0, 5));
    };
    {
      Job job(DpOptions{.replicas = gpus});
      train(job, 0, 8);
      Saver saver;
      saver.save(job, middle, {.asynchronous = true});
      train(job, 8, 4);
      saver.finish(job);
      save(job, end);
    }
    Job job(DpOptions{.replicas = gpus});
    train(job, 2, 3);
    resume(job, middle);
    train(job, 8, 4);
    const std::string again = folder / "again.safetensors";
    save(job, again);
    BOOST_TEST((tensors_of(again) == tensors_of(end)), "other bits on " << gpus << " GPUs");
  }
}

BOOST_AUTO_TEST_SUITE_END()

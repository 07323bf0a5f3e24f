// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Checkpoints of jobs on GPUs, real or emulated: saved while steps go on, resumed, and
/// brought to the CPU and back.

#include <cstddef>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/checkpoint_files.hpp"

namespace checkpoints {

/// The tensors of `GpuPlainMlp<float, In, Hidden, Out>`, for a job on the host.
template <std::size_t In, std::size_t Hidden, std::size_t Out>
struct HostNetwork {
  using Parameters = ParameterList<
      Parameter<"fc1.weight", float, Hidden, In>, Parameter<"fc1.bias", float, Hidden>,
      Parameter<"fc2.weight", float, Hidden, Hidden>, Parameter<"fc2.bias", float, Hidden>,
      Parameter<"fc3.weight", float, Out, Hidden>, Parameter<"fc3.bias", float, Out>>;
};

/// `Job` has Optimizer<AdamW>, Accumulate<2> and Frozen<"fc2.*">. Files go to `folder`, the same on
/// all ranks; `batch_of(s)` is this rank's.
template <class Job, class HostModel>
void check_saved(auto& comm, const std::string& folder, const auto& batch_of) {
  using HostJob = DistributedDataParallel<HostModel, World<1>, Optimizer<AdamW>, Frozen<"fc2.*">,
                                          Accumulate<2>>;
  const auto path = [&](const char* name) { return folder + "/" + name + ".safetensors"; };
  const auto train = [&](Job& job, std::size_t begin, std::size_t end) {
    for (std::size_t s = begin; s < end; ++s) job.step(batch_of(s));
  };
  const auto require_same = [&](const char* one, const char* other) {
    if (tensors_of(path(one)) != tensors_of(path(other)))
      throw std::runtime_error(std::string("the bits of '") + one + "' are not those of '" + other +
                               "'");
  };
  Job job(comm);
  job.optimizer().lr = 0.02;
  train(job, 0, 6);
  Saver saver;
  saver.save(job, path("middle"), {.asynchronous = true});
  train(job, 6, 12);
  saver.finish(job);
  save(job, path("end"));
  save(job, path("parameters"), {.parameters_only = true});

  Job again(comm);
  train(again, 3, 6);
  const Resumed resumed = resume(again, path("middle"));
  if (resumed.step != 3 || !resumed.notes.empty()) throw std::runtime_error("it resumes elsewhere");
  train(again, 6, 12);
  save(again, path("again"));
  if (comm.rank() == Rank{0}) {
    require_same("again", "end");
    LoopbackCommunicator nobody;
    HostJob host(nobody);
    load(host, path("end"));
    save(host, path("host"));
    require_same("host", "end");
    // The same parameters are the same bytes, whatever the job that has them keeps beside them.
    save(host, path("host-parameters"), {.parameters_only = true});
    const auto bytes = [&](const char* name) {
      std::ifstream in(path(name), std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(in), {});
    };
    if (bytes("host-parameters") != bytes("parameters"))
      throw std::runtime_error("files of the same parameters have other bytes");
  }
  comm.barrier();
  Job back(comm);
  load(back, path("host"));
  save(back, path("back"));
  train(back, 12, 16);
  train(job, 12, 16);
  save(back, path("back-later"));
  save(job, path("later"));
  if (comm.rank() == Rank{0}) {
    require_same("back", "end");
    require_same("back-later", "later");
  }
  comm.barrier();
}

}  // namespace checkpoints

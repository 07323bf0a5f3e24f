// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Loads a file into a wrapped model: parameters alone, with the optimizer, or all that a job
/// needs to go on.
///
/// The file may have been written by a job of another world, strategy, backend, device, sharding or
/// precision: tensors are found by their names, and a rank reads what it keeps and nothing else.
/// Before anything of the job changes, rank 0 has compared all checksums, and all ranks have
/// compared names, shapes and types. What goes wrong on one rank is the same error on all.

#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/kept_job.hpp"
#include "lockstep/trainer/load_job.hpp"
#include "lockstep/trainer/load_what.hpp"
#include "lockstep/trainer/rejected.hpp"
#include "lockstep/trainer/with_kept_job.hpp"

namespace lockstep {

namespace detail {

template <class Wrapper>
Resumed load_wrapped(Wrapper& wrapped, const std::string& path, const LoadOptions& options,
                     LoadWhat what) {
  if constexpr (is_rejected<Wrapper>) {
    return {};
  } else {
    Resumed resumed;
    with_kept_job(wrapped, JobCall::load,
                  [&](const KeptJob& job) { resumed = load_job(job, path, options, what); });
    return resumed;
  }
}

}  // namespace detail

/// Loads parameters, buffers and the optimizer: its states, its numbers, its counts of updates, its
/// schedule and the loss scale. Gradients that were added up in the job are forgotten. **Ranks**
/// all, with the same path. **Host** blocks.
template <class Wrapper>
LoadReport load(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::training).report;
}

/// Loads parameters and buffers, from any safetensors file: `load_parameters(ddp,
/// "resnet.safetensors", {.rename = ...})`. The optimizer stays as it is. **Ranks** all, with the
/// same path. **Host** blocks.
template <class Wrapper>
LoadReport load_parameters(Wrapper& wrapped, const std::string& path,
                           const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::parameters).report;
}

/// Loads all that `load` does, and goes on where the job was saved, with the program's values. The
/// result says where, for `loader.resume` and the loop. **Ranks** all, with the same path. **Host**
/// blocks.
template <class Wrapper>
Resumed resume(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::job);
}

}  // namespace lockstep

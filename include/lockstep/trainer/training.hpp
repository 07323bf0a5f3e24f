// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The object that a trainer steps, for each strategy: a rank of DDP, or all replicas of DP.

#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/ddp.hpp"
#include "lockstep/trainer/dp.hpp"
#include "lockstep/trainer/options.hpp"

namespace lockstep::detail {

/// The trainer itself uses `communicator`, among ranks; `wrapper` runs the steps.
template <class Model, class Policies>
struct DdpTraining {
  using communicator = CommunicatorOf<Policies>;
  using wrapper = DdpOf<Model, Policies>;

  /// **Ranks** all. **Host** blocks until all have come.
  static communicator communicate(Session& session) { return make_communicator<Policies>(session); }
  /// `source` is the model, what makes it, or `DefaultModel`.
  template <class Source>
  static wrapper make(Session& session, communicator& comm, Source&& source,
                      const TrainerOptions& options) {
    if (options.replicas) {
      throw Error("launch", "--replicas was given to a job of ParallelStrategy<DDP>",
                  "give it --ranks, or use ParallelStrategy<DP>", session.rank());
    }
    return wrapper(comm, std::forward<Source>(source), options.seed);
  }
};

/// All replicas together are one rank, in a world of one.
template <class Model, class Policies>
struct DpTraining {
  using communicator = LoopbackCommunicator;
  using wrapper = DpOf<Model, Policies>;

  static communicator communicate(Session& session) {
    if (session.world() > WorldSize{1}) {
      throw Error("ParallelStrategy<DP>",
                  "the job has " + std::to_string(session.world().value()) +
                      " ranks, and DP is for the devices of one process",
                  "start it once, with --replicas, or use ParallelStrategy<DDP>", session.rank());
    }
    return communicator();
  }
  template <class Source>
  static wrapper make(Session& session, communicator&, Source&& source,
                      const TrainerOptions& options) {
    DpOptions wanted;
    if (options.replicas) wanted.replicas = *options.replicas;
    wanted.seed = options.seed;
    wanted.timeout = session.membership().timeout;
    return wrapper(wanted, std::forward<Source>(source));
  }
};

template <class Model, class Policies>
using TrainingOf =
    std::conditional_t<is_dp<Policies>, DpTraining<Model, Policies>, DdpTraining<Model, Policies>>;

}  // namespace lockstep::detail

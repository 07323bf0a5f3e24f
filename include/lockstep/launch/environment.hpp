// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Who am I: a rank's place in its job, from the variables that launchers set.
///
/// Looked for in this order, and the first that is there counts: lockstep's own launcher, torchrun
/// or whoever else sets `env://`'s variables, Open MPI, Slurm.
///
/// Where rank 0 opens the store depends on who launched:
/// - `env://` variables set by hand: at MASTER_ADDR:MASTER_PORT, as PyTorch does, and nowhere else.
/// - torchrun: its agent usually keeps MASTER_PORT for a store of its own (then it sets
///   TORCHELASTIC_USE_AGENT_STORE), so rank 0 takes the first free one of eight ports derived from
///   the run and MASTER_PORT, and the others try these in turn. A port of another program or job
///   shows in the handshake and is skipped. No file, no message through torchrun's store is needed.
/// - Open MPI, Slurm: the same with eight ports derived from the job's id, unless MASTER_PORT is
/// set.

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/launch/placement.hpp"
#include "lockstep/launch/slurm.hpp"

namespace lockstep {

/// Reads places out of an environment. `Lookup` maps a variable's name to its value or null, like
/// getenv, which is the only other one besides tests' tables.
template <class Lookup>
class EnvironmentReader {
 public:
  /// `meeting`, where given, is where rank 0 is to be found, whatever the launcher says of that.
  explicit EnvironmentReader(Lookup lookup, std::optional<Endpoint> meeting = std::nullopt)
      : lookup_(std::move(lookup)), meeting_(std::move(meeting)) {}

  /// This process's place, or nothing where no launcher has set any.
  std::optional<RankPlacement> placement() const {
    std::optional<RankPlacement> place;
    if (lookup_("LOCKSTEP_RANK") != nullptr) {
      place = from_lockstep();
    } else if (lookup_("RANK") != nullptr || lookup_("WORLD_SIZE") != nullptr) {
      place = from_env();
    } else if (lookup_("OMPI_COMM_WORLD_RANK") != nullptr) {
      place = from_open_mpi();
    } else if (lookup_("SLURM_PROCID") != nullptr && slurm_step() != nullptr) {
      // A batch script has SLURM_PROCID as well but is no task of a step: only srun starts ranks.
      place = from_slurm();
    }
    if (place) check_placement(*place);
    return place;
  }

  /// `env://` for a rank that is known already: only where to meet is read.
  RankPlacement meeting_place(Rank rank, WorldSize world) const {
    RankPlacement place;
    place.launcher = "the program";
    place.rank = rank;
    place.world = world;
    place_at_master(place, "");
    check_placement(place);
    return place;
  }

  std::optional<std::chrono::milliseconds> timeout() const {
    const char* text = lookup_("LOCKSTEP_TIMEOUT");
    if (text == nullptr) return std::nullopt;
    return parse_seconds("LOCKSTEP_TIMEOUT", text);
  }

  std::string secret() const { return text_or("LOCKSTEP_SECRET", ""); }

 private:
  std::string text_or(const char* name, std::string_view otherwise) const {
    const char* text = lookup_(name);
    return text == nullptr ? std::string(otherwise) : std::string(text);
  }

  std::string required(const char* name, const char* beside) const {
    const char* text = lookup_(name);
    if (text != nullptr) return text;
    throw Error("launch", std::string(beside) + " is set and " + name + " is not",
                "set both, or neither");
  }

  std::size_t number(const char* name, const char* beside) const {
    return parse_number(name, required(name, beside));
  }

  std::size_t number_or(const char* name, std::size_t otherwise) const {
    const char* text = lookup_(name);
    return text == nullptr ? otherwise : parse_number(name, text);
  }

  RankPlacement from_lockstep() const {
    RankPlacement place;
    place.launcher = "lockstep's launcher";
    place.rank = Rank{number("LOCKSTEP_RANK", "LOCKSTEP_RANK")};
    place.world = WorldSize{number("LOCKSTEP_WORLD_SIZE", "LOCKSTEP_RANK")};
    place.local_rank = number("LOCKSTEP_LOCAL_RANK", "LOCKSTEP_RANK");
    place.local_world = number("LOCKSTEP_LOCAL_WORLD_SIZE", "LOCKSTEP_RANK");
    const Endpoint store =
        parse_endpoint("LOCKSTEP_STORE", required("LOCKSTEP_STORE", "LOCKSTEP_RANK"));
    place.host = store.host;
    place.ports = {store.port};
    place.hosted = true;
    place.job = text_or("LOCKSTEP_JOB", "");
    if (const char* fd = lookup_("LOCKSTEP_SECRET_FD")) {
      place.secret_fd = static_cast<int>(parse_number("LOCKSTEP_SECRET_FD", fd) & 0x7fffffff);
    } else {
      place.secret = secret();
    }
    return place;
  }

  RankPlacement from_env() const {
    RankPlacement place;
    place.rank = Rank{number("RANK", "WORLD_SIZE")};
    place.world = WorldSize{number("WORLD_SIZE", "RANK")};
    const char* local_world = lookup_("LOCAL_WORLD_SIZE");
    if (local_world != nullptr) {
      place.local_rank = number("LOCAL_RANK", "LOCAL_WORLD_SIZE");
      place.local_world = parse_number("LOCAL_WORLD_SIZE", local_world);
    } else {
      number_or("LOCAL_RANK", 0);  // alone it says too little; still, it must be a number
    }
    const char* run = lookup_("TORCHELASTIC_RUN_ID");
    place.launcher = run != nullptr ? "torchrun" : "the environment";
    // Workers that torchrun has restarted must not meet those that are on their way out.
    const std::string id =
        run == nullptr ? "" : run + (" restart " + text_or("TORCHELASTIC_RESTART_COUNT", "0"));
    place_at_master(place, id);
    const std::string agent = text_or("TORCHELASTIC_USE_AGENT_STORE", "");
    if (run != nullptr && !meeting_ && (agent == "True" || agent == "true" || agent == "1")) {
      place.ports = derived_ports(id + " " + std::to_string(place.ports.front()));
      // The agent's name for its own host may be one that only other hosts can use.
      if (place.local_world == place.world.value()) place.host = "127.0.0.1";
    }
    return place;
  }

  RankPlacement from_open_mpi() const {
    RankPlacement place;
    place.launcher = "mpirun";
    place.rank = Rank{number("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK")};
    place.world = WorldSize{number("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")};
    place.local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
    place.local_world = number("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK");
    const std::string id =
        "mpirun " + text_or("PMIX_NAMESPACE", text_or("OMPI_MCA_ess_base_jobid", "0"));
    place_at_job(place, id, "");
    return place;
  }

  RankPlacement from_slurm() const {
    RankPlacement place;
    place.launcher = "Slurm";
    place.rank = Rank{number("SLURM_PROCID", "SLURM_STEP_ID")};
    const char* world = lookup_("SLURM_STEP_NUM_TASKS");
    place.world = WorldSize{world != nullptr ? parse_number("SLURM_STEP_NUM_TASKS", world)
                                             : number("SLURM_NTASKS", "SLURM_PROCID")};
    place.local_rank = number("SLURM_LOCALID", "SLURM_PROCID");
    if (const char* counts = lookup_("SLURM_STEP_TASKS_PER_NODE")) {
      place.local_world =
          slurm_tasks_on("SLURM_STEP_TASKS_PER_NODE", counts, number_or("SLURM_NODEID", 0));
    } else {
      place.local_world = number_or("SLURM_NTASKS_PER_NODE", 0);
    }
    const std::string id = "slurm " + text_or("SLURM_JOB_ID", "0") + "." + slurm_step();
    const std::string nodes = text_or("SLURM_STEP_NODELIST", text_or("SLURM_JOB_NODELIST", ""));
    place_at_job(place, id, first_slurm_host(nodes));
    return place;
  }

  const char* slurm_step() const {
    const char* step = lookup_("SLURM_STEP_ID");
    return step != nullptr ? step : lookup_("SLURM_STEPID");
  }

  /// At the meeting place the user gave, or at MASTER_ADDR:MASTER_PORT, both of which must be
  /// there.
  void place_at_master(RankPlacement& place, std::string_view id) const {
    Endpoint store;
    if (meeting_) {
      store = *meeting_;
    } else {
      store.host = required("MASTER_ADDR", "RANK");
      store.port = parse_port("MASTER_PORT", required("MASTER_PORT", "RANK"));
      if (store.host == "localhost") store.host = "127.0.0.1";
    }
    place.host = store.host;
    place.ports = {store.port};
    place.secret = derived_secret(id, store.port, secret());
  }

  /// For launchers that name a job but no port: MASTER_ADDR and MASTER_PORT where the user has set
  /// them; else loopback if all ranks are on this host, and `first_host` if they are not.
  void place_at_job(RankPlacement& place, const std::string& id,
                    const std::string& first_host) const {
    if (meeting_ || lookup_("MASTER_ADDR") != nullptr || lookup_("MASTER_PORT") != nullptr) {
      place_at_master(place, id);
      return;
    }
    if (place.local_world != place.world.value()) {
      if (first_host.empty()) {
        throw Error("launch",
                    place.launcher + " has ranks on several hosts and does not say where rank 0 is",
                    "set MASTER_ADDR and MASTER_PORT on all ranks, with mpirun's -x, or give "
                    "--rendezvous host:port");
      }
      place.host = first_host;
    }
    place.ports = derived_ports(id);
    place.secret = derived_secret(id, 0, secret());
  }

  Lookup lookup_;
  std::optional<Endpoint> meeting_;
};

/// The reader of this process's own environment.
inline auto environment(std::optional<Endpoint> meeting = std::nullopt) {
  return EnvironmentReader([](const char* name) -> const char* { return std::getenv(name); },
                           std::move(meeting));
}

}  // namespace lockstep

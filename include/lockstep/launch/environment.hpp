// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's place in its job, from the variables that launchers set.
///
/// The first of these launchers whose variables are set is used: lockstep's own, torchrun or
/// another that sets `env://`'s variables, Open MPI, Slurm.
///
/// Where rank 0 opens the store depends on the launcher:
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

namespace lockstep::detail {

/// Reads a rank's place from an environment. `Lookup` maps a variable's name to its value or null,
/// as getenv does; tests use tables.
template <class Lookup>
class EnvironmentReader {
 public:
  /// `meeting`, if given, is the address of rank 0, even if the launcher names another.
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

  /// `env://` for a rank that is known already: reads only the meeting place.
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

  /// See `restart_count`.
  std::size_t restarts() const {
    return number_or("LOCKSTEP_RESTART", 0) + number_or("TORCHELASTIC_RESTART_COUNT", 0) +
           number_or("SLURM_RESTART_COUNT", 0);
  }

  /// The `launch` call that lockstep's launcher has started this rank for.
  std::optional<std::size_t> launch_number() const {
    const char* text = lookup_("LOCKSTEP_LAUNCH");
    if (text == nullptr) return std::nullopt;
    return parse_number("LOCKSTEP_LAUNCH", text);
  }

  /// How many ranks lockstep's launcher wants as threads of this process.
  std::optional<std::size_t> threads() const {
    const char* text = lookup_("LOCKSTEP_THREADS");
    if (text == nullptr) return std::nullopt;
    return parse_number("LOCKSTEP_THREADS", text);
  }

 private:
  std::string text_or(const char* name, std::string_view otherwise) const {
    const char* text = lookup_(name);
    return text == nullptr ? std::string(otherwise) : std::string(text);
  }

  std::string required(const char* name, const char* beside) const {
    const char* text = lookup_(name);
    if (text != nullptr) return text;
    fail("launch", {beside, " is set and ", name, " is not"}, "set both, or neither");
  }

  std::size_t number(const char* name, const char* beside) const {
    return parse_number(name, required(name, beside));
  }

  std::size_t number_or(const char* name, std::size_t otherwise) const {
    const char* text = lookup_(name);
    return text == nullptr ? otherwise : parse_number(name, text);
  }

  /// A launcher's names for the four numbers.
  struct Names {
    const char* rank;
    const char* world;
    const char* local_rank;
    const char* local_world;
  };

  /// Without the size of the local world, ranks find out which ranks are local when they meet. A
  /// local rank alone is not enough, but must be a number.
  RankPlacement numbered(const char* launcher, const Names& names) const {
    RankPlacement place;
    place.launcher = launcher;
    place.rank = Rank{number(names.rank, names.world)};
    place.world = WorldSize{number(names.world, names.rank)};
    place.local_world = number_or(names.local_world, 0);
    place.local_rank = place.local_world != 0 ? number(names.local_rank, names.local_world)
                                              : number_or(names.local_rank, 0);
    return place;
  }

  int descriptor(const char* name) const {
    const char* text = lookup_(name);
    return text == nullptr ? -1 : static_cast<int>(parse_number(name, text) & 0x7fffffff);
  }

  RankPlacement from_lockstep() const {
    RankPlacement place =
        numbered("lockstep's launcher", {"LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE",
                                         "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_WORLD_SIZE"});
    const Endpoint store =
        parse_endpoint("LOCKSTEP_STORE", required("LOCKSTEP_STORE", "LOCKSTEP_RANK"));
    place.host = store.host;
    place.ports = {store.port};
    place.hosted = true;
    place.job = text_or("LOCKSTEP_JOB", "");
    place.secret_fd = descriptor("LOCKSTEP_SECRET_FD");
    if (place.secret_fd < 0) place.secret = secret();
    place.report_fd = descriptor("LOCKSTEP_REPORT_FD");
    return place;
  }

  RankPlacement from_env() const {
    const char* run = lookup_("TORCHELASTIC_RUN_ID");
    RankPlacement place = numbered(run != nullptr ? "torchrun" : "the environment",
                                   {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
    // Workers that torchrun has restarted must not meet the old ones, which may still be ending.
    const std::string id =
        run == nullptr ? "" : text({run, " restart ", text_or("TORCHELASTIC_RESTART_COUNT", "0")});
    place_at_master(place, id);
    const std::string agent = text_or("TORCHELASTIC_USE_AGENT_STORE", "");
    if (run != nullptr && !meeting_ && (agent == "True" || agent == "true" || agent == "1")) {
      place.ports = derived_ports(text({id, " ", place.ports.front()}));
      // The name that the agent gives its host may be usable on other hosts only.
      if (place.local_world == place.world.value()) place.host = "127.0.0.1";
    }
    return place;
  }

  RankPlacement from_open_mpi() const {
    RankPlacement place =
        numbered("mpirun", {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
    const std::string job = text_or("PMIX_NAMESPACE", text_or("OMPI_MCA_ess_base_jobid", "0"));
    place_at_job(place, text({"mpirun ", job}), "");
    return place;
  }

  RankPlacement from_slurm() const {
    const bool step = lookup_("SLURM_STEP_NUM_TASKS") != nullptr;
    RankPlacement place =
        numbered("Slurm", {"SLURM_PROCID", step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS",
                           "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"});
    if (const char* counts = lookup_("SLURM_STEP_TASKS_PER_NODE")) {
      place.local_rank = number("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE");
      place.local_world =
          slurm_tasks_on("SLURM_STEP_TASKS_PER_NODE", counts, number_or("SLURM_NODEID", 0));
    }
    // A job that is requeued keeps its id and counts its steps anew.
    const std::string id = text({"slurm ", text_or("SLURM_JOB_ID", "0"), ".", slurm_step(),
                                 " restart ", text_or("SLURM_RESTART_COUNT", "0")});
    const std::string nodes = text_or("SLURM_STEP_NODELIST", text_or("SLURM_JOB_NODELIST", ""));
    place_at_job(place, id, first_slurm_host(nodes));
    return place;
  }

  const char* slurm_step() const {
    const char* step = lookup_("SLURM_STEP_ID");
    return step != nullptr ? step : lookup_("SLURM_STEPID");
  }

  /// Sets the meeting place that the user gave, or MASTER_ADDR:MASTER_PORT, which must both be set.
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
        fail("launch",
             {place.launcher, " has ranks on several hosts and does not say where rank 0 is"},
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

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's placement in its job, from the first launcher whose variables are set.
///
/// Rank 0 opens the store at
/// - MASTER_ADDR:MASTER_PORT for `env://` variables set by hand, as PyTorch does.
/// - the first free one of eight ports derived from the run and MASTER_PORT under torchrun, whose
///   agent usually keeps MASTER_PORT for its own store (TORCHELASTIC_USE_AGENT_STORE). The other
///   ranks try these in turn; the handshake exposes ports of other programs and jobs.
/// - any free port under mpirun and srun, if the program includes lockstep/mpi.hpp: the other ranks
///   learn the address through MPI. Otherwise one of eight ports from the job's id for Open MPI and
///   Slurm. MASTER_PORT and --rendezvous replace both.

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>

#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/launch/host.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// A process's placement by its launcher. A local world of 0 and an empty job id are unknown yet.
struct RankPlacement : Membership {
  std::string launcher;
  std::vector<std::uint16_t> ports;  // rank 0 opens the store at the first that is free
  bool hosted = false;               // the launcher serves the store, instead of rank 0
  int secret_fd = -1;                // the pipe that has the secret, where it is not known
  int report_fd = -1;
  bool asks_mpi = false;  // MPI, if it is there, tells ranks where the store is

  explicit RankPlacement(std::string_view launcher = {}, Rank rank = {}, WorldSize world = {})
      : Membership{rank, world, 0, 0}, launcher(launcher) {}

  /// A single task inside an allocation may launch ranks.
  bool is_alone() const { return world == WorldSize{1} && !hosted; }
};

/// How ranks tell each other an address before they have a store.
struct MpiRendezvous {
  /// Is this rank of a world of so many the same to MPI? Initialises MPI.
  bool (*is_there)(Rank rank, WorldSize world);
  /// Rank 0's text. **Ranks** all. **Host** blocks until it is here; throws after the limit.
  std::string (*broadcast)(const std::string& own, std::chrono::milliseconds limit);
};

/// Set by lockstep/mpi.hpp; a program without MPI has none.
inline const MpiRendezvous* mpi_rendezvous = nullptr;

/// Throws if the numbers are inconsistent, before any rank waits for another.
inline void check_placement(const RankPlacement& placement) {
  if (placement.world.value() == 0) {
    fail("launch", {placement.launcher, " gives a world of zero ranks"},
         "a job has at least one rank");
  }
  if (placement.rank >= Rank{placement.world.value()}) {
    fail("launch",
         {placement.launcher, " gives rank ", placement.rank, " of a world of ", placement.world},
         "ranks count from 0 and stay below the world size");
  }
  if (placement.local_world > placement.world.value() ||
      (placement.local_world > 0 && placement.local_rank >= placement.local_world)) {
    fail("launch",
         {placement.launcher, " gives local rank ", placement.local_rank, " of ",
          placement.local_world, " in a world of ", placement.world},
         "local ranks count from 0 and stay below the number of ranks on the host");
  }
}

/// Eight ports outside the ephemeral range: rank 0 takes the first free one, the others try all.
inline std::vector<std::uint16_t> derived_ports(std::string_view job) {
  constexpr std::uint64_t begin = 20000;
  constexpr std::uint64_t count = 12000;
  const std::uint64_t start = hash_of(job) % count;
  std::vector<std::uint16_t> ports(8);
  for (std::uint64_t i = 0; i < ports.size(); ++i)
    ports[i] = static_cast<std::uint16_t>(begin + (start + i * 1543) % count);
  return ports;
}

/// A secret for ranks that were given none: it separates jobs, but only `given`, of
/// LOCKSTEP_SECRET_FILE, stops strangers. Rank 0's host is no part of it, because ranks may have
/// different names for it.
inline std::string derived_secret(std::string_view job, std::uint16_t port,
                                  std::string_view given) {
  return text({"job ", job.size(), ":", job, " port ", port, " secret ", given});
}

/// `node[07-09,12],login` is node07, `rack[1-2]n[3-4]` is rack1n3.
inline std::string first_slurm_host(std::string_view list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const std::size_t end = std::min(list.find(']', i), list.size());
    host += list.substr(i + 1, std::min(list.find_first_of(",-", i), end) - i - 1);
    i = end;
  }
  return host;
}

/// The number of tasks of a node: `2(x3),1` is 2, 2, 2, 1.
inline std::size_t slurm_tasks_on(std::string_view name, std::string_view counts,
                                  std::size_t node) {
  const std::string_view whole = counts;
  std::size_t first = 0;
  while (!counts.empty()) {
    std::string_view item = counts.substr(0, counts.find(','));
    counts.remove_prefix(item.size() == counts.size() ? item.size() : item.size() + 1);
    std::size_t nodes = 1;
    if (const std::size_t times = item.find("(x"); times != std::string_view::npos) {
      std::string_view repeat = item.substr(times + 2);
      if (repeat.ends_with(')')) repeat.remove_suffix(1);
      nodes = parse_number(name, repeat);
      item = item.substr(0, times);
    }
    if (node < first + nodes) return parse_number(name, item);
    first += nodes;
  }
  fail("launch", {name, " is '", whole, "' and has no node ", node},
       "run the program with srun, which sets it");
}

struct PlacementVariables {
  const char* launcher;
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
};
inline constexpr PlacementVariables placement_variables[] = {
    {"lockstep's launcher", "LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK",
     "LOCKSTEP_LOCAL_WORLD_SIZE"},
    {"the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};

/// Tests replace `lookup` by a table.
class LaunchEnvironment {
 public:
  using Lookup = const char* (*)(const char* name);

  /// `rendezvous`, if given, is the address of rank 0, whatever the launcher says.
  explicit LaunchEnvironment(
      std::optional<Endpoint> rendezvous = std::nullopt,
      Lookup lookup = [](const char* name) -> const char* { return std::getenv(name); })
      : lookup_(lookup), rendezvous_(std::move(rendezvous)) {}

  std::optional<RankPlacement> placement() const {
    const auto& [own, by_hand, open_mpi, mpich, slurm] = placement_variables;
    std::optional<RankPlacement> placement;
    if (lookup_(own.rank) != nullptr) {
      placement = from_lockstep(numbered(own));
    } else if (lookup_(by_hand.rank) != nullptr || lookup_(by_hand.world) != nullptr) {
      placement = from_env(numbered(by_hand));
    } else if (lookup_(open_mpi.rank) != nullptr) {
      placement = numbered(open_mpi);
      const std::string job = text_or("PMIX_NAMESPACE", text_or("OMPI_MCA_ess_base_jobid", "0"));
      set_job(*placement, text({"mpirun ", job}), "");
    } else if (lookup_(mpich.rank) != nullptr && lookup_(mpich.local_world) != nullptr) {
      placement = numbered(mpich);
      set_job(*placement, "", "");
    } else if (lookup_(slurm.rank) != nullptr && slurm_step() != nullptr) {
      // A batch script has SLURM_PROCID too, but only srun starts ranks.
      PlacementVariables step = slurm;
      if (lookup_("SLURM_STEP_NUM_TASKS") != nullptr) step.world = "SLURM_STEP_NUM_TASKS";
      placement = from_slurm(numbered(step));
    }
    if (placement) {
      check_placement(*placement);
      placement->devices = devices();
    }
    return placement;
  }

  /// The GPUs of this host's ranks, by local rank; empty if none were chosen.
  std::vector<std::size_t> devices() const {
    const char* const list = lookup_("LOCKSTEP_DEVICES");
    if (list == nullptr || *list == '\0') return {};
    return parse_devices("LOCKSTEP_DEVICES", list);
  }

  /// `env://` for a rank that is known already: reads only rank 0's address.
  RankPlacement rendezvous_placement(Rank rank, WorldSize world) const {
    RankPlacement placement("the program", rank, world);
    set_master(placement, "");
    return placement;
  }

  std::optional<std::chrono::milliseconds> timeout() const {
    const char* text = lookup_("LOCKSTEP_TIMEOUT");
    if (text == nullptr) return std::nullopt;
    return parse_seconds("LOCKSTEP_TIMEOUT", text);
  }

  /// The text of LOCKSTEP_SECRET_FILE without the end of its line; empty if the variable is not
  /// set. The secret itself is in no variable, because environments appear in logs and in /proc.
  std::string secret(Rank rank) const {
    if (lookup_("LOCKSTEP_SECRET") != nullptr) {
      fail("launch", {"LOCKSTEP_SECRET is set, and a secret in a variable is not safe"},
           "write it to a file with mode 600, and name that by LOCKSTEP_SECRET_FILE", rank);
    }
    const char* path = lookup_("LOCKSTEP_SECRET_FILE");
    if (path == nullptr) return {};
    const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    const bool is_file = file && ::fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode);
    if (is_file && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
      fail("launch", {"'", path, "' of LOCKSTEP_SECRET_FILE is open to other users"},
           text({"run chmod 600 '", path, "', and change the secret if others may have read it"}),
           rank);
    }
    std::string secret = is_file ? read_all(file.get()) : "";
    while (secret.ends_with('\n') || secret.ends_with('\r')) secret.pop_back();
    if (secret.empty()) {
      fail("launch",
           {"'", path, "' of LOCKSTEP_SECRET_FILE has no secret: ",
            is_file ? "it is empty"
            : file  ? "it is no file"
                    : error_text(errno)},
           "write one to it, the same on all hosts: umask 077; openssl rand -hex 32 > file", rank);
    }
    return secret;
  }

  std::size_t restarts() const {
    std::size_t sum = 0;
    for (const char* name :
         {"LOCKSTEP_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}) {
      sum += number(name).value_or(0);
    }
    return sum;
  }

  /// The `launch` call for which lockstep's launcher has started this rank.
  std::optional<std::size_t> launch_number() const { return number("LOCKSTEP_LAUNCH"); }

  /// How many ranks lockstep's launcher wants as threads of this process.
  std::optional<std::size_t> threads() const { return number("LOCKSTEP_THREADS"); }

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

  std::optional<std::size_t> number(const char* name) const {
    const char* text = lookup_(name);
    if (text == nullptr) return std::nullopt;
    return parse_number(name, text);
  }
  std::size_t required_number(const char* name, const char* beside) const {
    return parse_number(name, required(name, beside));
  }

  int descriptor(const char* name) const {
    const auto found = number(name);
    return found ? static_cast<int>(*found & 0x7fffffff) : -1;
  }

  /// Without the local world's size, ranks determine their local ranks in the rendezvous.
  RankPlacement numbered(const PlacementVariables& names) const {
    RankPlacement placement(names.launcher, Rank{required_number(names.rank, names.world)},
                            WorldSize{required_number(names.world, names.rank)});
    placement.local_world = number(names.local_world).value_or(0);
    placement.local_rank = placement.local_world != 0
                               ? required_number(names.local_rank, names.local_world)
                               : number(names.local_rank).value_or(0);
    return placement;
  }

  RankPlacement from_lockstep(RankPlacement placement) const {
    const Endpoint store =
        parse_endpoint("LOCKSTEP_STORE", required("LOCKSTEP_STORE", "LOCKSTEP_RANK"));
    placement.host = store.host;
    placement.ports = {store.port};
    placement.hosted = true;
    placement.job = text_or("LOCKSTEP_JOB", "");
    placement.secret_fd = descriptor("LOCKSTEP_SECRET_FD");
    if (placement.secret_fd < 0) placement.secret = secret(placement.rank);
    placement.report_fd = descriptor("LOCKSTEP_REPORT_FD");
    return placement;
  }

  RankPlacement from_env(RankPlacement placement) const {
    const char* run = lookup_("TORCHELASTIC_RUN_ID");
    if (run != nullptr) placement.launcher = "torchrun";
    // Restarted workers must not meet the old ones, which may still be shutting down.
    const std::string id =
        run == nullptr ? "" : text({run, " restart ", text_or("TORCHELASTIC_RESTART_COUNT", "0")});
    set_master(placement, id);
    const std::string agent = text_or("TORCHELASTIC_USE_AGENT_STORE", "");
    if (run != nullptr && !rendezvous_ && (agent == "True" || agent == "true" || agent == "1")) {
      placement.ports = derived_ports(text({id, " ", placement.ports.front()}));
      // The agent's name for its host may be valid on other hosts only.
      if (placement.local_world == placement.world.value()) placement.host = "127.0.0.1";
    }
    return placement;
  }

  RankPlacement from_slurm(RankPlacement placement) const {
    if (const char* counts = lookup_("SLURM_STEP_TASKS_PER_NODE")) {
      placement.local_rank = required_number("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE");
      placement.local_world =
          slurm_tasks_on("SLURM_STEP_TASKS_PER_NODE", counts, number("SLURM_NODEID").value_or(0));
    }
    // A requeued job keeps its id and restarts its step numbers.
    const std::string id = text({"slurm ", text_or("SLURM_JOB_ID", "0"), ".", slurm_step(),
                                 " restart ", text_or("SLURM_RESTART_COUNT", "0")});
    const std::string nodes = text_or("SLURM_STEP_NODELIST", text_or("SLURM_JOB_NODELIST", ""));
    set_job(placement, id, first_slurm_host(nodes));
    return placement;
  }

  const char* slurm_step() const {
    const char* step = lookup_("SLURM_STEP_ID");
    return step != nullptr ? step : lookup_("SLURM_STEPID");
  }

  void set_master(RankPlacement& placement, std::string_view id) const {
    Endpoint store;
    if (rendezvous_) {
      store = *rendezvous_;
    } else {
      store.host = required("MASTER_ADDR", "RANK");
      store.port = parse_port("MASTER_PORT", required("MASTER_PORT", "RANK"));
      if (store.host == "localhost") store.host = "127.0.0.1";
    }
    placement.host = store.host;
    placement.ports = {store.port};
    placement.secret = derived_secret(id, store.port, secret(placement.rank));
  }

  /// MASTER_ADDR:MASTER_PORT if set; otherwise ports of the job, on loopback or `first_host`.
  void set_job(RankPlacement& placement, const std::string& id,
               const std::string& first_host) const {
    if (rendezvous_ || lookup_("MASTER_ADDR") != nullptr || lookup_("MASTER_PORT") != nullptr) {
      set_master(placement, id);
      return;
    }
    placement.asks_mpi = mpi_rendezvous != nullptr && placement.world > WorldSize{1};
    const bool is_one_host = placement.local_world == placement.world.value();
    if (!is_one_host) placement.host = first_host;
    if (id.empty() || placement.host.empty()) {
      // MPICH's mpiexec gives jobs no id, Open MPI's mpirun no hosts: only MPI helps then.
      if (placement.asks_mpi || placement.world == WorldSize{1}) return;
      fail("launch",
           {placement.launcher,
            is_one_host ? " does not say which job this is"
                        : " has ranks on several hosts and does not say where rank 0 is"},
           "set MASTER_ADDR and MASTER_PORT on all ranks, with mpirun's -x, or give "
           "--rendezvous host:port");
    }
    placement.ports = derived_ports(id);
    placement.secret = derived_secret(id, 0, secret(placement.rank));
  }

  Lookup lookup_;
  std::optional<Endpoint> rendezvous_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

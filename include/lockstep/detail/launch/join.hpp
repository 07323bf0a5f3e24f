// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The rendezvous of a rank whose placement is known.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lockstep/detail/launch/environment.hpp"
#include "lockstep/detail/store/connection.hpp"
#include "lockstep/detail/store/server.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The file of `file:///path`, by which rank 0 publishes the store's address and secret, readable
/// by its owner only, until the job ends. A file of an earlier job is harmless: no store answers to
/// its secret, and ranks wait until rank 0 replaces it. The file of a running job is an error.
class RendezvousFile {
 public:
  RendezvousFile(std::string path, std::string_view host, std::uint16_t port,
                 std::string_view secret)
      : path_(std::move(path)) {
    const std::string temporary = text({path_, ".", random_id()});
    const Descriptor file(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    text_ = text({title, "\n", host, "\n", port, "\n", secret, "\n"});
    if (!file || !write_all(file.get(), text_) ||
        std::rename(temporary.c_str(), path_.c_str()) != 0) {
      const std::string why = error_text(errno);
      ::unlink(temporary.c_str());
      fail("join", {"rank 0 cannot write ", path_, ": ", why},
           "give file:// a path in a folder that rank 0 may write to", Rank{0});
    }
  }

  RendezvousFile(const RendezvousFile&) = delete;
  RendezvousFile& operator=(const RendezvousFile&) = delete;

  ~RendezvousFile() {
    // Another job may have replaced the file.
    if (!path_.empty() && read_file(path_.c_str()) == text_) ::unlink(path_.c_str());
  }

  /// Parses `/path` or `/path?host=name`, the host of rank 0; without it all ranks are on one host.
  static std::pair<std::string, std::string> parse(std::string_view text) {
    const std::size_t query = text.find("?host=");
    std::string host = "127.0.0.1";
    if (query != std::string_view::npos) {
      host = text.substr(query + 6);
      text = text.substr(0, query);
    }
    if (text.size() < 2 || text.front() != '/' || host.empty()) {
      fail("join", {"'file://", text, "' names no file"},
           "write file:///absolute/path, or file:///absolute/path?host=name-of-rank-0's-host");
    }
    return {std::string(text), host};
  }

  /// Waits for a file whose store answers, and copies its address and secret to `placement`.
  static void wait(const std::string& path, RankPlacement& placement,
                   std::chrono::milliseconds timeout) {
    const Deadline deadline = Deadline::after(timeout);
    std::string why;
    do {
      if (answers(path, placement, deadline, why)) return;
      sleep_for(std::chrono::milliseconds(10));
    } while (!deadline.passed());
    fail("join",
         {"rank 0 did not open a store through ", path, " within ", seconds_text(timeout), " (",
          why, ")"},
         "check that rank 0 runs, as the same user, and was given the same file", placement.rank);
  }

  static void check_unused(const std::string& path) {
    const std::string found = read_file(path.c_str());
    if (!found.empty() && !found.starts_with(title)) {
      fail("join", {path, " exists and is not a file of lockstep's"},
           "give file:// the path of a file that does not exist yet", Rank{0});
    }
    RankPlacement other;
    std::string why;
    if (answers(path, other, Deadline::after(std::chrono::seconds(1)), why)) {
      fail("join", {path, " is in use by another job"},
           "give every job a file of its own, or wait until that job has ended", Rank{0});
    }
  }

 private:
  static constexpr std::string_view title = "lockstep rendezvous 1";

  /// Completes `placement` if the file's store answers. Only this user's files: it may be in /tmp.
  static bool answers(const std::string& path, RankPlacement& placement, Deadline deadline,
                      std::string& why) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) {
      why = error_text(errno);
      return false;
    }
    const bool is_own = S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
    const std::string bytes = is_own ? read_all(file.get()) : "";
    std::string_view rest = bytes;
    std::string_view lines[4];  // title, host, port, secret
    for (std::string_view& line : lines) {
      line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    }
    if (!is_own || lines[0] != title || !bytes.ends_with('\n') || lines[3].empty()) {
      why = is_own ? "it is not a file of lockstep's" : "it belongs to another user";
      return false;
    }
    placement.host = lines[1];
    placement.ports = {parse_port(path, lines[2])};
    placement.secret = lines[3];
    const SipKey key = derive_key(placement.secret);
    return static_cast<bool>(
        connect_to_store(placement.host, placement.ports.front(), key, deadline, why));
  }

  std::string path_;
  std::string text_;
};

/// The store of a job without a launcher that hosts it, and its rendezvous file.
struct StoreHost {
  StoreServer server;
  std::optional<RendezvousFile> file = std::nullopt;
};

/// The secret of a launched rank, from a pipe that is read once: an environment appears in logs.
inline const std::string& inherited_secret(int fd) {
  static const std::string secret = [fd] {
    const Descriptor pipe = inherited_pipe(fd);
    if (!pipe) {
      fail("launch", {"LOCKSTEP_RANK is set but the pipe from the launcher is not there"},
           "unset LOCKSTEP_RANK where a rank starts another lockstep program");
    }
    return read_all(pipe.get());
  }();
  return secret;
}

/// Rank 0 listens on loopback, or on every interface for a name, which may resolve to any address.
inline Descriptor listen_at(const RankPlacement& placement) {
  const std::string host = is_loopback(placement.host) ? placement.host : "";
  int error = 0;
  std::string ports;
  for (std::uint16_t port : placement.ports) {
    if (Descriptor listener = try_listen(host, port, error)) return listener;
    ports += text({ports.empty() ? "" : ", ", port});
  }
  fail("join", {"rank 0 cannot open the job's store on port ", ports, ": ", error_text(error)},
       "choose another port (MASTER_PORT or --rendezvous), or end what uses it", placement.rank);
}

/// Registers the rank in the store, checks it against the others, and waits until all have joined.
inline void introduce(Store& store, Membership& member, bool knows_local_ranks) {
  const std::string rank = text({member.rank});
  const std::string world = text({member.world});
  const std::string first_world = store.compare_set("lockstep/world", "", world);
  if (first_world != world) {
    fail("join", {"this rank was told of a world of ", world, ", another one of ", first_world},
         "start all ranks of a job with the same world size", member.rank);
  }
  if (store.add(text({"lockstep/joined/", rank}), 1) != 1) {
    fail("join", {"another process has joined as rank ", rank},
         "give every rank its own number, and every job its own port, file or run id", member.rank);
  }
  if (member.job.empty()) member.job = store.compare_set("lockstep/job", "", random_id());
  const std::string here = host_identity();
  const std::vector<std::string> hosts =
      store.gather("rendezvous", member.rank, member.world, here, member.timeout);
  if (knows_local_ranks) return;
  member.local_rank = member.local_world = 0;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] != here) continue;
    if (r < member.rank.value()) ++member.local_rank;
    ++member.local_world;
  }
}

/// How often this process has joined as this rank at this address before. The number makes each
/// join's secret unique: the store of an earlier job, which waits for its ranks, rejects it.
inline std::size_t earlier_joins(const RankPlacement& placement) {
  static std::mutex mutex;
  static std::vector<std::string> joins;
  const std::lock_guard lock(mutex);
  const std::string mine =
      text({placement.rank, " ", placement.host, ":", placement.ports.front()});
  const auto earlier = static_cast<std::size_t>(std::count(joins.begin(), joins.end(), mine));
  joins.push_back(mine);
  return earlier;
}

/// Completes a placement: reads the secret, and opens the store if this process hosts it.
inline std::unique_ptr<StoreHost> complete_placement(RankPlacement& placement) {
  check_placement(placement);
  if (placement.secret_fd >= 0) placement.secret = inherited_secret(placement.secret_fd);
  if (!placement.hosted && placement.world > WorldSize{1}) {
    if (const std::size_t earlier = earlier_joins(placement))
      placement.secret += text({"/", earlier});
  }
  if (placement.hosted || placement.rank != Rank{0}) return nullptr;
  const std::size_t clients = placement.world.value() * placement.process_ranks;
  std::unique_ptr<StoreHost> host(
      new StoreHost{StoreServer(placement.secret, listen_at(placement), clients)});
  placement.ports = {host->server.port()};
  // The host itself connects over loopback, whatever name the other ranks use.
  if (!is_loopback(placement.host)) placement.host = "127.0.0.1";
  return host;
}

/// Completes a placement whose store's address MPI tells: rank 0 opens it at any free port. Where
/// MPI does not know these ranks, which a launcher may have started without it, what the launcher
/// says must do. Returns what `complete_placement` does. **Ranks** all. **Host** blocks.
inline std::unique_ptr<StoreHost> meet(RankPlacement& placement, std::string& name,
                                       std::chrono::milliseconds timeout) {
  const bool by_mpi =
      placement.asks_mpi && mpi_rendezvous->is_there(placement.rank, placement.world);
  if (placement.asks_mpi && !by_mpi && placement.ports.empty()) {
    fail("join", {placement.launcher, " has not started the ranks of this job's MPI"},
         "start them with the mpirun of the MPI that the program is linked with, or with srun "
         "--mpi=pmix; or set MASTER_ADDR and MASTER_PORT on all ranks",
         placement.rank);
  }
  std::unique_ptr<StoreHost> host;
  if (by_mpi && placement.rank == Rank{0}) {
    if (placement.host.empty()) placement.host = host_name();
    placement.ports = {0};
    placement.secret = random_id();
  }
  name = placement.host;
  if (!by_mpi || placement.rank == Rank{0}) host = complete_placement(placement);
  if (!by_mpi) return host;
  const std::string own = host == nullptr ? std::string()
                                          : store_protocol::Writer{}
                                                .text(name)
                                                .u32(placement.ports.front())
                                                .text(placement.secret)
                                                .bytes();
  const std::string said = mpi_rendezvous->broadcast(own, timeout);
  if (host != nullptr) return host;
  store_protocol::Reader in(said);
  placement.host = name = in.text();
  placement.ports = {static_cast<std::uint16_t>(in.u32())};
  placement.secret = in.text();
  placement.hosted = true;
  return host;
}

/// The rendezvous as one rank of a settled placement, through `store` if it is connected already.
inline Session rendezvous_at(const RankPlacement& placement, Membership member,
                             std::unique_ptr<StoreHost> host, std::optional<Store> store = {}) {
  try {
    if (!store) store.emplace(placement.host, placement.ports, placement.secret, member.timeout);
    member.port = store->port();
    introduce(*store, member, placement.local_world > 0);
    return Session(std::move(member), *std::move(store), std::move(host));
  } catch (const Error& error) {
    throw error.on(member.rank);
  }
}

/// Joins the job; rank 0 publishes the store through `file`, if given. **Ranks** all must call.
/// **Host** blocks until all have joined. **Stream** none.
inline Session join_at(RankPlacement placement, std::chrono::milliseconds timeout = default_timeout,
                       const std::string& file = {}) {
  std::string name;
  std::unique_ptr<StoreHost> host = meet(placement, name, timeout);
  if (host && !file.empty())
    host->file.emplace(file, name, placement.ports.front(), placement.secret);
  Membership member = placement;
  member.host = name;
  member.timeout = timeout;
  return rendezvous_at(placement, std::move(member), std::move(host));
}

inline Session join_by_file(std::string_view method, Rank rank, WorldSize world,
                            std::chrono::milliseconds timeout) {
  RankPlacement placement("the program", rank, world);
  check_placement(placement);
  const auto [path, name] = RendezvousFile::parse(method);
  if (rank == Rank{0}) {
    RendezvousFile::check_unused(path);
    placement.host = name;
    placement.ports = {0};
    placement.secret = random_id();
  } else {
    RendezvousFile::wait(path, placement, timeout);
    placement.hosted = true;  // by rank 0, with the secret of this join
  }
  return join_at(std::move(placement), timeout, path);
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END

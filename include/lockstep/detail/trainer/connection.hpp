// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From policies to the communicators of ranks and of replicas.

#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "lockstep/detail/trainer/axes.hpp"

namespace lockstep {

namespace detail {

template <class Policies>
inline constexpr std::size_t static_world = Pick<axes::World, Policies>::static_size;

}  // namespace detail

/// Connects ranks on a device through a backend: `make<Policies>(session, name)` returns a rank's
/// communicator, `name` distinguishes several. `ranks_are_threads` marks threads of one process. A
/// world that is known to be of one when compiled has no backend, void.
template <class Device, class Backend>
struct Connection;

template <>
struct Connection<Cpu, void> {
  template <class Policies>
  static LoopbackCommunicator make(Session&, const std::string& = "world") {
    return {};
  }
};

template <>
struct Connection<Cpu, Shm> {
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_shm_communicator<detail::static_world<Policies>,
                                 typename detail::Pick<axes::Progress, Policies>::choice>(
        session.membership(), session.store(), name);
  }
};

namespace detail {

/// DP's replicas communicate in the memory of one process; the backend has no effect.
template <class Policies>
inline constexpr bool is_dp =
    std::is_same_v<Pick<axes::ParallelStrategy, Policies>, ParallelStrategy<DP>>;

template <class Policies>
using ConnectionOf = Connection<
    typename Pick<axes::Device, Policies>::choice,
    std::conditional_t<
        static_world<Policies> == 1, void,
        std::conditional_t<is_dp<Policies>, Shm, typename Pick<axes::Backend, Policies>::choice>>>;

template <class Policies>
using CommunicatorOf =
    decltype(ConnectionOf<Policies>::template make<Policies>(std::declval<Session&>()));

/// **Ranks** all. **Host** blocks until all have come.
template <class Policies>
CommunicatorOf<Policies> make_communicator(Session& session, const std::string& name = "world") {
  require_world<static_world<Policies>>(session.world(), session.rank());
  return ConnectionOf<Policies>::template make<Policies>(session, name);
}

/// Gives a compile error that names the header which a job needs and which is not included.
template <class Policies>
consteval bool require_connection() {
  using Transport = typename Pick<axes::Backend, Policies>::choice;
  constexpr bool connected = requires { sizeof(ConnectionOf<Policies>); };
  constexpr bool is_known = is_connectable<Transport>;
  constexpr bool has_ranks = is_known && !is_dp<Policies> && static_world<Policies> != 1;
  constexpr bool by_mpi = has_ranks && uses_mpi<Transport>;
  constexpr bool by_both = by_mpi && uses_nccl<Transport>;
  constexpr bool by_nccl = has_ranks && uses_nccl<Transport> && !by_both;
  constexpr bool by_gloo = has_ranks && (std::is_same_v<Transport, Gloo> ||
                                         std::is_same_v<Transport, Hierarchical<Shm, Gloo>>);
  constexpr bool on_gpu = std::is_same_v<Pick<axes::Device, Policies>, Device<Cuda>>;
  static_assert(connected || is_known,
                "lockstep: Backend<Hierarchical<Inside, Between>> has Shm inside hosts and Gloo, "
                "Mpi, MpiAnyOrder or Nccl between them, or Nccl inside and Mpi or MpiAnyOrder "
                "between; choose two of these");
  static_assert(connected || !is_known || by_nccl || by_gloo || by_mpi,
                "lockstep: a job with Device<Cuda> needs #include <lockstep/lockstep.cuh>, in a "
                "file that nvcc compiles");
  static_assert(connected || !by_nccl,
                "lockstep: a job with Device<Cuda> and Backend<Nccl>, its default, also between "
                "hosts only, needs #include <lockstep/nccl.cuh>, in a file that nvcc compiles, and "
                "-lnccl");
  static_assert(
      connected || !by_gloo || !on_gpu,
      "lockstep: a job with Device<Cuda> and Backend<Gloo>, also between hosts only, needs "
      "#include <lockstep/gloo.cuh>, in a file that nvcc compiles, and -lgloo");
  static_assert(connected || !by_gloo || on_gpu,
                "lockstep: a job with Backend<Gloo>, also between hosts only, needs #include "
                "<lockstep/gloo.hpp>, and -lgloo");
  static_assert(
      connected || !by_both,
      "lockstep: a job with Device<Cuda> and Backend<Hierarchical<Nccl, Mpi>> needs #include "
      "<lockstep/mpi_nccl.cuh>, in a file that nvcc compiles, the flags that mpicc -show prints, "
      "and -lnccl");
  static_assert(
      connected || !by_mpi || by_both || !on_gpu,
      "lockstep: a job with Device<Cuda> and Backend<Mpi>, also between hosts only, needs "
      "#include <lockstep/mpi.cuh>, in a file that nvcc compiles, and the flags that "
      "mpicc -show prints");
  static_assert(connected || !by_mpi || on_gpu,
                "lockstep: a job with Backend<Mpi>, also between hosts only, needs #include "
                "<lockstep/mpi.hpp>, and the flags that mpicc -show prints");
  return connected;
}

/// The rendezvous of DP's replicas, which are threads. Every replica calls `prepare`, which waits
/// for no other and may fail on one alone, then `join`, which waits for all, on its own thread.
template <class Device, class Policies>
class ReplicaRendezvous;

template <class Policies>
class ReplicaRendezvous<Cpu, Policies> {
  static constexpr std::size_t static_size = Pick<axes::World, Policies>::static_size;
  static constexpr bool alone = static_size == 1;

 public:
  using communicator = std::conditional_t<
      alone, LoopbackCommunicator,
      ShmCommunicator<static_size, typename Pick<axes::Progress, Policies>::choice>>;

  static std::size_t devices() { return core_count(); }

  /// Device numbers have no meaning here: replicas share one device.
  ReplicaRendezvous(std::size_t replicas, std::chrono::milliseconds timeout,
                    const std::vector<std::size_t>& /*devices*/)
      : size_(replicas), timeout_(timeout), files_(replicas) {
    if constexpr (!alone) files_[0] = shm::Engine::make_file(WorldSize{replicas});
  }

  std::size_t size() const { return size_; }

  void prepare(Rank rank) {
    if constexpr (!alone) {
      if (rank != Rank{0})
        files_[rank.value()] = shm::Engine::open(shm::Engine::address(files_[0]));
    }
  }
  communicator join(Rank rank) {
    if constexpr (alone) {
      return {};
    } else {
      return communicator(rank, WorldSize{size_}, std::move(files_[rank.value()]), timeout_);
    }
  }

 private:
  std::size_t size_;
  std::chrono::milliseconds timeout_;
  std::vector<Descriptor> files_;
};

template <class Policies>
using ReplicaRendezvousOf =
    ReplicaRendezvous<typename Pick<axes::Device, Policies>::choice, Policies>;

}  // namespace detail

}  // namespace lockstep

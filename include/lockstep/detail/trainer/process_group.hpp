// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Process groups: from launched processes to a communicator, for hand-written loops.

#include "lockstep/detail/comm/hierarchical/hosts.hpp"
#include "lockstep/detail/trainer/connection.hpp"

namespace lockstep {

namespace detail {

template <class P>
inline constexpr bool is_group_policy = PolicyOf<P, axes::Backend> || PolicyOf<P, axes::Device> ||
                                        PolicyOf<P, axes::World> || PolicyOf<P, axes::Progress>;

/// An invalid group has been reported; a world of one keeps that the only error.
template <class... Ps>
consteval auto group_policies() {
  constexpr bool fits = (is_group_policy<Ps> && ...);
  static_assert(fits,
                "lockstep: a process group has the policies Backend<...>, Device<...>, World<...> "
                "and Progress<...> only");
  using Alone = CanonicalPolicies<World<1>>;
  if constexpr (fits) {
    // NCCL implies `Device<Cuda>`.
    constexpr bool on_gpu = uses_nccl<typename PickOr<Backend<Shm>, Ps...>::choice>;
    using Policies = std::conditional_t<on_gpu, CanonicalPolicies<Ps..., Device<Cuda>>,
                                        CanonicalPolicies<Ps...>>;
    return std::conditional_t<require_connection<Policies>(), Policies, Alone>{};
  } else {
    return Alone{};
  }
}
template <class... Ps>
using GroupPolicies = decltype(group_policies<Ps...>());

/// Every process group of this process shares it while it lives, unless it was moved from.
inline const std::shared_ptr<const char> living_groups = std::make_shared<const char>();

}  // namespace detail

/// A rank and its communicator, under PyTorch's names. Several may exist at once.
///
///     ProcessGroup group(session);                  // inside launch; shared memory
///     ProcessGroup<Backend<Gloo>> group(session);   // needs <lockstep/gloo.hpp>
template <class... Policies>
class ProcessGroup {
  using All = detail::GroupPolicies<Policies...>;

 public:
  using communicator_type = detail::CommunicatorOf<All>;

  /// The session must outlive its group. **Ranks** all. **Host** blocks until all have come.
  explicit ProcessGroup(Session& session)
      : session_(&session), comm_(detail::make_communicator<All>(session)) {}
  explicit ProcessGroup(Session&& session)
      : own_(std::make_unique<Session>(std::move(session))),
        session_(own_.get()),
        comm_(detail::make_communicator<All>(*session_)) {}

  Rank rank() const { return session_->rank(); }
  WorldSize world_size() const { return session_->world(); }
  std::size_t local_rank() const { return session_->membership().local_rank; }
  const Membership& membership() const { return session_->membership(); }

  /// The collectives: `group->all_reduce(gradients, Average{})`.
  communicator_type& operator*() { return comm_; }
  communicator_type* operator->() { return &comm_; }

  Session& session() { return *session_; }
  Store& store() { return session_->store(); }

 private:
  std::unique_ptr<Session> own_;  // outlives the communicator, which uses its store
  Session* session_;
  communicator_type comm_;
  std::shared_ptr<const char> living_ = detail::living_groups;
};

/// Joins as the rank that torchrun, mpirun or srun has set in the environment, or alone. Inside of
/// `launch`, use `ProcessGroup group(session)`. **Ranks** all. **Host** blocks until all join.
///
///     auto group = init_process_group();                  // shared memory
///     auto group = init_process_group<Backend<Gloo>>();   // needs <lockstep/gloo.hpp>
///     auto group = init_process_group<Backend<Nccl>>();   // needs <lockstep/nccl.cuh>
template <class... Policies>
ProcessGroup<Policies...> init_process_group(std::chrono::milliseconds timeout = default_timeout) {
  using Joined = detail::ConnectionOf<detail::GroupPolicies<Policies...>>;
  static_assert(
      !requires { Joined::ranks_are_threads; },
      "lockstep: the ranks of this backend are threads of one process; start them with "
      "launch_threads, and make a ProcessGroup of the session that it gives");
  return ProcessGroup<Policies...>(join(timeout));
}

/// Joins by `env://`, `tcp://host:port` or `file:///path`. **Ranks** all. **Host** blocks.
template <class... Policies>
ProcessGroup<Policies...> init_process_group(std::string_view init_method, Rank rank,
                                             WorldSize world,
                                             std::chrono::milliseconds timeout = default_timeout) {
  return ProcessGroup<Policies...>(join(init_method, rank, world, timeout));
}

/// Does this process have a process group?
inline bool is_initialized() { return detail::living_groups.use_count() > 1; }

/// Ends a group before its scope does. **Ranks** all. **Host** blocks as the destructor does.
template <class... Policies>
void destroy_process_group(ProcessGroup<Policies...>&& group) {
  [[maybe_unused]] const ProcessGroup<Policies...> ended = std::move(group);
}

/// A communicator of the listed ranks, in that order, with its own backend, and on GPUs its own
/// compute stream: `new_group<Backend<Gloo>>(group, {Rank{0}, Rank{2}})`. Others get nothing.
/// **Ranks** all of `group`, with the same list. **Host** blocks until members join.
template <class FirstPolicy, class... More, class... Policies>
  requires detail::is_group_policy<FirstPolicy>
auto new_group(ProcessGroup<Policies...>& group, const std::vector<Rank>& members) {
  using All = detail::GroupPolicies<FirstPolicy, More...>;
  using Comm = detail::CommunicatorOf<All>;
  const detail::GroupPosition position = detail::position_among(members, *group);
  group->agree(detail::division_call(position));
  std::optional<Comm> made;
  if (position.is_member()) {
    const std::string name = detail::group_name(members);
    const Membership& all = group.membership();
    Membership member = detail::membership_in_group(all, group.store(), position, name);
    Session session(std::move(member), group.store().share());
    made.emplace(detail::make_communicator<All>(session, name));
  }
  return OptionalGroup<Comm>(std::move(made), group.rank());
}

template <class Group>
  requires requires { typename Group::communicator_type; }
auto new_group(Group& group, const std::vector<Rank>& members) {
  return new_group(*group, members);
}

}  // namespace lockstep

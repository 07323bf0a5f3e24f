// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A wrapped model as saving and loading see it.

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/fingerprint.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/strategy/dp.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/trainer/job.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/kept_job.hpp"
#include "lockstep/trainer/kept_shape.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep::detail {

template <class... Ps>
std::vector<std::string> policy_names(PolicyPack<Ps...>) {
  return {std::string(spelling<Ps>())...};
}

/// A wrapper's model and policies, and the communicator of the ranks that make a call together.
template <class Wrapper>
struct WrapperParts;
template <class M, class P, class Comm>
struct WrapperParts<BasicDdp<M, P, Comm>> {
  using model = M;
  using policies = P;
  static constexpr bool is_one_process = false;
  static std::size_t replicas(BasicDdp<M, P, Comm>& ddp) {
    return ddp.communicator().world_size().value();
  }
  static Rank rank(BasicDdp<M, P, Comm>& ddp) { return ddp.communicator().rank(); }
  static std::vector<std::string> gather(BasicDdp<M, P, Comm>& ddp, std::string text) {
    if constexpr (ReplicaTraits<M, P>::alone) {
      return {std::move(text)};
    } else {
      return all_gather_objects(ddp.communicator(), std::move(text));
    }
  }
};
template <class M, class P, class Meeting>
struct WrapperParts<BasicDp<M, P, Meeting>> {
  using model = M;
  using policies = P;
  static constexpr bool is_one_process = true;
  static std::size_t replicas(BasicDp<M, P, Meeting>& dp) { return dp.replicas(); }
  static Rank rank(BasicDp<M, P, Meeting>&) { return Rank{0}; }
  static std::vector<std::string> gather(BasicDp<M, P, Meeting>&, std::string text) {
    return {std::move(text)};
  }
};

/// How many processes make a call together.
template <class Wrapper>
std::size_t process_count(Wrapper& wrapped) {
  using Parts = WrapperParts<Wrapper>;
  return Parts::is_one_process ? 1 : Parts::replicas(wrapped);
}

/// Every rank's text, by rank, as a part of the program's call `call`. **Ranks** all. **Host**
/// blocks.
template <class Wrapper>
std::vector<std::string> gather_texts(Wrapper& wrapped, JobCall call, std::string text) {
  [[maybe_unused]] const auto on = wrapped.on_device();
  const InJobCall in(call);
  return WrapperParts<Wrapper>::gather(wrapped, std::move(text));
}

/// Calls `f(ranks)`, with the ranks that make a call together, as a part of the program's call.
template <class Wrapper>
void with_joint_ranks(Wrapper& wrapped, JobCall call, FunctionRef<void(const JointRanks&)> f) {
  using Parts = WrapperParts<Wrapper>;
  if constexpr (!Parts::is_one_process) wrapped.require_joined("checkpoints");
  [[maybe_unused]] const auto on = wrapped.on_device();
  const InJobCall in(call);
  const auto gather = [&](std::string text) {
    return gather_texts(wrapped, call, std::move(text));
  };
  f(JointRanks{Parts::rank(wrapped), process_count(wrapped), gather});
}

/// Calls `f(job)` as a part of the program's call `call`. It is compiled once for a wrapper,
/// whatever is done with the job.
template <class Wrapper>
void with_kept_job(Wrapper& wrapped, JobCall call, FunctionRef<void(const KeptJob&)> f) {
  using Parts = WrapperParts<Wrapper>;
  using Model = typename Parts::model;
  using Policies = typename Parts::policies;
  using traits = ReplicaTraits<Model, Policies>;
  if constexpr (!Parts::is_one_process) wrapped.require_joined("checkpoints");
  [[maybe_unused]] const auto on = wrapped.on_device();
  const InJobCall in(call);
  // While the job's memory is read and written, another thread tells the other ranks that this one
  // is alive. Both use the communicator, one at a time.
  std::mutex turns;
  const auto gather = [&](std::string text) {
    const std::lock_guard turn(turns);
    return gather_texts(wrapped, call, std::move(text));
  };
  const auto pieces = [&](KeptFor use) {
    const std::lock_guard turn(turns);
    std::vector<KeptPiece> all;
    const auto add = [&](const KeptPiece& piece) { all.push_back(piece); };
    if (use == KeptFor::saving) {
      wrapped.template for_each_kept<KeptFor::saving>(add);
    } else {
      wrapped.template for_each_kept<KeptFor::loading>(add);
    }
    return all;
  };
  const auto progress = [&] {
    const std::lock_guard turn(turns);
    return wrapped.progress();
  };
  const auto set_progress = [&](const ReplicaProgress& to) {
    const std::lock_guard turn(turns);
    wrapped.set_progress(to);
  };
  const auto synchronize_buffers = [&] {
    if constexpr (traits::unites_buffers) wrapped.synchronize_buffers();
  };
  const auto make_memory = [&](std::size_t bytes) {
    using Memory = decltype(wrapped.make_kept_memory(bytes));
    const auto memory = std::make_shared<Memory>(wrapped.make_kept_memory(bytes));
    return SnapshotMemory{memory, memory->data(), bytes};
  };
  const auto copy_out = [&](std::span<const KeptCopy> copies) {
    const std::lock_guard turn(turns);
    wrapped.copy_out(copies);
  };
  const auto copy_in = [&](const KeptPiece& piece, const std::byte* from) {
    const std::lock_guard turn(turns);
    wrapped.copy_in(piece, from);
  };
  KeptShape shape;
  shape.replicas = Parts::replicas(wrapped);
  shape.world = Parts::is_one_process ? 1 : shape.replicas;
  shape.gradient_divisor = traits::sums_gradients ? 1 : static_cast<double>(shape.replicas);
  shape.micro_batches = traits::micro_batches;
  shape.keeps_own_buffers =
      !traits::alone && std::is_same_v<typename traits::template choice<axes::Buffers>, Local>;
  shape.policies = policy_names(typename Policies::pack{});
  shape.fingerprint = ComposedJob<Model, Policies>::fingerprint(wrapped.model());
  std::vector<NameAlias> aliases;
  if constexpr (TensorListing<Model>) aliases = listed_aliases(wrapped.model());
  const KeptJob job{JointRanks{Parts::rank(wrapped), shape.world, gather},
                    shape,
                    Parts::is_one_process,
                    wrapped.micro_batches(),
                    pieces,
                    progress,
                    set_progress,
                    synchronize_buffers,
                    make_memory,
                    copy_out,
                    [](void* wrapper) { static_cast<Wrapper*>(wrapper)->await_copies(); },
                    &wrapped,
                    copy_in,
                    std::move(aliases)};
  f(job);
}

}  // namespace lockstep::detail

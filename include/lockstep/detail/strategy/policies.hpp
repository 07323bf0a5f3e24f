// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The axes of a strategy: how replicas share the work, and what a step is.

#include "lockstep/detail/bucket/buckets.hpp"
#include "lockstep/detail/bucket/subgraphs.hpp"

namespace lockstep {

namespace axes {
struct Precision : WithName<"Precision"> {};
struct ParallelStrategy : WithName<"ParallelStrategy"> {};
struct Accumulate : WithName<"Accumulate"> {};
struct StepExecution : WithName<"StepExecution"> {};
struct UnusedParameters : WithName<"UnusedParameters"> {};
struct Buffers : WithName<"Buffers"> {};
struct Norms : WithName<"Norms"> {};
struct NormRanks : WithName<"NormRanks"> {};
struct LossPlacement : WithName<"LossPlacement"> {};
struct UnevenInputs : WithName<"UnevenInputs"> {};
struct JoinDivisor : WithName<"JoinDivisor"> {};
}  // namespace axes

/// Parameters, gradients and buffers have the types that the model declares.
struct AsDeclared : Choice<axes::Precision>, WithName<"AsDeclared"> {
  using parameter_types = detail::DeclaredTypes;
  using buffer_types = detail::DeclaredTypes;
  /// The type in which gradients of T are reduced.
  template <class T>
  using reduced = T;
  static constexpr bool keeps_masters = false;
  static constexpr bool scales_loss = false;
};

/// Own types for parameters and their gradients, for reductions, and for buffers. The model
/// declares float and sees `Parameters`; the optimizer keeps master weights in float. Where a type
/// is `Half`, the loss is scaled like with PyTorch's GradScaler.
template <class Parameters, class Reduction = Parameters, class Buffers = float>
struct Mixed : Choice<axes::Precision>, WithName<"Mixed"> {
  using parameter_types = detail::FloatingAs<Parameters>;
  using buffer_types = detail::FloatingAs<Buffers>;
  template <class>
  using reduced = Reduction;
  static constexpr bool keeps_masters = !std::is_same_v<Parameters, float>;
  static constexpr bool scales_loss =
      std::is_same_v<Parameters, Half> || std::is_same_v<Reduction, Half>;
  static constexpr void fingerprint(detail::Hash& hash) {
    for (const ElementKind kind :
         {element_kind<Parameters>(), element_kind<Reduction>(), element_kind<Buffers>()})
      hash.number(static_cast<std::uint64_t>(kind));
  }
};

/// Declared types and a scaled loss, for models that compute in half precision themselves, such as
/// LibTorch modules under `Autocast`; the model multiplies its loss by `step.loss_scale()`.
struct ScaledLoss : AsDeclared {
  static constexpr std::string_view name = "ScaledLoss";
  static constexpr bool scales_loss = true;
};

/// The policy for the types of training: `Precision<Mixed<BFloat16>>`.
template <class Types>
struct Precision : detail::ChoicePolicy<axes::Precision, Types> {};

/// One rank per process or thread; gradients are averaged over ranks, bucket by bucket.
struct DDP : Choice<axes::ParallelStrategy>, WithName<"DDP"> {};

/// One process: batches are scattered over devices, and gradients are reduced over the replicas.
struct DP : Choice<axes::ParallelStrategy>, WithName<"DP"> {};

/// The policy that says what a replica is: a rank (`DDP`) or a thread of one process (`DP`).
template <class Strategy>
struct ParallelStrategy : detail::ChoicePolicy<axes::ParallelStrategy, Strategy> {};

/// What a trainer does with the last batches of an epoch, if they are too few for a whole step.
enum class Tail : std::uint8_t {
  step,  ///< they make a step of their own, with their own mean
  drop,  ///< their gradients are discarded
};

/// Gradients of `MicroBatches` batches are accumulated locally; ranks communicate with the last.
template <std::size_t MicroBatches, Tail Rest = Tail::step>
struct Accumulate : detail::ValuePolicy<axes::Accumulate> {
  static constexpr std::size_t micro_batches = MicroBatches;
  static constexpr Tail tail = Rest;
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Accumulate::name).number(MicroBatches).number(static_cast<std::size_t>(Rest));
  }
  /// The number of updates that a trainer makes in an epoch.
  static constexpr std::uint64_t updates_of(std::uint64_t batches) {
    return (batches + (Rest == Tail::step ? MicroBatches - 1 : 0)) / MicroBatches;
  }
};

/// A step is enqueued call by call.
struct EagerStep : detail::ValuePolicy<axes::StepExecution> {
  static constexpr bool captures = false;
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("EagerStep"); }
};

/// Forward, backward, collectives and update are captured as a CUDA graph for each shape of batch,
/// and replayed. A model that cannot be captured runs eagerly, and a message says why.
struct CapturedStep : detail::ValuePolicy<axes::StepExecution> {
  static constexpr bool captures = true;
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("CapturedStep"); }
};

/// A parameter without a gradient is an error that names it.
struct Forbid : Choice<axes::UnusedParameters>, WithName<"Forbid"> {};

/// A missing gradient counts as zero; the optimizer skips parameters that no rank has used.
struct Zero : Choice<axes::UnusedParameters>, WithName<"Zero"> {};

/// The policy for parameters that get no gradient in a step: `Forbid`, `Zero` or `Subgraphs<...>`.
template <class Meaning>
struct UnusedParameters : detail::ChoicePolicy<axes::UnusedParameters, Meaning> {};

/// Rank 0's buffers are broadcast before every forward pass, as in PyTorch.
struct Broadcast : Choice<axes::Buffers>, WithName<"Broadcast"> {};

/// Every rank keeps its own buffers, or normalises with the statistics of its own samples.
struct Local : Choice<axes::Buffers, axes::Norms>, WithName<"Local"> {};

/// Buffers are averaged at the end of an epoch and before evaluations and checkpoints; batch norms
/// take their statistics over the samples of all ranks.
struct Synced : Choice<axes::Buffers, axes::Norms>, WithName<"Synced"> {};

/// The policy for buffers: `Broadcast`, `Local` or `Synced`.
template <class How>
struct Buffers : detail::ChoicePolicy<axes::Buffers, How> {};

/// Batch norms share their statistics with all ranks of the job.
struct AllRanks : Choice<axes::NormRanks>, WithName<"AllRanks"> {};

/// Batch norms share their statistics inside of each group of `Groups<Grid<W, G>>`.
struct WithinGroup : Choice<axes::NormRanks>, WithName<"WithinGroup"> {};

/// The policy for batch norms: `Norms<Local>`, `Norms<Synced>` or `Norms<Synced, WithinGroup>`.
/// Like PyTorch's `convert_sync_batchnorm`, it applies to every `BatchNorm` of an unchanged model.
template <class How, class Ranks = AllRanks>
struct Norms : detail::ChoicePolicy<axes::Norms, How> {
  static constexpr bool is_synced = std::is_same_v<How, Synced>;
  static constexpr bool in_group = is_synced && std::is_same_v<Ranks, WithinGroup>;
  static constexpr bool well_formed = detail::ChoiceOf<How, axes::Norms> &&
                                      detail::ChoiceOf<Ranks, axes::NormRanks> &&
                                      (is_synced || std::is_same_v<Ranks, AllRanks>);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Norms::name).text(How::name);
    if constexpr (is_synced) hash.text(Ranks::name);
  }
};

/// `DP` computes one loss of the gathered outputs on the output device, as in PyTorch.
struct LossOnOutput : detail::ValuePolicy<axes::LossPlacement> {
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("LossOnOutput"); }
};

/// `DP` computes a loss on every replica, of its own share: balanced work, no gathered outputs.
struct LossOnReplica : detail::ValuePolicy<axes::LossPlacement> {
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("LossOnReplica"); }
};

/// Ranks have the same number of batches; anything else is an error that names the rank.
struct Even : Choice<axes::UnevenInputs>, WithName<"Even"> {};

/// Joined ranks contribute zeros until all ranks have exhausted their batches, as PyTorch's `join`.
struct Join : Choice<axes::UnevenInputs>, WithName<"Join"> {};

/// Gradients are divided by the initial number of ranks: samples keep their weight, as in PyTorch.
struct DivideByInitial : Choice<axes::JoinDivisor>, WithName<"DivideByInitial"> {};

/// Sums of gradients are divided by the number of ranks that still have batches.
struct DivideByLive : Choice<axes::JoinDivisor>, WithName<"DivideByLive"> {};

/// The policy for uneven inputs: `UnevenInputs<Join>` or `UnevenInputs<Join, DivideByLive>`.
template <class How, class Divisor = DivideByInitial>
struct UnevenInputs : detail::ChoicePolicy<axes::UnevenInputs, How> {
  static constexpr bool joins = std::is_same_v<How, Join>;
  static constexpr bool divides_by_live = joins && std::is_same_v<Divisor, DivideByLive>;
  static constexpr bool well_formed = detail::ChoiceOf<How, axes::UnevenInputs> &&
                                      detail::ChoiceOf<Divisor, axes::JoinDivisor> &&
                                      (joins || std::is_same_v<Divisor, DivideByInitial>);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::UnevenInputs::name).text(How::name);
    if constexpr (joins) hash.text(Divisor::name);
  }
};

}  // namespace lockstep

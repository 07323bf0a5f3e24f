// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every composition error of the library, as a sentence. Exactly one of them is printed.

#include "lockstep/core/name.hpp"

namespace lockstep {

namespace detail {

/// The faults of a composition, in the order in which they are looked for.
enum class Fault {
  none,
  model_not_first,
  model_no_class,
  choice_without_policy,
  unknown_policy,
  policy_given_twice,
  wrong_choice,
  choice_not_built,
  torch_module,
  model_without_parameters,
  malformed_parameters,
  malformed_buffers,
  unsupported_element,
  integer_parameter,
  tensor_too_large,
  tensor_without_name,
  name_declared_twice,
  shapes_not_given,
  world_of_zero,
  accumulate_zero,
  clip_not_positive,
  pattern_without_match,
  everything_frozen,
  group_without_parameters,
  subgraphs_not_declared,
  subgraph_without_parameters,
  subgraph_declared_twice,
  too_many_subgraphs,
  nccl_on_cpu,
  shared_without_shm,
  mixed_on_cpu,
  mixed_of_other_types,
  captured_on_cpu,
  captured_with_unused,
  captured_with_union,
  captured_with_exact,
  captured_through_host,
  for_ranks_alone,
  malformed_output,
  hook_out_of_range,
  hooks_out_of_order,
  hooks_with_host_shared,
  local_sgd_with_skip,
  local_sgd_with_shards,
  // Ranks that are exhausted before others.
  join_with_captured,
  join_with_shared,
  join_with_same_subgraph,
  join_with_hooks,
  // Groups of ranks.
  groups_of_other_world,
  // Ranks that read for others.
  feed_without_groups,
  feed_with_join,
  // Sharding<ZeroRedundancy, Gradients>.
  freed_with_join,
  freed_with_hooks,
  // Norms<Synced>.
  norms_without_groups,
  norms_with_join,
  norms_with_union,
};

}  // namespace detail

/// One sentence per fault. `Culprit`, the name of an axis or a tensor where there is one, is
/// printed by the compiler beside the sentence, because it is in this type.
template <detail::Fault F, Name Culprit>
struct Verdict {
  using enum detail::Fault;
  static_assert(F != model_not_first,
                "lockstep: the model comes first: Trainer<Model, Policies...>");
  static_assert(F != model_no_class,
                "lockstep: the model must be a class that declares its parameters and has "
                "forward(step, batch) and backward(step, batch)");
  static_assert(F != choice_without_policy,
                "lockstep: a choice was given without its policy; write Backend<Shm>, not Shm");
  static_assert(
      F != unknown_policy,
      "lockstep: one of the template arguments is not a policy; after the model come policies "
      "such as ParallelStrategy<DDP>, Backend<Shm> or World<4>");
  static_assert(F != policy_given_twice, "lockstep: a policy was given twice; keep one of the two");
  static_assert(
      F != wrong_choice,
      "lockstep: a policy was given something that is not one of its choices; docs/policies.md "
      "lists the choices of every policy, and a hook of your own needs a name and a template "
      "Bucket (docs/hooks.md)");
  static_assert(F != choice_not_built,
                "lockstep: this choice has its name but is not built yet; docs/policies.md says "
                "what works in this version");
  static_assert(F != torch_module,
                "lockstep: a LibTorch module is no model by itself; wrap it in "
                "lockstep::torch::DistributedDataParallel<Net>, or train a TorchModel<Model, Net> "
                "that says what its loss is");
  static_assert(F != model_without_parameters,
                "lockstep: the model declares no parameters; give it using Parameters = "
                "ParameterList<Parameter<\"weight\", float, 10, 784>, ...>");
  static_assert(
      F != malformed_parameters,
      "lockstep: the model's Parameters must be a ParameterList of Parameter, Scope and Repeat, "
      "each with at most eight extents");
  static_assert(
      F != malformed_buffers,
      "lockstep: the model's Buffers must be a BufferList of Buffer, Scope and Repeat, each "
      "with at most eight extents");
  static_assert(
      F != unsupported_element,
      "lockstep: a tensor's element type is not supported; use double, float, Half, BFloat16 "
      "or an integer of 8 to 64 bits");
  static_assert(F != integer_parameter,
                "lockstep: a parameter of integers has no gradient; declare it as a Buffer");
  static_assert(
      F != tensor_too_large,
      "lockstep: the model's tensors have more bytes than memory has addresses; check the "
      "extents (the compiler prints the name of the first that is too much)");
  static_assert(F != tensor_without_name,
                "lockstep: a tensor or scope has an empty name; give every one a name");
  static_assert(F != name_declared_twice,
                "lockstep: a name is declared twice; every parameter and buffer needs its own");
  static_assert(F != shapes_not_given,
                "lockstep: the model has dynamic extents but does not say them; give it void "
                "shapes(auto& shape) const with one shape(\"name\"_p, extents...) for each");
  static_assert(
      F != world_of_zero,
      "lockstep: a world of zero ranks cannot train; write World<1> or more, or World<dynamic>");
  static_assert(F != accumulate_zero,
                "lockstep: Accumulate<0> would never step; write Accumulate<1> or more");
  static_assert(F != clip_not_positive,
                "lockstep: Clip needs a norm above zero; leave Clip out to clip nothing");
  static_assert(F != pattern_without_match,
                "lockstep: no parameter matches a pattern of Frozen, of a group or of a sub-graph; "
                "compare it with the names in the model's ParameterList (the compiler prints the "
                "pattern beside this sentence)");
  static_assert(F != everything_frozen,
                "lockstep: Frozen matches every parameter, and nothing is left to train; freeze "
                "fewer");
  static_assert(F != group_without_parameters,
                "lockstep: one of ParameterGroups has no parameter to train; earlier groups or "
                "Frozen have all that it contains (the compiler prints its number, from 1)");
  static_assert(F != subgraphs_not_declared,
                "lockstep: Subgraphs<...> declares no sub-graph; write Subgraphs<Subgraph<"
                "\"with_adapter\", \"fc1.*\", \"adapter.*\">, ...>, or leave it out");
  static_assert(F != subgraph_without_parameters,
                "lockstep: a sub-graph contains no parameter to train; add a pattern, or freeze "
                "fewer (the compiler prints its name beside this sentence)");
  static_assert(F != subgraph_declared_twice,
                "lockstep: two sub-graphs have one name, or one has none; give each its own (the "
                "compiler prints the name beside this sentence)");
  static_assert(F != too_many_subgraphs,
                "lockstep: a job has at most 31 sub-graphs, and 14 with SameOnAllRanks; let one "
                "contain more parameters");
  static_assert(
      F != nccl_on_cpu,
      "lockstep: Backend<Nccl> moves GPU memory and this is a CPU job; add Device<Cuda>, or "
      "choose Backend<Shm> or Backend<Gloo>");
  static_assert(
      F != shared_without_shm,
      "lockstep: Sharding<HostShared> needs ranks that share memory; use it with Device<Cpu> and "
      "Backend<Shm>, or choose Sharding<Replicated>");
  static_assert(F != mixed_on_cpu,
                "lockstep: Precision<Mixed<...>> needs a GPU's arithmetic; add Device<Cuda>, or "
                "leave Precision out: a LibTorch module computes in 16 bits inside of an "
                "Autocast");
  static_assert(
      F != mixed_of_other_types,
      "lockstep: Precision<Mixed<Parameters, Reduction, Buffers>> takes float, Half and BFloat16, "
      "for a model whose parameters are all declared float");
  static_assert(F != captured_on_cpu,
                "lockstep: CapturedStep makes a CUDA graph; add Device<Cuda>, or leave it out");
  static_assert(
      F != captured_with_unused,
      "lockstep: with UnusedParameters<Zero> the host decides in every step what is updated, which "
      "a captured step cannot change; keep one of the two");
  static_assert(
      F != captured_with_union,
      "lockstep: ranks that capture a step replay it together and must use one sub-graph; write "
      "Subgraphs<SameOnAllRanks, ...>, or leave CapturedStep out");
  static_assert(
      F != captured_with_exact,
      "lockstep: with Sampler<Distributed, Exact> ranks can have last batches of different sizes, "
      "and CapturedStep needs all ranks to replay together; use Padding, DropLast or Masked");
  static_assert(
      F != captured_through_host,
      "lockstep: with Backend<Gloo> and Backend<Hierarchical<...>> the host takes part in every "
      "reduction, which no CUDA graph can hold; leave CapturedStep out, or use Backend<Nccl> or "
      "Backend<Shm>");
  static_assert(F != for_ranks_alone,
                "lockstep: this policy is for ranks, each with batches of its own, and a job of "
                "ParallelStrategy<DP> is one process whose replicas share a batch; leave it out, "
                "or use ParallelStrategy<DDP> (the compiler prints its name beside this sentence)");
  static_assert(
      F != malformed_output,
      "lockstep: the model's Output must be an OutputOf, such as OutputOf<float, 10>, for "
      "ParallelStrategy<DP> to gather it; or use LossOnReplica");
  static_assert(F != hook_out_of_range,
                "lockstep: a hook's number is out of range; PowerSGD needs a rank of 1 or more, "
                "LocalSGD 1 step or more");
  static_assert(
      F != hooks_out_of_order,
      "lockstep: these hooks cannot follow each other; give one of PowerSGD and LocalSGD, "
      "because each says alone what travels");
  static_assert(
      F != hooks_with_host_shared,
      "lockstep: Sharding<HostShared> reduces slices where they are used, and hooks want whole "
      "buckets; choose Sharding<Replicated>, or leave the hooks out");
  static_assert(
      F != local_sgd_with_skip,
      "lockstep: with LocalSGD every rank has gradients of its own, and Anomaly<Skip> or a loss "
      "scale would skip updates on some ranks only; leave one of the two out");
  static_assert(F != local_sgd_with_shards,
                "lockstep: with LocalSGD every rank updates all parameters by itself, and with "
                "Sharding<ZeroRedundancy> its share of them; keep one of the two");
  static_assert(
      F != join_with_captured,
      "lockstep: with UnevenInputs<Join> ranks that are through run other work than those that "
      "have batches, and CapturedStep needs all ranks to replay together; keep one of the two");
  static_assert(
      F != join_with_shared,
      "lockstep: with UnevenInputs<Join> ranks learn from the first bucket who still has batches, "
      "and Sharding<HostShared> reduces no buckets; choose Sharding<Replicated>, its default");
  static_assert(F != join_with_same_subgraph,
                "lockstep: with UnevenInputs<Join> a rank that is through does not know which "
                "sub-graph the others use; leave SameOnAllRanks out of Subgraphs");
  static_assert(
      F != join_with_hooks,
      "lockstep: with UnevenInputs<Join> ranks learn from the first bucket who still has batches, "
      "and of the hooks only CompressTo brings all of its elements; leave the others out");
  static_assert(
      F != groups_of_other_world,
      "lockstep: the topology of Groups<...> is not one of the job's World<N>; give both the same "
      "number of ranks, with groups that divide it, or write Groups<Grid<dynamic, G>>");
  static_assert(
      F != feed_without_groups,
      "lockstep: Feed<LeaderOfGroup> and Feed<ScatterThenBroadcast> read for the ranks of a group, "
      "and this job has no groups; add a policy such as Groups<Grid<8, 4>>, or leave Feed out");
  static_assert(
      F != feed_with_join,
      "lockstep: with UnevenInputs<Join> every rank has data of its own, which no other can read "
      "for it; leave Feed or UnevenInputs<Join> out");
  static_assert(
      F != freed_with_join,
      "lockstep: with Sharding<ZeroRedundancy, Gradients> every batch is scattered at once, and "
      "ranks that are through could not answer; use Sharding<ZeroRedundancy> with "
      "UnevenInputs<Join>");
  static_assert(
      F != freed_with_hooks,
      "lockstep: hooks need whole buckets, of which Sharding<ZeroRedundancy, Gradients> keeps "
      "slices; use Sharding<ZeroRedundancy> with Hooks");
  static_assert(
      F != norms_without_groups,
      "lockstep: Norms<Synced, WithinGroup> takes statistics over a rank's group, and this job has "
      "no groups; add a policy such as Groups<Grid<8, 4>>, or write Norms<Synced>");
  static_assert(
      F != norms_with_join,
      "lockstep: with Norms<Synced> every rank's forward waits for the statistics of all, and with "
      "UnevenInputs<Join> a rank that is through has none to give; keep one of the two");
  static_assert(
      F != norms_with_union,
      "lockstep: with Norms<Synced> ranks must run the same norms in every step, which sub-graphs "
      "chosen by each rank do not; write Subgraphs<SameOnAllRanks, ...>, or use Norms<Local>");
};

}  // namespace lockstep

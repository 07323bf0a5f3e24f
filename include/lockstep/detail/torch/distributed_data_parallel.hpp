// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::DistributedDataParallel`: DDP for hand-written loops.

#include "lockstep/detail/torch/loop_gradients.hpp"
#include "lockstep/detail/trainer/process_group.hpp"
#include "lockstep/detail/trainer/rejected.hpp"

namespace lockstep {

inline namespace torch_modules {

/// The parameter types of a module, if not all are float, as an argument among the policies:
/// `lockstep::torch::DistributedDataParallel<Net, ParameterTypes<float, double>>`.
template <Element... Ts>
struct ParameterTypes : detail::ValuePolicy<ParameterTypes<>> {};

}  // namespace torch_modules

namespace detail {

/// `PolicyPack<P>` if the policy applies to a hand-written loop, or is malformed, which the
/// composition check reports; else an empty one and a compile error that names the alternative.
template <class P>
consteval auto acting() {
  if constexpr (PolicyOf<P, ParameterTypes<>> || std::is_same_v<P, Sharding<Replicated>> ||
                std::is_same_v<P, Norms<Local>>) {
    return PolicyPack<>{};
  } else if constexpr (!Policy<P>) {
    return PolicyPack<P>{};
  } else if constexpr (!P::well_formed || !answers<typename P::axis>(CanonicalPolicies<>::pack{})) {
    return PolicyPack<P>{};
  } else {
    constexpr bool is_default = std::is_same_v<P, Pick<typename P::axis, CanonicalPolicies<>>>;
    constexpr bool makes_updates = PolicyOf<P, axes::Optimizer> ||
                                   PolicyOf<P, axes::ParameterGroups> || PolicyOf<P, axes::Clip> ||
                                   PolicyOf<P, axes::Accumulate> || PolicyOf<P, axes::Schedule>;
    static_assert(!makes_updates,
                  "lockstep: this wrapper leaves the update to the program; use LibTorch's "
                  "optimizers with their groups, clip_grad_norm_ and no_sync(), or a Trainer with "
                  "a TorchModel, which has the policies Optimizer, ParameterGroups, Clip, "
                  "Accumulate and Schedule");
    constexpr bool averages_parameters = requires { requires P::stages::averages_parameters; };
    static_assert(!averages_parameters,
                  "lockstep: LocalSGD averages parameters after updates of lockstep's; use a "
                  "Trainer with a TorchModel");
    constexpr bool has_subgraphs = requires {
      requires PolicyOf<P, axes::UnusedParameters> && (SubgraphsIn<typename P::choice>::count > 1);
    };
    static_assert(!has_subgraphs,
                  "lockstep: Subgraphs are for declared models; add UnusedParameters<Zero>, with "
                  "which autograd says what a pass has used");
    constexpr bool has_replicas =
        (PolicyOf<P, axes::ParallelStrategy> && !is_default) || PolicyOf<P, axes::LossPlacement>;
    static_assert(!has_replicas,
                  "lockstep: this wrapper is ParallelStrategy<DDP>, and every rank has its own "
                  "loss; DP is lockstep::torch::DataParallel<Net>, and LossOnReplica is for a "
                  "Trainer with a TorchModel");
    constexpr bool loads_data =
        PolicyOf<P, axes::Sampler> || (PolicyOf<P, axes::Feed> && !is_default);
    static_assert(!loads_data,
                  "lockstep: here the program loads its data; give LibTorch's loader a "
                  "RankSampler, or use a Trainer with a TorchModel, which has the policies Sampler "
                  "and Feed");
    constexpr bool shards = PolicyOf<P, axes::Sharding>;
    static_assert(!shards,
                  "lockstep: LibTorch's optimizers update all parameters on every rank; leave "
                  "Sharding out and divide their states with "
                  "lockstep::torch::ZeroRedundancyOptimizer, or use a Trainer with a TorchModel");
    constexpr bool runs_steps =
        (PolicyOf<P, axes::StepExecution> || PolicyOf<P, axes::Precision>) && !is_default;
    static_assert(!runs_steps,
                  "lockstep: CapturedStep and Precision need a step that lockstep runs; use a "
                  "Trainer with a TorchModel");
    constexpr bool acts = !(makes_updates || averages_parameters || has_subgraphs || has_replicas ||
                            loads_data || shards || runs_steps);
    return std::conditional_t<acts, PolicyPack<P>, PolicyPack<>>{};
  }
}

/// The job of a wrapper with parameters of types `Ts` and policies `Ps`.
template <class Net, class Types, class Acting>
struct SortedLoopJob;
template <class Net, class... Ts, class... Ps>
struct SortedLoopJob<Net, ParameterTypes<Ts...>, PolicyPack<Ps...>> {
  template <class M, class Policies>
  using Of = Replica<M, Policies, CommunicatorOf<Policies>>;
  using Model = LoopModule<Net, Ts...>;
  using replica = Compose<Of, Model, Ps...>;
  using policies = CanonicalPolicies<Ps...>;
  using communicator = CommunicatorOf<policies>;
  static_assert(PickOr<World<dynamic>, Ps...>::static_size != 1,
                "lockstep: World<1> has nobody to average with; leave it out, or the wrapper");
  static_assert(std::is_same_v<PickOr<Groups<>, Ps...>, Groups<>> ||
                    PickOr<Norms<Local>, Ps...>::in_group,
                "lockstep: in a program's own loop Groups<...> are for Norms<Synced, WithinGroup> "
                "alone; add it, or make groups of your own with new_group(...)");
};
/// Does a wrapper synchronise all batch norms?
template <class... Given>
inline constexpr bool syncs_all_norms = PickOr<Norms<Local>, Given...>::is_synced;
/// Without the policy, a wrapper can synchronise those that `convert_sync_batchnorm` has met, but
/// not where a rank may run out of batches.
template <class... Given>
using LoopNorms = std::conditional_t<
    syncs_all_norms<Given...> ||
        !std::is_same_v<PickOr<UnevenInputs<Even>, Given...>, UnevenInputs<Even>>,
    PolicyPack<>, PolicyPack<Norms<Synced>>>;
/// Sorts the wrapper's arguments, and adds `Sharding<Replicated>` and norms.
template <class Net, class... Given>
using LoopJob =
    SortedLoopJob<Net, PickOr<ParameterTypes<>, Given...>,
                  decltype((PolicyPack<Sharding<Replicated>>{} + ... + acting<Given>()) +
                           LoopNorms<Given...>{})>;

}  // namespace detail

/// Found as `lockstep::torch::X`, since `lockstep::X` are the wrappers of declared models.
namespace torch_loops {

/// PyTorch's wrapper. `Net` is a module class or its holder:
///
///     auto net = std::make_shared<Net>();
///     lockstep::torch::DistributedDataParallel<Net> ddp(net, session);
///     torch::optim::SGD optimizer(net->parameters(), 0.1);
///     for (auto& [inputs, labels] : batches) {
///       auto loss = torch::cross_entropy_loss(ddp(inputs), labels);
///       loss.backward();        // gradients are averages over all ranks when it returns
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Reductions overlap with `backward`. Averages are in `Tensor::grad` without a copy: clone one to
/// keep it over the next `backward`. Optimizers may be made before or after the wrapper. Every
/// backward pass that reaches parameters of the module is a collective, unless the latest `forward`
/// was in a `no_sync()` scope; it averages the sum of new gradients and those in `Tensor::grad`.
template <class Net, class... Policies>
class DistributedDataParallel {
  using Source = detail::ModuleSource<Net>;
  using Contained = typename Source::Contained;
  using Job = detail::LoopJob<Net, Policies...>;
  using Replica = typename Job::replica;
  using traits = typename Replica::traits;

 public:
  using communicator_type = typename Job::communicator;

  /// Compares the module over ranks and broadcasts rank 0's parameters and buffers. The group, a
  /// communicator or a session, must outlive the wrapper. **Ranks** all. **Host** blocks.
  DistributedDataParallel(std::shared_ptr<Contained> module, communicator_type& group)
      : module_(std::move(module)),
        replica_(group,
                 detail::abort_on_exception_of<false>(
                     group,
                     [&] { return typename Replica::layouts_type(typename Job::Model(module_)); }),
                 typename Job::Model(module_)),
        gradients_(
            (detail::abort_on_exception(replica_, [&] { replica_.initialize_from_model(Seed{}); }),
             replica_)) {
    // From now on the norms know their job, and training beside it is an error.
    detail::abort_on_exception(
        replica_, [&] { replica_.with_step([&](auto& step) { (void)open_norms(step); }); });
  }
  template <class... Ps>
  DistributedDataParallel(std::shared_ptr<Contained> module, ProcessGroup<Ps...>& group)
      : DistributedDataParallel(std::move(module), *group) {}
  DistributedDataParallel(std::shared_ptr<Contained> module, Session& session)
      : DistributedDataParallel(std::move(module),
                                std::unique_ptr<communicator_type>(new communicator_type(
                                    detail::make_communicator<typename Job::policies>(session)))) {}
  /// For a holder, such as `torch::nn::Sequential`. `Net` is deduced by the guides below alone:
  /// from here the compiler would also try, and make, a wrapper of a `std::shared_ptr`.
  template <class Group>
    requires(!std::same_as<Net, Contained>)
  DistributedDataParallel(const std::type_identity_t<Net>& holder, Group& group)
      : DistributedDataParallel(holder.ptr(), group) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;
  /// Tensors that the program keeps get memory of their own. Those of the module do not count among
  /// them if nobody else has it.
  ~DistributedDataParallel() { module_.reset(); }

  Contained& module() { return *module_; }
  Contained* operator->() { return module_.get(); }
  communicator_type& communicator() { return replica_.communicator(); }
  /// Where the module's tensors are, and inputs belong.
  at::Device device() { return replica_.model().adopted().parameters()[0].tensor.device(); }

  /// The module's forward pass; in training with gradients enabled, rank 0's buffers are broadcast
  /// first. **Ranks** all in that case, else this one. **Host** blocks.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return in_job([&] {
      prepare();
      return replica_.with_step([&](auto& step) {
        const auto norms = open_norms(step);
        return module_->forward(std::forward<Arguments>(arguments)...);
      });
    });
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// `loss.backward()` that also tells all ranks the reason of a failure and, with
  /// `UnusedParameters<Zero>`, finds unused parameters early. **Ranks** all. **Host** blocks.
  void backward(const at::Tensor& loss, bool retain_graph = false, bool create_graph = false) {
    [[maybe_unused]] const auto on = replica_.on_device();
    gradients_.run(loss, [&] { loss.backward({}, retain_graph, create_graph); });
  }

  /// Throws if an average was not finite (`Anomaly<Stop>`). **Host** blocks until all is done.
  void require_finite() {
    in_job([&] { gradients_.require_finite(); });
  }

  /// The number of backward passes that `Anomaly<Skip>` left out, because an average was NaN or
  /// infinite: they leave all gradients undefined, those that earlier passes have added too, on all
  /// ranks, so that LibTorch's optimizers change nothing. **Host** does not block; on a GPU each
  /// `backward` has waited for its averages.
  std::uint64_t skipped_steps() const { return gradients_.skipped(); }

  /// Gives all ranks rank 0's buffers, or with `Buffers<Synced>` the averages over ranks (of
  /// integers and booleans the largest), as an evaluation or a file needs them. Not in the scope of
  /// `join`, where ranks may be exhausted. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void synchronize_buffers() {
    in_job([&] {
      if (is_joining_) {
        detail::fail("synchronize_buffers",
                     {"in the scope of join some ranks may have no more batches, and would not "
                      "make this call"},
                     "call it after joined.finish()");
      }
      gradients_.require_intact();
      gradients_.streams().in_order([&] { replica_.synchronize_buffers(); });
    });
  }

  /// In the result's scope, gradients accumulate in `Tensor::grad`; the next pass averages the sum.
  ///
  ///     { auto local = ddp.no_sync();  ddp(x).mean().backward(); }
  [[nodiscard("gradients are averaged again when the result is gone: auto local = ...")]] auto
  no_sync() {
    return detail::ValueWhile(synchronizes_, false);
  }

  /// With `UnevenInputs<Join>`: until the result's end, ranks may have different numbers of
  /// batches, with one `backward` per `forward`. `update` is the program's code after a backward
  /// pass: an exhausted rank calls it after each pass of the others, which keeps its parameters and
  /// optimizer states equal to theirs. **Ranks** all. **Host** does not block here.
  ///
  ///     const auto update = [&] { optimizer.step(); optimizer.zero_grad(); };
  ///     auto joined = ddp.join(update);
  ///     for (auto& batch : batches) { loss_of(ddp(batch)).backward(); update(); }
  ///     joined.finish();
  template <class Update, class T = traits>
  auto join(Update update) {
    static_assert(T::may_join,
                  "lockstep: ranks of this job have the same number of batches; add "
                  "UnevenInputs<Join> to let some run out of batches before others");
    return detail::JoinScope(*this, std::move(update));
  }
  template <class T = traits>
  auto join() {
    static_assert(!T::may_join && sizeof(T) == 0,
                  "lockstep: a rank that has no more batches makes the updates of the others, or "
                  "the states of its optimizer would fall behind; say what an update is, and add "
                  "UnevenInputs<Join>: ddp.join([&] { optimizer.step(); optimizer.zero_grad(); })");
    return detail::JoinScope(*this, [] {});
  }

  // Called by `join`.

  void begin_join() { is_joining_ = true; }
  void leave_join() { is_joining_ = false; }
  bool is_joining() const { return is_joining_; }
  void finish_join(const auto& update) {
    if (!std::exchange(is_joining_, false)) return;
    in_job([&] { answer_all(update); });
  }

  /// Called by `Checkpoint`: all ranks' texts. **Ranks** all. **Host** blocks.
  std::vector<std::string> all_gather_text(std::string text, detail::JobCall call) {
    [[maybe_unused]] const auto on = replica_.on_device();
    const detail::InJobCall in(call);
    return all_gather_objects(communicator(), std::move(text));
  }

  /// The bytes that this rank has sent for gradients, with `Hooks<...>`.
  auto bytes_sent()
    requires(traits::is_hooked)
  {
    return replica_.bytes_sent();
  }

  // Called by `GradScaler`.

  static constexpr bool ignores_anomalies = !traits::stops_at_anomaly && !traits::skips_anomalies;
  static constexpr bool may_join = traits::may_join;
  /// The largest of all ranks' numbers, each a float tensor of one element. **Ranks** all. **Host**
  /// blocks, or on a GPU enqueues. **Stream** LibTorch's current one.
  at::Tensor largest_over_ranks(const at::Tensor& own) {
    return in_job([&] {
      at::Tensor largest = own.to(device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      gradients_.streams().in_order([&] {
        replica_.communicator().all_reduce(std::span(largest.mutable_data_ptr<float>(), 1), Max{});
      });
      return largest;
    });
  }

 private:
  /// Owns the communicator, which must outlive the replica.
  DistributedDataParallel(std::shared_ptr<Contained> module, std::unique_ptr<communicator_type> own)
      : DistributedDataParallel(std::move(module), *own) {
    own_ = std::move(own);
  }

  /// A part of the job, on its device; an exception tells the other ranks.
  auto in_job(const auto& f) {
    [[maybe_unused]] const auto on = replica_.on_device();
    return detail::abort_on_exception(replica_, f);
  }

  auto open_norms(auto& step) {
    constexpr bool all = detail::syncs_all_norms<Policies...>;
    return replica_.model().template open_norms<all>(gradients_.streams().norm_ranks(step));
  }

  void prepare() {
    gradients_.require_intact();
    if (!at::GradMode::is_enabled()) return;
    gradients_.streams().keep_backward_here();
    gradients_.receive(synchronizes_);
    if constexpr (traits::broadcasts_buffers) {
      if (!synchronizes_) return;
      // An exhausted rank answers one broadcast per backward pass.
      const bool wanted = traits::joins ? std::exchange(next_buffers_, gradients_.passes() + 1) <=
                                              gradients_.passes()
                                        : detail::is_in_training(*module_);
      if (!wanted) return;
      gradients_.streams().in_order(
          [&] { replica_.synchronize_buffers(detail::JobCall::forward); });
    }
  }

  /// Answers the others' collectives until all ranks are exhausted.
  void answer_all(const auto& update) {
    if constexpr (traits::joins) {
      const detail::InJobCall in(detail::JobCall::backward);
      do {
        gradients_.streams().job_waits_for_program();
      } while (replica_.answer_others([&] {
        gradients_.publish();
        const detail::InJobCall own(detail::JobCall::none);  // for the program's own calls
        update();
      }));
    }
  }

  std::unique_ptr<communicator_type> own_;
  std::shared_ptr<Contained> module_;
  Replica replica_;
  detail::LoopGradients<Replica> gradients_;
  bool synchronizes_ = true;
  std::uint64_t next_buffers_ = 0;  // passes before buffers are next broadcast, with Join
  bool is_joining_ = false;
};

template <class Module, class Group>
DistributedDataParallel(std::shared_ptr<Module>, Group&) -> DistributedDataParallel<Module>;
template <class Holder, class Group>
  requires requires { typename Holder::ContainedType; }
DistributedDataParallel(const Holder&, Group&) -> DistributedDataParallel<Holder>;

}  // namespace torch_loops

}  // namespace lockstep

namespace torch {

using namespace ::lockstep::torch_loops;

}  // namespace torch

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::DistributedDataParallel`: DDP for programs that keep their own loop and
/// LibTorch's optimizers.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/core/strong.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/policy/policy.hpp"
#include "lockstep/strategy/join_scope.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/tell_others.hpp"
#include "lockstep/torch/loop_gradients.hpp"
#include "lockstep/torch/module_source.hpp"
#include "lockstep/torch/namespace.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/process_group.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep {

inline namespace torch_modules {

/// The types of a module's parameters, where they are not all float: stands among the policies of
/// `lockstep::torch::DistributedDataParallel<Net, ParameterTypes<float, double>>`.
template <Element... Ts>
struct ParameterTypes {};

}  // namespace torch_modules

namespace detail {

template <class P>
inline constexpr bool is_parameter_types = false;
template <class... Ts>
inline constexpr bool is_parameter_types<ParameterTypes<Ts...>> = true;

/// The model and the policies of a wrapper, from what the program lists.
template <class Net, class Types, class... Ps>
struct LoopComposition;
template <class Net, class... Ts, class... Ps>
struct LoopComposition<Net, ParameterTypes<Ts...>, PolicyPack<Ps...>> {
  using Model = LoopModule<Net, Ts...>;

  template <class Axis>
  static constexpr bool names = (PolicyOf<Ps, Axis> || ...);
  static_assert(!names<axes::Optimizer> && !names<axes::Clip> && !names<axes::Accumulate> &&
                    !names<axes::Schedule>,
                "lockstep: this wrapper leaves the update to the program: use LibTorch's "
                "optimizers, clip_grad_norm_ and no_sync(), or a Trainer with a TorchModel, which "
                "has the policies Optimizer, Clip, Accumulate and Schedule");
  static_assert(std::is_same_v<PickOr<Sharding<Replicated>, Ps...>, Sharding<Replicated>>,
                "lockstep: LibTorch's optimizers update all parameters on every rank: leave "
                "Sharding out, or use a Trainer with a TorchModel");
  static_assert(std::is_same_v<PickOr<Device<Cpu>, Ps...>, Device<Cpu>>,
                "lockstep: this wrapper is for the CPU; on GPUs use a Trainer with a TorchModel");
  static_assert(PickOr<World<dynamic>, Ps...>::static_size != 1,
                "lockstep: World<1> has nobody to average with: leave it out, or the wrapper");

  static auto policies() {
    if constexpr (names<axes::Sharding>) {
      return std::type_identity<PolicyPack<Ps...>>{};
    } else {
      return std::type_identity<PolicyPack<Ps..., Sharding<Replicated>>>{};
    }
  }
};

template <class Model, class Pack>
struct LoopReplica;
template <class Model, class... Ps>
struct LoopReplica<Model, PolicyPack<Ps...>> {
  template <class M, class Policies>
  using Of = Replica<M, Policies, CommunicatorOf<Policies>>;
  using policies = CanonicalPolicies<Ps...>;
  using type = Compose<Of, RejectedWrapper, Model, Ps...>;
  static_assert(!type::traits::averages_parameters,
                "lockstep: LocalSGD averages parameters after updates of lockstep's: use a Trainer "
                "with a TorchModel");
  static_assert(!type::traits::has_subgraphs,
                "lockstep: Subgraphs are for declared models: add UnusedParameters<Zero>, with "
                "which autograd says what a pass has used");
};

/// Sorts what a program lists into types and policies.
template <class Types, class Sorted, class... Given>
struct SortLoopPolicies {
  using types = Types;
  using policies = Sorted;
};
template <class Types, class... Sorted, class First, class... Rest>
struct SortLoopPolicies<Types, PolicyPack<Sorted...>, First, Rest...>
    : std::conditional_t<is_parameter_types<First>,
                         SortLoopPolicies<First, PolicyPack<Sorted...>, Rest...>,
                         SortLoopPolicies<Types, PolicyPack<Sorted..., First>, Rest...>> {};

template <class Net, class... Ps>
struct LoopJob {
  using Sorted = SortLoopPolicies<ParameterTypes<>, PolicyPack<>, Ps...>;
  using Composition = LoopComposition<Net, typename Sorted::types, typename Sorted::policies>;
  using Model = typename Composition::Model;
  using Chosen = LoopReplica<Model, typename decltype(Composition::policies())::type>;
  using replica = typename Chosen::type;
  using policies = typename Chosen::policies;
  using communicator = CommunicatorOf<policies>;
};

}  // namespace detail

/// Wrappers for hand-written loops, found as `lockstep::torch::X`: in `lockstep` the same names are
/// wrappers of declared models.
namespace torch_loops {

/// PyTorch's wrapper. `Net` is a module's class or its holder:
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
/// Reductions begin while `backward` runs. Averages lie in `Tensor::grad` without a copy: a program
/// that keeps one over the next `backward` clones it. Optimizers may be made before or after.
/// Every backward pass in which parameters of the module take part is a call of all ranks, unless
/// the latest `forward` was in a `no_sync()` scope; it averages the sum of its gradients and of
/// what `Tensor::grad` had.
template <class Net, class... Policies>
class DistributedDataParallel {
  using Source = detail::ModuleSource<Net>;
  using Contained = typename Source::Contained;
  using Job = detail::LoopJob<Net, Policies...>;
  using Replica = typename Job::replica;
  using traits = typename Replica::traits;

 public:
  using module_type = Net;
  using communicator_type = typename Job::communicator;

  /// Compares the module over ranks, and gives all of them rank 0's parameters and buffers.
  /// `group` is a communicator of the backend, a `ProcessGroup` or a session, which outlives this.
  /// **Ranks** all. **Host** blocks.
  DistributedDataParallel(std::shared_ptr<Contained> module, communicator_type& group)
      : module_(std::move(module)),
        replica_(group,
                 detail::tell_others_of<false>(
                     group,
                     [&] { return typename Replica::layouts_type(typename Job::Model(module_)); }),
                 typename Job::Model(module_)),
        gradients_((detail::tell_others(replica_, [&] { replica_.initialize_from_model(Seed{}); }),
                    replica_)) {}
  template <class... Ps>
  DistributedDataParallel(std::shared_ptr<Contained> module, ProcessGroup<Ps...>& group)
      : DistributedDataParallel(std::move(module), *group) {}
  DistributedDataParallel(std::shared_ptr<Contained> module, Session& session)
      : DistributedDataParallel(std::move(module),
                                std::unique_ptr<communicator_type>(new communicator_type(
                                    detail::make_communicator<typename Job::policies>(session)))) {}
  /// The same of a holder, such as `torch::nn::Sequential`.
  template <class Group>
    requires(!std::same_as<Net, Contained>)
  DistributedDataParallel(const Net& holder, Group& group)
      : DistributedDataParallel(holder.ptr(), group) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// The wrapped module.
  Contained& module() { return *module_; }
  Contained* operator->() { return module_.get(); }
  communicator_type& communicator() { return replica_.communicator(); }

  /// The module's forward pass. Where gradients are wanted and the module is in training, all ranks
  /// have rank 0's buffers first. **Ranks** all in that case, else this one. **Host** blocks.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::tell_others(replica_, [&] {
      prepare();
      return replica_.with_step([&](auto& step) {
        const auto norms = replica_.model().open_norms(step);
        return module_->forward(std::forward<Arguments>(arguments)...);
      });
    });
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// What `loss.backward()` does, and a little more: a failure's words reach all ranks, and with
  /// `UnusedParameters<Zero>` it is known from the begin which parameters have no gradient, so that
  /// no bucket waits for them. **Ranks** all. **Host** blocks.
  void backward(const at::Tensor& loss, bool retain_graph = false, bool create_graph = false) {
    gradients_.run(loss, [&] { loss.backward({}, retain_graph, create_graph); });
  }

  /// While the result lives, forward passes lead to backward passes whose gradients stay on this
  /// rank, in `Tensor::grad`; the next pass outside averages the sum.
  ///
  ///     { auto local = ddp.no_sync();  ddp(x).mean().backward(); }
  [[nodiscard("gradients are averaged again when the result is gone: auto local = ...")]] auto
  no_sync() {
    return Local(*this);
  }

  /// With `UnevenInputs<Join>`: ranks may have different numbers of batches until the result ends.
  /// Each has one `backward` for each `forward`. With `joined.finish([&] { optimizer.step();
  /// optimizer.zero_grad(); })` a rank that is through updates with the others; with `finish()`, or
  /// at the end of the scope, all ranks get the parameters of one that came last, and optimizers
  /// keep the states that they have. **Ranks** all. **Host** does not block here.
  template <class T = traits>
  auto join() {
    static_assert(T::may_join,
                  "lockstep: ranks of this job have the same number of batches; add "
                  "UnevenInputs<Join> to let some be through before others");
    return detail::JoinScope<DistributedDataParallel>(*this);
  }

  // What `join` calls.

  void begin_join() { is_joining_ = true; }
  void leave_join() { is_joining_ = false; }
  bool is_joining() const { return is_joining_; }
  void finish_join() {
    if (!std::exchange(is_joining_, false)) return;
    detail::tell_others(replica_, [&] {
      const Rank newest = answer_all([] {});
      replica_.take_values_of(newest);
    });
  }
  template <class F>
  void finish_join(const F& after_backward) {
    if (!std::exchange(is_joining_, false)) return;
    detail::tell_others(replica_, [&] { answer_all(after_backward); });
  }

  /// The bytes that this rank has sent for gradients, with `Hooks<...>`.
  auto bytes_sent()
    requires(traits::is_hooked)
  {
    return replica_.bytes_sent();
  }

 private:
  /// The communicator that this wrapper has made for itself comes first, and goes last.
  DistributedDataParallel(std::shared_ptr<Contained> module, std::unique_ptr<communicator_type> own)
      : DistributedDataParallel(std::move(module), *own) {
    own_ = std::move(own);
  }

  class Local {
   public:
    explicit Local(DistributedDataParallel& ddp)
        : ddp_(ddp), before_(std::exchange(ddp.synchronizes_, false)) {}
    ~Local() { ddp_.synchronizes_ = before_; }
    Local(const Local&) = delete;
    Local& operator=(const Local&) = delete;

   private:
    DistributedDataParallel& ddp_;
    bool before_;
  };

  void prepare() {
    gradients_.require_intact();
    if (!at::GradMode::is_enabled()) return;
    gradients_.receive(synchronizes_);
    if constexpr (traits::broadcasts_buffers) {
      if (!synchronizes_) return;
      // A rank that is through answers one broadcast for each backward pass.
      const bool wanted = traits::joins ? std::exchange(next_buffers_, gradients_.passes() + 1) <=
                                              gradients_.passes()
                                        : module_->is_training();
      if (wanted) replica_.synchronize_buffers(detail::step_call<traits>());
    }
  }

  /// Answers the others until no rank has a batch. Returns who had the last one.
  template <class F>
  Rank answer_all(const F& after_backward) {
    Rank newest{0};
    if constexpr (traits::joins) {
      do {
        newest = replica_.newest();
      } while (replica_.answer_others([&] {
        gradients_.hand_out();
        after_backward();
      }));
    }
    return newest;
  }

  std::unique_ptr<communicator_type> own_;
  std::shared_ptr<Contained> module_;
  Replica replica_;
  detail::LoopGradients<Replica> gradients_;
  bool synchronizes_ = true;
  std::uint64_t next_buffers_ = 0;  // after so many passes, under UnevenInputs<Join>
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

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradients in a hand-written loop: averages in `Tensor::grad` when a backward pass returns.

#include <ATen/ops/isfinite.h>
#include <torch/csrc/autograd/engine.h>

#include "lockstep/detail/strategy/ddp.hpp"
#include "lockstep/detail/torch/model.hpp"

namespace lockstep::detail {

/// Orders the streams of the program and its job. `Chosen` is the job's device.
template <class Chosen, class Comm>
class LoopStreams {
  static_assert(sizeof(Comm) == 0,
                "lockstep: a module on a GPU needs lockstep/torch.cuh, in a file for nvcc");
};

/// On the host, calls are synchronous, and backward passes run on the calling thread.
template <class Comm>
class LoopStreams<Cpu, Comm> {
 public:
  explicit LoopStreams(Comm&) {}

  /// Before a forward pass with gradients enabled, and before a backward pass.
  void keep_backward_here() {}
  /// At the first gradient of a backward pass; `begin()` prepares the buckets.
  void begin_pass(const auto& begin) { begin(); }
  /// The job's stream waits for the program's.
  void job_waits_for_program() {}
  /// The program's stream waits for the job's.
  void program_waits_for_job() {}
  /// Runs collectives of the job between the program's work before and after.
  void in_order(const auto& f) { f(); }
  void before_write() {}
  /// Waits until both streams are empty.
  void synchronize() {}

  /// Writes a gradient to a tensor in its bucket.
  template <class Step>
  static void write(const Step& step, at::Tensor& to, const at::Tensor& gradient) {
    TorchDevice<Step>::write(step, to.mutable_data_ptr(), to.scalar_type(), gradient);
  }

  static auto norm_ranks(const auto& step) { return step.norm_ranks(); }
};

/// A module whose passes the program runs: a model that only lists tensors.
template <class Net, Element... Ts>
class LoopModule : public TorchModel<LoopModule<Net, Ts...>, Net, Ts...> {
  using Base = TorchModel<LoopModule, Net, Ts...>;

 public:
  static constexpr bool has_own_passes = true;
  using Base::Base;
};

/// Puts the gradients of backward passes into the buckets of a replica. A pass begins with
/// autograd's first complete gradient and ends in its final callback, before `backward` returns.
template <class Replica>
class LoopGradients {
  using traits = typename Replica::traits;
  using Device = TorchDevice<typename Replica::step_type>;
  using Elements = typename Replica::model_type::Elements;
  using Streams = LoopStreams<typename traits::device, typename Replica::communicator_type>;

 public:
  /// Moves the module's tensors. **Host** blocks. **Stream** hooks will run on the current one.
  explicit LoopGradients(Replica& replica)
      : replica_(replica), streams_(replica.communicator()), receive_(*this) {
    [[maybe_unused]] const auto on = replica_.on_device();
    streams_.synchronize();
    replica_.with_step([&](auto& step) {
      replica_.model().keep_in(step);
      for (std::size_t i = 0; i != parameters().size(); ++i) {
        if (step.trains(i)) averages_.push_back(tensor_of_gradient(step, i));
        slots_.push_back(step.trains(i) ? averages_.size() - 1 : none);
      }
    });
    if constexpr (traits::skips_unused) has_arrived_.resize(parameters().size());
    receive(true);
  }
  LoopGradients(const LoopGradients&) = delete;
  LoopGradients& operator=(const LoopGradients&) = delete;
  ~LoopGradients() {
    receive(false);
    // After a failed backward pass, a GPU waits for reductions that other ranks will not join.
    if (is_in_pass_) replica_.communicator().abort("its backward pass ended with an exception");
    try {
      [[maybe_unused]] const auto on = replica_.on_device();
      streams_.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): a GPU that has failed uses no memory any more
    }
  }

  /// Chooses whether the next passes' gradients are averaged or stay in this rank's `Tensor::grad`.
  void receive(bool averages) {
    replica_.model().adopted().receiver().take = averages ? &receive_ : nullptr;
  }

  /// Before a forward pass: throws if the last backward pass failed or tensors were replaced.
  void require_intact() {
    if (is_in_pass_) [[unlikely]] {
      fail(
          "forward",
          {"the backward pass before has not ended: an exception has left it, after some gradients "
           "had been sent"},
          "let the exception end the program: ranks cannot go on from different gradients");
    }
    replica_.with_step([&](auto& step) { replica_.model().keep_in(step); });
  }

  /// Runs a backward pass from `root`, from which unused parameters can be found early.
  void run(const at::Tensor& root, const auto& backward) {
    const ValueWhile scope(root_, &root);
    streams_.keep_backward_here();
    abort_on_exception(replica_, backward);
  }

  /// Called by the hooks with a complete gradient.
  void operator()(std::size_t parameter, const at::Tensor& gradient) {
    const at::NoGradGuard quiet;
    [[maybe_unused]] const auto on = replica_.on_device();
    const InJobCall in(JobCall::backward);
    abort_on_exception(replica_, [&] {
      if (!is_in_pass_) begin();
      write(parameter, gradient);
    });
  }

  /// Publishes the averages of a complete step in `Tensor::grad`; parameters that no rank used keep
  /// theirs. With `Anomaly<Stop>` throws on a NaN or infinite average, on a GPU in a later pass.
  /// `Anomaly<Skip>` and `SkipZeroGradients` leave gradients undefined, so that optimizers pass the
  /// parameters by. All ranks decide alike without asking each other: averages have the same bits.
  void publish() {
    replica_.reduce_and_publish([&](const auto& is_used) {
      streams_.program_waits_for_job();
      ++averaged_;
      if constexpr (traits::stops_at_anomaly) {
        if (const auto found = find_anomaly()) [[unlikely]]
          reject_anomaly(*found);
      }
      if constexpr (leaves_out && !on_host) streams_.measure(averages_);
      if constexpr (traits::skips_anomalies) {
        if (find_anomaly()) {
          ++skipped_;
          for_each_trained([&](std::size_t i, at::Tensor&) {
            parameters()[i].tensor.mutable_grad().reset();  // with what earlier passes have added
          });
          return;
        }
      }
      for_each_trained([&](std::size_t i, at::Tensor& average) {
        at::Tensor& own = parameters()[i].tensor.mutable_grad();
        if (!is_used(i)) return;
        if (traits::skips_zero_gradients && is_zero(i)) {
          own.reset();
        } else if (!own.is_same(average)) {
          own = average;
        }
      });
    });
  }

  /// Throws if an average was NaN or infinite (`Anomaly<Stop>`). **Host** blocks until all is done.
  void require_finite() {
    if constexpr (traits::stops_at_anomaly && !on_host) {
      streams_.synchronize();
      if (const auto found = streams_.anomaly_seen()) reject_anomaly(*found);
    }
  }

  Streams& streams() { return streams_; }

  /// The number of completed backward passes.
  std::uint64_t passes() const { return passes_; }
  /// The number of passes, also those of others that this rank joined, that `Anomaly<Skip>` left
  /// out.
  std::uint64_t skipped() const { return skipped_; }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  static constexpr bool on_host = std::is_same_v<typename traits::device, Cpu>;
  /// Does the host look at averages before it publishes them?
  static constexpr bool leaves_out = traits::skips_anomalies || traits::skips_zero_gradients;

  const std::vector<ModuleTensor>& parameters() { return replica_.model().adopted().parameters(); }
  void for_each_trained(const auto& f) {
    for (std::size_t i = 0; i != slots_.size(); ++i)
      if (slots_[i] != none) f(i, averages_[slots_[i]]);
  }

  /// Is a gradient still the average of an earlier pass?
  static bool lies_in(const at::Tensor& own, const at::Tensor& average) {
    return own.defined() && !own.is_sparse() && own.const_data_ptr() == average.const_data_ptr();
  }

  at::Tensor tensor_of_gradient(auto& step, std::size_t i) {
    at::Tensor made;
    Elements::with_parameter(parameters()[i].listed, [&]<class T>(std::type_identity<T>) {
      const auto view = step.grad(Listed<T>{i});
      using Held = typename decltype(view)::value_type;
      made = replica_.model().adopted().storages().tensor_at(
          view.data_handle(), parameters()[i].tensor.sizes(), scalar_type<Held>,
          Device::device(step));
    });
    return made;
  }

  void begin() {
    replica_.model().require_shared_norms();
    is_in_pass_ = true;
    if constexpr (traits::skips_unused)
      std::fill(has_arrived_.begin(), has_arrived_.end(), std::uint8_t{0});
    if constexpr (is_checked) copy_out_averages();  // buckets are filled with a pattern
    ::torch::autograd::Engine::get_default_engine().queue_callback([this] { end(); });
    streams_.begin_pass([&] { replica_.begin_backward(Sync::yes); });
    if constexpr (traits::skips_unused) {
      if (root_ == nullptr) return;
      for_each_unreached(*root_, replica_.model().adopted().nodes(),
                         [&](std::size_t i) { leave_out(i); });
    }
  }

  void end() {
    const at::NoGradGuard quiet;
    [[maybe_unused]] const auto on = replica_.on_device();
    const InJobCall in(JobCall::backward);
    abort_on_exception(replica_, [&] {
      if constexpr (traits::skips_unused) {
        for_each_trained([&](std::size_t i, at::Tensor&) {
          if (has_arrived_[i] == 0) leave_out(i);
        });
      }
      streams_.job_waits_for_program();
      replica_.end_backward();
      publish();
    });
    is_in_pass_ = false;
    ++passes_;
  }

  /// Writes the sum of the gradient and a `Tensor::grad` that was not cleared, as in PyTorch.
  void write(std::size_t i, const at::Tensor& gradient) {
    streams_.before_write();
    at::Tensor& to = averages_[slots_[i]];
    const at::Tensor& own = parameters()[i].tensor.grad();
    const at::Tensor more =
        gradient.defined() && gradient.is_sparse() ? gradient.to_dense() : gradient;
    if (own.defined()) {
      if (!lies_in(own, to)) to.copy_(own.is_sparse() ? own.to_dense() : own);
      if (more.defined()) to.add_(more);
    } else if (more.defined()) {
      replica_.with_step([&](auto& step) { Streams::write(step, to, more); });
    } else {
      to.zero_();
    }
    if constexpr (traits::skips_unused) has_arrived_[i] = 1;
    streams_.job_waits_for_program();
    replica_.with_step([&](auto& step) { step.ready(i); });
  }

  /// A parameter without a gradient in this pass, which may have one from earlier passes.
  void leave_out(std::size_t i) {
    if (parameters()[i].tensor.grad().defined()) {
      write(i, at::Tensor());
    } else {
      has_arrived_[i] = 1;
      replica_.with_step([&](auto& step) { step.unused(i); });
    }
  }

  /// The index in `averages_` of the first that is NaN or infinite; with `Anomaly<Stop>` on a GPU,
  /// of an earlier pass.
  std::optional<std::size_t> find_anomaly() {
    if constexpr (on_host) {
      for (std::size_t i = 0; i != slots_.size(); ++i) {
        if (slots_[i] == none) continue;
        bool finite = true;
        with_average(i, [&]<class T>(std::span<const T> values) {
          using A = Accumulator<T>;
          decltype(non_finite(A{})) found = 0;
          for (const T value : values) found |= non_finite(static_cast<A>(value));
          finite = found == 0;
        });
        if (!finite) [[unlikely]]
          return slots_[i];
      }
      return std::nullopt;
    } else if constexpr (traits::skips_anomalies) {
      return streams_.measured_anomaly();
    } else {
      return streams_.find_anomaly(averages_);
    }
  }
  /// Is the average of a parameter's gradient zero in all elements? A NaN is not.
  bool is_zero(std::size_t i) {
    if constexpr (!traits::skips_zero_gradients) {
      return false;
    } else if constexpr (on_host) {
      bool zero = true;
      with_average(i, [&](auto values) { zero = all_zero(values); });
      return zero;
    } else {
      return streams_.measured_zero(slots_[i]);
    }
  }
  /// Calls `f(values)` with the elements of a parameter's average, on the host.
  void with_average(std::size_t i, const auto& f) {
    const at::Tensor& average = averages_[slots_[i]];
    Elements::with_parameter(parameters()[i].listed, [&]<class T>(std::type_identity<T>) {
      f(std::span(static_cast<const T*>(average.const_data_ptr()),
                  static_cast<std::size_t>(average.numel())));
    });
  }
  [[noreturn, gnu::cold, gnu::noinline]] void reject_anomaly(std::size_t slot) {
    const auto i = static_cast<std::size_t>(std::ranges::find(slots_, slot) - slots_.begin());
    std::string what = "the gradient of " + parameters()[i].name + " is ";
    if constexpr (on_host) {
      const at::Tensor values = averages_[slot].flatten().to(at::kDouble);
      const auto at = at::isfinite(values).logical_not().nonzero()[0].item<std::int64_t>();
      what += std::to_string(values[at].item<double>()) + " at element " + std::to_string(at) +
              ", as the average over ranks, in backward pass " + std::to_string(averaged_);
    } else {
      what += "not finite, as the average over ranks, in one of " + std::to_string(averaged_) +
              " backward passes";
    }
    throw Error("backward", what,
                "lower the learning rate, clip gradients (clip_grad_norm_) or look at the batch; "
                "with Anomaly<Ignore> nobody looks");
  }

  /// Clones gradients that are still averages of an earlier pass.
  void copy_out_averages() {
    for_each_trained([&](std::size_t i, at::Tensor& average) {
      at::Tensor& own = parameters()[i].tensor.mutable_grad();
      if (lies_in(own, average)) own = own.detach().clone();
    });
  }

  Replica& replica_;
  Streams streams_;
  std::vector<at::Tensor> averages_;  // views of bucket memory
  std::vector<std::size_t> slots_;    // index in `averages_`, by parameter
  GradientReceiver::Take receive_;
  std::vector<std::uint8_t> has_arrived_;  // with UnusedParameters<Zero>
  const at::Tensor* root_ = nullptr;       // of the current pass, if known
  bool is_in_pass_ = false;
  std::uint64_t passes_ = 0;
  std::uint64_t averaged_ = 0;  // passes, including those of other ranks that this one joins
  std::uint64_t skipped_ = 0;   // of these, those that Anomaly<Skip> left out
};

}  // namespace lockstep::detail

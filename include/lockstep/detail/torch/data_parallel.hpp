// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::DataParallel`: replicas in one process, for hand-written loops.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/torch/module.hpp"

namespace lockstep::detail {

/// A device as tensors name it: `cuda` is the current GPU, and there is one CPU.
inline at::Device indexed(at::Device device) {
  if (device.is_cpu()) return at::kCPU;
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

/// All devices of a GPU's type, itself first; of a CPU itself.
inline std::vector<at::Device> all_devices(at::Device first) {
  std::vector<at::Device> devices{first};
  if (first.is_cpu()) return devices;
  const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(first.type()).deviceCount();
  for (c10::DeviceIndex i = 0; i < count; ++i)
    if (i != first.index()) devices.emplace_back(first.type(), i);
  return devices;
}

/// Splits a tensor like PyTorch's `chunk`; scalars and other types go whole to all replicas.
template <class T>
std::vector<at::Tensor> shares_of(const T& argument, std::size_t most) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (argument.dim() != 0) return argument.chunk(static_cast<std::int64_t>(most));
  }
  return {};
}

template <class T>
decltype(auto) share_of(const T& argument, [[maybe_unused]] const std::vector<at::Tensor>& shares,
                        [[maybe_unused]] std::size_t i, [[maybe_unused]] at::Device device) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return (shares.empty() ? argument : shares[i]).to(device);
  } else {
    return (argument);
  }
}

/// The number of chunks, which all tensors must have in common.
inline std::size_t count_shares(std::span<const std::vector<at::Tensor>> cut) {
  std::size_t common = 0;
  for (const std::vector<at::Tensor>& shares : cut) {
    if (shares.empty() || shares.size() == common) continue;
    if (common != 0)
      fail("DataParallel",
           {"one argument is cut into ", common, " shares and another one into ", shares.size()},
           "give all tensors as many rows");
    common = shares.size();
  }
  return common == 0 ? 1 : common;
}

/// Gathers the replicas' outputs on a device: concatenates tensors, stacks scalars. If one replica
/// alone has run, its output is moved.
template <class Output>
Output gather_outputs(const std::vector<Output>& outputs, at::Device device) {
  if constexpr (std::is_same_v<Output, at::Tensor>) {
    std::vector<at::Tensor> near;
    near.reserve(outputs.size());
    for (const at::Tensor& output : outputs) near.push_back(output.to(device));
    if (near.size() == 1) return near[0];
    return near[0].dim() == 0 ? at::stack(near) : at::cat(near);
  } else if constexpr (std::is_same_v<Output, std::vector<at::Tensor>>) {
    Output gathered;
    for (std::size_t i = 0; i != outputs[0].size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const Output& output : outputs) parts.push_back(output.at(i));
      gathered.push_back(gather_outputs(parts, device));
    }
    return gathered;
  } else if constexpr (requires { std::tuple_size<Output>::value; }) {
    const auto part = [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      std::vector<std::tuple_element_t<I, Output>> parts;
      for (const Output& output : outputs) parts.push_back(std::get<I>(output));
      return gather_outputs(parts, device);
    };
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Output{part(std::integral_constant<std::size_t, I>{})...};
    }(std::make_index_sequence<std::tuple_size_v<Output>>{});
  } else {
    static_assert(sizeof(Output) == 0,
                  "lockstep: outputs of replicas are gathered if the module's forward returns a "
                  "tensor, or a tuple, pair or vector of tensors");
  }
}

/// A deep copy of a module whose parameters depend on the module's own: they share values (on the
/// same device also memory), and autograd propagates gradients of any order to the originals, also
/// where the copy has untied shared parameters. Buffers are copies.
template <class Contained>
class ModuleReplica {
 public:
  ModuleReplica(const Contained& original, at::Device device)
      : device_(device), copy_(clone_of<Contained>(original)) {
    parameters_ = copy_->parameters();
    buffers_ = copy_->buffers();
    for (at::Tensor& parameter : parameters_) parameter.set_requires_grad(false);
    for (at::Tensor& buffer : buffers_) buffer.set_data(buffer.to(device));
    for (ModuleTensor& buffer : module_buffers(*copy_, ties_of(original)))
      for (at::Tensor& copy : buffer.copies) copy.set_data(buffer.tensor);
  }

  Contained& module() { return *copy_; }
  at::Device device() const { return device_; }

  /// Before a forward pass: takes over values, modes and gradient edges of the module.
  void follow(Contained& original) {
    const std::vector<at::Tensor> parameters = original.parameters();
    const std::vector<at::Tensor> buffers = original.buffers();
    if (parameters.size() != parameters_.size() || buffers.size() != buffers_.size()) [[unlikely]]
      fail(
          "DataParallel",
          {"the module has other tensors than its copy: it has got some since, or its reset() does "
           "not register all"},
          "register everything in reset(), before the module is wrapped");
    for (std::size_t i = 0; i != parameters.size(); ++i) follow(parameters_[i], parameters[i]);
    {
      // Hidden from autograd: earlier graphs hold buffers that backward in training does not read.
      const at::NoGradGuard quiet;
      for (std::size_t i = 0; i != buffers.size(); ++i) buffers_[i].data().copy_(buffers[i]);
    }
    const auto from = original.modules(), to = copy_->modules();
    // Outer modules come first, since `train` also sets their inner modules.
    for (std::size_t i = 0; i != from.size(); ++i)
      if (to[i]->is_training() != from[i]->is_training()) to[i]->train(from[i]->is_training());
  }

 private:
  void follow(at::Tensor& mine, const at::Tensor& original) const {
    const bool is_near = original.device() == device_;
    const at::Tensor value = is_near ? original.view_as(original) : original.to(device_);
    mine.set_data(value.detach());
    // A backward pass after an in-place update of the original must fail.
    if (is_near)
      ::torch::autograd::impl::set_version_counter(
          mine, ::torch::autograd::impl::version_counter(original));
    ::torch::autograd::impl::set_gradient_edge(
        mine, value.requires_grad() ? ::torch::autograd::impl::gradient_edge(value)
                                    : ::torch::autograd::Edge());
  }

  at::Device device_;
  std::shared_ptr<Contained> copy_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace lockstep::detail

namespace lockstep::torch_loops {

/// PyTorch's `DataParallel`: a forward pass splits its tensors, runs a replica of the module on
/// each chunk in parallel and gathers the outputs; backward adds gradients to the module's own.
///
///     lockstep::torch::DataParallel<Net> dp(net);     // on all GPUs, if the module is on one
///     lockstep::torch::DataParallel<Net> dp(net, 4);  // or four replicas on its device
///     torch::cross_entropy_loss(dp(inputs), labels).backward();
///     optimizer.step();
///
/// In every pass, replicas take over the module's values and modes. Replica 0 is the module, whose
/// running statistics are those of the first chunk. A module must be a `torch::nn::Cloneable`.
template <class Net>
class DataParallel {
  using Contained = typename detail::ModuleSource<Net>::Contained;
  using Replica = detail::ModuleReplica<Contained>;

 public:
  /// A replica on each GPU, the module's own first; on a CPU one, the module itself.
  explicit DataParallel(std::shared_ptr<Contained> module)
      : DataParallel(module, detail::all_devices(device_of(*module))) {}
  /// `replicas` replicas on the module's device, which share its parameters.
  DataParallel(std::shared_ptr<Contained> module, std::size_t replicas,
               std::optional<at::Device> output_device = std::nullopt)
      : DataParallel(module, std::vector<at::Device>(replicas, device_of(*module)), output_device) {
  }
  /// A replica per device; the module is on the first. Outputs are gathered on `output_device`, by
  /// default the first, and may be on any device.
  DataParallel(std::shared_ptr<Contained> module, const std::vector<at::Device>& devices,
               std::optional<at::Device> output_device = std::nullopt)
      : module_(std::move(module)),
        device_(device_of(*module_)),
        output_device_(detail::indexed(output_device.value_or(device_))) {
    if (devices.empty()) detail::fail("DataParallel", {"no replicas are wanted"}, "ask for one");
    if (detail::indexed(devices[0]) != device_)
      detail::fail(
          "DataParallel",
          {"the module lies on ", device_.str(), " and the first device is ", devices[0].str()},
          "move the module there before it is wrapped: module->to(devices[0])");
    for (std::size_t i = 1; i != devices.size(); ++i)
      replicas_.push_back(std::make_unique<Replica>(*module_, detail::indexed(devices[i])));
  }
  /// For a holder, such as `torch::nn::Sequential`, to which a pointer would convert.
  template <std::same_as<Net> Holder, class... Where>
    requires(!std::same_as<Net, Contained> && sizeof...(Where) <= 2)
  explicit DataParallel(const Holder& holder, const Where&... where)
      : DataParallel(holder.ptr(), where...) {}

  Contained& module() { return *module_; }
  Contained* operator->() { return module_.get(); }
  std::size_t replicas() const { return replicas_.size() + 1; }
  at::Device output_device() const { return output_device_; }

  /// The module's forward pass; with fewer rows than replicas, some do not run. Throws the
  /// exception of the first replica that failed. **Host** blocks until all are done.
  template <class... Arguments>
  auto forward(const Arguments&... arguments) {
    const std::array<std::vector<at::Tensor>, sizeof...(Arguments)> cut{
        detail::shares_of(arguments, replicas())...};
    return run(detail::count_shares(cut), [&](Contained& module, at::Device device, std::size_t i) {
      return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return module.forward(detail::share_of(arguments, cut[I], i, device)...);
      }(std::index_sequence_for<Arguments...>{});
    });
  }
  template <class... Arguments>
  auto operator()(const Arguments&... arguments) {
    return forward(arguments...);
  }

 private:
  static at::Device device_of(const Contained& module) {
    const auto parameters = module.parameters();
    return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  }

  auto run(std::size_t count, const auto& run_one) {
    using Output = decltype(run_one(*module_, device_, 0));
    if (count == 1) {
      const c10::DeviceGuard near(device_);
      return detail::gather_outputs(std::vector<Output>{run_one(*module_, device_, 0)},
                                    output_device_);
    }
    for (std::size_t i = 1; i != count; ++i) replicas_[i - 1]->follow(*module_);
    std::vector<std::optional<Output>> outputs(count);
    std::vector<std::exception_ptr> failures(count);
    const auto attempt = [&](Contained& module, at::Device device, std::size_t i) {
      try {
        outputs[i].emplace(run_one(module, device, i));
      } catch (...) {
        failures[i] = std::current_exception();
      }
    };
    {
      const at::ThreadLocalState state;  // grad mode, autocast and so on
      const std::vector<c10::Stream> streams = current_streams();
      std::vector<detail::Thread> threads;
      for (std::size_t i = 1; i != count; ++i) {
        const auto run_replica = [&, i] {
          const at::ThreadLocalStateGuard here(state);
          const c10::MultiStreamGuard on(streams);
          Replica& replica = *replicas_[i - 1];
          const c10::DeviceGuard near(replica.device());
          attempt(replica.module(), replica.device(), i);
        };
        threads.emplace_back(
            detail::ThreadName{"lockstep module", "the thread of a replica"}, run_replica,
            [&, i](std::exception_ptr thrown) { failures[i] = std::move(thrown); },
            detail::Signals::delivered);
      }
      const c10::DeviceGuard near(device_);
      attempt(*module_, device_, 0);
    }
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
    std::vector<Output> all;
    for (auto& output : outputs) all.push_back(*std::move(output));
    return detail::gather_outputs(all, output_device_);
  }

  /// The program's streams, on which replicas run: so their work is ordered with the program's.
  std::vector<c10::Stream> current_streams() const {
    std::vector<c10::Stream> streams;
    const auto add = [&](at::Device device) {
      if (device.is_cpu()) return;
      const auto known = [&](const c10::Stream& stream) { return stream.device() == device; };
      if (std::ranges::any_of(streams, known)) return;
      streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    };
    add(device_);
    add(output_device_);
    for (const auto& replica : replicas_) add(replica->device());
    return streams;
  }

  std::shared_ptr<Contained> module_;
  at::Device device_;
  at::Device output_device_;
  std::vector<std::unique_ptr<Replica>> replicas_;  // without replica 0, the module
};

template <class Module, class... Where>
DataParallel(std::shared_ptr<Module>, const Where&...) -> DataParallel<Module>;
template <class Holder, class... Where>
  requires requires { typename Holder::ContainedType; }
DataParallel(const Holder&, const Where&...) -> DataParallel<Holder>;

}  // namespace lockstep::torch_loops

namespace torch {

using namespace ::lockstep::torch_loops;

}  // namespace torch

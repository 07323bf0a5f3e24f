// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::DataParallel`: replicas of a module in one process, for programs that
/// keep their own loop.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/torch/module_replica.hpp"
#include "lockstep/torch/module_source.hpp"
#include "lockstep/torch/namespace.hpp"
#include "lockstep/torch/tensor_shares.hpp"

namespace lockstep::torch_loops {

/// PyTorch's `DataParallel`: a forward pass cuts its tensors into shares, runs a replica of the
/// module on each at the same time, and puts the outputs together; a backward pass adds all
/// gradients to the module's own. `Net` is a module's class or its holder.
///
///     lockstep::torch::DataParallel<Net> dp(net, 4);
///     torch::cross_entropy_loss(dp(inputs), labels).backward();
///     optimizer.step();
///
/// Replicas follow the module in every pass: its values, however they were changed, and its modes.
/// Replica 0 is the module itself, so that its running statistics are those of the first share, as
/// in PyTorch. Gradients of gradients are right. A module must be a `torch::nn::Cloneable`.
template <class Net>
class DataParallel {
  using Contained = typename detail::ModuleSource<Net>::Contained;
  using Replica = detail::ModuleReplica<Contained>;

 public:
  using module_type = Net;

  /// So many replicas on the module's device, where they share its parameters.
  DataParallel(std::shared_ptr<Contained> module, std::size_t replicas)
      : DataParallel(module, std::vector<at::Device>(replicas, device_of(*module))) {}
  /// A replica on every device; the module lies on the first.
  DataParallel(std::shared_ptr<Contained> module, const std::vector<at::Device>& devices)
      : module_(std::move(module)), device_(device_of(*module_)) {
    if (devices.empty()) throw Error("DataParallel", "no replicas are wanted", "ask for one");
    if (devices[0] != device_) {
      throw Error(
          "DataParallel",
          "the module lies on " + device_.str() + " and the first device is " + devices[0].str(),
          "move the module there before it is wrapped: module->to(devices[0])");
    }
    for (std::size_t i = 1; i != devices.size(); ++i)
      replicas_.push_back(std::make_unique<Replica>(*module_, devices[i]));
  }
  template <class Where>
    requires(!std::same_as<Net, Contained>)
  DataParallel(const Net& holder, const Where& where) : DataParallel(holder.ptr(), where) {}

  Contained& module() { return *module_; }
  Contained* operator->() { return module_.get(); }
  std::size_t replicas() const { return replicas_.size() + 1; }

  /// The module's forward pass. With fewer rows than replicas, some do not run. Where several
  /// replicas throw, the exception of the first is thrown. **Host** blocks until all are done.
  template <class... Arguments>
  auto forward(const Arguments&... arguments) {
    const auto cut = std::make_tuple(detail::shares_of(arguments, replicas())...);
    return std::apply(
        [&](const auto&... argument) {
          return run(detail::count_shares({argument.count()...}), argument...);
        },
        cut);
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

  template <class... Shares>
  auto run(std::size_t count, const Shares&... shares) {
    using Output = decltype(module_->forward(shares.share(0, device_)...));
    const auto run_one = [&](Contained& module, at::Device device, std::size_t i) {
      return module.forward(shares.share(i, device)...);
    };
    if (count == 1) return run_one(*module_, device_, 0);
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
      const at::ThreadLocalState state;  // whether gradients are wanted, autocast and so on
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
      attempt(*module_, device_, 0);
    }
    for (const std::exception_ptr& failure : failures)
      if (failure) std::rethrow_exception(failure);
    std::vector<Output> all;
    for (auto& output : outputs) all.push_back(*std::move(output));
    return detail::GatheredTensors<Output>::gather(all, device_);
  }

  /// The streams on which the program works, one for each GPU: replicas work on the same ones, so
  /// that what they read is there, and what they write is there for the program.
  std::vector<c10::Stream> current_streams() const {
    std::vector<c10::Stream> streams;
    const auto add = [&](at::Device device) {
      if (device.is_cpu()) return;
      const auto known = [&](const c10::Stream& stream) { return stream.device() == device; };
      if (std::ranges::any_of(streams, known)) return;
      streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    };
    add(device_);
    for (const auto& replica : replicas_) add(replica->device());
    return streams;
  }

  std::shared_ptr<Contained> module_;
  at::Device device_;
  std::vector<std::unique_ptr<Replica>> replicas_;  // all but the first, which is the module
};

template <class Module, class Where>
DataParallel(std::shared_ptr<Module>, const Where&) -> DataParallel<Module>;
template <class Holder, class Where>
  requires requires { typename Holder::ContainedType; }
DataParallel(const Holder&, const Where&) -> DataParallel<Holder>;

}  // namespace lockstep::torch_loops

namespace torch {

using namespace ::lockstep::torch_loops;

}  // namespace torch

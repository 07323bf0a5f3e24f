// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The examples' convolutional network on a GPU: convolution 3 x 3, batch norm, ReLU and max
/// pooling, twice, and a linear layer.

#include <cstddef>
#include <map>
#include <memory>
#include <type_traits>

#include "device_array.cuh"
#include "lockstep/lockstep.cuh"
#include "max_pool.cuh"

using namespace lockstep;  // as every example has it

/// `ConvNet` of convnet.hpp with its arithmetic on the GPU: the same tensors under the same names.
/// Numbers that are `dynamic` are the constructor's. `Layers` says whose convolution and last layer
/// these are; `CudnnLayers` has cuDNN's.
///
/// A batch has `size()` images in device memory: `inputs`, contiguous, `labels`, one integer below
/// Classes for each, and `weights`, one number for each (null: all weigh the same). The loss is the
/// weighted mean.
///
/// In backward, gradients take the place of activations that are no longer needed.
template <class T, class Layers, std::size_t Channels, std::size_t Side, std::size_t First,
          std::size_t Second, std::size_t Classes>
class GpuConvNet {
  using Norm1 = BatchNorm<"bn1", First, T>;
  using Norm2 = BatchNorm<"bn2", Second, T>;
  static constexpr std::size_t features =
      Second == dynamic || Side == dynamic ? dynamic : Second * (Side / 4) * (Side / 4);

 public:
  using Parameters = ParameterList<
      Parameter<"conv1.weight", T, First, Channels, 3, 3>, Parameter<"conv1.bias", T, First>, Norm1,
      Parameter<"conv2.weight", T, Second, First, 3, 3>, Parameter<"conv2.bias", T, Second>, Norm2,
      Parameter<"fc.weight", T, Classes, features>, Parameter<"fc.bias", T, Classes>>;
  using Buffers = BufferList<Norm1, Norm2>;

  struct Sizes {
    std::size_t channels = Channels, side = Side, first = First, second = Second, classes = Classes;

    std::size_t half() const { return side / 2; }  // of a side, after the first pooling
    std::size_t features() const { return second * (side / 4) * (side / 4); }
  };

  GpuConvNet() = default;
  explicit GpuConvNet(const Sizes& given) : sizes_(given) {}

  void shapes(auto& shape) const {
    shape("conv1.weight"_p, sizes_.first, sizes_.channels, 3, 3);
    shape("conv1.bias"_p, sizes_.first);
    Norm1::shapes(shape, sizes_.first);
    shape("conv2.weight"_p, sizes_.second, sizes_.first, 3, 3);
    shape("conv2.bias"_p, sizes_.second);
    Norm2::shapes(shape, sizes_.second);
    shape("fc.weight"_p, sizes_.classes, sizes_.features());
    shape("fc.bias"_p, sizes_.classes);
  }

  /// For another replica of `ParallelStrategy<DP>`, on another GPU perhaps: the same model, with
  /// memory of its own.
  GpuConvNet replicate() const { return GpuConvNet(sizes_); }

  /// **Stream** puts the mean loss of the batch into `step.loss()`.
  void forward(auto& step, const auto& batch) { run(step, batch, step.loss()); }

  /// **Stream** overwrites all gradients, for the batch that `forward` has just seen.
  void backward(auto& step, const auto& batch) {
    Plan& plan = plan_for(batch.size());
    const cudaStream_t stream = step.stream();
    plan.fc.backward(stream, plan.pooled2, at(step.param("fc.weight"_p)),
                     at(step.grad("fc.weight"_p)), at(step.grad("fc.bias"_p)), plan.pooled2,
                     nullptr);
    step.ready("fc.bias"_p);
    step.ready("fc.weight"_p);

    max_pool::backward<T>(stream, plan.active2, plan.pooled2, plan.planes2, sizes_.half());
    norm2_.backward_relu(step, plan.images2(plan.convolved2), plan.images2(plan.active2),
                         plan.images2(plan.active2));  // marks its parameters ready
    plan.conv2.parameter_gradients(stream, plan.pooled1, plan.active2,
                                   at(step.grad("conv2.weight"_p)), at(step.grad("conv2.bias"_p)));
    step.ready("conv2.bias"_p);
    step.ready("conv2.weight"_p);

    plan.conv2.input_gradient(stream, plan.active2, at(step.param("conv2.weight"_p)), plan.pooled1);
    max_pool::backward<T>(stream, plan.active1, plan.pooled1, plan.planes1, sizes_.side);
    norm1_.backward_relu(step, plan.images1(plan.convolved1), plan.images1(plan.active1),
                         plan.images1(plan.active1));
    plan.conv1.parameter_gradients(stream, batch.inputs, plan.active1,
                                   at(step.grad("conv1.weight"_p)), at(step.grad("conv1.bias"_p)));
    step.ready("conv1.bias"_p);
    step.ready("conv1.weight"_p);  // the gradient of the images is not needed
  }

  /// **Host** waits for the batch's sums, and adds them to a tally: `add(name, sum, count)`.
  void evaluate(auto& step, const auto& batch, auto& tally) {
    run(step, batch, nullptr);
    const auto total = plan_for(batch.size()).fc.score(step);
    const auto count = static_cast<std::size_t>(total.weight);
    tally.add("loss", total.loss, count);
    tally.add("accuracy", total.correct, count);
  }

 private:
  using Images = DeviceView<T, dynamic, dynamic, dynamic>;  // their number, channels, pixels

  /// The memory and plans for batches of one size, made for the first such batch and kept, because
  /// captured steps refer to them.
  struct Plan {
    Plan(const typename Layers::Library& library, const Sizes& net, std::size_t count)
        : sizes(net),
          rows(count),
          conv1(library, {rows, net.channels, net.first, net.side}),
          conv2(library, {rows, net.first, net.second, net.half()}),
          fc(rows, net.features(), net.classes) {}

    Images images1(T* data) const {
      return Images(data, rows, sizes.first, sizes.side * sizes.side);
    }
    Images images2(T* data) const {
      return Images(data, rows, sizes.second, sizes.half() * sizes.half());
    }

    Sizes sizes;
    std::size_t rows;
    std::size_t planes1 = rows * sizes.first;  // channels of all images
    std::size_t planes2 = rows * sizes.second;
    typename Layers::template Convolution<T> conv1, conv2;
    typename Layers::template Head<T, features, Classes> fc;
    DeviceArray<T> convolved1{planes1 * sizes.side * sizes.side};
    DeviceArray<T> active1{planes1 * sizes.side * sizes.side};  // after batch norm and ReLU
    DeviceArray<T> pooled1{planes1 * sizes.half() * sizes.half()};
    DeviceArray<T> convolved2{planes2 * sizes.half() * sizes.half()};
    DeviceArray<T> active2{planes2 * sizes.half() * sizes.half()};
    DeviceArray<T> pooled2{rows * sizes.features()};
  };

  Plan& plan_for(std::size_t rows) {
    const auto found = plans_.find(rows);
    if (found != plans_.end()) return found->second;
    if (!library_) library_ = std::make_unique<typename Layers::Library>();
    return plans_.try_emplace(rows, *library_, sizes_, rows).first->second;
  }

  template <class View>
  static auto* at(const View& view) {
    static_assert(std::is_same_v<typename View::value_type, T>,
                  "lockstep: this network computes in the type that it declares; leave out "
                  "Precision<Mixed<...>>");
    return view.data_handle();
  }

  /// Up to the loss and its gradient by the outputs.
  void run(auto& step, const auto& batch, double* mean_loss) {
    Plan& plan = plan_for(batch.size());
    const cudaStream_t stream = step.stream();
    plan.conv1.forward(stream, batch.inputs, at(step.param("conv1.weight"_p)),
                       at(step.param("conv1.bias"_p)), plan.convolved1);
    norm1_.forward_relu(step, plan.images1(plan.convolved1), plan.images1(plan.active1));
    max_pool::forward<T>(stream, plan.active1, plan.pooled1, plan.planes1, sizes_.side);
    plan.conv2.forward(stream, plan.pooled1, at(step.param("conv2.weight"_p)),
                       at(step.param("conv2.bias"_p)), plan.convolved2);
    norm2_.forward_relu(step, plan.images2(plan.convolved2), plan.images2(plan.active2));
    max_pool::forward<T>(stream, plan.active2, plan.pooled2, plan.planes2, sizes_.half());
    plan.fc.forward(stream, plan.pooled2, at(step.param("fc.weight"_p)),
                    at(step.param("fc.bias"_p)), batch.labels, batch.weights, nullptr, mean_loss);
  }

  Sizes sizes_;
  Norm1 norm1_;
  Norm2 norm2_;
  std::unique_ptr<typename Layers::Library> library_;  // made on the rank's GPU
  std::map<std::size_t, Plan> plans_;
};

// SPDX-License-Identifier: Apache-2.0
// A model of PARAMETERS parameters, trained in a thread with a stack of 1 MiB.
#include <pthread.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <string_view>

#include "lockstep/ddp.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/core/dynamic.hpp"

namespace {

using namespace lockstep;

constexpr std::size_t count = PARAMETERS;

struct Batch {
  float x;
};

/// Every parameter is 1, and its gradient is `x` in every element.
struct Wide {
  using Parameters = ParameterList<
      Repeat<"layers", count / 2,
             ParameterList<Parameter<"weight", float, 2, 3>, Parameter<"bias", float, 3>>>>;

  void initialize(auto& initial) {
    initial.for_each_parameter([](auto, const auto& view) { write(view, 1); });
  }
  float forward(auto& step, const Batch&) {
    float sum = 0;
    step.for_each_parameter([&](auto, const auto& view) { sum += view.data_handle()[0]; });
    return sum;
  }
  void backward(auto& step, const Batch& batch) {
    detail::for_each_index<count / 2>([&](auto i) {
      constexpr auto layer = "layers"_p / at<count / 2 - 1 - i>;
      write(step.grad(layer / "bias"_p), batch.x);
      step.ready(layer / "bias"_p);
      write(step.grad(layer / "weight"_p), batch.x);
      step.ready(layer / "weight"_p);
    });
  }

 private:
  static void write(const auto& view, float value) {
    for (std::size_t i = 0; i != view.size(); ++i) view.data_handle()[i] = value;
  }
};

/// Is every parameter what so many updates make of it?
template <class... Ps>
bool trains(std::size_t updates, std::size_t micro_batches) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Wide, World<1>, Optimizer<SGD>, Ps...> ddp(nobody);
  ddp.optimizer().lr = 0.5;
  for (std::size_t s = 0; s != updates * micro_batches; ++s) ddp.step(Batch{0.25f});
  std::size_t right = 0;
  ddp.for_each_parameter([&](std::string_view, const auto& view) {
    const float last = view.data_handle()[view.size() - 1];
    right += last == 1 - 0.125f * static_cast<float>(updates) ? 1 : 0;
  });
  return right == count;
}

void* train(void* data) {
  auto& result = *static_cast<const char**>(data);
  try {
    // Everything that is kept for each parameter is, and each has a bucket.
    using Each = Buckets<BucketLimits{0, 0}>;
    result = trains<Accumulate<2>, UnusedParameters<Zero>, Each>(2, 2) ? nullptr : "parameters";
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
  return nullptr;
}

}  // namespace

int main() {
  const char* wrong = "an exception";
  pthread_attr_t attributes;
  pthread_t thread{};
  if (pthread_attr_init(&attributes) != 0 ||
      pthread_attr_setstacksize(&attributes, std::size_t{1} << 20) != 0 ||
      pthread_create(&thread, &attributes, train, &wrong) != 0) {
    std::puts("no thread with a stack of 1 MiB");
    return 1;
  }
  pthread_join(thread, nullptr);
  if (wrong != nullptr) std::printf("wrong: %s\n", wrong);
  return wrong == nullptr ? 0 : 1;
}

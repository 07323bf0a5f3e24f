// SPDX-License-Identifier: Apache-2.0
// Training written out: the model on a bare step, the optimizer's rule in a loop.
#include "steps.hpp"

int main(int argc, char** argv) {
  using namespace bare;
  using Where = detail::Layout<Net>;
  constexpr std::size_t count = Where::plan().bytes / sizeof(float);
  const HostArena parameters(Where::plan().bytes), gradients(Where::plan().bytes);
  const HostArena states(2 * Where::plan().bytes);
  Net net;
  detail::BareStep<Net> step(net, {parameters.data(), gradients.data(), nullptr});
  detail::InitialValues<Net, Where, detail::BufferLayout<Net>>({}, {}, parameters.data(), nullptr,
                                                               Seed{})
      .fill_by_default();
  const Rule::Options options;
  std::uint64_t updates = 0;
  auto* const p = reinterpret_cast<float*>(parameters.data());
  auto* const g = reinterpret_cast<float*>(gradients.data());
  auto* const s = reinterpret_cast<float*>(states.data());
  const double loss = counted_steps(steps_of(argc, argv), make_batch(), [&](const Batch& batch) {
    const double its_loss = net.forward(step, batch);
    net.backward(step, batch);
    const auto update = Rule::at<float>(options, options.lr, ++updates);
    [](float* __restrict value, const float* __restrict slope, float* __restrict first,
       float* __restrict second, const auto& rule) {
      for (std::size_t i = 0; i < count; ++i) {
        float state[2] = {first[i], second[i]};
        rule(value[i], slope[i], state);
        if constexpr (Rule::states > 0) first[i] = state[0];
        if constexpr (Rule::states > 1) second[i] = state[1];
      }
    }(p, g, s, s + count, update);
    return its_loss;
  });
  std::printf("%.17g\n", loss);
}

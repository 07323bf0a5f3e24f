// SPDX-License-Identifier: Apache-2.0
// One training in several ways, of which each is a function that nothing else calls:
// main by_hand|wrapped|watched SGD|AdamW STEPS
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "steps.hpp"

namespace bare {

/// Written out: the model on a bare step, the optimizer's rule in a loop.
template <class Rule>
[[gnu::noinline]] double by_hand(std::size_t steps) {
  using Where = detail::Layout<Net>;
  static constexpr std::size_t count = Where::plan().bytes / sizeof(float);
  const HostArena parameters(Where::plan().bytes), gradients(Where::plan().bytes);
  const HostArena states(2 * Where::plan().bytes);
  Net net;
  detail::BareStep<Net> step(net, {parameters.data(), gradients.data(), nullptr});
  detail::InitialValues<Net, Where>({}, {}, parameters.data(), nullptr, Seed{}).fill_by_default();
  const typename Rule::Options options;
  std::uint64_t updates = 0;
  auto* const p = reinterpret_cast<float*>(parameters.data());
  auto* const g = reinterpret_cast<float*>(gradients.data());
  auto* const s = reinterpret_cast<float*>(states.data());
  return counted_steps(steps, make_batch(), [&](const Batch& batch) {
    const double its_loss = net.forward(step, batch);
    net.backward(step, batch);
    const auto update = Rule::template at<float>(options, options.lr, ++updates);
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
}

/// Through the library, in a world of one. `Anomaly<Ignore>` costs nothing.
template <class Rule, class Anomalies>
[[gnu::noinline]] double wrapped(std::size_t steps) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Net, World<1>, Optimizer<Rule>, Anomalies> ddp(nobody);
  return counted_steps(steps, make_batch(), [&](const Batch& batch) { return ddp.step(batch); });
}

template <class Rule>
double train(std::string_view way, std::size_t steps) {
  if (way == "by_hand") return by_hand<Rule>(steps);
  return way == "wrapped" ? wrapped<Rule, Anomaly<Ignore>>(steps)
                          : wrapped<Rule, Anomaly<Stop>>(steps);
}

}  // namespace bare

int main(int /*argc*/, char** argv) {
  const auto steps = static_cast<std::size_t>(std::atoi(argv[3]));
  const bool is_sgd = std::string_view(argv[2]) == "SGD";
  std::printf("%.17g\n", is_sgd ? bare::train<lockstep::SGD>(argv[1], steps)
                                : bare::train<lockstep::AdamW>(argv[1], steps));
}

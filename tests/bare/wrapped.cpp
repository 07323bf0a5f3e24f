// SPDX-License-Identifier: Apache-2.0
// The same training through the library, in a world of one. ANOMALY is Ignore, which costs nothing,
// or Stop.
#include "steps.hpp"

int main(int argc, char** argv) {
  using namespace bare;
  LoopbackCommunicator nobody;
  DistributedDataParallel<Net, World<1>, Optimizer<Rule>, Anomaly<ANOMALY>> ddp(nobody);
  const double loss = counted_steps(steps_of(argc, argv), make_batch(),
                                    [&](const Batch& batch) { return ddp.step(batch); });
  std::printf("%.17g\n", loss);
}

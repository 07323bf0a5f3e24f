// SPDX-License-Identifier: Apache-2.0
// Early stopping: a few samples are soon learnt by heart, so training ends when the loss of other
// samples has not fallen for some epochs, and goes back to the best epoch.
//
//   ./early_stopping --ranks 4
//
// `job.evaluate` adds up over ranks, so every rank has the same score and all leave the loop
// together. A `break` ends the epoch as its last batch does, with its line and its record.
#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "image_dataset.hpp"
#include "mlp.hpp"

using Model = Mlp<float, 784, 64, 10>;
using Job = Trainer<Model, ParallelStrategy<DDP>, Backend<Shm>, Optimizer<AdamW>>;

/// A copy of all parameters, and the way back.
struct Snapshot {
  std::map<std::string, std::vector<float>, std::less<>> values;

  void take(Job& job) {
    job.for_each_parameter([&](std::string_view name, auto view) {
      values[std::string(name)].assign(view.data_handle(), view.data_handle() + view.size());
    });
  }
  void restore(Job& job) const {
    job.initialize([&](auto& initial) {  // on rank 0; all ranks get its values
      initial.for_each_parameter([&](std::string_view name, auto view) {
        const auto& saved = values.find(name)->second;
        std::copy(saved.begin(), saved.end(), view.data_handle());
      });
    });
  }
};

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const Normalization normalization{.mean = 0.5f, .deviation = 0.3f};
    const auto train =
        generated_dataset("train", {.samples = 1000, .normalization = normalization});
    const auto test = generated_dataset("test", {.samples = 2000, .normalization = normalization});
    constexpr std::uint64_t patience = 3;
    constexpr double least = 0.02;  // a smaller gain does not count
    job.optimizer().lr = 1e-3;

    double best = std::numeric_limits<double>::infinity();
    std::uint64_t best_epoch = 0;
    Snapshot snapshot;
    for (auto epoch : job.epochs(100)) {
      for (const auto& batch : epoch.batches(train, 16 / job.world_size().value())) job.step(batch);
      const double loss = job.evaluate(test, 500)["loss"];
      if (loss < best - least) {
        best = loss;
        best_epoch = epoch.number();
        snapshot.take(job);
      } else if (epoch.number() - best_epoch == patience) {
        break;
      }
    }

    snapshot.restore(job);
    const double again = job.evaluate(test, 500)["loss"];
    job.on_rank0([&](auto log) {
      log.print("best: epoch " + std::to_string(best_epoch + 1) + ", test loss " +
                fixed_text(best, 4) + "; after going back to it " + fixed_text(again, 4));
    });
  });
}

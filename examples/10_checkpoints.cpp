// SPDX-License-Identifier: Apache-2.0
// Checkpoints: a training that may be killed at any instant and goes on as if nothing had happened,
// to the same bits.
//
//   ./checkpoints --ranks 2 --checkpoint run             kill it whenever you like: kill -9, Ctrl-C
//   ./checkpoints --ranks 2 --checkpoint run --resume    goes on with the batch that comes next
//   ./checkpoints --ranks 2 --checkpoint run --max-restarts 3     starts again by itself
//
// The file of the best epoch stays, whatever comes after it; the end goes back to it. Python reads
// all of them: safetensors.torch.load_file("run/best.safetensors").
#include <string>

#include "image_dataset.hpp"
#include "mlp.hpp"

using Model = Mlp<float, 784, 64, 10>;
using Job = Trainer<Model, ParallelStrategy<DDP>, Backend<Shm>, Optimizer<AdamW>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const Normalization normalization{.mean = 0.5f, .deviation = 0.3f};
    const auto train =
        generated_dataset("train", {.samples = 1000, .normalization = normalization});
    const auto test = generated_dataset("test", {.samples = 1000, .normalization = normalization});
    job.optimizer().lr = 3e-3;

    // The command line has precedence over these. Saving takes the step the time of a copy.
    job.checkpoints({.folder = "run", .every_steps = 100, .keep = 2, .best_by = "test_accuracy"});
    RandomStream noise = job.random();  // every rank's own, and saved with the rest
    job.keep("noise", noise);

    for (auto epoch : job.epochs(8)) {
      for (auto batch : epoch.batches(train, 16 / job.world_size().value())) {
        for (float& pixel : batch.inputs) pixel += 0.1f * static_cast<float>(noise.normal());
        job.step(batch);
      }
      job.evaluate(test, 500);
    }

    job.finish_saves();  // what is still being written might be the best
    job.load_parameters(*job.checkpoints()->best_path());
    const Scores scores = job.evaluate(test, 500);
    job.on_rank0([&](auto log) {
      log.print("best: " + fixed_text(100 * *job.checkpoints()->best(), 2) +
                "%; after going back to it " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}

// SPDX-License-Identifier: Apache-2.0
// Fashion-MNIST from an LMDB, as sets that are too large for memory are kept: all ranks of a host
// read its pages where they lie, and every image is moved and mirrored at random on its way into a
// batch.
//
//   ./lmdb --ranks 2 --epochs 4 --folder /tmp/clothes
//
// The first run writes the files, later ones find them. An image gets the same move in the same
// epoch on any number of ranks: random numbers belong to the sample. (`--data generated` runs where
// Fashion-MNIST is missing, and learns nothing: its pixels have no neighbours.)
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>

#include "fashion_mnist.hpp"
#include "lockstep/lmdb.hpp"
#include "mlp.hpp"

using Job = Trainer<Mlp<float, 784, 256, 10>, ParallelStrategy<DDP>, Backend<Shm>, Optimizer<AdamW>,
                    Schedule<Cosine>>;

using Stored = LabelledSample<std::uint8_t, std::int32_t>;  // in the file's own pages
using Bytes = OwnedSample<std::uint8_t, std::int32_t>;
using Image = OwnedSample<float, std::int32_t>;
constexpr int side = 28;

/// Writes a split unless it is there. A set is there as a whole or not at all.
void write_once(const std::string& path, const std::string& split, const std::string& source) {
  if (std::filesystem::exists(path)) return;
  write_lmdb(path, fashion_mnist(split, source) | map<Bytes>([](const Image& image, Bytes& out) {
                     out.label = image.label;
                     out.inputs.resize(image.inputs.size());
                     std::ranges::transform(image.inputs, out.inputs.begin(), [](float x) {
                       return static_cast<std::uint8_t>(std::lround(255 * x));
                     });
                   }));
}

void to_floats(const Stored& stored, Image& out) {
  out.label = stored.label;
  out.inputs.resize(stored.inputs.size());
  std::ranges::transform(stored.inputs, out.inputs.begin(),
                         [](std::uint8_t x) { return static_cast<float>(x) / 255; });
}

/// The image moved by up to one pixel each way, and mirrored in half of all cases.
void augment(const Stored& stored, Image& out, RandomStream& random) {
  const int right = static_cast<int>(random.below(3)) - 1;
  const int down = static_cast<int>(random.below(3)) - 1;
  const bool is_mirrored = random.below(2) == 1;
  out.label = stored.label;
  out.inputs.assign(stored.inputs.size(), 0.f);
  for (int row = std::max(0, -down); row < std::min(side, side - down); ++row) {
    for (int column = std::max(0, -right); column < std::min(side, side - right); ++column) {
      const int from = is_mirrored ? side - 1 - column : column;
      out.inputs[(row + down) * side + column + right] =
          static_cast<float>(stored.inputs[row * side + from]) / 255;
    }
  }
}

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto epochs = job.option("epochs", 8u, "passes over the training images");
    const std::filesystem::path folder =
        job.option("folder", (std::filesystem::temp_directory_path() / "lockstep-08").string(),
                   "where the two files are, or are written");
    job.barrier();  // --help ends here, and writes nothing
    const std::string train_file = folder / "train.lmdb";
    const std::string test_file = folder / "test.lmdb";
    if (job.rank() == Rank{0}) {
      std::filesystem::create_directories(folder);
      write_once(train_file, "train", job.data());
      write_once(test_file, "test", job.data());
    }
    job.barrier();  // the files are there

    const auto train = lmdb_dataset<std::uint8_t, std::int32_t>(train_file) | map<Image>(augment);
    const auto test = lmdb_dataset<std::uint8_t, std::int32_t>(test_file) | map<Image>(to_floats);
    job.optimizer().lr = 2e-3;
    Scores scores;
    for (auto epoch : job.epochs(epochs)) {
      const std::size_t batch_size = 128 / job.world_size().value();
      for (const auto& batch : epoch.batches(train, batch_size)) job.step(batch);
      scores = job.evaluate(test, 500);
    }
    job.on_rank0([&](auto log) {
      log.print("test accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The same samples in every format: the files that lockstep and PyTorch both read.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fashion_mnist.hpp"
#include "lockstep/detail/data/batch.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "processes.hpp"
#if LOCKSTEP_LMDB
#include "lockstep/detail/data/lmdb.hpp"
#endif

namespace bench {

using namespace lockstep;

using Samples = LabelledBatch<float, std::int32_t>;

/// Fashion-MNIST's 60,000 images of 784 pixels, or generated ones of their shape.
inline Samples all_samples() {
  const bool found = find_idx_files("train", idx_folder()).has_value();
  const ImageDataset images = fashion_mnist("train", found ? "" : "generated");
  std::vector<std::size_t> indices(images.size());
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  Samples samples;
  images.load(indices, samples);
  return samples;
}

/// A folder with the samples as IDX, .npy and LMDB.
class SampleFiles : public TemporaryFolder {
 public:
  SampleFiles(const Samples& samples, const std::string& folder) : TemporaryFolder(folder) {
    const auto count = static_cast<std::uint32_t>(samples.size());
    std::vector<std::uint8_t> pixels(samples.inputs.size());
    for (std::size_t i = 0; i != pixels.size(); ++i)
      pixels[i] = static_cast<std::uint8_t>(std::lround(255 * samples.inputs[i]));
    const std::vector<std::uint8_t> labels(samples.labels.begin(), samples.labels.end());
    write_idx("train-images-idx3-ubyte", {count, 28, 28}, pixels);
    write_idx("train-labels-idx1-ubyte", {count}, labels);
    write_npy(file("inputs.npy"), samples.inputs, {samples.size(), samples.width});
    write_npy(file("labels.npy"), samples.labels);
#if LOCKSTEP_LMDB
    write_lmdb(file("train.lmdb"), npy());
#endif
  }

  std::string file(const std::string& name) const { return path() / name; }
  NpyDataset<float, std::int32_t> npy() const {
    return {NpyArray<float>(file("inputs.npy")), NpyFile(file("labels.npy"))};
  }

 private:
  void write_idx(const std::string& name, const std::vector<std::uint32_t>& extents,
                 std::span<const std::uint8_t> bytes) const {
    std::ofstream out(file(name), std::ios::binary);
    out.put(0).put(0).put(8).put(static_cast<char>(extents.size()));
    for (const std::uint32_t extent : extents) {
      for (const int shift : {24, 16, 8, 0}) out.put(static_cast<char>(extent >> shift));
    }
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) throw std::runtime_error("cannot write " + file(name));
  }
};

}  // namespace bench

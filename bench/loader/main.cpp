// SPDX-License-Identifier: Apache-2.0
// An epoch of Fashion-MNIST's 60,000 images through the loader, from memory and from files, as they
// are and augmented: samples a second against PyTorch's DataLoader on the same files, and against a
// memcpy of the same rows. Then the step of example 03's network on two ranks, with its loader,
// over the step alone.
//
//   bench_loader [--rounds 3] [--folder build/bench] [--only npy] [--batch 64]
#include <cstdio>
#include <exception>
#include <string>

#include "comparison_table.hpp"
#include "load.hpp"
#include "rates.hpp"
#include "steps.hpp"

namespace {

using namespace bench;

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    if (word == "--rounds") options.rounds = std::stoi(argv[i + 1]);
    if (word == "--folder") options.folder = argv[i + 1];
    if (word == "--only") options.only = argv[i + 1];
    if (word == "--batch") options.batch = std::stoul(argv[i + 1]);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const OthersLoad others;
  const nlohmann::json rates = Rates(parse(argc, argv)).run();
  std::printf("\nthe step and its data, microseconds\n\n");
  ComparisonTable table;
  for (const auto& row : rates) table.add(row);
  const Samples samples = all_samples();
  measure_steps(table, samples, 1);
  measure_steps(table, samples, 2);
  table.write("loader");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench loader: %s\n", error.what());
  return 1;
}

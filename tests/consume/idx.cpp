// SPDX-License-Identifier: Apache-2.0
// Reads a data set in MNIST's format: needs what the component `idx` brings.
#include <cstdio>
#include <lockstep/data/idx_dataset.hpp>

int main(int, char** argv) {
  const auto data = lockstep::idx_dataset("train", {.classes = 3, .folder = argv[1]});
  std::printf("%zu images of %zu bytes\n", data.size(), data.width());
}

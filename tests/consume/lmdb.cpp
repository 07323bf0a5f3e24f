// SPDX-License-Identifier: Apache-2.0
// Writes an LMDB and reads it again: needs what the component `lmdb` brings.
#include <cstdio>
#include <lockstep/lmdb.hpp>

int main(int, char** argv) {
  const lockstep::InMemoryDataset<float, int> points({1, 2, 3, 4, 5, 6}, {7, 8});
  lockstep::write_lmdb(argv[1], points);
  const auto data = lockstep::lmdb_dataset<float, int>(argv[1]);
  lockstep::LabelledSample<float, int> sample;
  data.read(1, sample);
  std::printf("%zu samples, the last is %g %g %g: %d\n", data.size(), sample.inputs[0],
              sample.inputs[1], sample.inputs[2], sample.label);
}

// SPDX-License-Identifier: Apache-2.0
// A few ranks read and feed the others, for storage that cannot serve every rank at once.
//
//   ./feeding_groups --ranks 4                        groups of two
//   ./feeding_groups --ranks 6 --group-size 3         groups of three
//
// First, one rank of every group reads files of its own and broadcasts them within the group. Then
// rank 0 alone reads: it scatters files to the groups' leaders, and the leaders broadcast. The
// leaders are a group too, one of the transposed grid. Files differ in rows and columns, and their
// names travel beside them. A job needs none of this: its policy Feed<LeaderOfGroup> or
// Feed<ScatterThenBroadcast> feeds ranks while they compute (docs/data.md).
//
//   Grid<6, 3>     [0 1 2] [3 4 5]      a group shares a batch
//   transposed     [0 3] [1 4] [2 5]    the first group is that of the leaders
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/comm.hpp"
#include "lockstep/data.hpp"

using namespace lockstep;
using Batch = LabelledBatch<float, int>;

constexpr std::size_t files = 7;

/// Stands for storage: file n has n + 1 rows of 10 + n numbers, all of them n.
std::string read_file(std::size_t n, Batch& batch) {
  batch.resize(n + 1, 10 + n);
  std::fill(batch.inputs.begin(), batch.inputs.end(), static_cast<float>(n));
  std::iota(batch.labels.begin(), batch.labels.end(), 0);
  return "file " + std::to_string(n);
}

/// Stands for training: every rank of a group takes every so-many-th row of the group's batch.
double add_rows(const Batch& batch, std::size_t place, std::size_t group_size) {
  double sum = 0;
  for (std::size_t row = place; row < batch.size(); row += group_size) {
    for (float x : batch.row(row)) sum += static_cast<double>(x);
  }
  return sum;
}

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    const std::size_t wanted = session.option("group-size", 2u, "ranks that share a reader");
    auto world = make_shm_communicator(session.membership(), session.store());
    const Grid<dynamic, dynamic> grid{world.world_size(),
                                      std::min(wanted, world.world_size().value())};
    auto group = join_groups(world, grid);
    auto across = join_groups(world, transpose(grid));
    const std::size_t groups = grid.group_world_size();
    const std::size_t mine = grid.group_rank(world.rank()).value();
    const std::size_t place = group.rank().value();
    constexpr Rank leader{0};  // of a group, and of the leaders
    Batch batch;
    std::string name;
    double sums[2] = {};

    // One rank per group reads. An empty batch says that there are no more.
    for (std::size_t n = mine;; n += groups) {
      batch.resize(0, 0);
      if (place == 0 && n < files) name = read_file(n, batch);
      broadcast_batch(group, batch, leader);
      if (batch.size() == 0) break;
      broadcast_object(group, name, leader);
      sums[0] += add_rows(batch, place, grid.group_size());
    }

    // One rank reads for all groups. Every group gets equally many batches, the last may be empty.
    for (std::size_t first = 0; first < files; first += groups) {
      if (place == 0) {
        std::vector<Batch> batches;
        std::vector<std::string> names;
        if (across.rank() == leader) {
          batches.resize(groups);
          names.resize(groups);
          for (std::size_t g = 0; g < groups && first + g < files; ++g)
            names[g] = read_file(first + g, batches[g]);
        }
        scatter_batches(across, batches, batch, leader);
        name = scatter_objects(across, names, leader);
      }
      broadcast_batch(group, batch, leader);
      broadcast_object(group, name, leader);
      if (place == 1 && batch.size() > 0)
        std::printf("group %zu has %s: %zu rows of %zu\n", mine, name.c_str(), batch.size(),
                    batch.width);
      sums[1] += add_rows(batch, place, grid.group_size());
    }

    world.all_reduce(sums, Sum{});
    double all = 0;  // the sum that one process finds if it reads all files
    for (std::size_t n = 0; n < files; ++n) {
      read_file(n, batch);
      all += add_rows(batch, 0, 1);
    }
    if (world.rank() == Rank{0})
      std::printf("sums of all rows: %g, %g, and %g by one process\n", sums[0], sums[1], all);
    return sums[0] == all && sums[1] == all ? 0 : 1;
  });
}

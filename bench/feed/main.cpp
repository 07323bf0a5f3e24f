// SPDX-License-Identifier: Apache-2.0
// How a group's batches should leave the rank that has read them: each to the rank that needs it,
// as `Feed` does, or all of them to all ranks of the group, by one broadcast. Four ranks of one
// host in `Grid<4, 2>` and in one group of four, over shared memory and over Gloo on the loopback;
// the batches are 64 images of 784 floats, and of 784 bytes.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/data/serialize.hpp"
#include "lockstep/lockstep.hpp"
#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "lockstep/gloo.hpp"
#endif

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

/// A rank of a group whose first rank has read a batch for every member.
template <class Comm, class Group, class Batch>
struct Fed {
  /// The messages of `Feed<LeaderOfGroup>`.
  void each_its_own() {
    if (line.reads()) {
      for (std::size_t i = 1; i != read.size(); ++i) {
        writer.clear();
        writer.put(read[i]);
        line.send(line.batch, writer.written(), line.route().carried[i - 1].to);
      }
    } else {
      detail::ArchiveReader(line.receive(buffer).second).take(mine);
    }
  }

  /// Every member has all batches then, and takes its own.
  void broadcast() {
    std::vector<std::uint64_t>& sizes = group_sizes;
    if (line.reads()) {
      writer.clear();
      std::size_t before = 0;
      for (std::size_t i = 1; i != read.size(); ++i, before = writer.size()) {
        writer.put(read[i]);
        sizes[i] = writer.size() - before;
      }
    }
    group.broadcast(std::span(sizes), Rank{0});
    std::size_t total = 0;
    std::size_t begin = 0;
    for (std::size_t i = 1; i != sizes.size(); ++i) {
      if (i == group.rank().value()) begin = total;
      total += sizes[i];
    }
    const std::span<std::uint8_t> archives = line.reads() ? writer.written() : room(total);
    group.broadcast(archives, Rank{0});
    if (!line.reads())
      detail::ArchiveReader(archives.subspan(begin, sizes[group.rank().value()])).take(mine);
  }

  std::span<std::uint8_t> room(std::size_t bytes) {
    if (buffer.size() < bytes) buffer.resize(bytes);
    return std::span(buffer).first(bytes);
  }

  detail::FeedLine<Comm&> line;
  Group& group;
  std::vector<Batch> read;
  std::vector<std::uint64_t> group_sizes = std::vector<std::uint64_t>(group.world_size().value());
  Batch mine{};
  detail::ArchiveWriter writer{};
  std::vector<std::uint8_t> buffer{};
};

/// Microseconds that a round takes, from a barrier to the last rank's end.
template <class Once>
double time_of(auto& comm, const Once& once) {
  constexpr std::size_t rounds = 20;
  comm.barrier();
  const auto begin = Clock::now();
  for (std::size_t i = 0; i != rounds; ++i) once();
  comm.barrier();
  const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
  return taken.count() / static_cast<double>(rounds);
}

struct Summary {
  double median;
  double least;
};
Summary summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

template <class X>
void compare(auto& comm, const auto& grid, const std::string& how) {
  using Batch = LabelledBatch<X, std::int32_t>;
  auto group = join_groups(comm, grid);
  const std::size_t members = group.world_size().value();
  Batch one;
  one.resize(64, 784);
  Fed<std::remove_reference_t<decltype(comm)>, decltype(group), Batch> fed{
      {comm, detail::feed_route<LeaderOfGroup>(grid, comm.rank())},
      group,
      std::vector<Batch>(members, one)};
  std::vector<double> own;
  std::vector<double> broadcast;
  for (int turn = 0; turn != 41; ++turn) {  // the first one warms up
    own.push_back(time_of(comm, [&] { fed.each_its_own(); }));
    broadcast.push_back(time_of(comm, [&] { fed.broadcast(); }));
  }
  own.erase(own.begin());
  broadcast.erase(broadcast.begin());
  if (comm.rank() != Rank{0}) return;
  const Summary a = summary(own);
  const Summary b = summary(broadcast);
  std::printf("| %s, groups of %zu, 64 x 784 %s | %.0f | %.0f | %.0f | %.0f | %.2f |\n",
              how.c_str(), members, sizeof(X) == 1 ? "bytes" : "floats", a.median, a.least,
              b.median, b.least, b.least / a.least);
  std::fflush(stdout);
}

template <class How>
void run(Session& session, const std::string& name) {
  auto comm = detail::make_communicator<CanonicalPolicies<Backend<How>>>(session);
  const auto both = [&](const auto& grid) {
    compare<float>(comm, grid, name);
    compare<std::uint8_t>(comm, grid, name);
  };
  both(Grid<4, 2>{});
  both(Grid<4, 4>{});
}

}  // namespace

int main(int argc, char** argv) {
  return launch(
      argc, argv,
      [](Session& session) {
        if (session.rank() == Rank{0}) {
          std::printf(
              "what a round of batches takes, microseconds: each rank is sent its own, or all "
              "those of its group\n\n"
              "| | each its own, median | least | broadcast, median | least | ratio of least |\n"
              "|---|---|---|---|---|---|\n");
          std::fflush(stdout);
        }
        run<Shm>(session, "Shm");
#if LOCKSTEP_GLOO
        run<Gloo>(session, "Gloo on the loopback");
#endif
      },
      4);
}

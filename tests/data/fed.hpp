// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that are fed, over any communicator: their batches are those that they would have
/// read themselves.

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/detail/data/feed.hpp"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/data/sampler.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "require.hpp"

namespace fed {

using namespace lockstep;

/// A batch with names, and rows of different lengths.
struct Rows {
  std::vector<std::size_t> samples;
  std::vector<std::string> names;
  std::vector<std::vector<float>> rows;
  std::vector<float> weights;
  std::uint64_t epoch = 0;

  friend bool operator==(const Rows&, const Rows&) = default;
  friend void pack(auto& archive, Rows& batch) {
    archive(batch.samples, batch.names, batch.rows, batch.weights, batch.epoch);
  }
};

/// Samples that tell their number and the epoch. Some are larger than a message's first piece.
struct Numbers {
  using batch_type = Rows;

  std::size_t samples;
  bool is_here = true;  ///< else nobody may load
  std::size_t bad = static_cast<std::size_t>(-1);

  std::size_t size() const { return samples; }
  void load(std::span<const std::size_t> indices, Pass pass, Rows& out) const {
    require(is_here, "a rank loads although another reads for it");
    out.samples.assign(indices.begin(), indices.end());
    out.names.clear();
    out.rows.resize(indices.size());
    out.weights.assign(indices.size(), 1.f);
    out.epoch = pass.epoch.value();
    for (std::size_t i = 0; i != indices.size(); ++i) {
      if (indices[i] == bad) throw std::runtime_error("sample " + std::to_string(bad) + " is bad");
      out.names.push_back("sample " + std::to_string(indices[i]));
      out.rows[i].assign(indices[i] % 5 == 0 ? 20'000 : indices[i] % 7,
                         static_cast<float>(indices[i]) + 0.25f);
    }
  }
};

inline detail::FeedRoute route_of(std::size_t group, bool scatters, WorldSize world, Rank rank) {
  const Grid<dynamic, dynamic> grid(world, group);
  return scatters ? detail::feed_route<ScatterThenBroadcast>(grid, rank)
                  : detail::feed_route<LeaderOfGroup>(grid, rank);
}

/// The batches of a loader, up to `most`.
std::vector<Rows> batches_of(auto& loader, std::size_t most = static_cast<std::size_t>(-1)) {
  std::vector<Rows> all;
  if (most == 0) return all;
  for (const Rows& batch : loader) {
    all.push_back(batch);
    if (all.size() == most) break;
  }
  return all;
}

/// Runs loops, whole, left early, resumed and one inside another, with and without feeding.
template <class Sampler, class Line>
void compare(Line& line, WorldSize world, std::size_t samples, const LoaderOptions& options) {
  const Rank rank = line.rank();
  const Numbers all{samples};
  const Numbers mine{samples, line.reads()};
  const SamplerOptions drawing{true, Seed{3}};
  Sampler own_sampler(samples, world, rank, drawing);
  Sampler fed_sampler(samples, world, rank, drawing);
  DataLoader own(all, own_sampler, options);
  DataLoader<Numbers, Sampler, detail::FedBatches<Numbers, Sampler, Line>> fed(mine, fed_sampler,
                                                                               options, line);
  const auto same = [&](const std::string& when, std::size_t most) {
    require(batches_of(fed, most) == batches_of(own, most), "the batches differ " + when);
    require(fed.state() == own.state(), "the position differs " + when);
  };
  require(fed.size() == own.size(), "the number of batches differs");
  for (std::uint64_t epoch = 0; epoch != 2; ++epoch) {
    own_sampler.set_epoch(Epoch{epoch});
    fed_sampler.set_epoch(Epoch{epoch});
    same("in a whole loop", static_cast<std::size_t>(-1));
    for (const std::size_t most : {1, 2}) same("in a loop that is left", most);
    const SamplerState state = own.state();
    own.resume(state);
    fed.resume(state);
    same("in a loop that goes on", static_cast<std::size_t>(-1));
  }
  // Another world has begun the epoch.
  SamplerState before = own_sampler.state();
  before.world = WorldSize{world.value() + 1};
  before.position = samples / (2 * before.world.value());
  own.resume(before);
  fed.resume(before);
  same("where another world has begun", static_cast<std::size_t>(-1));
  // An evaluation between two batches.
  std::vector<Rows> around;
  std::vector<Rows> within;
  Sampler inner_sampler(samples, world, rank, drawing);
  inner_sampler.set_epoch(own_sampler.epoch());
  for (const Rows& batch : fed) {
    around.push_back(batch);
    if (around.size() > 2) continue;
    DataLoader<Numbers, Sampler, detail::FedBatches<Numbers, Sampler, Line>> inner(
        mine, inner_sampler, options, line);
    within = batches_of(inner);
  }
  require(around == batches_of(own), "the batches differ around another loop");
  require(around.empty() || within == around, "the batches of the other loop differ");
}

/// Every rank of `comm` is fed, in every way that fits its world.
template <class Sampler, class Comm, class Select = decltype(detail::no_device)>
void check(Comm& comm, std::span<const std::size_t> sizes, const Select& select = {}) {
  const WorldSize world = comm.world_size();
  for (std::size_t group = 1; group <= world.value(); ++group) {
    if (world.value() % group != 0) continue;
    for (const bool scatters : {false, true}) {
      detail::FeedLine<Comm&, Select> line(comm, route_of(group, scatters, world, comm.rank()),
                                           select);
      for (const std::size_t samples : sizes) {
        LoaderOptions options;  // nvcc takes no designated ones here
        options.batch_size = 3;
        options.workers = samples % 3;
        options.prefetch = 1 + samples % 2;
        options.may_be_empty = true;
        compare<Sampler>(line, world, samples, options);
      }
    }
  }
}

}  // namespace fed

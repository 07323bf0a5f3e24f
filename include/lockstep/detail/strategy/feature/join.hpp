// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `UnevenInputs<Join>`: flags behind the first bucket tell ranks who still has batches.

#include "lockstep/detail/bucket/plan.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/strategy/features.hpp"

namespace lockstep::detail {

/// A rank adds one bit to its flag. The sum of four bits is at most 15: exact in every type, and
/// still recovered from an average over thousands of ranks.
inline constexpr std::size_t ranks_per_flag = 4;
/// The most ranks of a job with `World<dynamic>`.
inline constexpr std::size_t most_joining_ranks = 4096;

constexpr std::size_t join_flags_for(std::size_t ranks) {
  return ((ranks == dynamic ? most_joining_ranks : ranks) + ranks_per_flag - 1) / ranks_per_flag;
}

/// The ranks with batches in a round. A round without any leaves `lowest` unchanged.
struct LiveRanks {
  std::size_t count = 0;
  std::size_t lowest = 0;
};

template <class T>
LOCKSTEP_HOST_DEVICE constexpr T join_flag(std::size_t index, std::size_t rank, bool is_live) {
  using A = Accumulator<T>;
  const bool is_own = is_live && index == rank / ranks_per_flag;
  return static_cast<T>(is_own ? static_cast<A>(1u << rank % ranks_per_flag) : A{0});
}

/// Reads reduced flags, whose sums over ranks are `scale` times their values.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr LiveRanks read_join_flags(const T* flags, std::size_t count,
                                                         double scale, std::size_t lowest_before) {
  using A = Accumulator<T>;
  LiveRanks live{0, lowest_before};
  for (std::size_t i = 0; i != count; ++i) {
    const double sum = static_cast<double>(static_cast<A>(flags[i])) * scale;
    // NOLINTNEXTLINE(bugprone-incorrect-roundings): never negative, and lround is no constant
    const auto bits = static_cast<unsigned>(sum + 0.5);
    for (std::size_t k = 0; k != ranks_per_flag; ++k) {
      if ((bits >> k & 1u) == 0) continue;
      if (live.count++ == 0) live.lowest = i * ranks_per_flag + k;
    }
  }
  return live;
}

template <class Traits>
constexpr std::size_t flags_behind([[maybe_unused]] std::size_t bucket,
                                   [[maybe_unused]] WorldSize world) {
  if constexpr (Traits::joins) return bucket == 0 ? join_flags_for(world.value()) : 0;
  return 0;
}

/// The flags on a device: `write` this rank's before the first bucket is reduced, `read` the sums
/// after it; `live` is the result. Specialised for `Cpu` here, for `Cuda` in features.cuh.
template <class Device, class Comm>
class JoinFlags;

template <class Comm>
class JoinFlags<Cpu, Comm> {
 public:
  explicit JoinFlags(Comm& comm) : rank_(comm.rank()) {}

  template <class T>
  void write(std::span<T> flags, bool is_live) {
    for (std::size_t i = 0; i != flags.size(); ++i)
      flags[i] = join_flag<T>(i, rank_.value(), is_live);
  }
  template <class T>
  void read(std::span<T> flags, double scale) {
    live_ = read_join_flags(flags.data(), flags.size(), scale, live_.lowest);
  }
  const LiveRanks& live() const { return live_; }
  /// Forgets all rounds; `lowest` counts as the lowest live rank.
  void reset(std::size_t lowest) { live_ = {0, lowest}; }

 private:
  Rank rank_;
  LiveRanks live_;
};

template <class Traits, class Comm>
class JoiningRanks : public Stages<JoiningRanks<Traits, Comm>> {
 public:
  explicit JoiningRanks(auto& gradients) : flags_(gradients.comm()) {
    // The plan has flags for the static world size, or for `most_joining_ranks`.
    const std::size_t ranks = gradients.comm().world_size().value();
    if (join_flags_for(ranks) > Traits::join_flags) {
      fail("UnevenInputs<Join>",
           {"the job has ", ranks, " ranks, and World<dynamic> has room for ", most_joining_ranks},
           "write World<N> with the number of ranks", gradients.comm().rank());
    }
  }

  void before_reductions(auto& gradients, bool live) {
    is_pending_ = true;
    is_averaged_ = false;
    Traits::with_element(first_bucket(gradients).element, [&]<class T>(std::type_identity<T>) {
      flags_.write(gradients.template own<T>(offset(gradients), bytes<T>(gradients)), live);
    });
  }
  void bucket_reduced(auto& gradients, std::size_t bucket) {
    if (bucket != 0 || !is_pending_) return;
    is_pending_ = false;
    const auto ranks = static_cast<double>(gradients.comm().world_size().value());
    Traits::with_element(first_bucket(gradients).element, [&]<class T>(std::type_identity<T>) {
      flags_.read(gradients.template averages<T>(offset(gradients), bytes<T>(gradients)),
                  gradients.factor() * ranks);
    });
  }
  static constexpr bool divides_averages = Traits::divides_by_live;
  double divisor(auto& gradients) {
    if constexpr (!Traits::divides_by_live) return 1;
    const double share = live_share(gradients);
    is_averaged_ = true;
    return share;
  }

  /// The ranks with batches in the latest round. **Host** blocks until its first bucket is reduced.
  LiveRanks live(auto& gradients) {
    gradients.wait(0);
    return flags_.live();
  }
  /// The rank with the newest buffers: one of the last that had a batch.
  Rank newest() const { return Rank{flags_.live().lowest}; }
  /// All ranks have joined, or begin; `newest` has the newest buffers.
  void forget_live(Rank newest = Rank{0}) { flags_.reset(newest.value()); }
  /// The fraction of live ranks, or 1 once `divisor` has divided by it. **Host** blocks.
  double live_share(auto& gradients) {
    if (is_averaged_) return 1;
    return static_cast<double>(live(gradients).count) /
           static_cast<double>(gradients.comm().world_size().value());
  }
  bool is_averaged() const { return is_averaged_; }
  auto& join_flags() { return flags_; }

 private:
  static const Bucket& first_bucket(const auto& gradients) {
    return gradients.layout().plan().bucket_table[0];
  }
  static std::size_t offset(const auto& gradients) {
    return first_bucket(gradients).offset + first_bucket(gradients).bytes;
  }
  template <class T>
  static std::size_t bytes(auto& gradients) {
    return flags_behind<Traits>(0, gradients.comm().world_size()) * sizeof(T);
  }

  JoinFlags<typename Traits::device, Comm> flags_;
  bool is_pending_ = false;   // flags are in flight
  bool is_averaged_ = false;  // by `divisor`, before their update
};

}  // namespace lockstep::detail

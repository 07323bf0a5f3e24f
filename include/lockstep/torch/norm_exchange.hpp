// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The ranks of a step as a LibTorch operator sees them, whose code knows no communicator's
/// type.

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// The ranks with which norms share their statistics: what `step.norm_ranks()` returns, behind
/// pointers to functions.
class NormExchange {
 public:
  /// The ranks may be others than before; those of a step are the same throughout a job.
  template <class Ranks>
  void use(const Ranks& ranks) {
    world_ = ranks.world();
    rank_.reset();
    calls_ = nullptr;
    if constexpr (Ranks::communicates) {
      static_assert(std::is_trivially_copyable_v<Ranks> && sizeof(Ranks) <= sizeof(ranks_),
                    "lockstep: the ranks of norms are a few pointers");
      std::memcpy(ranks_, &ranks, sizeof(Ranks));
      rank_ = ranks.rank();
      calls_ = &calls_of<Ranks>;
    }
  }
  /// The job has ended, and its communicator with it.
  void end() { has_ended_ = true; }

  /// Do norms share statistics, as the policy `Norms<Synced>` says?
  bool communicates() const { return calls_ != nullptr; }
  bool has_ended() const { return has_ended_; }
  std::size_t world() const { return world_; }
  std::optional<Rank> rank() const { return rank_; }

  /// all = every rank's own, by rank. **Ranks** all of these, in the order of their norms. **Host**
  /// blocks, or on a GPU enqueues. **Stream** the step's.
  void all_gather(std::span<const double> own, std::span<double> all) const {
    calls_->gather_doubles(ranks_, own, all);
  }
  void all_gather(std::span<const float> own, std::span<float> all) const {
    calls_->gather_floats(ranks_, own, all);
  }
  /// values = their sum over ranks. **Ranks**, **Host** and **Stream** as `all_gather`.
  void all_reduce(std::span<double> values) const { calls_->reduce_doubles(ranks_, values); }
  void all_reduce(std::span<float> values) const { calls_->reduce_floats(ranks_, values); }

 private:
  struct Calls {
    void (*gather_doubles)(const std::byte*, std::span<const double>, std::span<double>);
    void (*gather_floats)(const std::byte*, std::span<const float>, std::span<float>);
    void (*reduce_doubles)(const std::byte*, std::span<double>);
    void (*reduce_floats)(const std::byte*, std::span<float>);
  };

  template <class Ranks>
  static const Ranks& ranks_at(const std::byte* ranks) {
    return *std::launder(reinterpret_cast<const Ranks*>(ranks));
  }
  template <class Ranks, class T>
  static void gather(const std::byte* ranks, std::span<const T> own, std::span<T> all) {
    ranks_at<Ranks>(ranks).all_gather(own, all);
  }
  template <class Ranks, class T>
  static void reduce(const std::byte* ranks, std::span<T> values) {
    ranks_at<Ranks>(ranks).all_reduce(values);
  }
  template <class Ranks>
  static constexpr Calls calls_of{gather<Ranks, double>, gather<Ranks, float>,
                                  reduce<Ranks, double>, reduce<Ranks, float>};

  alignas(std::max_align_t) std::byte ranks_[32] = {};
  const Calls* calls_ = nullptr;
  std::size_t world_ = 1;
  std::optional<Rank> rank_;
  bool has_ended_ = false;
};

/// The ranks of the step that runs on this thread, or null.
inline std::shared_ptr<NormExchange>& current_norm_exchange() {
  static thread_local std::shared_ptr<NormExchange> current;
  return current;
}

/// While it lives, the norms that run on this thread find these ranks.
class [[nodiscard]] NormScope {
 public:
  explicit NormScope(std::shared_ptr<NormExchange> exchange)
      : before_(std::exchange(current_norm_exchange(), std::move(exchange))) {}
  NormScope(const NormScope&) = delete;
  NormScope& operator=(const NormScope&) = delete;
  ~NormScope() { current_norm_exchange() = std::move(before_); }

 private:
  std::shared_ptr<NormExchange> before_;
};

}  // namespace lockstep::detail

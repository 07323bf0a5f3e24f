// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random numbers of a model's layers: the step that draws them, and their keys.

#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/detail/strategy/features.hpp"

namespace lockstep::detail {

/// The keys from which layers draw, in a micro-batch and in evaluations.
struct RandomKeys {
  std::uint64_t micro_batch = 0;
  std::uint64_t evaluation = 0;
};

/// The keys of a replica in device memory (`keys()`, `store(keys)`); `draw` gives a layer's random
/// numbers from a key. Specialised for `Cpu` here, for `Cuda` in features.cuh.
template <class Device, class Comm>
class RandomKeyStore;
template <class Comm>
class RandomKeyStore<Cpu, Comm> {
 public:
  constexpr explicit RandomKeyStore(Comm&) {}
  const RandomKeys* keys() const { return &keys_; }
  void store(const RandomKeys& keys) { keys_ = keys; }
  static LayerRandom draw(const std::uint64_t* key, std::uint64_t layer) {
    return layer_random(*key, layer);
  }

 private:
  RandomKeys keys_;
};

template <class Step, class Store>
class RandomStep : public Step {
 public:
  static constexpr bool draws = true;

  RandomStep(const Step& step, const RandomKeys* keys, const RandomKeys* host_keys)
      : Step(step), keys_(keys), host_keys_(host_keys) {}

  /// The numbers of a layer, by its name: new in every micro-batch and rank, the same in backward.
  auto random(const auto& layer) const {
    return Store::draw(&keys_->micro_batch, layer_hash(layer));
  }
  auto random_in_evaluation(const auto& layer) const {
    return Store::draw(&keys_->evaluation, layer_hash(layer));
  }

  /// A seed for another library's generator, known to the host on any device; varies as `random`.
  std::uint64_t random_seed(const auto& layer) const {
    return layer_random(host_keys_->micro_batch, layer_hash(layer)).bits(0);
  }
  std::uint64_t random_seed_in_evaluation(const auto& layer) const {
    return layer_random(host_keys_->evaluation, layer_hash(layer)).bits(0);
  }

 private:
  const RandomKeys* keys_;
  const RandomKeys* host_keys_;
};

/// The key of a micro-batch is a function of seed, rank, earlier updates and index in the step: a
/// job that resumes, or repeats a failed batch, draws the same numbers.
template <class Traits, class Comm>
class RandomNumbers : public Stages<RandomNumbers<Traits, Comm>> {
  using Store = RandomKeyStore<typename Traits::device, Comm>;

 public:
  explicit RandomNumbers(auto& gradients) : store_(gradients.comm()) {}

  void start(Seed seed, Rank rank) {
    seed_ = seed;
    // Distinct from the numbers of a program's own `RandomStream(rank_seed(seed, rank))`.
    constexpr std::uint64_t salt = hash_of("step.random");
    stream_ = mix_bits(rank_seed(seed, rank).value() ^ salt);
    keys_ = {key_of(0, 0), random_at(stream_, ~std::uint64_t{0})};
    store_.store(keys_);
  }
  Seed seed() const { return seed_; }
  const RandomKeys& keys() const { return keys_; }

  /// Selects a micro-batch. **Stream** on a GPU, in its order, outside of a capture.
  void prepare(std::uint64_t updates, std::size_t micro_batch) {
    keys_.micro_batch = key_of(updates, micro_batch);
    store_.store(keys_);
  }
  template <class Step>
  using View = RandomStep<Step, Store>;
  template <class Step>
  View<Step> view(const Step& step, auto& /*replica*/) const {
    return {step, store_.keys(), &keys_};
  }

 private:
  std::uint64_t key_of(std::uint64_t updates, std::size_t micro_batch) const {
    return random_at(random_at(stream_, updates), micro_batch);
  }

  Seed seed_;
  std::uint64_t stream_ = 0;
  RandomKeys keys_;
  Store store_;
};

}  // namespace lockstep::detail

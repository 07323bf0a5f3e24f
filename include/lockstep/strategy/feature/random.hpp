// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random numbers of a model's layers: the step that draws them, and where these come from.

#include "lockstep/core/hash.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/strategy/features.hpp"

namespace lockstep::detail {

/// The keys from which the layers of a model draw. Evaluations have one of their own.
struct RandomKeys {
  std::uint64_t micro_batch = 0;
  std::uint64_t evaluation = 0;
};

/// Where the keys of a replica lie: `keys()` in the memory of its device, and `store(keys)`. `draw`
/// gives the numbers of a layer from a key there. Specialised for every device: `Cpu` here, `Cuda`
/// in features.cuh.
template <class Device, class Comm>
class RandomKeyStore;
template <class Comm>
class RandomKeyStore<Cpu, Comm> {
 public:
  constexpr explicit RandomKeyStore(Comm&) {}
  const RandomKeys* keys() const { return &keys_; }
  void store(const RandomKeys& keys) { keys_ = keys; }
  static LayerRandom draw(const std::uint64_t* key, LayerHash layer) {
    return layer_random(*key, layer);
  }

 private:
  RandomKeys keys_;
};

/// An execution's step with random numbers.
template <class Step, class Store>
class RandomStep : public Step {
 public:
  static constexpr bool draws = true;

  RandomStep(const Step& step, const RandomKeys* keys, const RandomKeys* host_keys)
      : Step(step), keys_(keys), host_keys_(host_keys) {}

  /// The numbers of a layer, by a name or text that no other layer has: other ones in every
  /// micro-batch and on every rank, the same ones in forward and backward.
  template <class Layer>
  auto random(const Layer& layer) const {
    return Store::draw(&keys_->micro_batch, layer_hash(layer));
  }
  /// Those of an evaluation.
  template <class Layer>
  auto random_in_evaluation(const Layer& layer) const {
    return Store::draw(&keys_->evaluation, layer_hash(layer));
  }

  /// A number for generators of another library, which begin from a seed: as `random`, known to the
  /// host whatever the device is.
  template <class Layer>
  std::uint64_t random_seed(const Layer& layer) const {
    return layer_random(host_keys_->micro_batch, layer_hash(layer)).bits(0);
  }
  template <class Layer>
  std::uint64_t random_seed_in_evaluation(const Layer& layer) const {
    return layer_random(host_keys_->evaluation, layer_hash(layer)).bits(0);
  }

 private:
  const RandomKeys* keys_;
  const RandomKeys* host_keys_;
};

/// The random numbers of a replica. The key of a micro-batch is a function of the seed, the rank,
/// the updates begun before it and its place among the micro-batches of the next one: nothing is
/// counted here, so that a job that goes on from a checkpoint, or repeats a batch that failed,
/// draws what it would have drawn.
template <class Traits, class Comm>
class RandomNumbers : public Stages<RandomNumbers<Traits, Comm>> {
  using Store = RandomKeyStore<typename Traits::device, Comm>;

 public:
  explicit RandomNumbers(auto& gradients) : store_(gradients.comm()) {}

  /// Draws from another seed from now on.
  void start(Seed seed, Rank rank) {
    seed_ = seed;
    // A program may draw from `RandomStream(rank_seed(seed, rank))`: those are other numbers.
    constexpr std::uint64_t apart = hash_of("step.random");
    stream_ = mix_bits(rank_seed(seed, rank).value() ^ apart);
    keys_ = {key_of(0, 0), random_at(stream_, ~std::uint64_t{0})};
    store_.store(keys_);
  }
  Seed seed() const { return seed_; }
  /// The keys, in the host's memory.
  const RandomKeys& keys() const { return keys_; }

  /// Goes to a micro-batch. **Stream** on a GPU, in its order, and never as part of a graph.
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

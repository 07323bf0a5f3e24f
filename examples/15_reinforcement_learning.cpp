// SPDX-License-Identifier: Apache-2.0
// Reinforcement learning: ranks play, and learn from what all of them have seen. REINFORCE balances
// a pole on a cart (Barto, Sutton and Anderson 1983) with a policy of five numbers.
//
//   ./reinforcement_learning --ranks 4 --updates 100
//
// There are eight carts, each with random numbers of its own; a rank has every so-many-th of them.
// Episodes differ in length, so ranks have different numbers of steps. DDP averages over ranks, and
// the gradient wanted is the mean over steps. So every rank divides the sum over its own steps by
// the mean number of steps of a rank: the average over ranks is then the sum over all steps divided
// by their number, which is the gradient of one process that has played all episodes itself. Any
// number of ranks learns the same, until rounding makes an action fall the other way.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

constexpr std::size_t carts = 8;         // of all ranks together
constexpr std::size_t longest = 500;     // steps of an episode
constexpr double discount = 0.99;        // of a reward one step later
constexpr std::size_t observations = 4;  // place, speed, angle, and how fast the angle changes

/// The environment. Its state after `reset` is drawn from its own stream of random numbers.
struct CartPole {
  RandomStream random;
  double state[observations] = {};

  void reset() {
    for (double& x : state) x = random.uniform(-0.05, 0.05);
  }

  /// Pushes the cart to the right or to the left for 20 ms. False once the pole has fallen.
  bool step(bool right) {
    auto& [place, speed, angle, turning] = state;
    const double sine = std::sin(angle);
    const double cosine = std::cos(angle);
    const double push = ((right ? 10.0 : -10.0) + 0.05 * turning * turning * sine) / 1.1;
    const double turn =
        (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine * cosine / 1.1));
    const double move = push - 0.05 * turn * cosine / 1.1;
    place += 0.02 * speed;
    speed += 0.02 * move;
    angle += 0.02 * turning;
    turning += 0.02 * turn;
    return std::abs(place) < 2.4 && std::abs(angle) < 0.2095;
  }
};

/// The steps of this rank's episodes: what was seen, what was done, and what it was worth.
struct Rollout {
  std::vector<double> seen;  // row-major, `observations` columns
  std::vector<char> right;
  std::vector<double> worth;  // the discounted rewards from this step on
  double divisor = 1;         // of the sum over steps

  std::size_t size() const { return right.size(); }
};

/// Pushes to the right with probability sigmoid(weight . observation + bias).
struct Policy {
  using Parameters =
      ParameterList<Parameter<"weight", double, observations>, Parameter<"bias", double>>;

  std::vector<double> surprises;  // probability - action of every step, kept for backward

  static double probability(const auto& from, const double* seen) {
    double sum = from.param("bias"_p)();
    for (std::size_t j = 0; j < observations; ++j) sum += from.param("weight"_p)(j) * seen[j];
    return 1 / (1 + std::exp(-sum));
  }

  double forward(auto& step, const Rollout& rollout) {
    surprises.resize(rollout.size());
    double loss = 0;
    for (std::size_t t = 0; t < rollout.size(); ++t) {
      const double p = probability(step, rollout.seen.data() + t * observations);
      surprises[t] = p - (rollout.right[t] ? 1 : 0);
      loss -= std::log(1 - std::abs(surprises[t])) * rollout.worth[t];
    }
    return loss / rollout.divisor;
  }

  void backward(auto& step, const Rollout& rollout) {
    const auto bias = step.grad("bias"_p);
    const auto weight = step.grad("weight"_p);
    bias() = 0;
    for (std::size_t j = 0; j < observations; ++j) weight(j) = 0;
    for (std::size_t t = 0; t < rollout.size(); ++t) {
      const double error = surprises[t] * rollout.worth[t] / rollout.divisor;
      bias() += error;
      for (std::size_t j = 0; j < observations; ++j)
        weight(j) += error * rollout.seen[t * observations + j];
    }
    step.ready("bias"_p);
    step.ready("weight"_p);
  }
};

/// Plays one episode to its end and adds it to the rollout. Returns its number of steps, which is
/// also its reward.
std::size_t play(CartPole& cart, const auto& ddp, Rollout& rollout) {
  const std::size_t first = rollout.size();
  cart.reset();
  for (bool stands = true; stands && rollout.size() < first + longest;) {
    const bool right = cart.random.uniform() < Policy::probability(ddp, cart.state);
    rollout.seen.insert(rollout.seen.end(), cart.state, cart.state + observations);
    rollout.right.push_back(right);
    stands = cart.step(right);
  }
  rollout.worth.resize(rollout.size());
  double worth = 0;
  for (std::size_t t = rollout.size(); t-- > first;)
    rollout.worth[t] = worth = 1 + discount * worth;
  return rollout.size() - first;
}

int train(Session& session) {
  const std::size_t updates = session.option("updates", 60u, "of the policy");
  ProcessGroup group(session);
  const std::size_t world = group.world_size().value();
  DistributedDataParallel<Policy, Optimizer<Adam>> ddp(*group);
  ddp.optimizer().lr = 0.1;

  std::vector<CartPole> own;
  for (std::size_t cart = group.rank().value(); cart < carts; cart += world)
    own.push_back({RandomStream(rank_seed(Seed{0}, Rank{cart}))});

  double first = 0;
  double average = 0;
  for (std::size_t update = 1; update <= updates; ++update) {
    Rollout rollout;
    for (CartPole& cart : own) play(cart, ddp, rollout);

    // What all ranks must know of each other: how many steps, and how good a step is on average.
    double sums[] = {static_cast<double>(rollout.size()), 0, 0};
    for (const double worth : rollout.worth) {
      sums[1] += worth;
      sums[2] += worth * worth;
    }
    group->all_reduce(sums, Sum{});
    const double mean = sums[1] / sums[0];
    const double deviation = std::sqrt(sums[2] / sums[0] - mean * mean) + 1e-9;
    for (double& worth : rollout.worth) worth = (worth - mean) / deviation;
    rollout.divisor = sums[0] / static_cast<double>(world);

    ddp.step(rollout);
    average = sums[0] / carts;
    if (update == 1) first = average;
    if (group.rank() == Rank{0} && (update % 10 == 0 || update == 1))
      std::printf("update %zu: average return %.1f\n", update, average);
  }
  return average > 4 * first ? 0 : 1;  // it has learnt
}

}  // namespace

int main(int argc, char** argv) { return launch(argc, argv, train); }

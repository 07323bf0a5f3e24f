// SPDX-License-Identifier: Apache-2.0
// Reinforcement learning with `Trainer` and no data set: ranks walk through a maze, each with
// walkers of its own, and learn the way out from all walks. ./reinforce --ranks 2
#include <lockstep/lockstep.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace lockstep;

constexpr std::size_t rows = 5, columns = 6, cells = rows * columns, moves = 4;
constexpr std::size_t walkers = 6;   // of all ranks together
constexpr std::size_t longest = 80;  // steps of a walk
constexpr const char* maze[rows] = {
    "..#...", "..#.#.", ".##.#.", "....#o", ".#....",
};

/// The steps of all walks of a rank. Every step costs 1; a walk ends at the `o`.
struct Walks {
  std::vector<std::size_t> cell;
  std::vector<std::size_t> move;
  std::vector<double> worth;  // of what came after the step, against the average
  double divisor = 1;
  std::size_t size() const { return cell.size(); }
};

/// For every cell, how likely each move is: softmax of its row.
struct Policy {
  using Parameters = ParameterList<Parameter<"moves", double, cells, moves>>;

  static void probabilities(const auto& from, std::size_t cell, double* p) {
    const auto scores = from.param("moves"_p);
    double sum = 0;
    for (std::size_t m = 0; m < moves; ++m) sum += p[m] = std::exp(scores(cell, m));
    for (std::size_t m = 0; m < moves; ++m) p[m] /= sum;
  }

  void initialize(auto& initial) {  // all moves are equally likely
    const auto scores = initial.param("moves"_p);
    std::fill_n(scores.data_handle(), scores.size(), 0.0);
  }

  double forward(auto& step, const Walks& walks) {
    double loss = 0;
    double p[moves];
    for (std::size_t t = 0; t < walks.size(); ++t) {
      probabilities(step, walks.cell[t], p);
      loss -= std::log(p[walks.move[t]]) * walks.worth[t];
    }
    return loss / walks.divisor;
  }

  void backward(auto& step, const Walks& walks) {
    const auto gradient = step.grad("moves"_p);
    std::fill_n(gradient.data_handle(), gradient.size(), 0.0);
    double p[moves];
    for (std::size_t t = 0; t < walks.size(); ++t) {
      probabilities(step, walks.cell[t], p);
      for (std::size_t m = 0; m < moves; ++m)
        gradient(walks.cell[t], m) +=
            (p[m] - (m == walks.move[t])) * walks.worth[t] / walks.divisor;
    }
    step.ready("moves"_p);
  }
};

/// Goes from the upper left corner until it finds the way out, or is tired.
void walk(const auto& job, RandomStream& random, Walks& walks) {
  const std::size_t first = walks.size();
  std::size_t y = 0, x = 0;
  while (maze[y][x] != 'o' && walks.size() < first + longest) {
    double p[moves];
    Policy::probabilities(job, y * columns + x, p);
    double left = random.uniform();
    std::size_t m = 0;
    while (m + 1 < moves && left >= p[m]) left -= p[m++];
    walks.cell.push_back(y * columns + x);
    walks.move.push_back(m);
    const std::size_t to_y = y + (m == 0) - (m == 1);  // below 0 is beyond the last
    const std::size_t to_x = x + (m == 2) - (m == 3);
    if (to_y < rows && to_x < columns && maze[to_y][to_x] != '#') y = to_y, x = to_x;
  }
  for (std::size_t t = first; t < walks.size(); ++t)
    walks.worth.push_back(-static_cast<double>(walks.size() - t));
}

using Job = Trainer<Policy, Optimizer<Adam>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    job.optimizer().lr = 0.1;
    const std::size_t world = job.world_size().value();
    std::vector<RandomStream> own;
    for (std::size_t w = job.rank().value(); w < walkers; w += world) own.emplace_back(Seed{w});

    double first = 0;
    double steps = 0;
    for (int update = 0; update < 150; ++update) {
      Walks walks;
      for (RandomStream& random : own) walk(job, random, walks);

      Tally tally;
      double sum = 0;
      for (const double worth : walks.worth) sum += worth;
      tally.add("worth", sum, static_cast<double>(walks.size()));
      const Scores scores = job.reduce_metrics(tally);  // over the steps of all ranks
      for (double& worth : walks.worth) worth -= scores["worth"];
      walks.divisor = scores.count("worth") / static_cast<double>(world);
      job.step(walks);
      steps = scores.count("worth") / walkers;
      if (update == 0) first = steps;
    }
    job.on_rank0([&](auto log) {
      log.print("steps of a walk: " + fixed_text(first, 2) + " at first, " + fixed_text(steps, 2) +
                " in the end");
    });
    return steps < 20 ? 0 : 1;
  });
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model without mathematics: its batches say what its gradients are, which parameters are
/// used and what goes wrong, so that a test can compute by hand what must come out.

#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/model/declaration.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/plain_mlp.hpp"

namespace train {

using namespace lockstep;
using ranks::As;
using ranks::Ends;
using ranks::require;
using ranks::Shared;

/// What a batch does to the parameters a, b and c.
struct Entry {
  enum class Trouble { none, in_forward, in_backward, ready_twice, no_exception };

  std::array<double, 3> gradient{};  // of element i: gradient * (1 + i)
  std::array<bool, 3> used{true, true, true};
  std::size_t zeros = 0;  // so many elements of every gradient are zero
  Trouble trouble = Trouble::none;
  double loss = 0;
};

/// A batch that DP can cut, with an entry for each sample.
struct Entries {
  std::vector<Entry> all;
  std::size_t size() const { return all.size(); }
  Entries slice(std::size_t first, std::size_t count) const {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return {{begin, begin + static_cast<std::ptrdiff_t>(count)}};
  }
};

inline constexpr std::array<std::size_t, 3> sheet_sizes{40, 70, 3};

/// Parameter p's element i starts as start(p, i): exact in every element type.
inline double start(std::size_t p, std::size_t i) {
  return 0.25 * static_cast<double>(p + 1) + 0.125 * static_cast<double>(i % 8);
}
inline double slope(double gradient, std::size_t i) {
  return gradient * static_cast<double>(1 + i % 8);
}

template <class A = double, class B = A, class C = A>
struct Sheet {
  using Parameters =
      ParameterList<Parameter<"a", A, 40>, Parameter<"b", B, 70>, Parameter<"c", C, 3>>;

  void initialize(auto& initial) const {
    std::size_t p = 0;
    each(initial, [&](const auto& view) {
      for (std::size_t i = 0; i < view.size(); ++i) view(i) = to(view(i), start(p, i));
      ++p;
    });
  }

  std::string subgraph;  // of the latest forward pass

  double forward(auto& step, const Entry& entry) {
    if constexpr (requires { step.subgraph(); }) subgraph = step.subgraph().name();
    if (entry.trouble == Entry::Trouble::in_forward)
      throw std::runtime_error("forward ran out of luck");
    return entry.loss;
  }

  void backward(auto& step, const Entry& entry) {
    give(step, "c"_p, 2, entry);
    give(step, "b"_p, 1, entry);
    if (entry.trouble == Entry::Trouble::in_backward)
      throw std::runtime_error("backward ran out of luck");
    if (entry.trouble == Entry::Trouble::no_exception) throw 7;
    if (entry.trouble == Entry::Trouble::ready_twice)
      if_trained(step, "b"_p, [](auto& trained) { trained.ready("b"_p); });
    give(step, "a"_p, 0, entry);
  }

  static void each(const auto& step, auto&& f) {
    f(step.param("a"_p));
    f(step.param("b"_p));
    f(step.param("c"_p));
  }

 private:
  static auto to(auto like, double value) {
    using T = decltype(like);
    return static_cast<T>(static_cast<lockstep::detail::Accumulator<T>>(value));
  }
  static void give(auto& step, auto key, std::size_t p, const Entry& entry) {
    if (!entry.used[p]) return;
    if_trained(step, key, [&](auto& trained) {
      const auto view = trained.grad(key);
      for (std::size_t i = 0; i < view.size(); ++i)
        view(i) = to(view(i), i < entry.zeros ? 0 : slope(entry.gradient[p], i));
      trained.ready(key);
    });
  }
};

/// One number of each parameter as the model has it: `value(ddp, p, i)`.
double value(const auto& ddp, std::size_t p, std::size_t i) {
  double result = 0;
  std::size_t at = 0;
  Sheet<>::each(ddp, [&](const auto& view) {
    using T = typename std::decay_t<decltype(view)>::value_type;
    if (at++ == p)
      result = static_cast<double>(static_cast<lockstep::detail::Accumulator<T>>(view(i)));
  });
  return result;
}

/// All numbers are `expected(p, i)`, to a relative error of `within`.
void compare(const auto& ddp, const auto& expected, const std::string& when,
             double within = 1e-12) {
  for (std::size_t p = 0; p < 3; ++p) {
    for (std::size_t i = 0; i < sheet_sizes[p]; ++i) {
      const double have = value(ddp, p, i);
      const double want = expected(p, i);
      require(std::abs(have - want) <= within * std::max(std::abs(want), 1e-2),
              when + ": parameter " + std::to_string(p) + "[" + std::to_string(i) + "] is " +
                  std::to_string(have) + " and should be " + std::to_string(want));
    }
  }
}

/// A number for each parameter's element, each with its plain optimizer.
template <class Rule>
struct PlainSheet {
  std::array<std::array<double, 70>, 3> values;
  std::array<std::array<Rule, 70>, 3> rules;

  explicit PlainSheet(const Rule& rule) {
    for (std::size_t p = 0; p < 3; ++p) {
      rules[p].fill(rule);
      for (std::size_t i = 0; i < 70; ++i) values[p][i] = start(p, i);
    }
  }
  void update(std::size_t p, double gradient, std::size_t zeros = 0) {
    for (std::size_t i = 0; i < sheet_sizes[p]; ++i)
      rules[p][i].update(values[p][i], i < zeros ? 0 : slope(gradient, i));
  }
  double operator()(std::size_t p, std::size_t i) const { return values[p][i]; }
};

/// A second communicator of the same ranks, with another way to progress.
template <class Who>
ShmCommunicator<dynamic, Who> join_again(Shared& comm) {
  using detail::shm::Engine;
  const bool makes = comm.rank() == Rank{0};
  detail::Descriptor file = makes ? Engine::make_file(comm.world_size()) : detail::Descriptor();
  std::string address = makes ? Engine::address(file) : "";
  broadcast_object(comm, address, Rank{0});
  if (!makes) file = Engine::open(address);
  return {comm.rank(), comm.world_size(), std::move(file), comm.timeout()};
}

/// Every rank must come through.
void all_well(std::size_t world, auto f, As as = As::processes) {
  const Ends ends = ranks::run(as, world, f);
  for (std::size_t r = 0; r < world; ++r) {
    BOOST_TEST(ends[r] == "", "rank " << r << " of " << world << ": " << ends[r]);
  }
}

/// Every rank must end with words that contain `words`.
inline void all_say(const Ends& ends, const std::string& words) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    BOOST_TEST(ends[r].find(words) != std::string::npos,
               "rank " << r << " does not say \"" << words << "\" but \"" << ends[r] << "\"");
  }
}

}  // namespace train

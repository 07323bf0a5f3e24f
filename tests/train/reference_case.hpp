// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cases of ddp.json, whatever their worlds, sizes and options are. What cannot be run,
/// or comes out differently, throws the case's name and the reason. CPUs and GPUs train the same
/// cases: nothing here needs a device.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/detail/core/macros.hpp"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/constants.hpp"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/policy/policy.hpp"
#include "reference.hpp"
#include "train/plain_mlp.hpp"

namespace train {

/// One of several rules, chosen when the program runs: cases of all optimizers share one type, and
/// the compiler writes DDP's code once for all of them. The arithmetic is that of the rules.
template <class... Rules>
struct OneRuleOf : Choice<axes::Optimizer> {
  static constexpr std::string_view name = "OneRuleOf";
  static constexpr std::size_t states = std::max({Rules::states...});

  struct Options : Rules::Options... {
    double lr = 0;
    std::size_t chosen = 0;  // of Rules

    template <class F>
    constexpr void for_each(F&& f) const {
      f("lr", lr);
      f("chosen", static_cast<double>(chosen));
      (Rules::Options::for_each(f), ...);
    }
    template <class Rule>
    typename Rule::Options& choose() {
      chosen = 0;
      static_cast<void>(((std::is_same_v<Rule, Rules> || (++chosen, false)) || ...));
      return *this;
    }
  };

  template <class A, class Rule>
  using UpdateOf = decltype(Rule::template at<A>({}, 0.0, 1));

  template <class A>
  struct Update : UpdateOf<A, Rules>... {
    std::size_t chosen;

    LOCKSTEP_HOST_DEVICE constexpr void operator()(A& parameter, A gradient, A* state) const {
      std::size_t index = 0;
      ((index++ == chosen
            ? static_cast<const UpdateOf<A, Rules>&>(*this)(parameter, gradient, state)
            : void()),
       ...);
    }
  };

  template <class A>
  LOCKSTEP_HOST_DEVICE static constexpr Update<A> at(const Options& options, double lr,
                                                     std::uint64_t step) {
    return {Rules::template at<A>(options, lr, step)..., options.chosen};
  }
};

using ReferenceRule = OneRuleOf<SGD, SGDMomentum, SGDNesterov, Adam, AdamW>;

/// A Clip policy whose norm is that of the case that is running, and not part of its type.
struct ReferenceClip : lockstep::detail::ValuePolicy<axes::Clip> {
  struct Norm {
    static inline std::atomic<double> value = 0;
    constexpr bool operator>(int) const { return true; }  // `reference_case` has seen to it
    operator double() const { return value; }
  };
  static constexpr Norm norm{};
  static constexpr bool clips = true;
  static constexpr void fingerprint(lockstep::detail::Hash& hash) {
    hash.text(axes::Clip::name).text("of the reference");
  }
};

struct ReferenceCase {
  std::string name;
  std::size_t world, accumulate, steps, batch;
  std::size_t in, hidden, out;
  bool clips;
  double clip;
  std::string optimizer;
  nlohmann::json hyper, mean_loss, params;

  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error(name + ": " + why);
  }

  /// The batch of a rank in a micro-step, both counted from 0.
  Samples samples(std::size_t micro_step, std::size_t rank) const {
    return reference_batch(batch, in, out, micro_step, rank);
  }

  /// A model with the extents of the case.
  template <class Model>
  Model model() const {
    Model model;
    model.in = in;
    model.hidden = hidden;
    model.out = out;
    return model;
  }
};

/// Case `number` of ddp.json, from 0.
inline ReferenceCase reference_case(std::size_t number, const nlohmann::json& c) {
  ReferenceCase result;
  result.name = "ddp.json, case " + std::to_string(number);
  const auto positive = [&](const nlohmann::json& value, const std::string& what) {
    const double given = value;
    if (!(given > 0)) result.fail(what + " is not above zero");
    return given;
  };
  const auto count = [&](const nlohmann::json& value, const std::string& what) {
    return static_cast<std::size_t>(positive(value, what));
  };
  try {
    result.world = count(c.at("world"), "world");
    result.accumulate = count(c.at("accumulate"), "accumulate");
    result.steps = count(c.at("steps"), "steps");
    result.batch = count(c.at("batch"), "batch");
    result.in = count(c.at("dims").at(0), "dims[0]");
    result.hidden = count(c.at("dims").at(1), "dims[1]");
    result.out = count(c.at("dims").at(2), "dims[2]");
    result.clips = !c.at("clip").is_null();
    result.clip = result.clips ? positive(c.at("clip"), "clip") : 0;
    result.optimizer = c.at("optimizer");
    result.hyper = c.at("hyper");
    result.mean_loss = c.at("mean_loss");
    result.params = c.at("params");
  } catch (const nlohmann::json::exception& error) {
    result.fail(error.what());
  }
  if (result.mean_loss.size() != result.steps)
    result.fail("mean_loss needs a number for each step");
  result.name += " (" + result.optimizer + ", world " + std::to_string(result.world) +
                 ", accumulate " + std::to_string(result.accumulate) +
                 (result.clips ? ", clip " + c["clip"].dump() : ", no clip") + ", dims " +
                 c["dims"].dump() + ")";
  return result;
}

/// The optimizer's numbers, which have PyTorch's names. What is not given is PyTorch's default.
void set_options(auto& options, const ReferenceCase& c) {
  if constexpr (requires { options.momentum; }) options.momentum = 0;
  for (const auto& [key, value] : c.hyper.items()) {
    bool known = true;
    if (key == "lr") {
      options.lr = value;
    } else if (key == "weight_decay") {
      options.weight_decay = value;
    } else if constexpr (requires { options.momentum; }) {
      if (key == "momentum") {
        options.momentum = value;
      } else if (key == "dampening") {
        options.dampening = value;
      } else {
        known = key == "nesterov";  // which chose the rule
      }
    } else if constexpr (requires { options.beta1; }) {
      if (key == "betas") {
        options.beta1 = value.at(0);
        options.beta2 = value.at(1);
      } else if (key == "eps") {
        options.eps = value;
      } else {
        known = false;
      }
    } else {
      known = key == "momentum" || key == "nesterov" || key == "dampening";  // all of them zero
    }
    // A switch that is off changes nothing.
    if (!known && !value.is_null() && value != false)
      c.fail("the tests do not know the option '" + key + "'");
  }
}

/// Calls `f.template operator()<Rule>()` with the optimizer that a case names. As in PyTorch,
/// momentum and Nesterov are numbers of SGD.
void with_rule(const ReferenceCase& c, const auto& f) {
  const bool is_nesterov = c.hyper.value("nesterov", c.optimizer == "sgd_nesterov");
  const bool has_momentum = is_nesterov || c.hyper.value("momentum", 0.0) != 0;
  if (c.optimizer == "adam") {
    f.template operator()<Adam>();
  } else if (c.optimizer == "adamw") {
    f.template operator()<AdamW>();
  } else if (c.optimizer != "sgd" && c.optimizer != "sgd_momentum" &&
             c.optimizer != "sgd_nesterov") {
    c.fail("the tests do not know the optimizer '" + c.optimizer + "'");
  } else if (is_nesterov) {
    f.template operator()<SGDNesterov>();
  } else if (has_momentum) {
    f.template operator()<SGDMomentum>();
  } else {
    f.template operator()<SGD>();
  }
}

/// Sets the options of a `ReferenceRule` to those of a case.
inline void choose_rule(ReferenceRule::Options& options, const ReferenceCase& c) {
  with_rule(c, [&]<class Rule>() {
    typename Rule::Options& own = options.template choose<Rule>();
    set_options(own, c);
    options.lr = own.lr;
  });
}

/// Calls `f.template operator()<ClipPolicy>()`.
void with_clip(const ReferenceCase& c, const auto& f) {
  if (c.clips) {
    ReferenceClip::Norm::value = c.clip;
    f.template operator()<ReferenceClip>();
  } else {
    f.template operator()<Clip<>>();
  }
}

/// Calls `f.template operator()<MicroBatches, ClipPolicy>()`, where a step has at most `Most`
/// micro-batches.
template <std::size_t Most = 4, std::size_t N = 1>
void with_policies(const ReferenceCase& c, const auto& f) {
  if constexpr (N > Most) {
    c.fail("accumulate is " + std::to_string(c.accumulate) +
           ", and this test is compiled for 1 to " + std::to_string(Most));
  } else if (c.accumulate != N) {
    with_policies<Most, N + 1>(c, f);
  } else {
    with_clip(c, [&]<class ClipPolicy>() { f.template operator()<N, ClipPolicy>(); });
  }
}

/// Throws unless a number is PyTorch's, to rounding.
inline void require_figure(const ReferenceCase& c, double have, double want,
                           const std::string& what) {
  if (std::abs(have - want) <= 1e-9 * std::max(std::abs(want), 1e-3)) return;
  char numbers[80];
  std::snprintf(numbers, sizeof numbers, " is %.12g, PyTorch has %.12g", have, want);
  c.fail(what + numbers);
}
inline void require_loss(const ReferenceCase& c, std::size_t step, double mean) {
  require_figure(c, mean, c.mean_loss[step], "the loss of step " + std::to_string(step));
}
/// `values(view)` are the numbers of a parameter.
void require_parameters(const ReferenceCase& c, const auto& ddp, const auto& values) {
  constexpr std::array names{"fc1.weight", "fc1.bias",   "fc2.weight",
                             "fc2.bias",   "fc3.weight", "fc3.bias"};
  std::size_t p = 0;
  ddp.for_each_parameter([&](std::string_view, const auto& view) {
    const std::string name = names[p++];
    const std::vector<double> want = c.params.at(name);
    const std::vector<double> have = values(view);
    require_figure(c, static_cast<double>(have.size()), static_cast<double>(want.size()),
                   "the size of " + name);
    for (std::size_t i = 0; i < want.size(); ++i)
      require_figure(c, have[i], want[i], name + "[" + std::to_string(i) + "]");
  });
}

}  // namespace train

// SPDX-License-Identifier: Apache-2.0
// Frozen parameters and parameter groups: against PyTorch's figures, against optimizers that are
// written out, and for random networks against one process.
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/repeat.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "optim/plain.hpp"
#include "reference.hpp"
#include "train/closeness.hpp"
#include "train/listed.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(parameter_groups)

namespace {

using namespace train;
using Pieces = Buckets<BucketLimits{0, 0}>;
constexpr double no_limit = std::numeric_limits<double>::infinity();

// ---- Optimizers written out

Entry entry_of(std::size_t rank, std::size_t step) {
  const auto r = static_cast<double>(rank);
  const auto s = static_cast<double>(step);
  return {.gradient = {0.5 + 0.25 * r - 0.125 * s, 0.75 - 0.5 * r * s, 0.25 * s - 0.5}, .loss = s};
}

constexpr auto nothing = [](std::size_t) {};

/// Trains on ranks and by hand. Parameters that are not `trained` keep their bits.
void train_sheet(auto& comm, auto& ddp, auto& plain, const std::array<bool, 3>& trained,
                 double max_norm, std::size_t micro_batches, const auto& before_update) {
  const std::size_t world = comm.world_size().value();
  for (std::size_t u = 0; u < 4; ++u) {
    std::array<double, 3> mean{};
    for (std::size_t m = 0; m < micro_batches; ++m) {
      const std::size_t s = u * micro_batches + m;
      ddp.step(entry_of(comm.rank().value(), s));
      for (std::size_t p = 0; p < 3; ++p) {
        for (std::size_t r = 0; r < world; ++r)
          mean[p] += entry_of(r, s).gradient[p] / static_cast<double>(world * micro_batches);
      }
    }
    double squares = 0;
    for (std::size_t p = 0; p < 3; ++p) {
      for (std::size_t i = 0; trained[p] && i < sheet_sizes[p]; ++i)
        squares += std::pow(slope(mean[p], i), 2);
    }
    const double factor = std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6));
    before_update(u);
    for (std::size_t p = 0; p < 3; ++p) {
      if (trained[p]) plain.update(p, factor * mean[p]);
    }
    compare(ddp, plain, "update " + std::to_string(u), 1e-9);
    for (std::size_t p = 0; p < 3; ++p) {
      for (std::size_t i = 0; !trained[p] && i < sheet_sizes[p]; ++i)
        require(value(ddp, p, i) == start(p, i), "a frozen parameter has changed");
    }
  }
}

constexpr plain::Sgd momentum{.lr = 0.0625, .momentum = 0.5};

template <std::size_t Micro, class... Ps>
void frozen_case(double max_norm = no_limit) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Frozen<"b">, Accumulate<Micro>,
                              Ps...>
          ddp(comm);
      ddp.optimizer().lr = momentum.lr;
      ddp.optimizer().momentum = momentum.momentum;
      PlainSheet plain(momentum);
      train_sheet(comm, ddp, plain, {true, false, true}, max_norm, Micro, nothing);
    });
  }
}

constexpr plain::Adam adam(double lr, double decay) {
  return {.lr = lr, .weight_decay = decay, .decoupled = true};
}

using OfB = Named<"b">;

/// Every parameter is in a group of its own: a has the common numbers, b its own, c no decay.
template <std::size_t Micro, class... Ps>
void group_case(double max_norm = no_limit) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      DistributedDataParallel<Sheet<>, Optimizer<AdamW>, ParameterGroups<OfB, NoDecay<"c*">>,
                              Accumulate<Micro>, Ps...>
          ddp(comm);
      ddp.optimizer().lr = 0.05;
      ddp.optimizer().weight_decay = 0.25;
      ddp.optimizer(OfB{}).lr = 0.01;
      PlainSheet plain(adam(0.05, 0.25));
      plain.rules[1].fill(adam(0.01, 0.25));
      plain.rules[2].fill(adam(0.05, 0));
      train_sheet(comm, ddp, plain, {true, true, true}, max_norm, Micro, nothing);
    });
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(frozen_parameters_keep_their_values_while_all_others_train) {
  frozen_case<1>();
  frozen_case<1, Sharding<Replicated>, Pieces>();
  frozen_case<2, UnusedParameters<Zero>>();
}

BOOST_AUTO_TEST_CASE(the_norm_of_clipping_is_that_of_all_trained_parameters) {
  frozen_case<2, Clip<2.0>>(2);
  frozen_case<1, Clip<2.0>, Sharding<Replicated>>(2);
}

BOOST_AUTO_TEST_CASE(groups_are_updated_with_numbers_of_their_own) {
  group_case<1>();
  group_case<1, Sharding<Replicated>, Pieces>();
  group_case<2, Clip<2.0>>(2);
  group_case<1, UnusedParameters<Zero>, Sharding<Replicated>>();
}

BOOST_AUTO_TEST_CASE(a_world_of_one_has_no_memory_for_gradients_of_frozen_parameters) {
  using Job = detail::ComposedJob<Sheet<>, CanonicalPolicies<World<1>, Frozen<"b">>>;
  static_assert(Job::layout::plan().bytes ==
                detail::align_up(40 * sizeof(double)) + detail::align_up(3 * sizeof(double)));
  static_assert(Job::layout::plan().all_bytes ==
                Job::layout::plan().bytes + detail::align_up(70 * sizeof(double)));
  LoopbackCommunicator nobody;
  DistributedDataParallel<Sheet<>, World<1>, Optimizer<SGDMomentum>, Frozen<"b">> ddp(nobody);
  ddp.optimizer().lr = momentum.lr;
  ddp.optimizer().momentum = momentum.momentum;
  PlainSheet plain(momentum);
  train_sheet(nobody, ddp, plain, {true, false, true}, no_limit, 1, nothing);
  BOOST_TEST(ddp.grad("c"_p).size() == 3u);
}

BOOST_AUTO_TEST_CASE(a_schedule_multiplies_the_rate_of_every_group) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Sheet<>, World<1>, Optimizer<AdamW>, Schedule<StepDecay>,
                          ParameterGroups<OfB>>
      ddp(nobody);
  ddp.optimizer().lr = 0.05;
  ddp.optimizer(OfB{}).lr = 0.01;
  ddp.schedule().updates = 2;
  ddp.schedule().factor = 0.5;
  PlainSheet plain(adam(0.05, 0.01));
  train_sheet(nobody, ddp, plain, {true, true, true}, no_limit, 1, [&](std::size_t update) {
    const double factor = update < 2 ? 1 : 0.5;
    for (std::size_t p = 0; p < 3; ++p)
      for (plain::Adam& rule : plain.rules[p]) rule.lr = (p == 1 ? 0.01 : 0.05) * factor;
  });
  BOOST_TEST(ddp.learning_rate() == 0.05 * 0.25);  // of the group without a set
}

BOOST_AUTO_TEST_CASE(a_set_follows_the_common_numbers_until_it_gets_its_own) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Sheet<>, World<1>, Optimizer<AdamW>, ParameterGroups<OfB, NoDecay<>>> ddp(
      nobody);
  const auto group = [&](std::size_t number) { return ddp.group_options().of(number); };
  ddp.optimizer().lr = 0.5;
  ddp.optimizer().weight_decay = 0.125;
  BOOST_TEST(group(1).lr == 0.5);
  BOOST_TEST(group(1).weight_decay == 0.125);
  BOOST_TEST(group(2).lr == 0.5);
  BOOST_TEST(group(2).weight_decay == 0);
  ddp.optimizer(NoDecay<>{}).beta1 = 0.75;
  ddp.optimizer().lr = 0.25;
  BOOST_TEST(group(0).lr == 0.25);
  BOOST_TEST(group(1).lr == 0.25);
  BOOST_TEST(group(2).lr == 0.5);
  BOOST_TEST(group(2).weight_decay == 0);
  BOOST_TEST(group(2).beta1 == 0.75);
}

// ---- PyTorch's figures

namespace {

/// Which names a case of groups.json freezes: known when it runs, and not part of its type. Only
/// for models that list their tensors, whose names are matched at run time.
struct ReferenceFrozen : detail::ValuePolicy<axes::Frozen> {
  static constexpr std::array<std::string_view, 1> patterns{"*"};
  static inline std::vector<std::string> prefixes;
  static bool match(std::string_view name) {
    for (const std::string& prefix : prefixes)
      if (name.starts_with(prefix)) return true;
    return false;
  }
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("of the reference"); }
};

using Network = PlainMlp<dynamic, dynamic, dynamic>;

/// The reference network with its tensors listed.
struct ListedReference {
  using Elements = ElementList<double>;
  Network network;

  /// Hands out tensors by name and in their shapes.
  template <class Step>
  struct ByNames {
    const Step& step;
    Shapes<Network> shapes;

    ByNames(const Network& network, const Step& listed) : step(listed) { network.shapes(shapes); }

    template <class Key>
    static constexpr std::size_t index =
        NamedTensor<Network, detail::TensorRole::parameter, Key>::index;
    template <class Key>
    auto shaped(const auto& row) const {
      constexpr std::size_t rank =
          NamedTensor<Network, detail::TensorRole::parameter, Key>::info.rank;
      using T = typename std::decay_t<decltype(row)>::element_type;
      const auto& extents =
          shapes.tensors<detail::TensorRole::parameter>().infos[index<Key>].extents;
      if constexpr (rank == 1) {
        return HostView<T, dynamic>(row.data_handle(), extents[0]);
      } else {
        return HostView<T, dynamic, dynamic>(row.data_handle(), extents[0], extents[1]);
      }
    }
    template <class Key>
    auto param(Key) const {
      return shaped<Key>(step.param(index<Key>));
    }
    template <class Key>
    auto grad(Key) const {
      return shaped<Key>(step.grad(index<Key>));
    }
    template <class Key>
    void ready(Key) const {
      step.ready(index<Key>);
    }
    template <class Key>
    bool trains(Key) const {
      return step.trains(index<Key>);
    }
  };

  void tensors(TensorList& list) const {
    Shapes<Network> shapes;
    network.shapes(shapes);
    const auto& infos = shapes.tensors<detail::TensorRole::parameter>().infos;
    for (std::size_t i = 0; i != infos.size(); ++i) {
      list.parameter(std::string(detail::parameter_table<Network>.name(i)), infos[i].element,
                     {infos[i].extents.begin(), infos[i].extents.begin() + infos[i].rank});
    }
  }
  void initialize(auto& initial) {
    const ByNames named(network, initial);
    network.initialize(named);
  }
  double forward(auto& step, const Samples& batch) {
    const ByNames named(network, step);
    return network.forward(named, batch);
  }
  void backward(auto& step, const Samples& batch) {
    const ByNames named(network, step);
    network.backward(named, batch);
  }
};

using Biases = Named<"*.bias">;

template <class... Ps>
void check_reference() {
  std::size_t cases = 0;
  for (const nlohmann::json& c : reference("groups.json")) {
    const std::string name = "groups.json, case " + std::to_string(cases++);
    BOOST_TEST_REQUIRE(c.at("optimizer") == "adamw", name);
    ReferenceFrozen::prefixes = c.at("frozen");
    const std::size_t in = c.at("dims").at(0), out = c.at("dims").at(2), batch = c.at("batch");
    const std::size_t steps = c.at("steps"), world = c.at("world");
    BOOST_TEST_CONTEXT(name) {
      all_well(world, [&](Shared& comm) {
        ListedReference model;
        model.network.in = in;
        model.network.hidden = c.at("dims").at(1);
        model.network.out = out;
        DistributedDataParallel<ListedReference, Optimizer<AdamW>, ReferenceFrozen,
                                ParameterGroups<Biases>, Ps...>
            ddp(comm, model);
        ddp.optimizer().lr = c.at("lr").at("weight");
        ddp.optimizer().weight_decay = c.at("weight_decay").at("weight");
        ddp.optimizer(Biases{}).lr = c.at("lr").at("bias");
        ddp.optimizer(Biases{}).weight_decay = c.at("weight_decay").at("bias");
        for (std::size_t s = 0; s < steps; ++s)
          ddp.step(reference_batch(batch, in, out, s, comm.rank().value()));
        for (std::size_t p = 0; p != detail::parameter_table<Network>.size(); ++p) {
          const std::string tensor(detail::parameter_table<Network>.name(p));
          const std::vector<double> want = c.at("params").at(tensor);
          const auto have = ddp.param(p);
          require(have.size() == want.size(), "the size of " + tensor);
          for (std::size_t i = 0; i < want.size(); ++i) {
            require(std::abs(have(i) - want[i]) <= 1e-9 * std::max(std::abs(want[i]), 1e-3),
                    tensor + "[" + std::to_string(i) + "] is " + std::to_string(have(i)) +
                        ", PyTorch has " + std::to_string(want[i]));
          }
        }
      });
    }
  }
  BOOST_TEST(cases != 0u, "groups.json has no cases");
}

}  // namespace

BOOST_AUTO_TEST_CASE(frozen_parameters_and_groups_train_as_in_pytorch) {
  check_reference<>();
  check_reference<Sharding<Replicated>, Buckets<BucketLimits{600, 1500}>>();
}

// ---- Random networks against one process

namespace {

/// Policies, and by hand the group of every parameter of the network in the order of their
/// declaration: -1 for frozen ones.
template <class Still, class TheGroups, int... Group>
struct Sets {
  using frozen = Still;
  using groups = TheGroups;
  static constexpr std::array<int, 6> group{Group...};
};
using FrozenBase = Sets<Frozen<"fc1.*">, ParameterGroups<NoDecay<>>, -1, -1, 0, 1, 0, 1>;
using FrozenHead =
    Sets<Frozen<"fc2.bias", "fc3.*">, ParameterGroups<Named<"*.weight">>, 1, 0, 1, -1, -1, -1>;
using ManyGroups =
    Sets<Frozen<>, ParameterGroups<Named<"fc2.*">, NoDecay<"*.bias">, Named<"fc1.w*">>, 3, 2, 1, 1,
         0, 2>;

struct Numbers {
  double lr;
  double decay;
};
using NumbersOfGroups = std::array<Numbers, 4>;

template <class... TheSets>
void set_numbers(auto& ddp, ParameterGroups<TheSets...>, const NumbersOfGroups& numbers) {
  const auto set = [](auto& options, const Numbers& own) {
    options.lr = own.lr;
    options.weight_decay = own.decay;
  };
  set(ddp.optimizer(), numbers[0]);
  std::size_t group = 0;
  (set(ddp.optimizer(TheSets{}), numbers[++group]), ...);
}

/// All numbers of a job, one parameter behind the other.
std::vector<double> numbers_of(const auto& ddp) {
  std::vector<double> all;
  Network::for_each_parameter(ddp, [&](const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

struct RandomCase {
  std::size_t world = 1, in = 1, hidden = 1, out = 2, rows = 1, salt = 0;
  NumbersOfGroups numbers{};

  Network network() const { return network_of(in, hidden, out); }
  Samples share(std::size_t step, std::size_t rank) const {
    return reference_batch(rows, in, out, salt + step, rank);
  }
  Samples whole(std::size_t step) const {
    Samples all{in, {}, {}};
    for (std::size_t r = 0; r < world; ++r) {
      const Samples part = share(step, r);
      all.x.insert(all.x.end(), part.x.begin(), part.x.end());
      all.y.insert(all.y.end(), part.y.begin(), part.y.end());
    }
    return all;
  }
};

constexpr std::size_t updates = 3;
constexpr double max_norm = 0.25;

/// Gradients in place of parameters.
template <class Ddp>
struct Gradients {
  const Ddp& ddp;
  auto param(auto key) const { return ddp.grad(key); }
};

/// The gradients of the bare network, and optimizers that are written out.
template <class TheSets>
std::vector<double> train_by_hand(const RandomCase& c) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Network, World<1>> bare(nobody, c.network());
  std::vector<double> values = numbers_of(bare);
  std::vector<plain::Adam> rules(values.size());
  std::vector<bool> trained(values.size());
  std::size_t at = 0, parameter = 0;
  Network::for_each_parameter(bare, [&](const auto& view) {
    const int group = TheSets::group[parameter++];
    for (std::size_t i = 0; i < view.size(); ++i, ++at) {
      trained[at] = group >= 0;
      if (!trained[at]) continue;
      const Numbers& own = c.numbers[static_cast<std::size_t>(group)];
      rules[at] = adam(own.lr, own.decay);
    }
  });
  for (std::size_t s = 0; s < updates; ++s) {
    bare.initialize([&](auto& initial) {
      std::size_t i = 0;
      Network::for_each_parameter(initial, [&](const auto& view) {
        for (std::size_t k = 0; k < view.size(); ++k) view.data_handle()[k] = values[i++];
      });
    });
    const Samples batch = c.whole(s);
    static_cast<void>(bare.forward(batch).backward().reduce());
    const std::vector<double> gradients = numbers_of(Gradients<decltype(bare)>{bare});
    double squares = 0;
    for (std::size_t i = 0; i < values.size(); ++i)
      squares += trained[i] ? gradients[i] * gradients[i] : 0;
    const double factor = std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6));
    for (std::size_t i = 0; i < values.size(); ++i)
      if (trained[i]) rules[i].update(values[i], factor * gradients[i]);
  }
  return values;
}

constexpr std::size_t most_numbers = 4000;

template <class TheSets, class... Ps>
std::vector<double> train_on_ranks(const RandomCase& c, std::size_t count) {
  const ranks::Common<std::array<double, most_numbers>> result;
  all_well(c.world, [&](Shared& comm) {
    DistributedDataParallel<Network, Optimizer<AdamW>, Clip<max_norm>, typename TheSets::frozen,
                            typename TheSets::groups, Ps...>
        ddp(comm, c.network());
    set_numbers(ddp, typename TheSets::groups{}, c.numbers);
    for (std::size_t s = 0; s < updates; ++s) ddp.step(c.share(s, comm.rank().value()));
    const std::vector<double> mine = numbers_of(ddp);
    std::vector<double> all(mine.size() * c.world);
    comm.all_gather(mine, all);
    for (std::size_t i = 0; i < all.size(); ++i)
      require(all[i] == mine[i % mine.size()], "ranks have other bits");
    if (comm.rank() == Rank{0}) std::copy(mine.begin(), mine.end(), result->begin());
  });
  return {result->begin(), result->begin() + static_cast<std::ptrdiff_t>(count)};
}

template <class TheSets>
void check_random_networks() {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(2, 40); ++i) {
    RandomCase c;
    c.world = 1 + chance(4);
    c.in = 1 + chance(30);
    c.hidden = 1 + chance(30);
    c.out = 2 + chance(20);
    c.rows = 1 + chance(5);
    c.salt = chance(1000);
    for (Numbers& own : c.numbers) own = {0.001 * (1 + chance(50)), 0.1 * chance(4)};
    const std::string what = std::to_string(c.in) + "-" + std::to_string(c.hidden) + "-" +
                             std::to_string(c.out) + " on " + std::to_string(c.world) + " ranks";
    const std::vector<double> want = train_by_hand<TheSets>(c);
    require_close(train_on_ranks<TheSets>(c, want.size()), want, what);
    require_close(train_on_ranks<TheSets, Sharding<Replicated>, Buckets<BucketLimits{200, 3000}>>(
                      c, want.size()),
                  want, what + ", replicated");
    DataParallel<Network, Optimizer<AdamW>, Clip<max_norm>, typename TheSets::frozen,
                 typename TheSets::groups>
        dp({.replicas = c.world}, c.network());
    set_numbers(dp, typename TheSets::groups{}, c.numbers);
    for (std::size_t s = 0; s < updates; ++s) dp.step(c.whole(s));
    require_close(numbers_of(dp), want, what + ", replicas");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_frozen_base_and_no_decay_of_vectors) { check_random_networks<FrozenBase>(); }
BOOST_AUTO_TEST_CASE(a_frozen_head_and_a_group_of_weights) { check_random_networks<FrozenHead>(); }
BOOST_AUTO_TEST_CASE(groups_that_alternate_in_every_bucket) { check_random_networks<ManyGroups>(); }

// ---- Tensors that are listed, and what can go wrong

BOOST_AUTO_TEST_CASE(listed_tensors_are_frozen_and_grouped_to_the_same_bits) {
  using Fixed = PlainMlp<7, 9, 4>;
  using Listed = ListedModel<Fixed, double>;
  LoopbackCommunicator nobody;
  using Still = Frozen<"fc1.*", "fc3.bias">;
  using Groups = ParameterGroups<Vectors>;
  DistributedDataParallel<Fixed, World<1>, Still, Groups, Optimizer<AdamW>> declared(nobody);
  DistributedDataParallel<Listed, World<1>, Accumulate<2>, Still, Groups, Optimizer<AdamW>> listed(
      nobody);
  declared.optimizer(Vectors{}).lr = listed.optimizer(Vectors{}).lr = 0.125;
  for (std::size_t s = 0; s < 3; ++s) {
    const Samples batch = reference_batch(5, 7, 4, s, 0);
    declared.step(batch);
    listed.step(batch);
    listed.step(batch);
  }
  const ByName<Fixed, decltype(listed)> named(listed);
  BOOST_TEST((numbers_of(named) == numbers_of(declared)));
  std::string words;
  try {
    static_cast<void>(listed.grad(0));
  } catch (const Error& error) {
    words = error.what();
  }
  BOOST_TEST(words.find("fc1.weight is frozen and has no gradient") != std::string::npos, words);
}

namespace {

template <class... Ps>
std::string words_of_listed() {
  LoopbackCommunicator nobody;
  try {
    DistributedDataParallel<ListedModel<Sheet<>, double>, World<1>, Ps...> ddp(nobody);
    return "nothing went wrong";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(sets_without_listed_tensors_are_rejected) {
  const auto says = [](const std::string& words, const std::string& part) {
    BOOST_TEST(words.find(part) != std::string::npos, words);
  };
  says(words_of_listed<Frozen<"a", "head.*">>(), "lists no parameter that matches head.*");
  says(words_of_listed<Frozen<"a", "*b*", "c">>(), "all parameters are frozen");
  says(words_of_listed<Frozen<"a">, ParameterGroups<Named<"b">, Named<"a">>>(),
       "group 2 of 2 has no parameter");
  says(words_of_listed<Frozen<"a">, ParameterGroups<Named<"b">>>(), "nothing went wrong");
}

BOOST_AUTO_TEST_CASE(ranks_that_freeze_other_parameters_are_told_so) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    if (comm.rank() == Rank{0}) {
      DistributedDataParallel<Sheet<>, Frozen<"a">> ddp(comm);
    } else {
      DistributedDataParallel<Sheet<>, Frozen<"b">> ddp(comm);
    }
  });
  all_say(ends, "Frozen<");
}

BOOST_AUTO_TEST_SUITE_END()

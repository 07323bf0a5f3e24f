// SPDX-License-Identifier: Apache-2.0
// Optimizers whose states are divided among ranks end with the bits of the plain ones.
#include "lockstep/detail/torch/zero_redundancy_optimizer.hpp"

#include <ATen/ATen.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "message_of.hpp"
#include "torch/small_net.hpp"

#if LOCKSTEP_HAS_GLOO
#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#endif

BOOST_AUTO_TEST_SUITE(torch_zero_redundancy_optimizer)

namespace {

using namespace ranks;
using namespace torch_net;
namespace optim = torch::optim;
namespace loops = lockstep::torch;
template <class O>
using Zero = loops::ZeroRedundancyOptimizer<O>;
using Groups = std::vector<optim::OptimizerParamGroup>;

void require_same(const torch::nn::Module& a, const torch::nn::Module& b, const std::string& when) {
  const auto as = a.named_parameters(), bs = b.named_parameters();
  for (const auto& each : as)
    require(at::equal(each.value(), bs[each.key()]), when + ": " + each.key() + " differs");
}
void require_says(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'" + text + "' lacks '" + part + "'");
}
/// The elements of all states that an optimizer holds.
std::int64_t state_elements(const optim::Optimizer& optimizer) {
  const auto whole = lockstep::optimizer_state_dict(optimizer).toGenericDict();
  std::int64_t sum = 0;
  for (const auto& state : whole.at("state").toGenericDict())
    for (const auto& entry : state.value().toGenericDict())
      if (entry.key().toStringRef() != "step") sum += entry.value().toTensor().numel();
  return sum;
}

/// Have they the same structure, with the same bits?
bool same(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isTensor())
    return a.toTensor().scalar_type() == b.toTensor().scalar_type() &&
           at::equal(a.toTensor(), b.toTensor());
  if (a.isList() || a.isTuple()) {
    const auto as = a.isList() ? a.toListRef().vec() : a.toTupleRef().elements().vec();
    const auto bs = b.isList() ? b.toListRef().vec() : b.toTupleRef().elements().vec();
    return std::ranges::equal(as, bs, same);
  }
  if (!a.isGenericDict()) return a == b;
  const auto as = a.toGenericDict(), bs = b.toGenericDict();
  bool is_same = as.size() == bs.size();
  auto other = bs.begin();
  for (auto each = as.begin(); is_same && each != as.end(); ++each, ++other)
    is_same = same(each->key(), other->key()) && same(each->value(), other->value());
  return is_same;
}

/// Two groups, of which the second has a learning rate of its own.
template <class Options>
Groups groups_of(Net& net, const Options& options) {
  auto slower = std::make_unique<Options>(options);
  slower->lr(options.lr() / 2);
  Groups groups;
  groups.emplace_back(net.in->parameters());
  std::vector<at::Tensor> rest = net.out->parameters();
  for (const at::Tensor& each : net.extra->parameters()) rest.push_back(each);
  groups.emplace_back(rest, std::move(slower));
  groups.emplace_back(net.frozen->parameters());  // they have no gradients
  return groups;
}

/// Trains the same module with the plain optimizer and with the divided one, under the wrapper that
/// averages, with a scheduler.
template <class O, class Ddp, class Options>
void train_both(auto& comm, const std::string& what, const Options& options) {
  const std::size_t rank = comm.rank().value();
  auto plain_net = make_net(), net = make_net();
  Ddp plain_ddp(plain_net, comm), ddp(net, comm);
  O plain(groups_of(*plain_net, options), options);
  Zero<O> optimizer(groups_of(*net, options), ddp, options);
  optim::StepLR plain_schedule(plain, 2, 0.5), schedule(optimizer, 2, 0.5);
  for (std::size_t s = 0; s != 6; ++s) {
    const std::string when = what + ", step " + std::to_string(s);
    const bool with_none = s % 2 == 0;
    loss_of(plain_ddp(inputs_of(s, rank))).backward();
    loss_of(ddp(inputs_of(s, rank))).backward();
    plain.step();
    optimizer.step();
    require_same(*net, *plain_net, when);
    plain.zero_grad(with_none);
    optimizer.zero_grad(with_none);
    for (const at::Tensor& each : net->parameters())
      require(!each.grad().defined() || (!with_none && each.grad().abs().max().item<float>() == 0),
              when + ": a gradient is left");
    plain_schedule.step();
    schedule.step();
  }
  require(optimizer.param_groups()[1].options().get_lr() < options.lr() / 4, "no schedule");
}

/// With every optimizer.
template <class Ddp>
void train_all(auto& comm) {
  at::set_num_threads(1);
  train_both<optim::SGD, Ddp>(comm, "sgd", optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  train_both<optim::Adam, Ddp>(comm, "adam", optim::AdamOptions(0.01).amsgrad(true));
  train_both<optim::AdamW, Ddp>(comm, "adamw", optim::AdamWOptions(0.01).weight_decay(0.1));
  train_both<optim::RMSprop, Ddp>(comm, "rmsprop",
                                  optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
  train_both<optim::Adagrad, Ddp>(comm, "adagrad", optim::AdagradOptions(0.1).lr_decay(0.1));
}

/// Deterministic gradients, the same on all ranks.
void set_gradients(torch::nn::Module& net, std::int64_t step) {
  std::int64_t number = step * 100;
  for (at::Tensor& each : net.parameters()) {
    if (!each.requires_grad()) continue;
    const at::Tensor i = at::arange(each.numel(), at::kFloat).view(each.sizes());
    each.mutable_grad() = at::sin(i + static_cast<double>(++number));
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(parameters_are_divided_as_in_pytorch) {
  std::vector<std::size_t> sums(2);
  const auto divide = [&](const std::vector<std::size_t>& elements) {
    return lockstep::detail::divide_parameters(elements, sums);
  };
  BOOST_TEST(divide({5, 9, 4, 4, 1}) == (std::vector<std::size_t>{1, 0, 1, 0, 1}),
             boost::test_tools::per_element());
  BOOST_TEST(sums == (std::vector<std::size_t>{13, 10}), boost::test_tools::per_element());
  BOOST_TEST(divide({2, 2}) == (std::vector<std::size_t>{1, 1}), boost::test_tools::per_element());
  BOOST_TEST(divide({}).empty());
}

BOOST_AUTO_TEST_CASE(every_optimizer_ends_with_the_bits_of_the_plain_one) {
  for (const std::size_t world : {1, 2, 4})
    all_well(world, [](auto& comm) { train_all<loops::DistributedDataParallel<Net>>(comm); });
}

#if LOCKSTEP_HAS_GLOO
BOOST_AUTO_TEST_CASE(with_gloo_too) {
  for (const std::size_t world : {1, 2, 4}) {
    const Ends ends = run_processes<Sockets>(world, 30s, [](auto& comm) {
      train_all<loops::DistributedDataParallel<Net, lockstep::Backend<lockstep::Gloo>>>(comm);
    });
    for (const std::string& end : ends) BOOST_TEST(end == "");
  }
}
#endif

BOOST_AUTO_TEST_CASE(each_rank_has_the_states_of_its_share_alone) {
  for (const std::size_t world : {1, 2, 4}) {
    all_well(world, [&](auto& comm) {
      torch::nn::Sequential net;
      for (int i = 0; i != 8; ++i) net->push_back(torch::nn::Linear(24, 24 + i));
      std::int64_t all = 0;
      for (const at::Tensor& each : net->parameters()) all += each.numel();
      Zero<optim::Adam> optimizer(net->parameters(), comm);
      for (std::int64_t s = 0; s != 2; ++s) {
        set_gradients(*net, s);
        optimizer.step();
      }
      const std::int64_t own = state_elements(optimizer.optim());
      const auto share = static_cast<double>(2 * all) / static_cast<double>(world);
      require(static_cast<double>(own) < 1.15 * share && static_cast<double>(own) > 0.85 * share,
              std::to_string(own) + " elements of " + std::to_string(2 * all));
      require(comm.all_reduce(own) == 2 * all, "the shares are not the whole");
      require(optimizer.state().empty(), "the wrapper has states");
      optimizer.consolidate_state_dict();
      if (comm.rank().value() == 0)
        require(state_elements(optimizer) == 2 * all, "the state_dict is not whole");
    });
  }
}

BOOST_AUTO_TEST_CASE(large_and_small_parameters_arrive_by_every_way) {
  for (const std::size_t world : {1, 2, 4}) {
    all_well(world, [&](auto& comm) {
      using Exchange = lockstep::detail::ParameterExchange;
      const lockstep::detail::OptimizerRanks ranks(comm);
      for (const std::size_t large : {1, 100, 1000, 1000000}) {
        for (const bool to_one : {false, true}) {
          std::vector<at::Tensor> parameters, wanted;
          std::vector<std::size_t> owners;
          for (const std::int64_t n : {0, 1, 3, 25, 30, 60, 90, 300, 400, 25, 1, 7}) {
            const auto type = n == 3 ? at::kDouble : n == 60 ? at::kBFloat16 : at::kFloat;
            at::Tensor value = (at::arange(n) + parameters.size()).to(type);
            if (n % 2 == 0) value = value.view({2, n / 2});
            owners.push_back(to_one ? world - 1 : (parameters.size() * 7 + 1) % world);
            wanted.push_back(value);
            at::Tensor has = at::zeros_like(value);
            if (n == 300 || n == 60) has = has.t().contiguous().t();  // other strides
            if (owners.back() == comm.rank().value()) has.copy_(value);
            parameters.push_back(has.requires_grad_());
          }
          const std::int64_t version = parameters[8]._version();
          Exchange exchange(parameters, owners, ranks, {large, 200 * world});
          for (int twice = 0; twice != 2; ++twice) {
            exchange.run(ranks);
            for (std::size_t i = 0; i != parameters.size(); ++i)
              require(at::equal(parameters[i], wanted[i]),
                      "parameter " + std::to_string(i) + " with " + std::to_string(large));
          }
          require(owners[8] == comm.rank().value() || parameters[8]._version() > version,
                  "autograd has not seen the change");
        }
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(a_state_dict_is_the_plain_optimizers_and_goes_to_other_numbers_of_ranks) {
  const Common<std::array<char, 1 << 16>> file;
  const Common<std::size_t> bytes;
  const optim::AdamOptions options = optim::AdamOptions(0.01).amsgrad(true);
  // Written by four ranks, two, one; each goes on from what the one before has written.
  std::size_t step = 0;
  for (const std::size_t world : {1, 4, 2, 1, 2}) {
    all_well(world, [&](auto& comm) {
      at::set_num_threads(1);
      auto alone = make_net(), net = make_net();
      optim::Adam plain(groups_of(*alone, options), options);
      for (std::size_t s = 0; s != step; ++s) {
        set_gradients(*alone, static_cast<std::int64_t>(s));
        plain.step();
      }
      {
        const at::NoGradGuard quiet;
        const auto from = alone->parameters();
        const auto to = net->parameters();
        for (std::size_t i = 0; i != to.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
      }
      Zero<optim::Adam> optimizer(groups_of(*net, options), comm,
                                  step == 0 ? options : optim::AdamOptions(0.5));
      if (step != 0) {
        const c10::IValue saved = torch::pickle_load(
            std::vector<char>(file->begin(), file->begin() + static_cast<std::ptrdiff_t>(*bytes)));
        lockstep::load_optimizer_state_dict(optimizer, saved);
      }
      for (std::size_t s = step; s != step + 2; ++s) {
        set_gradients(*alone, static_cast<std::int64_t>(s));
        set_gradients(*net, static_cast<std::int64_t>(s));
        plain.step();
        optimizer.step();
      }
      require_same(*net, *alone, "after " + std::to_string(step) + " steps");
      const lockstep::Rank to{comm.world_size().value() - 1};
      require_says(message_of([&] { optimizer.state_dict(); }),
                   "call consolidate_state_dict(rank) on all ranks");
      optimizer.consolidate_state_dict(to);
      if (comm.rank() == to) {
        const c10::IValue state_dict = lockstep::optimizer_state_dict(optimizer);
        require(same(state_dict, lockstep::optimizer_state_dict(plain)),
                "another state_dict than the plain optimizer's");
        const std::vector<char> whole = torch::pickle_save(state_dict);
        require(whole.size() <= file->size(), "the file is too large");
        *bytes = whole.size();
        std::ranges::copy(whole, file->begin());
      } else {
        require_says(message_of([&] { optimizer.state_dict(); }), "this one has not gathered");
      }
      set_gradients(*net, 1);
      optimizer.step();  // the gathered states are old now
      require_says(message_of([&] { optimizer.state_dict(); }), "since the last step");
    });
    step += 2;
  }
}

BOOST_AUTO_TEST_CASE(groups_can_be_added_and_a_parameter_may_be_there_twice) {
  for (const std::size_t world : {1, 2, 4}) {
    all_well(world, [&](auto& comm) {
      at::set_num_threads(1);
      auto alone = make_net(), net = make_net();
      const auto twice = [](Net& of) {
        std::vector<at::Tensor> all = of.in->parameters();
        all.push_back(of.in->weight);  // as the parameters() of a module with tied ones
        return all;
      };
      optim::Adam plain(twice(*alone), optim::AdamOptions(0.01));
      Zero<optim::Adam> optimizer(twice(*net), comm, optim::AdamOptions(0.01));
      for (std::int64_t s = 0; s != 6; ++s) {
        if (s == 2) {
          plain.add_param_group(optim::OptimizerParamGroup(alone->out->parameters()));
          optimizer.add_param_group(optim::OptimizerParamGroup(net->out->parameters()));
        } else if (s == 4) {
          optim::Optimizer& base = optimizer;  // whose function is not virtual
          plain.add_param_group(optim::OptimizerParamGroup(alone->extra->parameters()));
          base.add_param_group(optim::OptimizerParamGroup(net->extra->parameters()));
        }
        set_gradients(*alone, s);
        set_gradients(*net, s);
        if (s == 3) alone->out->bias.mutable_grad().reset(), net->out->bias.mutable_grad().reset();
        plain.step();
        const at::Tensor loss = optimizer.step([&] { return at::full({}, 3.0); });
        require(loss.item<double>() == 3, "no loss of the closure");
        require_same(*net, *alone, "step " + std::to_string(s));
      }
      optimizer.param_groups()[0].params().push_back(net->extra->weight);
      require_says(message_of([&] { optimizer.step(); }),
                   "group 0 has 4 parameters, and was divided with 3; add parameters with "
                   "add_param_group");
    });
  }
}

BOOST_AUTO_TEST_CASE(ranks_with_other_parameters_or_options_are_named) {
  const auto ends_of = [](const auto& make) {
    return ranks::run(As::processes, 4, [&](auto& comm) { make(comm, comm.rank().value() == 2); });
  };
  all_say(ends_of([](auto& comm, bool other) {
            auto net = make_net();
            std::vector<at::Tensor> all = net->parameters();
            if (other) all[1] = at::zeros({2, 3});
            Zero<optim::Adam> optimizer(all, comm);
          }),
          "ZeroRedundancyOptimizer: ranks have different optimizers: rank 0 has \"group 0, "
          "parameter 1: Float [7]\" and rank 2 has \"group 0, parameter 1: Float [2, 3]\"");
  all_say(ends_of([](auto& comm, bool other) {
            auto net = make_net();
            Zero<optim::Adam> optimizer(net->parameters(), comm,
                                        optim::AdamOptions(other ? 0.5 : 0.25));
          }),
          "rank 0 has \"group 0: lr = 0.25\" and rank 2 has \"group 0: lr = 0.5\"");
  all_say(ends_of([](auto& comm, bool other) {
            auto net = make_net();
            Groups groups{net->in->parameters()};
            if (!other) groups.emplace_back(net->out->parameters());
            Zero<optim::SGD> optimizer(groups, comm, 0.1);
          }),
          "rank 2 has \"nothing more\"");
  // A failure on one rank reaches the others, which would wait for its parameters.
  const Ends ends = ends_of([](auto& comm, bool other) {
    auto net = make_net();
    Zero<optim::SGD> optimizer(net->parameters(), comm, 0.1);
    optimizer.step([&]() -> at::Tensor {
      if (other) throw std::runtime_error("no luck today");
      return {};
    });
    optimizer.step();
  });
  all_say(ends, "no luck today");
  all_well(2, [](auto& comm) {
    auto net = make_net();
    Zero<optim::SGD> optimizer(net->parameters(), comm, 0.1);
    torch::serialize::OutputArchive archive;
    require_says(message_of([&] { optimizer.save(archive); }), "consolidate_state_dict()");
    net->to(at::kDouble);
    require_says(message_of([&] { optimizer.step(); }),
                 "parameter 0 is of Double and was of Float when the optimizer was made");
  });
}

BOOST_AUTO_TEST_SUITE_END()

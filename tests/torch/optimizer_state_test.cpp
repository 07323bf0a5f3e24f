// SPDX-License-Identifier: Apache-2.0
// State_dicts of LibTorch's optimizers: training goes on from them, here and in Python.
#include "lockstep/detail/torch/optimizer_state.hpp"

#include <ATen/ATen.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "message_of.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"
#include "train/python.hpp"

BOOST_AUTO_TEST_SUITE(torch_optimizer_state)

namespace {

using lockstep::load_optimizer_state_dict;
using lockstep::optimizer_state_dict;
using namespace torch::optim;
using Groups = std::vector<OptimizerParamGroup>;
using Dict = c10::impl::GenericDict;

void check_says(const std::string& text, const std::string& part) {
  BOOST_TEST(text.find(part) != std::string::npos, "'" << text << "' lacks '" << part << "'");
}

std::vector<at::Tensor> make_parameters() {
  std::vector<at::Tensor> all;
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{3, 4}, {5}, {}, {2, 3, 2}})
    all.push_back((at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.125 - 0.5)
                      .view(sizes)
                      .requires_grad_());
  return all;
}
/// optimizer_state_peer.py has the same.
at::Tensor gradient(const at::Tensor& parameter, std::int64_t step) {
  const at::Tensor i = at::arange(parameter.numel(), at::kFloat).view(parameter.sizes());
  return parameter.detach() * 0.25 + at::remainder(i * 5 + step * 3, 7) * 0.0625 - 0.1875;
}
void train(Optimizer& optimizer, std::int64_t first, std::int64_t steps) {
  for (std::int64_t s = first; s != first + steps; ++s) {
    for (auto& group : optimizer.param_groups())
      for (at::Tensor& each : group.params()) each.mutable_grad() = gradient(each, s);
    optimizer.step();
  }
}

/// An optimizer with options that matter, and one of the same class with others.
struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Groups&)> make;
  std::function<std::unique_ptr<Optimizer>(const Groups&)> make_plain;
  std::size_t states;  ///< tensors of each parameter
};
template <class O, class Options>
Case make_case(const std::string& name, const Options& options, std::size_t states) {
  return {name,
          [=](const Groups& of) {
            auto optimizer = std::make_unique<O>(of, options);
            // The second group has a learning rate of its own.
            auto& second = optimizer->param_groups().back().options();
            second.set_lr(second.get_lr() / 4);
            return optimizer;
          },
          [](const Groups& of) { return std::make_unique<O>(of, Options(1e-5)); }, states};
}
const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      make_case<SGD>("sgd", SGDOptions(0.1), 0),
      make_case<SGD>("sgd_momentum",
                     SGDOptions(0.1).momentum(0.9).dampening(0.25).weight_decay(0.1), 1),
      make_case<SGD>("sgd_nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true), 1),
      make_case<Adam>("adam", AdamOptions(0.01).betas({0.8, 0.99}).eps(1e-6).weight_decay(0.1), 2),
      make_case<Adam>("adam_amsgrad", AdamOptions(0.01).amsgrad(true), 3),
      make_case<AdamW>("adamw", AdamWOptions(0.01).weight_decay(0.2), 2),
      make_case<AdamW>("adamw_amsgrad", AdamWOptions(0.01).amsgrad(true), 3),
      make_case<RMSprop>("rmsprop", RMSpropOptions(0.01).alpha(0.9).weight_decay(0.1), 1),
      make_case<RMSprop>("rmsprop_centered", RMSpropOptions(0.01).momentum(0.5).centered(true), 3),
      make_case<Adagrad>("adagrad",
                         AdagradOptions(0.1).lr_decay(0.25).initial_accumulator_value(0.5), 1)};
  return all;
}
const Case& case_of(const std::string& name) {
  for (const Case& each : cases())
    if (each.name == name) return each;
  throw std::runtime_error("no case " + name);
}

Groups groups_of(const std::vector<at::Tensor>& parameters) {
  return {std::vector<at::Tensor>{parameters[0], parameters[1]},
          std::vector<at::Tensor>{parameters[2], parameters[3]}};
}
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : parameters) all.push_back(each.detach().clone().requires_grad_());
  return all;
}

c10::IValue at_key(const c10::IValue& dict, const c10::IValue& key) {
  return dict.toGenericDict().at(key);
}
void erase(const Dict& from, const c10::IValue& key) {
  if (from.erase(key) != 1) throw std::runtime_error("nothing to erase");
}
Dict group_of(const c10::IValue& state_dict, std::size_t index) {
  return at_key(state_dict, "param_groups").toListRef()[index].toGenericDict();
}
Dict state_of(const c10::IValue& state_dict, std::int64_t number) {
  return at_key(state_dict, "state").toGenericDict().at(number).toGenericDict();
}
/// Through a file's bytes, which also makes it independent of the optimizer.
c10::IValue stored(const c10::IValue& value) {
  return torch::pickle_load(torch::pickle_save(value));
}

std::string python() {
  const std::string found = train::python_with_torch();
  if (found.empty())
    say_skipped("optimizers of PyTorch in " +
                boost::unit_test::framework::current_test_case().full_name() +
                " (no Python with PyTorch here)");
  return found;
}
void write(const c10::IValue& value, const std::string& path) {
  const std::vector<char> bytes = torch::pickle_save(value);
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}
c10::IValue read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return torch::pickle_load(std::vector<char>(std::istreambuf_iterator<char>(file), {}));
}

}  // namespace

BOOST_AUTO_TEST_CASE(training_goes_on_from_a_state_dict_with_the_same_bits) {
  for (const Case& each : cases()) {
    for (const std::int64_t before : {0, 1, 4}) {
      const std::vector<at::Tensor> parameters = make_parameters();
      const auto optimizer = each.make(groups_of(parameters));
      train(*optimizer, 0, before);
      const c10::IValue saved = stored(optimizer_state_dict(*optimizer));
      const std::vector<at::Tensor> others = copies(parameters);
      const auto other = each.make_plain(groups_of(others));
      train(*other, 7, before == 1 ? 2 : 0);  // states that are replaced
      {
        const at::NoGradGuard quiet;
        for (std::size_t i = 0; i != others.size(); ++i) others[i].copy_(parameters[i]);
      }
      load_optimizer_state_dict(*other, saved);
      train(*optimizer, before, 3);
      train(*other, before, 3);
      for (std::size_t i = 0; i != others.size(); ++i)
        BOOST_TEST(at::equal(parameters[i], others[i]),
                   each.name << ", parameter " << i << " after " << before << " steps");
    }
  }
}

BOOST_AUTO_TEST_CASE(the_structure_is_pythons) {
  for (const Case& each : cases()) {
    const std::vector<at::Tensor> parameters = make_parameters();
    const auto optimizer = each.make(groups_of(parameters));
    if (!each.name.starts_with("adagrad"))
      BOOST_TEST(at_key(optimizer_state_dict(*optimizer), "state").toGenericDict().empty());
    train(*optimizer, 0, 3);
    const c10::IValue saved = optimizer_state_dict(*optimizer);
    BOOST_TEST(at_key(saved, "param_groups").toListRef().size() == 2u);
    BOOST_TEST(group_of(saved, 1).at("params").toListRef()[1].toInt() == 3);
    BOOST_TEST(group_of(saved, 0).at("lr").toDouble() ==
               4 * group_of(saved, 1).at("lr").toDouble());
    BOOST_TEST(!group_of(saved, 0).at("maximize").toBool());
    if (each.states == 0) continue;
    BOOST_TEST(at_key(saved, "state").toGenericDict().size() == 4u);
    const Dict state = state_of(saved, 3);
    const bool counts = !each.name.starts_with("sgd");
    BOOST_TEST(state.size() == each.states + (counts ? 1 : 0), each.name);
    if (!counts) continue;
    BOOST_TEST(state.at("step").toTensor().item<double>() == 3);
    BOOST_TEST(state.at("step").toTensor().scalar_type() == at::kDouble);
    BOOST_TEST(state.at("step").toTensor().dim() == 0);
  }
}

BOOST_AUTO_TEST_CASE(
    a_parameter_without_a_gradient_has_no_state_and_one_that_is_there_twice_has_one) {
  const std::vector<at::Tensor> parameters = make_parameters();
  const at::Tensor &first = parameters[0], &second = parameters[1], &third = parameters[2];
  Adam optimizer(Groups{std::vector<at::Tensor>{first, second, first}, std::vector{third}});
  second.mutable_grad() = gradient(second, 1);
  third.mutable_grad() = gradient(third, 1);
  optimizer.step();
  const c10::IValue saved = optimizer_state_dict(optimizer);
  BOOST_TEST(at_key(saved, "state").toGenericDict().size() == 2u);
  BOOST_TEST(state_of(saved, 3).contains("exp_avg"));  // numbers go on after three places
  const auto numbers = group_of(saved, 0).at("params").toList();
  BOOST_TEST(numbers.size() == 3u);
  BOOST_TEST(numbers.get(2).toInt() == 0);
  Adam other(Groups{std::vector<at::Tensor>{first, second, first}, std::vector{third}});
  load_optimizer_state_dict(other, saved);
  BOOST_TEST(other.state().size() == 2u);
  BOOST_TEST(other.state().count(second.unsafeGetTensorImpl()) == 1u);
}

BOOST_AUTO_TEST_CASE(states_have_the_type_of_their_parameters_and_steps_any_type) {
  const at::Tensor parameter = at::ones({2, 3}, at::kBFloat16).requires_grad_();
  Adam optimizer(std::vector<at::Tensor>{parameter});
  const auto take = [&](const c10::IValue& step) {
    std::vector<at::Tensor> wide{at::ones({2, 3}, at::kDouble).requires_grad_()};
    Adam from(wide);
    wide[0].mutable_grad() = at::full({2, 3}, 0.3, at::kDouble);
    from.step();
    const c10::IValue saved = optimizer_state_dict(from);
    state_of(saved, 0).insert_or_assign("step", step);
    group_of(saved, 0).insert_or_assign("lr", at::scalar_tensor(0.5));
    group_of(saved, 0).insert_or_assign("weight_decay", 0);
    load_optimizer_state_dict(optimizer, saved);
    BOOST_TEST(optimizer.param_groups()[0].options().get_lr() == 0.5);
    const auto& state =
        static_cast<AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    BOOST_TEST(state.exp_avg().scalar_type() == at::kBFloat16);
    // A copy: what is done to one does not reach the other.
    BOOST_TEST(!state.exp_avg().is_alias_of(state_of(saved, 0).at("exp_avg").toTensor()));
    return state.step();
  };
  constexpr std::int64_t many = (std::int64_t{1} << 40) + 1;
  BOOST_TEST(take(5) == 5);
  BOOST_TEST(take(5.0) == 5);
  BOOST_TEST(take(at::scalar_tensor(7, at::kFloat)) == 7);
  BOOST_TEST(take(at::full({1}, 7, at::kInt)) == 7);
  BOOST_TEST(take(at::scalar_tensor(many, at::kLong)) == many);
  BOOST_TEST(take(state_of(stored(optimizer_state_dict(optimizer)), 0).at("step")) == many);
  check_says(message_of([&] { take(2.5); }), "'step' of parameter 0 of group 0 is 2.5, not a");
}

BOOST_AUTO_TEST_CASE(what_does_not_fit_is_named_and_nothing_changes) {
  std::vector<at::Tensor> parameters = make_parameters();
  const auto optimizer = case_of("adam").make(groups_of(parameters));
  train(*optimizer, 0, 2);
  const c10::IValue kept = stored(optimizer_state_dict(*optimizer));
  const auto words = [&](const c10::IValue& value) {
    const std::string said = message_of([&] { load_optimizer_state_dict(*optimizer, value); });
    const c10::IValue now = optimizer_state_dict(*optimizer);
    for (std::int64_t i = 0; i != 4; ++i)
      BOOST_TEST(at::equal(state_of(now, i).at("exp_avg").toTensor(),
                           state_of(kept, i).at("exp_avg").toTensor()));
    BOOST_TEST(group_of(now, 0).at("lr").toDouble() == 0.01);
    return said;
  };
  const auto with = [&](const auto& change) {
    c10::IValue value = stored(kept);
    group_of(value, 0).insert_or_assign("lr", 0.75);  // which must not arrive
    change(value);
    return words(value);
  };
  const auto of_case = [&](const std::string& name) {
    const std::vector<at::Tensor> others = make_parameters();
    const auto other = case_of(name).make(groups_of(others));
    train(*other, 0, 1);
    return words(optimizer_state_dict(*other));
  };

  check_says(words(3), "the value is Int, not a dict");
  check_says(with([](auto& v) { erase(v.toGenericDict(), "state"); }), "the value has no 'state'");
  Adam single(parameters);
  check_says(words(optimizer_state_dict(single)),
             "load_optimizer_state_dict: the state_dict does not fit the optimizer: it has 1 "
             "parameter group, and the optimizer has 2");
  Adam uneven(Groups{std::vector{parameters[0]},
                     std::vector<at::Tensor>{parameters[1], parameters[2], parameters[3]}});
  check_says(words(optimizer_state_dict(uneven)),
             "its group 0 has 1 parameter, and the optimizer's has 2");
  check_says(of_case("sgd_momentum"), "it has no option 'betas' of group 0, which Adam needs");
  check_says(of_case("sgd_momentum"), "state_dict of an optimizer of the same class");
  check_says(of_case("adamw"),
             "group 0 has the option decoupled_weight_decay = True, which torch::optim::Adam does "
             "not compute");
  check_says(of_case("adamw"), "load the state_dict of AdamW with AdamW");
  check_says(with([](auto& v) { group_of(v, 1).insert_or_assign("maximize", true); }),
             "group 1 has the option maximize = True");
  check_says(with([](auto& v) { group_of(v, 1).insert_or_assign("momentum_decay", 0.004); }),
             "group 1 has the option momentum_decay = 0.004");
  check_says(with([](auto& v) { group_of(v, 1).insert_or_assign("lr", "fast"); }),
             "option 'lr' of group 1 is fast, not a number");
  check_says(with([](auto& v) { group_of(v, 1).insert_or_assign("betas", 0.5); }),
             "option 'betas' of group 1 is 0.5, not two numbers");
  check_says(with([](auto& v) { group_of(v, 1).insert_or_assign("amsgrad", true); }),
             "it has no 'max_exp_avg_sq' of parameter 0 of group 1, which Adam needs with amsgrad");
  check_says(with([](auto& v) { erase(state_of(v, 3), "exp_avg"); }),
             "it has no 'exp_avg' of parameter 1 of group 1, which Adam needs");
  check_says(with([](auto& v) { state_of(v, 3).insert("mu", at::zeros({})); }),
             "it has 'mu' of parameter 1 of group 1, which Adam has not");
  check_says(with([](auto& v) { state_of(v, 1).insert_or_assign("exp_avg", at::zeros({6})); }),
             "'exp_avg' of parameter 1 of group 0 has shape [6], and the parameter has [5]");
  check_says(with([](auto& v) { state_of(v, 1).insert_or_assign("exp_avg", 2.0); }),
             "'exp_avg' of parameter 1 of group 0 is 2");
  check_says(with([](auto& v) { at_key(v, "state").toGenericDict().insert(9, state_of(v, 3)); }),
             "it has states of 5 parameters, and its groups name 4");
  Adagrad adagrad(groups_of(parameters));
  c10::IValue without = stored(optimizer_state_dict(adagrad));
  erase(at_key(without, "state").toGenericDict(), 2);
  check_says(message_of([&] { load_optimizer_state_dict(adagrad, without); }),
             "it has no state of parameter 0 of group 1, and Adagrad has one for every parameter");

  LBFGS lbfgs(parameters);
  check_says(message_of([&] { optimizer_state_dict(lbfgs); }),
             "only the states of SGD, Adam, AdamW, RMSprop and Adagrad");
  check_says(message_of([&] { load_optimizer_state_dict(lbfgs, kept); }), "torch::save");
}

BOOST_AUTO_TEST_CASE(options_of_python_that_change_no_result_are_taken) {
  std::vector<at::Tensor> parameters = make_parameters();
  Adam optimizer(parameters);
  train(optimizer, 0, 1);
  const c10::IValue value = stored(optimizer_state_dict(optimizer));
  Dict group = group_of(value, 0);
  group.insert_or_assign("foreach", true);
  group.insert_or_assign("fused", true);
  group.insert_or_assign("capturable", true);
  group.insert_or_assign("initial_lr", 0.5);
  group.insert_or_assign("name", "decoder");
  group.insert_or_assign("some_new_switch", false);
  group.insert_or_assign("decoupled_weight_decay", true);  // of nothing
  group.insert_or_assign("lr", 0.25);
  load_optimizer_state_dict(optimizer, value);
  BOOST_TEST(optimizer.param_groups()[0].options().get_lr() == 0.25);
  for (const char* older : {"maximize", "fused", "decoupled_weight_decay"}) erase(group, older);
  load_optimizer_state_dict(optimizer, value);

  SGD plain(parameters, 0.1);  // older Pythons write None where there is no momentum
  train(plain, 0, 1);
  const c10::IValue none = stored(optimizer_state_dict(plain));
  Dict states(c10::IntType::get(), c10::AnyType::get());
  Dict empty(c10::StringType::get(), c10::AnyType::get());
  empty.insert("momentum_buffer", c10::IValue());
  states.insert(0, empty);
  none.toGenericDict().insert_or_assign("state", states);
  load_optimizer_state_dict(plain, none);
  BOOST_TEST(plain.state().empty());
}

BOOST_AUTO_TEST_CASE(python_goes_on_from_a_state_dict_and_its_own_is_loaded_here) {
  if (python().empty()) return;
  const TemporaryFolder folder;
  struct Training {
    Case of;
    std::vector<at::Tensor> parameters = make_parameters();
    decltype(of.make(groups_of(parameters))) optimizer = of.make(groups_of(parameters));
  };
  std::vector<Training> trainings;
  std::string names;
  for (const Case& each : cases()) {
    const Training& training = trainings.emplace_back(Training{each});
    train(*training.optimizer, 0, 3);
    Dict file(c10::StringType::get(), c10::AnyType::get());
    c10::impl::GenericList list(c10::AnyType::get());
    for (const at::Tensor& parameter : training.parameters) list.push_back(parameter.detach());
    file.insert("parameters", list);
    file.insert("optimizer", optimizer_state_dict(*training.optimizer));
    write(file, folder / (each.name + ".pt"));
    names += " " + each.name;
  }
  BOOST_REQUIRE(train::ask_torch(python(), "../torch/optimizer_state_peer.py",
                                 "3 " + folder.path + names, folder / "peer"));
  for (const auto& [each, parameters, optimizer] : trainings) {
    // Python has made the steps 3 to 5, and this one makes them too; LibTorch and Python round
    // some of their sums in another order.
    train(*optimizer, 3, 3);
    const c10::IValue theirs = read(folder / (each.name + "-after.pt"));
    std::vector<at::Tensor> others;
    for (const c10::IValue& parameter : at_key(theirs, "parameters").toListRef())
      others.push_back(parameter.toTensor().detach().clone().requires_grad_());
    for (std::size_t i = 0; i != others.size(); ++i)
      BOOST_TEST(at::allclose(parameters[i], others[i], 1e-5, 1e-6),
                 each.name << ": parameter " << i << " is off by "
                           << (parameters[i] - others[i]).abs().max().item<float>());
    const auto other = each.make_plain(groups_of(others));
    load_optimizer_state_dict(*other, at_key(theirs, "optimizer"));
    const c10::IValue ours = optimizer_state_dict(*optimizer),
                      loaded = optimizer_state_dict(*other);
    BOOST_TEST(group_of(loaded, 1).at("lr").toDouble() == group_of(ours, 1).at("lr").toDouble());
    for (const auto& state : at_key(ours, "state").toGenericDict())
      for (const auto& entry : state.value().toGenericDict()) {
        const at::Tensor tensor = state_of(loaded, state.key().toInt()).at(entry.key()).toTensor();
        BOOST_TEST(at::allclose(entry.value().toTensor(), tensor, 1e-5, 1e-6),
                   each.name << ": " << entry.key().toStringRef() << " of " << state.key());
      }
    train(*optimizer, 6, 2);
    train(*other, 6, 2);
    for (std::size_t i = 0; i != others.size(); ++i)
      BOOST_TEST(at::allclose(parameters[i], others[i], 1e-5, 1e-6), each.name << ", later");
  }
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Python's `optimizer.state_dict()` for LibTorch's optimizers, which have none in C++.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/torch/module.hpp"

namespace lockstep::detail {

/// An optimizer whose states lie on several ranks. It is not one of LibTorch's classes, and has a
/// state_dict of its own.
class ShardedOptimizer {
 public:
  virtual ~ShardedOptimizer() = default;
  /// Gathers all states on one rank. **Ranks** all. **Host** blocks.
  virtual void consolidate_state_dict(Rank to) = 0;
  /// **Ranks** the one that has gathered them.
  virtual c10::IValue state_dict() const = 0;
  /// Throws where `load_state_dict` would. **Ranks** this one alone.
  virtual void check_state_dict(const c10::IValue& state_dict) const = 0;
  /// **Ranks** all, each with the whole.
  virtual void load_state_dict(const c10::IValue& state_dict) = 0;
};

/// An option of a parameter group, under Python's name for it.
struct OptionField {
  std::string_view name;
  std::variant<double*, bool*, std::tuple<double, double>*> value;
};
/// A part of a parameter's state, under Python's name for it.
struct StateField {
  std::string_view name;
  std::variant<std::int64_t*, at::Tensor*> value;
  std::string_view needed_by = {};  ///< the option without which there may be none
};

inline std::vector<OptionField> option_fields(::torch::optim::SGDOptions& of) {
  return std::vector<OptionField>{{"lr", &of.lr()},
                                  {"momentum", &of.momentum()},
                                  {"dampening", &of.dampening()},
                                  {"weight_decay", &of.weight_decay()},
                                  {"nesterov", &of.nesterov()}};
}
template <class AdamOptions>
  requires requires(AdamOptions& of) { of.amsgrad(); }
std::vector<OptionField> option_fields(AdamOptions& of) {
  return std::vector<OptionField>{{"lr", &of.lr()},
                                  {"betas", &of.betas()},
                                  {"eps", &of.eps()},
                                  {"weight_decay", &of.weight_decay()},
                                  {"amsgrad", &of.amsgrad()}};
}
inline std::vector<OptionField> option_fields(::torch::optim::RMSpropOptions& of) {
  return std::vector<OptionField>{
      {"lr", &of.lr()},   {"momentum", &of.momentum()}, {"alpha", &of.alpha()},
      {"eps", &of.eps()}, {"centered", &of.centered()}, {"weight_decay", &of.weight_decay()}};
}
inline std::vector<OptionField> option_fields(::torch::optim::AdagradOptions& of) {
  return std::vector<OptionField>{{"lr", &of.lr()},
                                  {"lr_decay", &of.lr_decay()},
                                  {"eps", &of.eps()},
                                  {"weight_decay", &of.weight_decay()},
                                  {"initial_accumulator_value", &of.initial_accumulator_value()}};
}

inline std::vector<StateField> state_fields(::torch::optim::SGDParamState& of) {
  return std::vector<StateField>{{"momentum_buffer", &of.momentum_buffer()}};
}
template <class AdamState>
  requires requires(AdamState& of) { of.max_exp_avg_sq(); }
std::vector<StateField> state_fields(AdamState& of) {
  return std::vector<StateField>{{"step", &of.step()},
                                 {"exp_avg", &of.exp_avg()},
                                 {"exp_avg_sq", &of.exp_avg_sq()},
                                 {"max_exp_avg_sq", &of.max_exp_avg_sq(), "amsgrad"}};
}
inline std::vector<StateField> state_fields(::torch::optim::RMSpropParamState& of) {
  return std::vector<StateField>{{"step", &of.step()},
                                 {"square_avg", &of.square_avg()},
                                 {"momentum_buffer", &of.momentum_buffer(), "momentum"},
                                 {"grad_avg", &of.grad_avg(), "centered"}};
}
inline std::vector<StateField> state_fields(::torch::optim::AdagradParamState& of) {
  return std::vector<StateField>{{"step", &of.step()}, {"sum", &of.sum()}};
}

/// One of LibTorch's optimizer classes.
struct OptimizerClass {
  using Options = ::torch::optim::OptimizerOptions;
  using State = ::torch::optim::OptimizerParamState;

  std::string_view name;
  bool (*is)(const ::torch::optim::Optimizer&);
  bool (*has_options)(const Options&);
  std::vector<OptionField> (*options)(Options&);
  std::vector<StateField> (*state)(State&);
  std::unique_ptr<State> (*make_state)();
  /// Options that Python has besides, with the values for what LibTorch computes.
  std::vector<std::pair<std::string_view, c10::IValue>> others;
  bool begins_with_states = false;  ///< before the first step
};

template <std::derived_from<::torch::optim::Optimizer> Optimizer, class Options, class State>
OptimizerClass optimizer_class(std::string_view name,
                               std::vector<std::pair<std::string_view, c10::IValue>> others) {
  return {name,
          [](const ::torch::optim::Optimizer& of) {
            return dynamic_cast<const Optimizer*>(&of) != nullptr;
          },
          [](const OptimizerClass::Options& of) {
            return dynamic_cast<const Options*>(&of) != nullptr;
          },
          [](OptimizerClass::Options& of) { return option_fields(static_cast<Options&>(of)); },
          [](OptimizerClass::State& of) { return state_fields(static_cast<State&>(of)); },
          []() -> std::unique_ptr<OptimizerClass::State> { return std::make_unique<State>(); },
          std::move(others)};
}

inline const std::vector<OptimizerClass>& optimizer_classes() {
  namespace optim = ::torch::optim;  // lockstep has an SGD, an Adam and an AdamW too
  static const std::vector<OptimizerClass> all = [] {
    const c10::IValue none;
    const auto adam = [&](bool is_decoupled) {
      return std::vector<std::pair<std::string_view, c10::IValue>>{
          {"maximize", false},       {"foreach", none}, {"capturable", false},
          {"differentiable", false}, {"fused", none},   {"decoupled_weight_decay", is_decoupled}};
    };
    std::vector<OptimizerClass> classes{
        optimizer_class<optim::SGD, optim::SGDOptions, optim::SGDParamState>(
            "SGD",
            {{"maximize", false}, {"foreach", none}, {"differentiable", false}, {"fused", none}}),
        optimizer_class<optim::Adam, optim::AdamOptions, optim::AdamParamState>("Adam",
                                                                                adam(false)),
        optimizer_class<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>("AdamW",
                                                                                   adam(true)),
        optimizer_class<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState>(
            "RMSprop", {{"capturable", false},
                        {"foreach", none},
                        {"maximize", false},
                        {"differentiable", false}}),
        optimizer_class<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState>(
            "Adagrad",
            {{"foreach", none}, {"maximize", false}, {"differentiable", false}, {"fused", none}})};
    classes.back().begins_with_states = true;
    return classes;
  }();
  return all;
}
inline const OptimizerClass& class_of(const ::torch::optim::Optimizer& optimizer,
                                      std::string_view operation) {
  for (const OptimizerClass& each : optimizer_classes())
    if (each.is(optimizer)) return each;
  fail(operation, {"only the states of SGD, Adam, AdamW, RMSprop and Adagrad have names in Python"},
       "use one of these, or write the optimizer with torch::save");
}

using OptimizerGroups = std::vector<::torch::optim::OptimizerParamGroup>;
using OptimizerStates =
    std::remove_cvref_t<decltype(std::declval<::torch::optim::Optimizer&>().state())>;
using StateDict = c10::impl::GenericDict;

inline std::vector<OptionField> group_options(const OptimizerClass& of,
                                              ::torch::optim::OptimizerOptions& options,
                                              std::size_t group, std::string_view operation) {
  if (!of.has_options(options))
    fail(operation, {"group ", group, " has the options of another class than ", of.name},
         text({"give the group torch::optim::", of.name, "Options"}));
  return of.options(options);
}

/// The parameters' numbers, group by group, as Python counts them: a parameter that is there twice
/// has one number.
inline std::vector<std::vector<std::int64_t>> parameter_numbers(const OptimizerGroups& groups) {
  std::vector<std::vector<std::int64_t>> numbers;
  std::unordered_map<const void*, std::int64_t> known;
  std::int64_t next = 0;
  for (const auto& group : groups) {
    numbers.emplace_back();
    for (const at::Tensor& parameter : group.params())
      numbers.back().push_back(
          known.try_emplace(parameter.unsafeGetTensorImpl(), next++).first->second);
  }
  return numbers;
}

inline StateDict string_dict() { return StateDict(c10::StringType::get(), c10::AnyType::get()); }

/// The entries of one parameter's state.
inline StateDict parameter_state_dict(const OptimizerClass& of, OptimizerClass::State& state) {
  StateDict entries = string_dict();
  for (const StateField& field : of.state(state)) {
    const std::string name(field.name);
    if (const auto* const count = std::get_if<std::int64_t*>(&field.value)) {
      // Python's own float tensor counts to 2^24 and then stays there.
      entries.insert(name, at::scalar_tensor(**count, at::TensorOptions(at::kDouble)));
    } else if (const at::Tensor& tensor = *std::get<at::Tensor*>(field.value); tensor.defined()) {
      entries.insert(name, tensor);
    }
  }
  return entries;
}
inline StateDict group_dict(const OptimizerClass& of,
                            const ::torch::optim::OptimizerParamGroup& group, std::size_t index,
                            const std::vector<std::int64_t>& numbers) {
  StateDict entries = string_dict();
  const auto options = group.options().clone();
  for (const OptionField& field : group_options(of, *options, index, "optimizer_state_dict")) {
    const std::string name(field.name);
    if (const auto* const betas = std::get_if<std::tuple<double, double>*>(&field.value)) {
      entries.insert(name,
                     c10::ivalue::Tuple::create({std::get<0>(**betas), std::get<1>(**betas)}));
    } else if (const auto* const number = std::get_if<double*>(&field.value)) {
      entries.insert(name, **number);
    } else {
      entries.insert(name, *std::get<bool*>(field.value));
    }
  }
  for (const auto& [name, value] : of.others) entries.insert(std::string(name), value);
  c10::impl::GenericList all(
      c10::AnyType::get());  // a list of int would be another class in a file
  for (const std::int64_t number : numbers) all.push_back(number);
  entries.insert("params", all);
  return entries;
}
/// The states under their parameters' numbers; copies are in the host's memory.
inline StateDict states_of(const OptimizerClass& of, const OptimizerGroups& groups,
                           const OptimizerStates& states, bool copies) {
  const auto numbers = parameter_numbers(groups);
  StateDict all(c10::IntType::get(), c10::AnyType::get());
  for (std::size_t g = 0; g != groups.size(); ++g) {
    for (std::size_t i = 0; i != numbers[g].size(); ++i) {
      const auto found = states.find(groups[g].params()[i].unsafeGetTensorImpl());
      if (found == states.end() || found->second == nullptr) continue;
      StateDict entries = parameter_state_dict(of, *found->second->clone());
      if (copies) {
        for (const auto& item : entries)
          item.setValue(item.value().toTensor().detach().to(at::kCPU,
                                                            item.value().toTensor().scalar_type(),
                                                            /*non_blocking=*/false, /*copy=*/true));
      }
      if (!entries.empty()) all.insert_or_assign(numbers[g][i], entries);
    }
  }
  return all;
}
/// The whole state_dict, with these states.
inline c10::IValue state_dict_with(const OptimizerClass& of, const OptimizerGroups& groups,
                                   const StateDict& states) {
  const auto numbers = parameter_numbers(groups);
  StateDict in_order(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericList all_groups(c10::AnyType::get());
  for (std::size_t g = 0; g != groups.size(); ++g) {
    for (const std::int64_t number : numbers[g]) {
      const auto found = states.find(number);
      if (found != states.end()) in_order.insert(number, found->value());
    }
    all_groups.push_back(group_dict(of, groups[g], g, numbers[g]));
  }
  StateDict whole = string_dict();
  whole.insert("state", in_order);
  whole.insert("param_groups", all_groups);
  return whole;
}

/// Compares a state_dict with an optimizer, and then copies it.
class StateDictLoad {
 public:
  /// Throws where they do not fit. Parameters of which `owns` is false have their states elsewhere.
  template <class Owns>
  StateDictLoad(const OptimizerClass& of, const OptimizerGroups& groups,
                const c10::IValue& state_dict, const Owns& owns)
      : class_(of) {
    const StateDict whole = dict(state_dict, "the value");
    const StateDict states = dict(entry(whole, "state", "the value"), "'state'");
    const c10::List<c10::IValue> saved =
        list(entry(whole, "param_groups", "the value"), "'param_groups'");
    if (saved.size() != groups.size())
      reject({"it has ", count(saved.size(), "parameter group"), ", and the optimizer has ",
              groups.size()},
             same_groups);
    std::set<std::int64_t> used;
    for (std::size_t g = 0; g != groups.size(); ++g) {
      const std::string in = text({"group ", g});
      const StateDict group = dict(saved.get(g), in);
      const c10::List<c10::IValue> numbers = list(entry(group, "params", in), in + "'s 'params'");
      const std::vector<at::Tensor>& parameters = groups[g].params();
      if (numbers.size() != parameters.size())
        reject({"its ", in, " has ", count(numbers.size(), "parameter"),
                ", and the optimizer's has ", parameters.size()},
               same_groups);
      read_options(groups[g], g, group);
      for (std::size_t i = 0; i != parameters.size(); ++i) {
        const c10::IValue number = numbers.get(i);
        if (!number.isInt())
          reject({in, " names a parameter ", words(number), ", not a number"}, whole_dict);
        const std::optional<c10::IValue> state = find(states, number);
        if (state) used.insert(number.toInt());
        read_state(g, i, parameters[i], state, owns(parameters[i]));
      }
    }
    if (used.size() != states.size())
      reject({"it has states of ", count(states.size(), "parameter"), ", and its groups name ",
              used.size()},
             whole_dict);
  }

  /// Replaces the options of the groups, and the states.
  void copy_to(OptimizerGroups& groups, OptimizerStates& states) {
    const at::NoGradGuard quiet;
    for (std::size_t g = 0; g != groups.size(); ++g) groups[g].set_options(std::move(options_[g]));
    states.clear();
    for (const LoadedState& loaded : states_) {
      auto state = class_.make_state();
      for (const StateField& field : class_.state(*state)) {
        const auto value = std::ranges::find(loaded.entries, field.name, &Entry::name);
        if (value == loaded.entries.end()) continue;
        if (auto* const count = std::get_if<std::int64_t*>(&field.value)) {
          **count = value->count;
        } else {
          *std::get<at::Tensor*>(field.value) = copied(value->tensor, loaded.parameter);
        }
      }
      states[loaded.parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }

 private:
  struct Entry {
    std::string_view name;
    std::int64_t count = 0;
    at::Tensor tensor = {};
  };
  struct LoadedState {
    at::Tensor parameter;
    std::vector<Entry> entries;
  };
  static constexpr const char* same_groups =
      "make the optimizer with the same parameter groups, in the same order, as the one that was "
      "saved";
  static constexpr const char* whole_dict =
      "load what optimizer_state_dict() or Python's optimizer.state_dict() returned, whole";
  static constexpr const char* same_class = "load the state_dict of an optimizer of the same class";

  [[noreturn]] static void reject(std::initializer_list<TextPart> problem,
                                  std::string_view advice) {
    fail("load_optimizer_state_dict",
         {"the state_dict does not fit the optimizer: ", text(problem)}, advice);
  }
  static std::string count(std::size_t number, std::string_view what) {
    return text({number, " ", what, number == 1 ? "" : "s"});
  }
  static std::string words(const c10::IValue& value) {
    if (value.isNone()) return "None";
    if (value.isBool()) return value.toBool() ? "True" : "False";
    std::ostringstream out;
    out << value;
    return out.str();
  }

  static StateDict dict(const c10::IValue& value, std::string_view what) {
    if (!value.isGenericDict())
      reject({std::string(what), " is ", value.tagKind(), ", not a dict"}, whole_dict);
    return value.toGenericDict();
  }
  static c10::List<c10::IValue> list(const c10::IValue& value, std::string_view what) {
    if (!value.isList())
      reject({std::string(what), " is ", value.tagKind(), ", not a list"}, whole_dict);
    return value.toList();
  }
  static std::optional<c10::IValue> find(const StateDict& in, const c10::IValue& key) {
    const auto found = in.find(key);
    return found == in.end() ? std::nullopt : std::optional(found->value());
  }
  static c10::IValue entry(const StateDict& in, const char* name, std::string_view of) {
    const std::optional<c10::IValue> found = find(in, name);
    if (!found) reject({std::string(of), " has no '", name, "'"}, whole_dict);
    return *found;
  }
  /// A number may be a tensor in Python: a learning rate, or a step.
  static std::optional<at::Scalar> scalar(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1)
      return value.toTensor().item();
    if (value.isDouble() || value.isInt() || value.isBool()) return value.toScalar();
    return std::nullopt;
  }
  static double number(const c10::IValue& value, const std::string& what) {
    const auto read = scalar(value);
    if (!read || read->isComplex())
      reject({what, " is ", words(value), ", not a number"}, same_class);
    return read->toDouble();
  }

  void read_options(const ::torch::optim::OptimizerParamGroup& group, std::size_t g,
                    const StateDict& saved) {
    options_.push_back(group.options().clone());
    const auto fields = group_options(class_, *options_.back(), g, "load_optimizer_state_dict");
    for (const OptionField& field : fields) {
      const std::string what = text({"option '", field.name, "' of group ", g});
      const std::optional<c10::IValue> value = find(saved, std::string(field.name));
      if (!value) reject({"it has no ", what, ", which ", class_.name, " needs"}, same_class);
      if (auto* const betas = std::get_if<std::tuple<double, double>*>(&field.value)) {
        const std::vector<c10::IValue> two = value->isTuple() ? value->toTupleRef().elements().vec()
                                             : value->isList() ? value->toListRef().vec()
                                                               : std::vector<c10::IValue>();
        if (two.size() != 2) reject({what, " is ", words(*value), ", not two numbers"}, same_class);
        **betas = {number(two[0], what), number(two[1], what)};
      } else if (auto* const to = std::get_if<double*>(&field.value)) {
        **to = number(*value, what);
      } else {
        *std::get<bool*>(field.value) = number(*value, what) != 0;
      }
    }
    for (const auto& item : saved) {
      if (!item.key().isString())
        reject({"group ", g, " has an option that is called ", words(item.key())}, same_class);
      const std::string& name = item.key().toStringRef();
      if (name != "params" && std::ranges::find(fields, name, &OptionField::name) == fields.end())
        require_no_meaning(fields, g, name, item.value());
    }
  }
  /// Options that LibTorch has not may be those of how Python computes, a scheduler's notes, or
  /// switched off. Another could change the results.
  void require_no_meaning(const std::vector<OptionField>& fields, std::size_t g,
                          const std::string& name, const c10::IValue& value) const {
    static constexpr std::string_view known[] = {
        "foreach", "capturable", "differentiable", "fused",         "initial_lr",   "param_names",
        "name",    "max_lr",     "min_lr",         "base_momentum", "max_momentum", "swa_lr"};
    if (std::ranges::find(known, name) != std::end(known)) return;
    const auto own =
        std::ranges::find(class_.others, name, &std::pair<std::string_view, c10::IValue>::first);
    if (own != class_.others.end()) {
      const bool is_same = value.isNone() || (number(value, name) != 0) == own->second.toBool();
      if (is_same || (name == "decoupled_weight_decay" && !is_on(fields, "weight_decay"))) return;
    } else if (value.isNone() || (value.isBool() && !value.toBool())) {
      return;
    }
    reject(
        {"group ", g, " has the option ", name, " = ", words(value),
         ", which torch::optim::", class_.name, " does not compute"},
        name == "decoupled_weight_decay"
            ? "load the state_dict of AdamW with AdamW, and that of Adam with Adam"
            : "switch the option off in Python before the state_dict is saved, or take it out of "
              "param_groups if the optimizer does not use it");
  }
  static bool is_on(const std::vector<OptionField>& fields, std::string_view name) {
    const auto& value = std::ranges::find(fields, name, &OptionField::name)->value;
    if (auto* const flag = std::get_if<bool*>(&value)) return **flag;
    return *std::get<double*>(value) > 0;
  }

  void read_state(std::size_t g, std::size_t i, const at::Tensor& parameter,
                  const std::optional<c10::IValue>& saved, bool owns) {
    const std::string of = text({"parameter ", i, " of group ", g});
    StateDict entries = string_dict();
    if (saved) entries = dict(*saved, "the state of " + of);
    bool is_empty = true;
    for (const auto& item : entries) is_empty &= item.value().isNone();
    if (is_empty) {
      if (class_.begins_with_states)
        reject({"it has no state of ", of, ", and ", class_.name, " has one for every parameter"},
               same_class);
      return;
    }
    LoadedState loaded{parameter, {}};
    const auto example = class_.make_state();
    const auto fields = class_.state(*example);
    const auto options = class_.options(*options_[g]);
    for (const StateField& field : fields) {
      const std::optional<c10::IValue> value = find(entries, std::string(field.name));
      const std::string what = text({"'", field.name, "' of ", of});
      if (!value || value->isNone()) {
        if (field.needed_by.empty() || is_on(options, field.needed_by))
          reject({"it has no ", what, ", which ", class_.name, " needs",
                  field.needed_by.empty() ? "" : " with ", field.needed_by},
                 same_class);
        continue;
      }
      if (std::holds_alternative<std::int64_t*>(field.value)) {
        const double steps = number(*value, what);
        if (steps < 0 || steps != std::floor(steps))
          reject({what, " is ", words(*value), ", not a number of steps"}, same_class);
        loaded.entries.push_back({field.name, static_cast<std::int64_t>(steps)});
        continue;
      }
      if (!value->isTensor()) reject({what, " is ", words(*value), ", not a tensor"}, same_class);
      const at::Tensor& tensor = value->toTensor();
      if (tensor.sizes() != parameter.sizes())
        reject({what, " has shape ", shape_text(shape_of(tensor)), ", and the parameter has ",
                shape_text(shape_of(parameter))},
               same_groups);
      loaded.entries.push_back({field.name, 0, tensor});
    }
    for (const auto& item : entries) {
      const std::string name = item.key().isString() ? item.key().toStringRef() : words(item.key());
      if (!item.value().isNone() &&
          std::ranges::find(fields, name, &StateField::name) == fields.end())
        reject({"it has '", name, "' of ", of, ", which ", class_.name, " has not"}, same_class);
    }
    if (owns) states_.push_back(std::move(loaded));
  }

  /// As in Python, states are where the parameter is, and have its type if that is a real one.
  static at::Tensor copied(const at::Tensor& from, const at::Tensor& parameter) {
    const at::ScalarType type =
        at::isFloatingType(parameter.scalar_type()) ? parameter.scalar_type() : from.scalar_type();
    at::Tensor to = at::empty_like(parameter.detach(), at::TensorOptions(type));
    to.copy_(from);
    return to;
  }

  const OptimizerClass& class_;
  std::vector<std::unique_ptr<OptimizerClass::Options>> options_;
  std::vector<LoadedState> states_;
};

/// Throws where `load_optimizer_state_dict` would, and changes nothing.
inline void check_optimizer_state_dict(const ::torch::optim::Optimizer& optimizer,
                                       const c10::IValue& state_dict) {
  if (const auto* const sharded = dynamic_cast<const ShardedOptimizer*>(&optimizer))
    return sharded->check_state_dict(state_dict);
  StateDictLoad(class_of(optimizer, "load_optimizer_state_dict"), optimizer.param_groups(),
                state_dict, [](const at::Tensor&) { return true; });
}

}  // namespace lockstep::detail

namespace lockstep {

inline namespace torch_modules {

/// What Python's `optimizer.state_dict()` returns, for SGD, Adam, AdamW, RMSprop and Adagrad: the
/// states under the parameters' numbers, which go over all groups, and the groups' options. As in
/// Python, its tensors are the optimizer's own: clone those that must not follow it. `step` is a
/// tensor of one double. `torch::pickle_save` writes it for `torch.load(path, weights_only=False)`.
/// **Ranks** this one alone; a `ZeroRedundancyOptimizer` has consolidated its states before.
inline c10::IValue optimizer_state_dict(const ::torch::optim::Optimizer& optimizer) {
  if (const auto* const sharded = dynamic_cast<const detail::ShardedOptimizer*>(&optimizer))
    return sharded->state_dict();
  const auto& kind = detail::class_of(optimizer, "optimizer_state_dict");
  const auto& groups = optimizer.param_groups();
  return detail::state_dict_with(
      kind, groups, detail::states_of(kind, groups, optimizer.state(), /*copies=*/false));
}

/// Replaces an optimizer's states and options by those of a state_dict, from here or from Python
/// (`torch::pickle_load`). States are copied to the device of their parameters, and have their
/// type. Nothing changes before everything is compared: numbers of groups and parameters, shapes,
/// names. Options that say how Python computes, such as `foreach`, are ignored; those that would
/// change results, such as `maximize`, are an error. **Ranks** this one alone; in a job, all ranks
/// load.
inline void load_optimizer_state_dict(::torch::optim::Optimizer& optimizer,
                                      const c10::IValue& state_dict) {
  if (auto* const sharded = dynamic_cast<detail::ShardedOptimizer*>(&optimizer))
    return sharded->load_state_dict(state_dict);
  detail::StateDictLoad(detail::class_of(optimizer, "load_optimizer_state_dict"),
                        optimizer.param_groups(), state_dict,
                        [](const at::Tensor&) { return true; })
      .copy_to(optimizer.param_groups(), optimizer.state());
}

}  // namespace torch_modules

}  // namespace lockstep

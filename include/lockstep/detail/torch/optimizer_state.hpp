// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Python's `optimizer.state_dict()` for LibTorch's optimizers, which have none in C++.

#include <ATen/core/grad_mode.h>
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
#include "lockstep/detail/torch/ivalue.hpp"
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

/// An option of a parameter group or a part of a parameter's state, under Python's name for it.
struct OptimizerField {
  std::string_view name;
  std::variant<double*, bool*, std::tuple<double, double>*, std::int64_t*, at::Tensor*> value;
  std::string_view needed_by = {};  ///< of a state: the option without which there may be none

  /// As in a state_dict; none for an undefined tensor.
  c10::IValue read() const {
    return std::visit(
        []<class T>(const T* of) -> c10::IValue {
          if constexpr (std::is_same_v<T, at::Tensor>) {
            return of->defined() ? c10::IValue(*of) : c10::IValue();
          } else if constexpr (std::is_same_v<T, std::int64_t>) {
            // Python's own float tensor counts to 2^24 and then stays there.
            return at::scalar_tensor(*of, at::TensorOptions(at::kDouble));
          } else if constexpr (std::is_same_v<T, std::tuple<double, double>>) {
            return c10::ivalue::Tuple::create({std::get<0>(*of), std::get<1>(*of)});
          } else {
            return *of;
          }
        },
        value);
  }
};
using OptimizerFields = std::vector<OptimizerField>;

inline OptimizerFields fields_of(::torch::optim::SGDOptions& of) {
  return OptimizerFields{{"lr", &of.lr()},
                         {"momentum", &of.momentum()},
                         {"dampening", &of.dampening()},
                         {"weight_decay", &of.weight_decay()},
                         {"nesterov", &of.nesterov()}};
}
template <class AdamOptions>
  requires requires(AdamOptions& of) { of.amsgrad(); }
OptimizerFields fields_of(AdamOptions& of) {
  return OptimizerFields{{"lr", &of.lr()},
                         {"betas", &of.betas()},
                         {"eps", &of.eps()},
                         {"weight_decay", &of.weight_decay()},
                         {"amsgrad", &of.amsgrad()}};
}
inline OptimizerFields fields_of(::torch::optim::RMSpropOptions& of) {
  return OptimizerFields{
      {"lr", &of.lr()},   {"momentum", &of.momentum()}, {"alpha", &of.alpha()},
      {"eps", &of.eps()}, {"centered", &of.centered()}, {"weight_decay", &of.weight_decay()}};
}
inline OptimizerFields fields_of(::torch::optim::AdagradOptions& of) {
  return OptimizerFields{{"lr", &of.lr()},
                         {"lr_decay", &of.lr_decay()},
                         {"eps", &of.eps()},
                         {"weight_decay", &of.weight_decay()},
                         {"initial_accumulator_value", &of.initial_accumulator_value()}};
}

inline OptimizerFields fields_of(::torch::optim::SGDParamState& of) {
  return OptimizerFields{{"momentum_buffer", &of.momentum_buffer()}};
}
template <class AdamState>
  requires requires(AdamState& of) { of.max_exp_avg_sq(); }
OptimizerFields fields_of(AdamState& of) {
  return OptimizerFields{{"step", &of.step()},
                         {"exp_avg", &of.exp_avg()},
                         {"exp_avg_sq", &of.exp_avg_sq()},
                         {"max_exp_avg_sq", &of.max_exp_avg_sq(), "amsgrad"}};
}
inline OptimizerFields fields_of(::torch::optim::RMSpropParamState& of) {
  return OptimizerFields{{"step", &of.step()},
                         {"square_avg", &of.square_avg()},
                         {"momentum_buffer", &of.momentum_buffer(), "momentum"},
                         {"grad_avg", &of.grad_avg(), "centered"}};
}
inline OptimizerFields fields_of(::torch::optim::AdagradParamState& of) {
  return OptimizerFields{{"step", &of.step()}, {"sum", &of.sum()}};
}

/// One of LibTorch's optimizer classes.
struct OptimizerClass {
  using Options = ::torch::optim::OptimizerOptions;
  using State = ::torch::optim::OptimizerParamState;

  /// Options that Python has besides, with the values for what LibTorch computes.
  using Others = std::vector<std::pair<std::string_view, c10::IValue>>;

  std::string_view name;
  bool (*is)(const ::torch::optim::Optimizer&);
  OptimizerFields (*options)(Options&);  ///< none where the options are of another class
  OptimizerFields (*state)(State&);
  std::unique_ptr<State> (*make_state)();
  Others others;
  bool begins_with_states = false;  ///< before the first step
};

template <std::derived_from<::torch::optim::Optimizer> Optimizer, class Options, class State>
OptimizerClass optimizer_class(std::string_view name, OptimizerClass::Others others,
                               bool begins_with_states = false) {
  return {name,
          [](const ::torch::optim::Optimizer& of) {
            return dynamic_cast<const Optimizer*>(&of) != nullptr;
          },
          [](OptimizerClass::Options& of) {
            auto* const own = dynamic_cast<Options*>(&of);
            return own == nullptr ? OptimizerFields() : fields_of(*own);
          },
          [](OptimizerClass::State& of) { return fields_of(static_cast<State&>(of)); },
          []() -> std::unique_ptr<OptimizerClass::State> { return std::make_unique<State>(); },
          std::move(others),
          begins_with_states};
}

inline const std::vector<OptimizerClass>& optimizer_classes() {
  namespace optim = ::torch::optim;  // lockstep has an SGD, an Adam and an AdamW too
  const c10::IValue none;
  const auto adam = [&](bool is_decoupled) {
    return OptimizerClass::Others{{"maximize", false},   {"foreach", none},
                                  {"capturable", false}, {"differentiable", false},
                                  {"fused", none},       {"decoupled_weight_decay", is_decoupled}};
  };
  static const std::vector<OptimizerClass> all{
      optimizer_class<optim::SGD, optim::SGDOptions, optim::SGDParamState>(
          "SGD",
          {{"maximize", false}, {"foreach", none}, {"differentiable", false}, {"fused", none}}),
      optimizer_class<optim::Adam, optim::AdamOptions, optim::AdamParamState>("Adam", adam(false)),
      optimizer_class<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>("AdamW",
                                                                                 adam(true)),
      optimizer_class<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState>(
          "RMSprop", {{"capturable", false},
                      {"foreach", none},
                      {"maximize", false},
                      {"differentiable", false}}),
      optimizer_class<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState>(
          "Adagrad",
          {{"foreach", none}, {"maximize", false}, {"differentiable", false}, {"fused", none}},
          /*begins_with_states=*/true)};
  return all;
}
/// Null for a class of which Python's names are not known here.
inline const OptimizerClass* find_class(const ::torch::optim::Optimizer& optimizer) {
  for (const OptimizerClass& each : optimizer_classes())
    if (each.is(optimizer)) return &each;
  return nullptr;
}
inline const OptimizerClass& class_of(const ::torch::optim::Optimizer& optimizer,
                                      std::string_view operation) {
  if (const OptimizerClass* const found = find_class(optimizer)) return *found;
  fail(operation, {"only the states of SGD, Adam, AdamW, RMSprop and Adagrad have names in Python"},
       "use one of these, or write the optimizer with torch::save");
}

using OptimizerGroups = std::vector<::torch::optim::OptimizerParamGroup>;
using OptimizerStates =
    std::remove_cvref_t<decltype(std::declval<::torch::optim::Optimizer&>().state())>;

inline OptimizerFields group_options(const OptimizerClass& of, OptimizerClass::Options& options,
                                     std::size_t group, std::string_view operation) {
  OptimizerFields fields = of.options(options);
  if (fields.empty())
    fail(operation, {"group ", group, " has the options of another class than ", of.name},
         text({"give the group torch::optim::", of.name, "Options"}));
  return fields;
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

/// The states under their parameters' numbers; copies are in the host's memory.
inline PythonDict states_of(const OptimizerClass& of, const OptimizerGroups& groups,
                            const OptimizerStates& states, bool copies) {
  const auto numbers = parameter_numbers(groups);
  PythonDict all(c10::IntType::get(), c10::AnyType::get());
  for (std::size_t g = 0; g != groups.size(); ++g) {
    for (std::size_t i = 0; i != numbers[g].size(); ++i) {
      const auto found = states.find(groups[g].params()[i].unsafeGetTensorImpl());
      if (found == states.end() || found->second == nullptr) continue;
      PythonDict entries = string_dict();
      const auto state = found->second->clone();
      for (const OptimizerField& field : of.state(*state)) {
        const c10::IValue value = field.read();
        if (value.isNone()) continue;
        const at::Tensor& tensor = value.toTensor();
        entries.insert(std::string(field.name),
                       copies ? tensor.detach().to(at::kCPU, tensor.scalar_type(),
                                                   /*non_blocking=*/false, /*copy=*/true)
                              : tensor);
      }
      if (!entries.empty()) all.insert_or_assign(numbers[g][i], entries);
    }
  }
  return all;
}
/// The whole state_dict, with these states.
inline c10::IValue state_dict_with(const OptimizerClass& of, const OptimizerGroups& groups,
                                   const PythonDict& states) {
  const auto numbers = parameter_numbers(groups);
  PythonDict in_order(c10::IntType::get(), c10::AnyType::get());
  PythonList all_groups = make_list();
  for (std::size_t g = 0; g != groups.size(); ++g) {
    PythonDict group = string_dict();
    const auto options = groups[g].options().clone();
    for (const OptimizerField& field : group_options(of, *options, g, "optimizer_state_dict"))
      group.insert(std::string(field.name), field.read());
    for (const auto& [name, value] : of.others) group.insert(std::string(name), value);
    PythonList parameters = make_list();  // a list of int would be another class in a file
    for (const std::int64_t number : numbers[g]) {
      parameters.push_back(number);
      if (const c10::IValue* const state = find_entry(states, number))
        in_order.insert(number, *state);
    }
    group.insert("params", parameters);
    all_groups.push_back(group);
  }
  PythonDict whole = string_dict();
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
    const PythonDict whole = dict(state_dict, "the value");
    const PythonDict states = dict(entry(whole, "state", "the value"), "'state'");
    const PythonList saved = list(entry(whole, "param_groups", "the value"), "'param_groups'");
    if (saved.size() != groups.size())
      reject({"it has ", count(saved.size(), "parameter group"), ", and the optimizer has ",
              groups.size()},
             same_groups);
    std::set<std::int64_t> used;
    for (std::size_t g = 0; g != groups.size(); ++g) {
      const std::string in = text({"group ", g});
      const PythonDict group = dict(saved.get(g), in);
      const PythonList numbers = list(entry(group, "params", in), in + "'s 'params'");
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
        const c10::IValue* const state = find_entry(states, number);
        if (state != nullptr) used.insert(number.toInt());
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
    for (auto& [parameter, state] : states_) {
      for (const OptimizerField& field : class_.state(*state))
        if (auto* const tensor = std::get_if<at::Tensor*>(&field.value))
          if ((*tensor)->defined()) **tensor = copied(**tensor, parameter);
      states[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }

 private:
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

  static PythonDict dict(const c10::IValue& value, std::string_view what) {
    if (!value.isGenericDict()) reject({what, " is ", value.tagKind(), ", not a dict"}, whole_dict);
    return value.toGenericDict();
  }
  static PythonList list(const c10::IValue& value, std::string_view what) {
    if (!value.isList()) reject({what, " is ", value.tagKind(), ", not a list"}, whole_dict);
    return value.toList();
  }
  static const c10::IValue& entry(const PythonDict& in, const char* name, std::string_view of) {
    const c10::IValue* const found = find_entry(in, name);
    if (found == nullptr) reject({of, " has no '", name, "'"}, whole_dict);
    return *found;
  }
  static double number(const c10::IValue& value, std::string_view what) {
    const auto read = scalar_of(value);
    if (!read || read->isComplex())
      reject({what, " is ", words(value), ", not a number"}, same_class);
    return read->toDouble();
  }

  void read_options(const ::torch::optim::OptimizerParamGroup& group, std::size_t g,
                    const PythonDict& saved) {
    options_.push_back(group.options().clone());
    const auto fields = group_options(class_, *options_.back(), g, "load_optimizer_state_dict");
    for (const OptimizerField& field : fields) {
      const std::string what = text({"option '", field.name, "' of group ", g});
      const c10::IValue* const value = find_entry(saved, std::string(field.name));
      if (value == nullptr)
        reject({"it has no ", what, ", which ", class_.name, " needs"}, same_class);
      if (auto* const betas = std::get_if<std::tuple<double, double>*>(&field.value)) {
        const auto two = elements_of(*value);
        if (!two || two->size() != 2)
          reject({what, " is ", words(*value), ", not two numbers"}, same_class);
        **betas = {number((*two)[0], what), number((*two)[1], what)};
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
      if (name != "params" &&
          std::ranges::find(fields, name, &OptimizerField::name) == fields.end())
        require_no_meaning(fields, g, name, item.value());
    }
  }
  /// Options that LibTorch has not may be those of how Python computes, a scheduler's notes, or
  /// switched off. Another could change the results.
  void require_no_meaning(const OptimizerFields& fields, std::size_t g, const std::string& name,
                          const c10::IValue& value) const {
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
  static bool is_on(const OptimizerFields& fields, std::string_view name) {
    const auto& value = std::ranges::find(fields, name, &OptimizerField::name)->value;
    if (auto* const flag = std::get_if<bool*>(&value)) return **flag;
    return *std::get<double*>(value) > 0;
  }

  void read_state(std::size_t g, std::size_t i, const at::Tensor& parameter,
                  const c10::IValue* saved, bool owns) {
    const std::string of = text({"parameter ", i, " of group ", g});
    const PythonDict entries = saved ? dict(*saved, "the state of " + of) : string_dict();
    bool is_empty = true;
    for (const auto& item : entries) is_empty &= item.value().isNone();
    if (is_empty) {
      if (class_.begins_with_states)
        reject({"it has no state of ", of, ", and ", class_.name, " has one for every parameter"},
               same_class);
      return;
    }
    auto state = class_.make_state();
    const auto fields = class_.state(*state);
    const auto options = class_.options(*options_[g]);
    for (const OptimizerField& field : fields) {
      const c10::IValue* const value = find_entry(entries, std::string(field.name));
      const std::string what = text({"'", field.name, "' of ", of});
      if (value == nullptr || value->isNone()) {
        if (field.needed_by.empty() || is_on(options, field.needed_by))
          reject({"it has no ", what, ", which ", class_.name, " needs",
                  field.needed_by.empty() ? "" : " with ", field.needed_by},
                 same_class);
        continue;
      }
      if (auto* const count = std::get_if<std::int64_t*>(&field.value)) {
        const double steps = number(*value, what);
        if (steps < 0 || steps != std::floor(steps))
          reject({what, " is ", words(*value), ", not a number of steps"}, same_class);
        **count = static_cast<std::int64_t>(steps);
        continue;
      }
      if (!value->isTensor()) reject({what, " is ", words(*value), ", not a tensor"}, same_class);
      const at::Tensor& tensor = value->toTensor();
      if (tensor.sizes() != parameter.sizes())
        reject({what, " has shape ", shape_text(shape_of(tensor)), ", and the parameter has ",
                shape_text(shape_of(parameter))},
               same_groups);
      *std::get<at::Tensor*>(field.value) = tensor;
    }
    for (const auto& item : entries) {
      const std::string name = item.key().isString() ? item.key().toStringRef() : words(item.key());
      if (!item.value().isNone() &&
          std::ranges::find(fields, name, &OptimizerField::name) == fields.end())
        reject({"it has '", name, "' of ", of, ", which ", class_.name, " has not"}, same_class);
    }
    if (owns) states_.emplace_back(parameter, std::move(state));
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
  /// With the parameters; their tensors are still the state_dict's.
  std::vector<std::pair<at::Tensor, std::unique_ptr<OptimizerClass::State>>> states_;
};

/// `load_optimizer_state_dict`, or, unless `sets`, only what it compares.
inline void read_optimizer_state_dict(::torch::optim::Optimizer& optimizer,
                                      const c10::IValue& state_dict, bool sets) {
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer))
    return sets ? sharded->load_state_dict(state_dict) : sharded->check_state_dict(state_dict);
  StateDictLoad load(class_of(optimizer, "load_optimizer_state_dict"), optimizer.param_groups(),
                     state_dict, [](const at::Tensor&) { return true; });
  if (sets) load.copy_to(optimizer.param_groups(), optimizer.state());
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
  detail::read_optimizer_state_dict(optimizer, state_dict, true);
}

}  // namespace torch_modules

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parts of a hand-written training as state_dicts: values as Python's, and as a file.

#include <torch/data/samplers/base.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <sstream>

#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/torch/optimizer_state.hpp"
#include "lockstep/detail/torch/pickle.hpp"
#include "lockstep/detail/torch/state_dict.hpp"

namespace lockstep::detail {

/// A value has another form than the part that it is loaded into.
[[noreturn]] inline void fail_form(std::string_view name, std::string_view expected,
                                   const c10::IValue& value) {
  std::ostringstream words;
  if (!value.isTensor() && !value.isGenericDict()) words << ": " << value;
  fail("load", {"'", name, "' is ", value.tagKind(), words.str(), ", and not ", expected},
       "give the name to what was saved under it");
}

inline const c10::IValue& member_of(std::string_view name, const c10::IValue& value,
                                    const char* key) {
  if (!value.isGenericDict()) fail_form(name, "a dictionary", value);
  const c10::IValue* const found = find_entry(value.toGenericDict(), key);
  if (found == nullptr)
    fail("load", {"'", name, "' has no '", key, "'"}, "load what was saved of the same class");
  return *found;
}

/// NaN and infinities may come as texts from JSON.
inline double number_of(std::string_view name, const c10::IValue& value) {
  if (const auto number = scalar_of(value)) return number->toDouble();
  if (value.isString()) {
    const std::string& words = value.toStringRef();
    if (words == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (words == "inf") return std::numeric_limits<double>::infinity();
    if (words == "-inf") return -std::numeric_limits<double>::infinity();
  }
  fail_form(name, "a number", value);
}
template <std::integral T>
T integer_of(std::string_view name, const c10::IValue& value) {
  const auto number = scalar_of(value);
  if (!number || !number->isIntegral(/*includeBool=*/true))
    fail_form(name, "a whole number", value);
  const auto read = number->toLong();
  if (!std::in_range<T>(read)) fail_form(name, "a number that its type can hold", value);
  return static_cast<T>(read);
}

// A part has `state_of(part)`, its state, and `set_state(name, part, state, sets)`, which compares
// the state with the part and, if `sets`, replaces the part's. As in Python, tensors of a state are
// the part's own.

template <class T>
concept StateNumber = std::is_arithmetic_v<T>;

template <StateNumber T>
c10::IValue state_of(const T& number) {
  if constexpr (std::is_same_v<T, bool>) {
    return number;
  } else if constexpr (std::is_integral_v<T>) {
    if (!std::in_range<std::int64_t>(number))
      fail("save", {number, " is larger than integers of a file"}, "save it as a text");
    return static_cast<std::int64_t>(number);
  } else {
    return static_cast<double>(number);
  }
}
template <StateNumber T>
void set_state(std::string_view name, T& number, const c10::IValue& state, bool sets) {
  T read{};
  if constexpr (std::is_same_v<T, bool>) {
    read = integer_of<int>(name, state) != 0;
  } else if constexpr (std::is_integral_v<T>) {
    read = integer_of<T>(name, state);
  } else {
    read = static_cast<T>(number_of(name, state));
  }
  if (sets) number = read;
}

inline c10::IValue state_of(const std::string& words) { return words; }
inline void set_state(std::string_view name, std::string& words, const c10::IValue& state,
                      bool sets) {
  if (!state.isString()) fail_form(name, "a text", state);
  if (sets) words = state.toStringRef();
}

inline c10::IValue state_of(const at::Tensor& tensor) { return tensor.detach(); }
/// A tensor that has no elements yet takes the shape, and every one keeps its device.
inline void set_state(std::string_view name, at::Tensor& tensor, const c10::IValue& state,
                      bool sets) {
  if (!state.isTensor()) fail_form(name, "a tensor", state);
  const at::Tensor& from = state.toTensor();
  const bool is_new = !tensor.defined() || tensor.numel() == 0;
  if (!is_new && tensor.sizes() != from.sizes()) fail_form(name, "a tensor of this shape", state);
  if (!sets) return;
  const at::NoGradGuard quiet;
  if (is_new) {
    tensor = tensor.defined() ? from.to(tensor.device()).clone() : from.clone();
  } else {
    tensor.copy_(from);
  }
}

template <StateNumber T>
c10::IValue state_of(const std::vector<T>& numbers) {
  PythonList list = make_list();
  for (const T number : numbers) list.push_back(state_of(number));
  return list;
}
template <StateNumber T>
void set_state(std::string_view name, std::vector<T>& numbers, const c10::IValue& state,
               bool sets) {
  const auto elements = elements_of(state);
  if (!elements) fail_form(name, "a list", state);
  std::vector<T> read;
  for (const c10::IValue& each : *elements) {
    T number{};
    set_state(name, number, each, true);
    read.push_back(number);
  }
  if (sets) numbers = std::move(read);
}

inline c10::IValue state_of(const ::torch::optim::Optimizer& optimizer) {
  return optimizer_state_dict(optimizer);
}
inline void set_state(std::string_view /*name*/, ::torch::optim::Optimizer& optimizer,
                      const c10::IValue& state, bool sets) {
  read_optimizer_state_dict(optimizer, state, sets);
}

/// LibTorch's schedulers show nobody how far they are, but a derived class may name a protected
/// member. Python's schedulers call the number `_step_count`.
struct SchedulerSteps : ::torch::optim::LRScheduler {
  static unsigned& of(::torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&SchedulerSteps::step_count_);
  }
};
inline c10::IValue state_of(const ::torch::optim::LRScheduler& scheduler) {
  PythonDict state = make_dict();
  auto& own =
      const_cast<::torch::optim::LRScheduler&>(  // NOLINT(cppcoreguidelines-pro-type-const-cast)
          scheduler);
  state.insert("_step_count", static_cast<std::int64_t>(SchedulerSteps::of(own)));
  return state;
}
inline void set_state(std::string_view name, ::torch::optim::LRScheduler& scheduler,
                      const c10::IValue& state, bool sets) {
  set_state(name, SchedulerSteps::of(scheduler), member_of(name, state, "_step_count"), sets);
}

using Plateau = ::torch::optim::ReduceLROnPlateauScheduler;
/// The best metric, and numbers of epochs: bad ones, of the cooldown, and all.
using PlateauState = std::tuple<float&, int&, int&, int&>;
inline constexpr const char* plateau_names[] = {"best", "num_bad_epochs", "cooldown_counter",
                                                "last_epoch"};
PlateauState plateau_state(Plateau& scheduler);
/// An explicit instantiation may name private members.
template <float Plateau::* Best, int Plateau::*... Counts>
struct PlateauAccess {
  friend PlateauState plateau_state(Plateau& scheduler) {
    return {scheduler.*Best, scheduler.*Counts...};
  }
};
template struct PlateauAccess<&Plateau::best, &Plateau::num_bad_epochs, &Plateau::cooldown_counter,
                              &Plateau::last_epoch>;

inline c10::IValue state_of(const Plateau& scheduler) {
  auto& own = const_cast<Plateau&>(scheduler);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  PythonDict state = make_dict();
  const char* const* name = plateau_names;
  std::apply([&](auto&... each) { (state.insert(*name++, state_of(each)), ...); },
             plateau_state(own));
  return state;
}
inline void set_state(std::string_view name, Plateau& scheduler, const c10::IValue& state,
                      bool sets) {
  const char* const* key = plateau_names;
  std::apply(
      [&](auto&... each) { (set_state(name, each, member_of(name, state, *key++), sets), ...); },
      plateau_state(scheduler));
}

/// Classes that have their own state_dicts, as `GradScaler`.
template <class T>
concept WithStateDict = requires(const T& part, T& to, const c10::IValue& state) {
  { part.state_dict() } -> std::convertible_to<c10::IValue>;
  to.load_state_dict(state);
} && !std::derived_from<T, ::torch::optim::Optimizer>;

template <WithStateDict T>
c10::IValue state_of(const T& part) {
  return part.state_dict();
}
template <WithStateDict T>
void set_state(std::string_view /*name*/, T& part, const c10::IValue& state, bool sets) {
  if (sets) part.load_state_dict(state);
}

/// Classes that write themselves into an archive of LibTorch's: samplers, and a program's own.
template <class T>
concept Archived = requires(const T& part, T& to, ::torch::serialize::OutputArchive& out,
                            ::torch::serialize::InputArchive& in) {
  part.save(out);
  to.load(in);
} && !std::derived_from<T, ::torch::optim::Optimizer>;

template <Archived T>
c10::IValue state_of(const T& part) {
  ::torch::serialize::OutputArchive archive;
  part.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string bytes = std::move(stream).str();
  at::Tensor state = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  return state;
}
template <Archived T>
void set_state(std::string_view name, T& part, const c10::IValue& state, bool sets) {
  if (!state.isTensor() || state.toTensor().scalar_type() != at::kByte)
    fail_form(name, "an archive of LibTorch's", state);
  if (!sets) return;
  const at::Tensor bytes = state.toTensor().cpu().contiguous();
  ::torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  part.load(archive);
}

template <class T>
concept TrainingPart = requires(const T& part, T& to, const c10::IValue& state) {
  state_of(part);
  set_state(std::string_view(), to, state, true);
};

// ---- as a file

/// Appends a value as JSON. Tensors become tensors of the file, and stand in no JSON.
inline void append_state(std::string& json, const std::string& path, const c10::IValue& state,
                         std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const auto append_all = [&](char begin, const auto& values, char end, const auto& append) {
    json += begin;
    bool is_first = true;
    for (const auto& value : values) append(value, std::exchange(is_first, false) ? "" : ",");
    json += end;
  };
  if (state.isNone()) {
    json += "null";
  } else if (state.isBool()) {
    json += state.toBool() ? "true" : "false";
  } else if (state.isInt()) {
    json += std::to_string(state.toInt());
  } else if (state.isDouble()) {
    const double number = state.toDouble();
    if (std::isfinite(number)) {
      append_json_number(json, number);
    } else {
      json += std::isnan(number) ? "\"nan\"" : number > 0 ? "\"inf\"" : "\"-inf\"";
    }
  } else if (state.isString()) {
    if (!append_json_string(json, state.toStringRef()))
      fail("save", {"'", path, "' is a text that is not UTF-8"}, "save bytes as a tensor");
  } else if (state.isGenericDict()) {
    std::vector<std::pair<std::string, c10::IValue>> plain;
    for (const auto& item : state.toGenericDict()) {
      const std::string key =
          item.key().isInt() ? std::to_string(item.key().toInt()) : item.key().toStringRef();
      if (key.find('/') != std::string::npos)
        fail("save", {"the name '", key, "' in '", path, "' has a slash"}, "choose another name");
      if (item.value().isTensor()) {
        tensors.emplace_back(path + "/" + key, item.value().toTensor());
      } else {
        plain.emplace_back(key, item.value());
      }
    }
    append_all('{', plain, '}', [&](const auto& item, const char* comma) {
      append_json_string(json += comma, item.first);
      append_state(json += ':', path + "/" + item.first, item.second, tensors);
    });
  } else if (const auto elements = elements_of(state)) {
    append_all('[', *elements, ']', [&](const c10::IValue& value, const char* comma) {
      if (value.isTensor())
        fail("save", {"'", path, "' is a list with tensors"}, "give each a name in a dictionary");
      append_state(json += comma, path, value, tensors);
    });
  } else {
    fail("save", {"'", path, "' is ", state.tagKind(), ", which files do not have"},
         "save numbers, texts, tensors, and lists and dictionaries of them");
  }
}

/// Names of digits are numbers, as the parameters of an optimizer have.
inline c10::IValue key_of(const std::string& name) {
  const bool is_number = !name.empty() && name.size() < 18 &&
                         std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? c10::IValue(std::int64_t{std::stoll(name)}) : c10::IValue(name);
}
inline c10::IValue state_of(const Json& json) {
  return std::visit(
      []<class T>(const T& value) -> c10::IValue {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, Json::Array>) {
          PythonList list = make_list();
          for (const Json& each : value) list.push_back(state_of(each));
          return list;
        } else if constexpr (std::is_same_v<T, Json::Object>) {
          PythonDict dict = make_dict();
          for (const auto& [name, member] : value)
            dict.insert_or_assign(key_of(name), state_of(member));
          return dict;
        } else if constexpr (std::is_same_v<T, std::uint64_t>) {
          return static_cast<std::int64_t>(value);
        } else {
          return value;
        }
      },
      json.value);
}
/// Puts a tensor of the file where its name says.
inline void insert_state(PythonDict dict, std::string_view path, const at::Tensor& tensor) {
  const std::size_t slash = path.find('/');
  const c10::IValue key = key_of(std::string(path.substr(0, slash)));
  if (slash == std::string_view::npos) {
    dict.insert_or_assign(key, tensor);
    return;
  }
  const PythonDict inner = find_dict(dict, key).value_or(make_dict());
  dict.insert_or_assign(key, inner);
  insert_state(inner, path.substr(slash + 1), tensor);
}

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module's state_dict as a safetensors file, which Python reads and writes as well.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <set>

#include "lockstep/detail/checkpoint/options.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/torch/module.hpp"

namespace lockstep {

namespace detail {

/// Null where the format has no such type.
inline const FileElement* file_element(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return file_element("BOOL");
    case at::kComplexFloat:
      return file_element("C64");
    case at::kFloat8_e4m3fn:
      return file_element("F8_E4M3");
    case at::kFloat8_e5m2:
      return file_element("F8_E5M2");
    default:
      return file_element(kind_of(type));
  }
}
/// Undefined where LibTorch has no such type.
inline at::ScalarType scalar_type_of(const FileElement& element) {
  for (const at::ScalarType type :
       {at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2})
    if (file_element(type) == &element) return type;
  return scalar_type_of(element.kind);
}

template <class Net>
const ::torch::nn::Module& module_of(const Net& net) {
  if constexpr (std::derived_from<Net, ::torch::nn::Module>) {
    return net;
  } else {
    return *net;
  }
}

/// Parameters and buffers, each tensor once with all its names.
inline std::vector<ModuleTensor> state_tensors(const ::torch::nn::Module& module) {
  std::vector<ModuleTensor> all = module_parameters(module);
  std::ranges::move(module_buffers(module), std::back_inserter(all));
  return all;
}

using StateDictEntry = std::pair<at::Tensor, const TensorEntry*>;

/// Throws where the file does not fit. Types may differ: Python's load_state_dict converts, too,
/// and after `module.to(at::kBFloat16)` even a C++ module's counts and masks have that type.
inline std::vector<StateDictEntry> match_state_dict(const ::torch::nn::Module& module,
                                                    const SafetensorsFile& file, bool strict,
                                                    LoadReport& report) {
  std::vector<StateDictEntry> matched;
  std::vector<std::string> misfits;
  std::set<std::string_view> known;
  const std::vector<ModuleTensor> tensors = state_tensors(module);
  for (const ModuleTensor& tensor : tensors) {
    const TensorEntry* entry = file.find(tensor.name);
    known.insert(tensor.name);
    // Python's save_model keeps one of several names.
    for (const std::string& name : tensor.other_names) {
      known.insert(name);
      if (entry == nullptr) entry = file.find(name);
    }
    if (entry == nullptr) {
      report.missing.push_back(tensor.name);
      continue;
    }
    const std::vector<std::size_t> shape = shape_of(tensor.tensor);
    const at::ScalarType type = scalar_type_of(*entry->element);
    if (entry->shape != shape) {
      misfits.push_back(text({tensor.name, " (", shape_text(entry->shape), " in the file, ",
                              shape_text(shape), " in the module)"}));
    } else if (type == at::ScalarType::Undefined ||
               (at::isComplexType(type) && !tensor.tensor.is_complex())) {
      misfits.push_back(text({tensor.name, " (", entry->element->name, " in the file, ",
                              c10::toString(tensor.tensor.scalar_type()), " in the module)"}));
    } else {
      matched.emplace_back(tensor.tensor, entry);
    }
  }
  for (const TensorEntry& entry : file.tensors()) {
    // A checkpoint's optimizer state has this prefix.
    if (!entry.name.starts_with("lockstep/") && !known.contains(entry.name))
      report.unexpected.push_back(entry.name);
  }
  std::string problem;
  const auto add = [&](std::string_view what, const std::vector<std::string>& names) {
    if (!names.empty()) problem += text({problem.empty() ? "" : "; ", what, listed(names)});
  };
  if (strict) {
    add("missing in the file: ", report.missing);
    add("unexpected in the file: ", report.unexpected);
  }
  add("other in the file: ", misfits);
  if (!problem.empty())
    fail("load_state_dict", {"'", file.path(), "' does not fit the module: ", problem},
         misfits.empty() ? "load a file of the same module, or what both have with strict = false"
                         : "load a file of the same module");
  return matched;
}

/// Reads a tensor in place.
inline void read_tensor(const SafetensorsFile& file, const TensorEntry& entry, at::Tensor& tensor) {
  const at::ScalarType type = scalar_type_of(*entry.element);
  const auto bytes_of = [](const at::Tensor& to) {
    return std::span(static_cast<std::byte*>(to.mutable_data_ptr()), to.nbytes());
  };
  if (tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type) {
    file.read(entry, 0, bytes_of(tensor));
    tensor.unsafeGetTensorImpl()->bump_version();
  } else {
    const at::Tensor read = at::empty(tensor.sizes(), at::TensorOptions(type));
    file.read(entry, 0, bytes_of(read));
    tensor.copy_(read);
  }
}

}  // namespace detail

inline namespace torch_modules {

/// Writes a module's parameters and buffers, contiguous, under all their names in the state_dict.
/// The file is replaced atomically. **Ranks** this one alone: one rank of a job may call it.
void save_state_dict(const auto& net, const std::string& path) {
  const at::NoGradGuard quiet;
  std::vector<detail::ModuleTensor> tensors = detail::state_tensors(detail::module_of(net));
  detail::FileToWrite file;
  for (detail::ModuleTensor& tensor : tensors) {
    const detail::FileElement* const element = detail::file_element(tensor.tensor.scalar_type());
    if (element == nullptr)
      detail::fail("save_state_dict",
                   {tensor.name, " has elements of ", c10::toString(tensor.tensor.scalar_type()),
                    ", which safetensors files do not have"},
                   "convert the tensor, or do not register it");
    tensor.tensor = tensor.tensor.detach().cpu().contiguous();
    const std::span data(static_cast<const std::byte*>(tensor.tensor.const_data_ptr()),
                         tensor.tensor.nbytes());
    const auto add = [&](const std::string& name) {
      file.tensors.push_back(
          {name, element->kind, detail::shape_of(tensor.tensor), data, {}, element->name});
    };
    add(tensor.name);
    for (const std::string& name : tensor.other_names) add(name);
  }
  detail::write_file(path, file);
}

/// Reads parameters and buffers in place from a safetensors file, lockstep's or Python's. Names
/// (one of a tensor's several) and shapes must match; types are converted, as in Python. Nothing
/// changes before everything is compared and verified. Without `strict`, tensors that the file
/// lacks keep their values and others are ignored; the report names both. **Ranks** this one alone;
/// in a job, all ranks load, or one before the job begins.
LoadReport load_state_dict(const auto& net, const std::string& path, bool strict = true) {
  const at::NoGradGuard quiet;
  const detail::SafetensorsFile file(path);
  LoadReport report;
  auto matched = detail::match_state_dict(detail::module_of(net), file, strict, report);
  file.verify();
  for (auto& [tensor, entry] : matched) detail::read_tensor(file, *entry, tensor);
  return report;
}

}  // namespace torch_modules

}  // namespace lockstep

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

/// The types of the format that only LibTorch has.
inline constexpr std::pair<at::ScalarType, const char*> torch_elements[] = {
    {at::kBool, "BOOL"},
    {at::kComplexFloat, "C64"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"}};

/// Null where the format has no such type.
inline const FileElement* file_element(at::ScalarType type) {
  for (const auto& [known, name] : torch_elements)
    if (known == type) return file_element(name);
  return file_element(kind_of(type));
}
/// Undefined where LibTorch has no such type.
inline at::ScalarType scalar_type_of(const FileElement& element) {
  for (const auto& [type, name] : torch_elements)
    if (element.name == name) return type;
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

/// A tensor of a file that may fit one of a module.
struct FileTensor {
  std::string_view name;
  std::vector<std::size_t> shape;
  at::ScalarType type;         // Undefined where LibTorch has none
  std::string_view type_name;  // as the file says it
};

/// The tensors of a module, each with the index of the file's tensor for it. Throws where the file
/// does not fit. Types may differ: Python's load_state_dict converts, too, and after
/// `module.to(at::kBFloat16)` even a C++ module's counts and masks have that type.
inline std::vector<std::pair<at::Tensor, std::size_t>> match_state_dict(
    const ::torch::nn::Module& module, const std::string& path, std::vector<FileTensor> stored,
    bool strict, LoadReport& report) {
  // Python's wrappers (DataParallel, DistributedDataParallel) put this before every name.
  constexpr std::string_view wrapped = "module.";
  const auto is_wrapped = [&](std::string_view name) { return name.starts_with(wrapped); };
  const std::vector<ModuleTensor> tensors = state_tensors(module);
  if (!stored.empty() && std::ranges::all_of(stored, is_wrapped, &FileTensor::name) &&
      std::ranges::none_of(tensors, is_wrapped, &ModuleTensor::name))
    for (FileTensor& each : stored) each.name.remove_prefix(wrapped.size());

  std::vector<std::pair<at::Tensor, std::size_t>> matched;
  std::vector<std::string> misfits;
  std::set<std::string_view> known;
  const auto find = [&](std::string_view name) {
    known.insert(name);
    return std::ranges::find(stored, name, &FileTensor::name);
  };
  for (const ModuleTensor& tensor : tensors) {
    auto entry = find(tensor.name);
    // Python's save_model keeps one of several names.
    for (const std::string& name : tensor.other_names) {
      const auto other = find(name);
      if (entry == stored.end()) entry = other;
    }
    if (entry == stored.end()) {
      report.missing.push_back(tensor.name);
      continue;
    }
    const std::vector<std::size_t> shape = shape_of(tensor.tensor);
    if (entry->shape != shape) {
      misfits.push_back(text({tensor.name, " (", shape_text(entry->shape), " in the file, ",
                              shape_text(shape), " in the module)"}));
    } else if (entry->type == at::ScalarType::Undefined ||
               (at::isComplexType(entry->type) && !tensor.tensor.is_complex())) {
      misfits.push_back(text({tensor.name, " (", entry->type_name, " in the file, ",
                              c10::toString(tensor.tensor.scalar_type()), " in the module)"}));
    } else {
      matched.emplace_back(tensor.tensor, static_cast<std::size_t>(entry - stored.begin()));
    }
  }
  for (const FileTensor& each : stored)
    if (!known.contains(each.name)) report.unexpected.emplace_back(each.name);
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
    fail("load_state_dict", {"'", path, "' does not fit the module: ", problem},
         misfits.empty() ? "load a file of the same module, or what both have with strict = false"
                         : "load a file of the same module");
  return matched;
}

/// A checkpoint's other states have this prefix.
inline constexpr std::string_view not_of_module = "lockstep/";

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

/// Compares a module with a file, and returns what copies the values.
inline auto match_state_dict(const ::torch::nn::Module& module, const SafetensorsFile& file,
                             bool strict, LoadReport& report) {
  std::vector<const TensorEntry*> entries;
  std::vector<FileTensor> stored;
  for (const TensorEntry& entry : file.tensors()) {
    if (entry.name.starts_with(not_of_module)) continue;
    entries.push_back(&entry);
    stored.push_back(
        {entry.name, entry.shape, scalar_type_of(*entry.element), entry.element->name});
  }
  auto matched = match_state_dict(module, file.path(), std::move(stored), strict, report);
  return [&file, entries, matched] {
    const at::NoGradGuard quiet;
    for (auto [tensor, index] : matched) read_tensor(file, *entries[index], tensor);
  };
}

/// Tensors that are written to one file, in memory of their own if it is written later.
class TensorFile {
 public:
  explicit TensorFile(bool is_copy = false) : is_copy_(is_copy) {}

  /// Adds a tensor, contiguous, under all names.
  void add(std::initializer_list<std::span<const std::string>> names, const at::Tensor& tensor) {
    const at::NoGradGuard quiet;
    const FileElement* const element = file_element(tensor.scalar_type());
    if (element == nullptr)
      fail("save_state_dict",
           {names.begin()->front(), " has elements of ", c10::toString(tensor.scalar_type()),
            ", which safetensors files do not have"},
           "convert the tensor, or do not register it");
    at::Tensor kept = tensor.detach().cpu().contiguous();
    if (is_copy_ && kept.is_alias_of(tensor)) kept = kept.clone();
    tensors_.push_back(kept);
    const std::span data(static_cast<const std::byte*>(kept.const_data_ptr()), kept.nbytes());
    for (const std::span<const std::string> some : names)
      for (const std::string& name : some)
        file_.tensors.push_back({name, element->kind, shape_of(kept), data, {}, element->name});
  }
  void add(const ::torch::nn::Module& module) {
    for (const ModuleTensor& each : state_tensors(module))
      add({std::span(&each.name, 1), each.other_names}, each.tensor);
  }
  /// A text of the header.
  void add(std::string name, std::string value) {
    file_.metadata.emplace_back(std::move(name), std::move(value));
  }

  /// Replaces the file at `path` atomically.
  void write(const std::string& path) const { write_file(path, file_); }

 private:
  bool is_copy_;
  std::vector<at::Tensor> tensors_;
  FileToWrite file_;
};

}  // namespace detail

inline namespace torch_modules {

/// Writes a module's parameters and buffers, contiguous, under all their names in the state_dict.
/// The file is replaced atomically. **Ranks** this one alone: one rank of a job may call it.
void save_state_dict(const auto& net, const std::string& path) {
  detail::TensorFile file;
  file.add(detail::module_of(net));
  file.write(path);
}

/// Reads parameters and buffers in place from a safetensors file, lockstep's or Python's. Names
/// (one of a tensor's several) and shapes must match; types are converted, as in Python. Nothing
/// changes before everything is compared and verified. Without `strict`, tensors that the file
/// lacks keep their values and others are ignored; the report names both. **Ranks** this one alone;
/// in a job, all ranks load, or one before the job begins.
LoadReport load_state_dict(const auto& net, const std::string& path, bool strict = true) {
  const detail::SafetensorsFile file(path);
  LoadReport report;
  const auto copy = detail::match_state_dict(detail::module_of(net), file, strict, report);
  file.verify();
  copy();
  return report;
}

}  // namespace torch_modules

}  // namespace lockstep

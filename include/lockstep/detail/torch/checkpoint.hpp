// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::Checkpoint`: the whole state of a hand-written training in one file.

#include <ATen/Context.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/torch/training_state.hpp"

namespace lockstep {

namespace detail {

/// A named part of a training. Its functions are called on all ranks, `save` on rank 0 alone.
struct SavedPart {
  std::string name;
  std::function<void()> consolidate;  // before `save`; may be empty
  std::function<c10::IValue()> save;
  std::function<void(const c10::IValue& state, bool sets)> load;
  bool is_compared;  ///< does `load` without `sets` find every misfit?
};

LOCKSTEP_COLD_BEGIN

/// The same for a state_dict in memory, which errors call `path`.
inline auto match_state_dict(const ::torch::nn::Module& module, const PythonDict& model,
                             const std::string& path, bool strict, LoadReport& report) {
  std::vector<at::Tensor> values;
  std::vector<FileTensor> stored;
  for (const auto& item : model) {
    if (!item.key().isString() || !item.value().isTensor()) continue;
    const at::Tensor& value = item.value().toTensor();
    values.push_back(value);
    stored.push_back({item.key().toStringRef(), shape_of(value), value.scalar_type(),
                      c10::toString(value.scalar_type())});
  }
  return [values, matched = match_state_dict(module, path, std::move(stored), strict, report)] {
    const at::NoGradGuard quiet;
    for (auto [tensor, index] : matched) tensor.copy_(values[index]);
  };
}

/// A file to load from: lockstep's own, or one of Python's `torch.save`. Everything but the module
/// is in `states`.
class TrainingFile {
 public:
  explicit TrainingFile(std::string path) : path_(std::move(path)) {
    if (is_zip_archive(path_)) {
      read_pt();
    } else {
      read_safetensors();
    }
  }

  /// The same on all ranks if their files are the same. The header of lockstep's own files has the
  /// checksums of all tensors; others are read once more.
  std::string identity() const {
    if (file_ && file_->digest())
      return text({file_->bytes(), " bytes, ", checksum_text(*file_->digest())});
    std::ifstream bytes(path_, std::ios::binary);
    Checksum checksum;
    std::vector<char> some(std::size_t{1} << 20);
    std::uint64_t count = 0;
    while (bytes.read(some.data(), static_cast<std::streamsize>(some.size())), bytes.gcount() > 0) {
      const auto size = static_cast<std::size_t>(bytes.gcount());
      checksum.add(std::string_view(some.data(), size));
      count += size;
    }
    return text({count, " bytes, ", checksum_text(checksum.value())});
  }

  /// The state of a part; null where the file has none. Python's scripts choose names freely, and
  /// these are the usual ones.
  const c10::IValue* find(const std::string& name) const {
    for (const char* const end : {"", "_state_dict", "_state"}) {
      if (const c10::IValue* const found = find_entry(states_, key_of(name + end))) return found;
      if (file_) break;
    }
    return nullptr;
  }

  /// Compares the module with the file, and returns what copies the values.
  std::function<void()> match(const ::torch::nn::Module& module, bool strict,
                              LoadReport& report) const {
    if (file_) return match_state_dict(module, *file_, strict, report);
    return match_state_dict(module, model_, path_, strict, report);
  }

 private:
  void read_safetensors() {
    file_.emplace(path_);
    file_->verify();
    if (const std::string* const json = file_->metadata("training")) {
      const c10::IValue read = state_of(Json::parse(*json, text({"'", path_, "', its training"})));
      if (read.isGenericDict()) states_ = read.toGenericDict();
    }
    for (const TensorEntry& entry : file_->tensors()) {
      if (!entry.name.starts_with(not_of_module)) continue;
      const at::ScalarType type = scalar_type_of(*entry.element);
      if (type == at::ScalarType::Undefined) continue;
      const std::vector<std::int64_t> sizes(entry.shape.begin(), entry.shape.end());
      at::Tensor tensor = at::empty(sizes, type);
      read_tensor(*file_, entry, tensor);
      insert_state(states_, std::string_view(entry.name).substr(not_of_module.size()), tensor);
    }
  }

  void read_pt() {
    const c10::IValue read = load_pt(path_);
    if (!read.isGenericDict())
      fail("load", {"'", path_, "' holds ", read.tagKind(), ", and no state_dict"},
           "save model.state_dict() in Python, or a dictionary with it");
    states_ = read.toGenericDict();
    model_ = states_;  // a plain state_dict
    for (const char* const name :
         {"model", "model_state_dict", "state_dict", "net", "net_state_dict", "module"}) {
      const auto found = find_dict(states_, name);
      if (!found) continue;
      model_ = *found;
      return;
    }
  }

  std::string path_;
  std::optional<SafetensorsFile> file_;
  PythonDict states_ = make_dict();
  PythonDict model_ = make_dict();
};

LOCKSTEP_COLD_END

}  // namespace detail

inline namespace torch_modules {

/// Python's `module.load_state_dict(torch.load(path))`: `load_state_dict(net, load_pt(path))`.
/// Without `strict`, missing tensors keep their values, and the report names them and others.
LoadReport load_state_dict(const auto& net, const c10::IValue& state_dict, bool strict = true) {
  if (!state_dict.isGenericDict())
    detail::fail("load_state_dict", {"the value is ", state_dict.tagKind(), ", not a dictionary"},
                 "take the member of the file that is the state_dict");
  LoadReport report;
  detail::match_state_dict(detail::module_of(net), state_dict.toGenericDict(), "the state_dict",
                           strict, report)();
  return report;
}

LOCKSTEP_COLD_BEGIN

/// The whole state of a training whose loop the program has: the module and whatever is added, in
/// one safetensors file, and the random numbers of every rank.
///
///     lockstep::torch::Checkpoint checkpoint(ddp);
///     checkpoint.add("optimizer", optimizer).add("scheduler", scheduler).add("sampler", sampler);
///     checkpoint.add("epoch", epoch).add("best", best);
///     checkpoint.resume("last.safetensors");       // where a run before has ended, if there was
///     one for (; epoch != epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) { ... }
///       checkpoint.save("last.safetensors");
///     }
///
/// What is added must outlive the checkpoint: optimizers and schedulers of LibTorch's, samplers,
/// numbers, texts, tensors, vectors of numbers, and classes with `state_dict` and `load_state_dict`
/// or with `save` and `load` for LibTorch's archives. Ranks share rank 0's values.
class Checkpoint {
 public:
  /// Of a wrapper, or of a module in a program with one rank.
  template <class Wrapped>
  explicit Checkpoint(Wrapped& wrapped) {
    if constexpr (requires { wrapped.module(); }) {
      module_ = &wrapped.module();
    } else {
      module_ = &detail::module_of(wrapped);
    }
    if constexpr (requires { wrapped.communicator(); }) {
      rank_ = wrapped.communicator().rank();
      world_ = wrapped.communicator().world_size().value();
      gather_ = [&wrapped](std::string text, detail::JobCall call) {
        return wrapped.all_gather_text(std::move(text), call);
      };
    } else {
      gather_ = [](std::string text, detail::JobCall) {
        return std::vector<std::string>{std::move(text)};
      };
    }
    writer_.emplace(rank_);
  }
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// Adds a part under a name. **Ranks** this one alone, and all in the same order.
  template <class T>
  Checkpoint& add(std::string name, T& part) {
    static_assert(detail::TrainingPart<T>,
                  "lockstep: a checkpoint takes LibTorch's optimizers, schedulers and samplers, "
                  "numbers, std::string, tensors, std::vector of numbers, and classes with "
                  "state_dict and load_state_dict or with save and load for LibTorch's archives");
    std::function<void()> consolidate;
    if constexpr (std::derived_from<T, ::torch::optim::Optimizer>) {
      if (auto* const sharded = dynamic_cast<detail::ShardedOptimizer*>(&part))
        consolidate = [sharded] { sharded->consolidate_state_dict(Rank{0}); };
    }
    if constexpr (detail::TrainingPart<T>) {
      add_part({name, std::move(consolidate), [&part] { return detail::state_of(part); },
                [&part, name](const c10::IValue& state, bool sets) {
                  detail::set_state(name, part, state, sets);
                },
                !detail::WithStateDict<T> && !detail::Archived<T>});
    }
    return *this;
  }

  /// Writes everything; the file is replaced atomically by rank 0. An error of one rank is thrown
  /// on all. **Ranks** all, with the same path. **Host** blocks until the file is on the disk.
  void save(const std::string& path) { save_to(path, false); }

  /// The same, but the file is written in the background, from copies; the next call waits for it,
  /// and throws its error. **Ranks** all. **Host** blocks until everything was copied.
  void async_save(const std::string& path) { save_to(path, true); }

  /// Waits for an `async_save`, and throws its error on all ranks. **Ranks** all. **Host** blocks.
  void finish() {
    together(detail::JobCall::save, [&] {
      writer_->wait();
      return std::string();
    });
  }

  /// Reads a file of `save`, by any number of ranks, or one of Python's `torch.save`: a state_dict,
  /// or the usual dictionary of several, under the names of the parts. Nothing changes before
  /// everything was compared, but for parts that read their states themselves, which come first.
  /// Tensors are copied to where the program's lie. Without `strict`, parts and tensors that the
  /// file lacks keep their values; the report names them. A rank that the saving program had not
  /// keeps its random numbers.
  ///
  /// **Ranks** all, with the same file. **Host** blocks.
  LoadReport load(const std::string& path, bool strict = true) {
    LoadReport report;
    std::optional<detail::TrainingFile> file;
    std::function<void()> copy;
    const auto compare = [&] {
      writer_->wait();
      file.emplace(path);
      copy = file->match(*module_, strict, report);
      for (const detail::SavedPart& part : parts_) {
        if (const c10::IValue* const state = file->find(part.name)) {
          part.load(*state, false);
        } else if (strict) {
          detail::fail("load", {"'", path, "' has no '", part.name, "'"},
                       "load a file with the same parts, or what there is with strict = false");
        } else {
          report.missing.push_back(part.name);
        }
      }
      return file->identity();
    };
    require_same("load", "files", together(detail::JobCall::load, compare));
    together(detail::JobCall::load, [&] {
      const auto set = [&](bool is_compared) {
        for (const detail::SavedPart& part : parts_) {
          if (part.is_compared != is_compared) continue;
          if (const c10::IValue* const state = file->find(part.name)) part.load(*state, true);
        }
      };
      set(false);  // a class that rejects its state does so before the module changes
      copy();
      set(true);
      set_random_state(*file);
      return std::string();
    });
    return report;
  }

  /// `load`, where the file is there; false where rank 0 finds none. **Ranks** all.
  bool resume(const std::string& path) {
    const auto found = together(detail::JobCall::load, [&] {
      return std::string(::access(path.c_str(), F_OK) == 0 ? "yes" : "no");
    });
    if (found[0] != "yes") return false;
    load(path);
    return true;
  }

 private:
  void add_part(detail::SavedPart part) {
    constexpr std::string_view own[] = {"model", "random"};
    if (part.name.empty() || part.name.find('/') != std::string::npos ||
        std::ranges::find(own, part.name) != std::end(own) ||
        std::ranges::find(parts_, part.name, &detail::SavedPart::name) != parts_.end())
      detail::fail("Checkpoint", {"the name '", part.name, "' is empty, taken, or has a slash"},
                   "choose another name; 'model' and 'random' are the checkpoint's own");
    parts_.push_back(std::move(part));
  }

  void save_to(const std::string& path, bool later) {
    for (const detail::SavedPart& part : parts_)
      if (part.consolidate) part.consolidate();
    std::vector<std::string> paths, random;
    for (const std::string& text : together(detail::JobCall::save, [&] {
           writer_->wait();
           return path + '\n' + random_state();
         })) {
      const std::size_t end = text.find('\n');
      paths.push_back(text.substr(0, end));
      random.push_back(text.substr(end + 1));
    }
    require_same("save", "paths", paths);
    together(detail::JobCall::save, [&] {
      if (rank_ == Rank{0}) {
        const auto file = std::make_shared<detail::TensorFile>(file_of(random, later));
        if (later) {
          writer_->start([file, path] { file->write(path); });
        } else {
          file->write(path);
        }
      }
      return std::string();
    });
  }
  detail::TensorFile file_of(std::span<const std::string> random, bool is_copy) const {
    detail::PythonDict states = detail::make_dict();
    for (const detail::SavedPart& part : parts_) states.insert(part.name, part.save());
    detail::PythonDict of_ranks = detail::make_dict();
    for (std::size_t rank = 0; rank != random.size(); ++rank)
      of_ranks.insert(static_cast<std::int64_t>(rank),
                      ::torch::jit::pickle_load({random[rank].begin(), random[rank].end()}));
    states.insert("random", of_ranks);

    detail::TensorFile file(is_copy);
    file.add(*module_);
    std::string json;
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    detail::append_state(json, "lockstep", states, tensors);
    for (const auto& [name, tensor] : tensors) file.add({std::span(&name, 1)}, tensor);
    file.add("training", std::move(json));
    return file;
  }

  /// The results of all ranks' `work()`, or the error of one on all of them.
  std::vector<std::string> together(detail::JobCall call, detail::FunctionRef<std::string()> work) {
    const auto gather = [&](std::string text) { return gather_(std::move(text), call); };
    return detail::store_together({rank_, world_, gather}, detail::job_call_text(call), work);
  }
  /// Throws on all ranks where not all have the same text.
  void require_same(const char* operation, const char* what,
                    std::span<const std::string> texts) const {
    for (std::size_t rank = 1; rank != texts.size(); ++rank)
      if (texts[rank] != texts[0])
        detail::fail(operation,
                     {"ranks have different ", what, ": rank 0 has '", texts[0], "' and rank ",
                      rank, " has '", texts[rank], "'"},
                     "let all ranks call it with the same file", rank_);
  }

  /// The default generators of this rank, by the name of their device.
  std::vector<std::pair<std::string, at::Generator>> generators() const {
    std::vector<std::pair<std::string, at::Generator>> all;
    const auto add = [&](const char* name, at::Device device) {
      all.emplace_back(name, at::globalContext().defaultGenerator(device));
    };
    add("cpu", at::kCPU);
    const auto parameters = module_->parameters();
    if (parameters.empty() || parameters[0].is_cpu()) return all;
    const at::Device device = parameters[0].device();
    add(c10::DeviceTypeName(device.type(), true).c_str(), device);
    return all;
  }
  /// Their states, pickled.
  std::string random_state() const {
    detail::PythonDict states = detail::string_dict();
    for (auto& [name, generator] : generators()) {
      const std::lock_guard lock(generator.mutex());
      states.insert(name, generator.get_state());
    }
    const std::vector<char> bytes = ::torch::jit::pickle_save(states);
    return {bytes.begin(), bytes.end()};
  }
  void set_random_state(const detail::TrainingFile& file) const {
    const c10::IValue* const all = file.find("random");
    if (all == nullptr || !all->isGenericDict()) return;
    const auto states =
        detail::find_dict(all->toGenericDict(), static_cast<std::int64_t>(rank_.value()));
    if (!states) return;
    for (auto& [name, generator] : generators()) {
      const c10::IValue* const state = detail::find_entry(*states, name);
      if (state == nullptr || !state->isTensor()) continue;
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state->toTensor());
    }
  }

  const ::torch::nn::Module* module_ = nullptr;
  Rank rank_{0};
  std::size_t world_ = 1;
  std::function<std::vector<std::string>(std::string, detail::JobCall)> gather_;
  std::vector<detail::SavedPart> parts_;
  std::optional<detail::BackgroundWriter> writer_;
};

LOCKSTEP_COLD_END

}  // namespace torch_modules

}  // namespace lockstep

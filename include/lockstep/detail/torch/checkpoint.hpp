// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::Checkpoint`: the whole state of a hand-written training in one file.

#include <ATen/Context.h>

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

  bool is_python() const { return !file_; }
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
      const auto found = states_.find(key_of(name + end));
      if (found != states_.end()) return &found->value();
      if (!is_python()) break;
    }
    return nullptr;
  }

  /// Compares the module with the file, and returns what copies the values.
  std::function<void()> match(const ::torch::nn::Module& module, bool strict,
                              LoadReport& report) const {
    if (file_) {
      return [this, matched = match_state_dict(module, *file_, strict, report)]() mutable {
        for (auto& [tensor, entry] : matched) read_tensor(*file_, *entry, tensor);
      };
    }
    return match_model(module, model_, path_, strict, report);
  }

  static std::function<void()> match_model(const ::torch::nn::Module& module, PythonDict model,
                                           const std::string& path, bool strict,
                                           LoadReport& report) {
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
    for (const char* const name :
         {"model", "model_state_dict", "state_dict", "net", "net_state_dict", "module"}) {
      const auto found = states_.find(name);
      if (found == states_.end() || !found->value().isGenericDict()) continue;
      model_ = found->value().toGenericDict();
      return;
    }
    model_ = states_;  // a plain state_dict
  }

  std::string path_;
  std::optional<SafetensorsFile> file_;
  PythonDict states_ = make_dict();
  PythonDict model_ = make_dict();
};

/// The default generators of a rank, by the name of their device.
inline std::vector<std::pair<std::string, at::Generator>> generators_of(at::Device device) {
  std::vector<std::pair<std::string, at::Generator>> all;
  all.emplace_back("cpu", at::globalContext().defaultGenerator(at::kCPU));
  if (!device.is_cpu())
    all.emplace_back(c10::DeviceTypeName(device.type(), true),
                     at::globalContext().defaultGenerator(device));
  return all;
}

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
  detail::TrainingFile::match_model(detail::module_of(net), state_dict.toGenericDict(),
                                    "the state_dict", strict, report)();
  return report;
}

}  // namespace torch_modules

inline namespace torch_modules {

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
  void finish();

  /// Reads a file of `save`, by any number of ranks, or one of Python's `torch.save`: a state_dict,
  /// or the usual dictionary of several, under the names of the parts. Nothing changes before
  /// everything was compared, but for parts that read their states themselves, which come first.
  /// Tensors are copied to where the program's lie. Without `strict`, parts and tensors that the
  /// file lacks keep their values; the report names them. A rank that the saving program had not
  /// keeps its random numbers.
  ///
  /// **Ranks** all, with the same file. **Host** blocks.
  LoadReport load(const std::string& path, bool strict = true);

  /// `load`, where the file is there; false where rank 0 finds none. **Ranks** all.
  bool resume(const std::string& path);

 private:
  using Gather = std::function<std::vector<std::string>(std::string, detail::JobCall)>;

  void add_part(detail::SavedPart part);
  void save_to(const std::string& path, bool later);
  detail::TensorFile file_of(std::span<const std::string> random, bool is_copy) const;
  /// Calls `f(ranks)` within the program's call `call`.
  void with_ranks(detail::JobCall call, detail::FunctionRef<void(const detail::JointRanks&)> f) {
    const auto gather = [&](std::string text) { return gather_(std::move(text), call); };
    f({rank_, world_, gather});
  }
  /// Throws on all ranks where not all have the same text.
  void require_same(const char* operation, const char* what,
                    std::span<const std::string> texts) const;
  std::string random_state() const;
  void set_random_state(const detail::TrainingFile& file) const;
  at::Device device() const {
    const auto parameters = module_->parameters();
    return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  }

  const ::torch::nn::Module* module_ = nullptr;
  Rank rank_{0};
  std::size_t world_ = 1;
  Gather gather_;
  std::vector<detail::SavedPart> parts_;
  std::optional<detail::BackgroundWriter> writer_;
};

LOCKSTEP_COLD_BEGIN

inline void Checkpoint::add_part(detail::SavedPart part) {
  constexpr std::string_view own[] = {"model", "random"};
  const auto is_taken = [&](std::string_view name) {
    return std::ranges::find(own, name) != std::end(own) ||
           std::ranges::find(parts_, name, &detail::SavedPart::name) != parts_.end();
  };
  if (part.name.empty() || part.name.find('/') != std::string::npos || is_taken(part.name))
    detail::fail("Checkpoint", {"the name '", part.name, "' is empty, taken, or has a slash"},
                 "choose another name; 'model' and 'random' are the checkpoint's own");
  parts_.push_back(std::move(part));
}

inline void Checkpoint::require_same(const char* operation, const char* what,
                                     std::span<const std::string> texts) const {
  for (std::size_t rank = 1; rank != texts.size(); ++rank)
    if (texts[rank] != texts[0])
      detail::fail(operation,
                   {"ranks have different ", what, ": rank 0 has '", texts[0], "' and rank ", rank,
                    " has '", texts[rank], "'"},
                   "let all ranks call it with the same file", rank_);
}

/// The states of the generators, each after its size.
inline std::string Checkpoint::random_state() const {
  std::string all;
  for (auto& [name, generator] : detail::generators_of(device())) {
    at::Tensor state;
    {
      const std::lock_guard lock(generator.mutex());
      state = generator.get_state();
    }
    all += name + " " + std::to_string(state.nbytes()) + " ";
    all.append(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
  }
  return all;
}

inline void Checkpoint::set_random_state(const detail::TrainingFile& file) const {
  const c10::IValue* const all = file.find("random");
  if (all == nullptr || !all->isGenericDict()) return;
  const auto ranks = all->toGenericDict();
  const auto mine = ranks.find(static_cast<std::int64_t>(rank_.value()));
  if (mine == ranks.end() || !mine->value().isGenericDict()) return;
  const auto states = mine->value().toGenericDict();
  for (auto& [name, generator] : detail::generators_of(device())) {
    const auto state = states.find(name);
    if (state == states.end() || !state->value().isTensor()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state->value().toTensor());
  }
}

inline detail::TensorFile Checkpoint::file_of(std::span<const std::string> random,
                                              bool is_copy) const {
  detail::PythonDict states = detail::make_dict();
  for (const detail::SavedPart& part : parts_) states.insert(part.name, part.save());
  detail::PythonDict of_ranks = detail::make_dict();
  for (std::size_t rank = 0; rank != random.size(); ++rank) {
    detail::PythonDict generators = detail::make_dict();
    for (std::string_view rest = random[rank]; !rest.empty();) {
      const std::size_t space = rest.find(' '), next = rest.find(' ', space + 1);
      const std::string name(rest.substr(0, space));
      const std::size_t bytes = std::stoull(std::string(rest.substr(space + 1, next - space - 1)));
      at::Tensor state = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
      std::memcpy(state.mutable_data_ptr(), rest.data() + next + 1, bytes);
      rest.remove_prefix(next + 1 + bytes);
      generators.insert(name, state);
    }
    of_ranks.insert(static_cast<std::int64_t>(rank), generators);
  }
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

inline void Checkpoint::save_to(const std::string& path, bool later) {
  for (const detail::SavedPart& part : parts_)
    if (part.consolidate) part.consolidate();
  with_ranks(detail::JobCall::save, [&](const detail::JointRanks& ranks) {
    std::vector<std::string> paths, random;
    for (const std::string& text : detail::store_together(ranks, "save", [&] {
           writer_->wait();
           return path + '\n' + random_state();
         })) {
      const std::size_t end = text.find('\n');
      paths.push_back(text.substr(0, end));
      random.push_back(text.substr(end + 1));
    }
    require_same("save", "paths", paths);
    detail::store_together(ranks, "save", [&] {
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
  });
}

inline void Checkpoint::finish() {
  with_ranks(detail::JobCall::save, [&](const detail::JointRanks& ranks) {
    detail::store_together(ranks, "save", [&] {
      writer_->wait();
      return std::string();
    });
  });
}

inline LoadReport Checkpoint::load(const std::string& path, bool strict) {
  LoadReport report;
  with_ranks(detail::JobCall::load, [&](const detail::JointRanks& ranks) {
    std::optional<detail::TrainingFile> file;
    std::function<void()> copy;
    require_same("load", "files", detail::store_together(ranks, "load", [&] {
                   writer_->wait();
                   file.emplace(path);
                   copy = file->match(*module_, strict, report);
                   for (const detail::SavedPart& part : parts_) {
                     if (const c10::IValue* const state = file->find(part.name)) {
                       part.load(*state, false);
                     } else if (strict) {
                       detail::fail(
                           "load", {"'", path, "' has no '", part.name, "'"},
                           "load a file with the same parts, or what there is with strict = false");
                     } else {
                       report.missing.push_back(part.name);
                     }
                   }
                   return file->identity();
                 }));
    detail::store_together(ranks, "load", [&] {
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
  });
  return report;
}

inline bool Checkpoint::resume(const std::string& path) {
  bool is_there = false;
  with_ranks(detail::JobCall::load, [&](const detail::JointRanks& ranks) {
    is_there = detail::store_together(ranks, "load", [&] {
                 return std::string(::access(path.c_str(), F_OK) == 0 ? "yes" : "no");
               })[0] == "yes";
  });
  if (is_there) load(path);
  return is_there;
}

LOCKSTEP_COLD_END

}  // namespace torch_modules

}  // namespace lockstep

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What stands for a trainer that was rejected, so that one error stays one error: it has the
/// members of `Trainer`, which take and give what theirs do. Nothing here is ever run.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpoints.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/observe/summary.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep {
struct FitOptions;
}
namespace lockstep {
struct PredictOptions;
}

namespace lockstep::detail {

template <class Batch>
struct RejectedBatches {
  std::size_t size() const { std::terminate(); }
  const Batch* begin() const { std::terminate(); }
  const Batch* end() const { std::terminate(); }
};

struct RejectedEpoch {
  std::uint64_t number() const { std::terminate(); }
  template <class Source>
  RejectedBatches<typename Source::batch_type> batches(const Source&, std::size_t) const {
    std::terminate();
  }
  template <class Source>
  RejectedBatches<typename Source::batch_type> batches(const Source&, LoaderOptions) const {
    std::terminate();
  }
  EpochSummary summary() const { std::terminate(); }
  void mark_as_printed() const {}
};

struct RejectedEpochs {
  const RejectedEpoch* begin() const { std::terminate(); }
  const RejectedEpoch* end() const { std::terminate(); }
};

template <class Model, class... Ps>
class RejectedTrainer : public RejectedWrapper<Model, Ps...> {
 public:
  explicit RejectedTrainer(Session&, DefaultModel = {}, const TrainerOptions& = {}) {}
  RejectedTrainer(Session&, Model, const TrainerOptions& = {}) {}
  template <ModelMaking<Model, Session> Make>
  RejectedTrainer(Session&, Make&&, const TrainerOptions& = {}) {}

  static std::uint64_t fingerprint() { std::terminate(); }
  Rank rank() const { std::terminate(); }
  WorldSize world_size() const { std::terminate(); }
  const Membership& membership() const { std::terminate(); }
  template <class T>
  auto option(std::string_view, T otherwise, std::string_view = {}) const {
    if constexpr (OptionText<T>) {
      return std::string(otherwise);
    } else {
      return otherwise;
    }
  }
  const std::vector<std::string>& arguments() const { std::terminate(); }
  const std::string& data() const { std::terminate(); }
  RejectedWrapper<Model, Ps...>& ddp() const { std::terminate(); }
  RejectedWrapper<Model, Ps...>& dp() const { std::terminate(); }
  Seed seed() const { std::terminate(); }
  RandomStream random() const { std::terminate(); }
  SamplerOptions& sampler_options() const { std::terminate(); }
  LoaderOptions& loader_options() const { std::terminate(); }

  auto open(auto&& make) const { return make(); }
  RejectedEpochs epochs(std::uint64_t) const { std::terminate(); }
  Scores evaluate(const auto&, std::size_t, std::string_view = "") const { std::terminate(); }
  template <auto Set>
  Scores evaluate(const auto&...) const {
    std::terminate();
  }
  template <auto Set>
  AnyView<HostMemory, float> predict(const auto&...) const {
    std::terminate();
  }
  Scores reduce_metrics(const Tally&) const { std::terminate(); }
  EpochSummary fit(const auto&, const FitOptions&, const auto&...) const { std::terminate(); }
  EpochSummary fit(const auto&, const auto&, const FitOptions&, const auto&...) const {
    std::terminate();
  }
  AnyView<HostMemory, float> predict(const auto&, std::size_t) const { std::terminate(); }
  AnyView<HostMemory, float> predict(const auto&, const PredictOptions&) const { std::terminate(); }
  const RejectedTrainer& communicator() const { std::terminate(); }
  const RejectedTrainer& group() const { std::terminate(); }
  const RejectedTrainer& across() const { std::terminate(); }
  void all_reduce(const auto&...) const {}
  void broadcast(const auto&...) const {}
  void all_gather(const auto&, const auto&) const {}
  std::vector<double> all_gather(const auto&) const { std::terminate(); }
  std::vector<double> all_gather_variable(const auto&...) const { std::terminate(); }
  std::vector<double> gather_variable(const auto&...) const { std::terminate(); }
  void barrier() const {}
  void log_field(std::string_view, const auto&) const {}
  void on_rank0(const auto&) const {}
  SamplerState position() const { std::terminate(); }
  void resume(const SamplerState&) const {}
  Resumed resume(const std::string&, const LoadOptions& = {}) const { std::terminate(); }
  std::optional<Resumed> resume() const { std::terminate(); }
  void keep(std::string_view, const auto&) const {}
  void save(const std::string&, const SaveOptions& = {}) const {}
  LoadReport load(const std::string&, const LoadOptions& = {}) const { std::terminate(); }
  LoadReport load_parameters(const std::string&, const LoadOptions& = {}) const {
    std::terminate();
  }
  void checkpoints(const CheckpointOptions&) const {}
  Checkpoints* checkpoints() const { std::terminate(); }
  void finish_saves() const {}
  EpochSummary summary() const { std::terminate(); }
};

}  // namespace lockstep::detail

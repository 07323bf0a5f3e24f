// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A trial's training once more in one process, with none of the library but its samplers,
/// its random numbers and its learning curves: sums in plain loops, and one number after the other
/// updated as PyTorch's documentation says.

#include <algorithm>
#include <optional>

#include "optim/plain.hpp"
#include "soak/soak.hpp"

namespace soak {

/// Optimizers whose numbers are drawn by nobody: those that `set_numbers` gives the jobs.
inline constexpr double common_lr = 0.02, named_lr = 0.05, common_decay = 0.01;

template <class Rule>
struct PlainRule;
template <>
struct PlainRule<SGD> {
  using type = plain::Sgd;
  static void prepare(plain::Sgd&) {}
};
template <>
struct PlainRule<SGDMomentum> {
  using type = plain::Sgd;
  static void prepare(plain::Sgd& rule) { rule.momentum = 0.9; }
};
template <>
struct PlainRule<SGDNesterov> {
  using type = plain::Sgd;
  static void prepare(plain::Sgd& rule) {
    rule.momentum = 0.9;
    rule.nesterov = true;
  }
};
template <>
struct PlainRule<Adam> {
  using type = plain::Adam;
  static void prepare(plain::Adam&) {}
};
template <>
struct PlainRule<AdamW> {
  using type = plain::Adam;
  static void prepare(plain::Adam& rule) { rule.decoupled = true; }
};

/// A parameter in double, what the batch at hand says of it, and the sum over batches.
struct PlainTensor {
  std::string name;
  std::vector<double> values, gradient, sum;
  bool is_trained = true;
  bool is_ready = false, is_used = false;
};

/// The step that a model with numbered tensors sees.
class PlainStep {
 public:
  static constexpr bool draws = true;
  static constexpr bool is_training() { return true; }

  struct Row {
    double* data;
    std::size_t count;
    using value_type = double;
    double& operator()(std::size_t i) const { return data[i]; }
    std::size_t size() const { return count; }
  };

  explicit PlainStep(std::vector<PlainTensor>& tensors) : tensors_(tensors) {}

  Row param(std::size_t p) const { return row(tensors_[p].values); }
  Row grad(std::size_t p) const { return row(tensors_[p].gradient); }
  void ready(std::size_t p) const { tensors_[p].is_ready = true; }
  bool trains(std::size_t p) const { return tensors_[p].is_trained; }
  LayerRandom random(std::string_view layer) const {
    return detail::layer_random(key, detail::hash_of(layer));
  }

  std::uint64_t key = 0;

 private:
  static Row row(std::vector<double>& values) { return {values.data(), values.size()}; }
  std::vector<PlainTensor>& tensors_;
};

/// A declared model of doubles in one process, through a step without ranks.
/// `Model::fill(name, p, values)` gives parameter p its first values.
template <class Model>
class PlainDeclared {
 public:
  explicit PlainDeclared(const Drawn& drawn)
      : model_(drawn),
        values_(bytes(model_)),
        gradients_(bytes(model_)),
        buffers_(1 << 16),
        step_(model_, {values_.data(), gradients_.data(), buffers_.data()}) {
    step_.for_each_parameter([&](std::string_view name, const auto& view) {
      PlainTensor tensor{.name = std::string(name), .values = {}, .gradient = {}, .sum = {}};
      tensor.values.resize(view.size());
      tensor.gradient.resize(view.size());
      Model::fill(name, tensors_.size(), tensor.values);
      tensors_.push_back(std::move(tensor));
    });
  }
  std::vector<PlainTensor>& tensors() { return tensors_; }
  double run(const auto& batch, std::uint64_t) {
    std::size_t p = 0;
    step_.for_each_parameter([&](std::string_view, const auto& view) {
      const auto& values = tensors_[p++].values;
      std::copy(values.begin(), values.end(), const_cast<double*>(view.data_handle()));
    });
    const double loss = model_.forward(step_, batch);
    model_.backward(step_, batch);
    p = 0;
    step_.for_each_gradient([&](std::string_view, const auto& view) {
      std::copy(view.data_handle(), view.data_handle() + view.size(), tensors_[p].gradient.begin());
      tensors_[p++].is_ready = true;
    });
    return loss;
  }

 private:
  static std::size_t bytes(const Model& model) { return detail::Layout<Model>(model).plan().bytes; }

  Model model_;
  HostArena values_, gradients_, buffers_;
  detail::BareStep<Model> step_;
  std::vector<PlainTensor> tensors_;
};

/// What a kind of job has of its own, beside its policies.
struct Plainly {
  bool by_rank = false;       // every rank's own mean, where a batch's samples have to do with it
  std::string_view frozen{};  // the beginning of these parameters' names
  std::string_view named{};   // the same of those with a rate of their own
  bool vectors_decay = true;
};

/// Trains like `ranks` ranks of the job. `Net` has `tensors()`, the parameters, and
/// `run(batch, key)`, which leaves gradients there and returns the loss.
template <class Job, class Net, class Data>
void train_plainly(Net& net, const Drawn& drawn, const Data& data, const Plainly& how) {
  using Rule = typename Job::template policy<axes::Optimizer>::choice;
  using Curve = typename Job::template policy<axes::Schedule>::choice;
  using Accumulation = typename Job::template policy<axes::Accumulate>;
  using PlainOne = typename PlainRule<Rule>::type;
  constexpr std::size_t together = Accumulation::micro_batches;
  const std::size_t ranks = drawn.plain;
  std::vector<typename Job::sampler> samplers;
  for (std::size_t r = 0; r != ranks; ++r)
    samplers.emplace_back(drawn.samples, WorldSize{ranks}, Rank{r},
                          SamplerOptions{.seed = Seed{drawn.seed}});
  const auto batches_of = [&](std::size_t r) {
    return (samplers[r].size() + drawn.batch - 1) / drawn.batch;
  };
  std::size_t most = 0;
  for (std::size_t r = 0; r != ranks; ++r) most = std::max(most, batches_of(r));
  typename Curve::Options curve{};
  if constexpr (requires { curve.steps; })
    curve.steps = drawn.epochs * Accumulation::updates_of(most);
  if constexpr (requires { curve.factor; }) curve.epochs = 1, curve.factor = 0.5;

  std::vector<PlainTensor>& tensors = net.tensors();
  std::vector<std::vector<PlainOne>> rules(tensors.size());
  for (std::size_t p = 0; p != tensors.size(); ++p) {
    PlainTensor& tensor = tensors[p];
    tensor.is_trained = how.frozen.empty() || !tensor.name.starts_with(how.frozen);
    PlainOne rule;
    PlainRule<Rule>::prepare(rule);
    rule.weight_decay = tensor.name.ends_with("bias") && !how.vectors_decay ? 0 : common_decay;
    rules[p].assign(tensor.values.size(), rule);
  }

  double losses = 0;  // of all ranks
  std::uint64_t updates = 0;
  for (std::size_t epoch = 0; epoch != drawn.epochs; ++epoch) {
    for (auto& sampler : samplers) sampler.set_epoch(Epoch{epoch});
    const auto draws_of = [&](std::size_t r, std::size_t number) {
      std::vector<std::size_t> draws;
      const std::size_t first = number * drawn.batch;
      for (std::size_t k = first; k < std::min(first + drawn.batch, samplers[r].size()); ++k)
        draws.push_back(samplers[r][k]);
      return draws;
    };
    // Runs one batch and adds its gradients to the sums, times `weight`.
    typename Data::batch_type batch;
    const auto run = [&](const std::vector<std::size_t>& draws, std::size_t r, std::size_t micro,
                         double weight) {
      data.load(draws, Pass{Seed{drawn.seed}, Epoch{epoch}}, batch);
      const std::uint64_t stream = detail::mix_bits(rank_seed(Seed{drawn.seed}, Rank{r}).value() ^
                                                    detail::hash_of("step.random"));
      for (PlainTensor& tensor : tensors) tensor.is_ready = false;
      const double loss =
          net.run(batch, detail::random_at(detail::random_at(stream, updates), micro));
      for (PlainTensor& tensor : tensors) {
        if (!tensor.is_ready) continue;
        tensor.is_used = true;
        for (std::size_t i = 0; i != tensor.sum.size(); ++i)
          tensor.sum[i] += weight * tensor.gradient[i];
      }
      return loss;
    };
    for (std::size_t first = 0; first < most; first += together) {
      const std::size_t end = std::min(first + together, most);
      for (PlainTensor& tensor : tensors) {
        tensor.sum.assign(tensor.values.size(), 0);
        tensor.is_used = false;
      }
      if (!how.by_rank) {
        for (std::size_t number = first; number != end; ++number) {
          std::vector<std::size_t> draws;
          for (std::size_t r = 0; r != ranks; ++r) {
            const auto own = draws_of(r, number);
            draws.insert(draws.end(), own.begin(), own.end());
          }
          losses += static_cast<double>(ranks) *
                    run(draws, 0, number - first, 1 / static_cast<double>(end - first));
        }
      } else {
        std::size_t live = 0;
        for (std::size_t r = 0; r != ranks; ++r) live += batches_of(r) > first;
        if constexpr (!Job::template policy<axes::UnevenInputs>::divides_by_live) live = ranks;
        for (std::size_t r = 0; r != ranks; ++r) {
          const std::size_t own_end = std::min(end, std::max(first, batches_of(r)));
          for (std::size_t number = first; number != own_end; ++number)
            losses += run(draws_of(r, number), r, number - first,
                          1 / static_cast<double>(live * (own_end - first)));
        }
      }
      if (end - first < together && Accumulation::tail == Tail::drop) continue;
      double squares = 0;
      for (const PlainTensor& tensor : tensors)
        if (tensor.is_used)
          for (const double g : tensor.sum) squares += g * g;
      double factor = 1;
      if constexpr (Job::template policy<axes::Clip>::clips)
        factor =
            std::min(1.0, Job::template policy<axes::Clip>::norm / (std::sqrt(squares) + 1e-6));
      const double rate = Curve::factor(curve, {updates, epoch});
      for (std::size_t p = 0; p != tensors.size(); ++p) {
        PlainTensor& tensor = tensors[p];
        if (!tensor.is_used) continue;
        const bool is_named = !how.named.empty() && tensor.name.starts_with(how.named);
        for (std::size_t i = 0; i != tensor.values.size(); ++i) {
          rules[p][i].lr = rate * (is_named ? named_lr : common_lr);
          rules[p][i].update(tensor.values[i], factor * tensor.sum[i]);
        }
      }
      ++updates;
    }
  }
  std::vector<double> numbers;
  for (const PlainTensor& tensor : tensors)
    numbers.insert(numbers.end(), tensor.values.begin(), tensor.values.end());
  write_numbers(drawn.out, numbers);
  std::printf("one process: losses %.17g\n", losses);
}

/// The numbers of a job's optimizer and schedule, which `train_plainly` knows too.
template <class Job>
void set_numbers(Job& job) {
  job.optimizer().lr = common_lr;
  job.optimizer().weight_decay = common_decay;
  if constexpr (requires { job.optimizer().momentum; }) job.optimizer().momentum = 0.9;
  if constexpr (requires { job.schedule().factor; }) {
    job.schedule().epochs = 1;
    job.schedule().factor = 0.5;
  }
  if constexpr (Job::template policy<axes::ParameterGroups>::count > 1)
    job.optimizer(Named<"0.*">{}).lr = named_lr;
}

/// What a kind needs to know of its model: `Net`, the same in one process, `From`, how a tensor of
/// it is read, and `samples(drawn)`.
template <class Model>
struct About;

/// The kinds of jobs that a program knows: the one that was drawn runs, on its ranks or plainly.
struct Kinds {
  int argc;
  char** argv;
  Drawn drawn{argc, argv};
  std::optional<int> status{};

  template <class Model, class... Policies>
  void kind(std::string_view name, const Plainly& how = {}) {
    if (drawn.kind != name) return;
    using Job = Trainer<Model, Policies...>;
    const auto data = About<Model>::samples(drawn);
    if (drawn.plain != 0) {
      typename About<Model>::Net net(drawn);
      train_plainly<Job>(net, drawn, data, how);
      status = 0;
      return;
    }
    status = launch<Job>(
        argc, argv, [this](Session&) { return Model(drawn); },
        [&](Job& job) {
          set_numbers(job);
          train<typename About<Model>::From>(job, drawn, data);
        });
  }
};

}  // namespace soak

// SPDX-License-Identifier: Apache-2.0
// LibTorch modules with batch norms in jobs of Norms<Synced>: PyTorch's figures.
#include "lockstep/detail/torch/sync_batch_norm.hpp"

#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "torch/norm_ranks.hpp"
#include "train/norm_case.hpp"

BOOST_AUTO_TEST_SUITE(torch_synced_norms)

namespace {

using namespace synced_ranks;
using train::NormCase;
namespace nn = ::torch::nn;

/// A rank's part of an input, and of the gradient of its output.
struct Part {
  at::Tensor x, dy;
};

/// One norm, which keeps what it computed.
struct OneNormImpl : nn::Cloneable<OneNormImpl> {
  explicit OneNormImpl(std::int64_t of) : channels(of) { OneNormImpl::reset(); }
  void reset() override { bn1 = register_module("bn1", nn::BatchNorm1d(channels)); }

  std::int64_t channels;
  nn::BatchNorm1d bn1{nullptr};
};

struct NormModel : TorchModel<NormModel, OneNormImpl, double> {
  using TorchModel::TorchModel;
  at::Tensor y;

  at::Tensor loss(const Part& part) {
    y = module().bn1->forward(part.x);
    return (y * part.dy).sum();
  }
};

std::shared_ptr<OneNormImpl> one_norm(std::int64_t channels) {
  auto net = std::make_shared<OneNormImpl>(channels);
  net->to(at::kDouble);
  const at::NoGradGuard quiet;
  for (std::int64_t c = 0; c != channels; ++c) {
    net->bn1->weight[c] = train::wave(static_cast<std::size_t>(c), 3, 1);
    net->bn1->bias[c] = train::wave(static_cast<std::size_t>(c), 4, 1);
  }
  return net;
}

at::Tensor numbers(const nlohmann::json& list) {
  return at::tensor(at::ArrayRef<double>(list.get<std::vector<double>>()), at::kDouble);
}

/// One step of a case of syncbn.json.
void check_case(ranks::Shared& comm, const nlohmann::json& c) {
  const std::size_t me = comm.rank().value();
  const auto channels = c.at("channels").get<std::int64_t>();
  const auto positions = c.at("spatial").get<std::int64_t>();
  const auto samples = c.at("batch_per_rank").get<std::vector<std::int64_t>>();
  std::int64_t first = 0;
  for (std::size_t r = 0; r != me; ++r) first += samples[r] * channels * positions;
  const std::int64_t size = samples[me] * channels * positions;
  const auto waves = [&](double k, double scale) {
    return ((at::arange(size, at::kDouble) * 0.37 + k).sin() * scale)
        .view({samples[me], channels, positions});
  };
  const Part part{waves(20 + static_cast<double>(me), 2).requires_grad_(),
                  waves(60 + static_cast<double>(me), 1)};
  DistributedDataParallel<NormModel, Norms<Synced>, Sharding<Replicated>> ddp(
      comm, NormModel(one_norm(channels)));
  auto reduced = ddp.forward(part).backward().reduce();
  const auto own = [&](const char* name) { return numbers(c.at(name)).narrow(0, first, size); };
  require_close(ddp.model().y.reshape({-1}), own("y"), "y", 1e-10);
  require_close(part.x.grad().reshape({-1}), own("dx"), "dx", 1e-10);
  const auto world = static_cast<double>(samples.size());
  for (std::int64_t i = 0; i != channels; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto close = [&](double have, const char* name) {
      require_close(at::scalar_tensor(have, at::kDouble), numbers(c.at(name))[i], name, 1e-10);
    };
    close(reduced.grad(Listed<double>{0})(at) * world, "dweight");  // DDP has averaged them
    close(reduced.grad(Listed<double>{1})(at) * world, "dbias");
    close(ddp.buffer(Listed<double>{0})(at), "running_mean");
    close(ddp.buffer(Listed<double>{1})(at), "running_var");
  }
  std::move(reduced).update();
}

/// The network of syncbn_train.json.
struct NormMlpImpl : nn::Cloneable<NormMlpImpl> {
  NormMlpImpl(std::size_t inputs, std::size_t width, std::size_t outputs)
      : in(static_cast<std::int64_t>(inputs)),
        hidden(static_cast<std::int64_t>(width)),
        out(static_cast<std::int64_t>(outputs)) {
    NormMlpImpl::reset();
  }
  void reset() override {
    fc1 = register_module("fc1", nn::Linear(in, hidden));
    bn1 = register_module("bn1", nn::BatchNorm1d(hidden));
    fc2 = register_module("fc2", nn::Linear(hidden, out));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(at::relu(bn1(fc1(x)))); }

  std::int64_t in, hidden, out;
  nn::Linear fc1{nullptr}, fc2{nullptr};
  nn::BatchNorm1d bn1{nullptr};
};

at::Tensor inputs_of(const train::Samples& batch) {
  return at::tensor(at::ArrayRef<double>(batch.x), at::kDouble)
      .view({-1, static_cast<std::int64_t>(batch.inputs)});
}

struct MlpModel : TorchModel<MlpModel, NormMlpImpl, double> {
  using TorchModel::TorchModel;
  at::Tensor loss(const train::Samples& batch) {
    const std::vector<std::int64_t> labels(batch.y.begin(), batch.y.end());
    return at::cross_entropy_loss(module().forward(inputs_of(batch)),
                                  at::tensor(at::ArrayRef<std::int64_t>(labels), at::kLong));
  }
};

std::shared_ptr<NormMlpImpl> norm_mlp(const NormCase& c) {
  auto net = std::make_shared<NormMlpImpl>(c.in, c.hidden, c.out);
  net->to(at::kDouble);
  const at::NoGradGuard quiet;
  double k = 1;
  for (auto& item : net->named_parameters()) {
    const at::Tensor index = at::arange(item.value().numel(), at::kDouble);
    item.value().copy_(((index * 0.37 + k++).sin() * 0.2).view_as(item.value()));
    if (item.key() == "bn1.weight") item.value() += 1;
  }
  return net;
}

/// Trains a case and compares everything that is known of it.
void train_case(auto& job, const NormCase& c, std::size_t part, std::size_t parts,
                const auto& mean) {
  job.optimizer().lr = c.lr;
  job.optimizer().momentum = c.momentum;
  for (std::size_t s = 0; s < c.steps; ++s) {
    const double loss = mean(job.step(c.samples(s, part, parts)));
    job.step_tail();
    train::require_numbers(c, {loss}, {c.mean_loss[s]}, "the loss of step " + std::to_string(s));
  }
  train::require_trained(c, job);
  if constexpr (requires { job.model().module(); }) {
    const at::NoGradGuard quiet;
    auto& net = job.model().module();
    net.eval();
    const at::Tensor outputs = net.forward(inputs_of(c.evaluated())).contiguous();
    train::require_numbers(
        c, {outputs.data_ptr<double>(), outputs.data_ptr<double>() + outputs.numel()},
        c.eval_outputs, "an output in evaluation");
    net.train();
  }
}

/// Every case on one, two and four ranks.
template <class Job>
void train_every_case() {
  for (const NormCase& c : train::norm_cases()) {
    for (const std::size_t world : {1u, 2u, 4u}) {
      if (!c.divides_among(world)) continue;
      BOOST_TEST_CONTEXT(c.name)
      expect_fine(on_ranks(world, [&](ranks::Shared& comm) {
        Job job(comm, MlpModel(norm_mlp(c)));
        train_case(job, c, comm.rank().value(), world,
                   [&](double loss) { return comm.all_reduce(loss, Average{}); });
      }));
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(uneven_batches_are_normalised_as_pytorch_does) {
  std::size_t cases = 0;
  for (const nlohmann::json& c : reference("syncbn.json")) {
    const std::size_t world = c.at("batch_per_rank").size();
    BOOST_TEST_CONTEXT("syncbn.json, case " << cases)
    expect_fine(on_ranks(world, [&](ranks::Shared& comm) { check_case(comm, c); }));
    ++cases;
  }
  BOOST_TEST(cases != 0u, "syncbn.json has no cases");
}

BOOST_AUTO_TEST_CASE(shared_parameters_train_as_in_pytorch) {
  train_every_case<DistributedDataParallel<MlpModel, Optimizer<SGDMomentum>, Norms<Synced>>>();
}

// Buckets of one parameter travel while norms communicate.
BOOST_AUTO_TEST_CASE(replicas_with_small_buckets_train_as_in_pytorch) {
  train_every_case<DistributedDataParallel<MlpModel, Optimizer<SGDMomentum>, Norms<Synced>,
                                           Sharding<Replicated>, Buckets<BucketLimits{0, 0}>>>();
}

BOOST_AUTO_TEST_CASE(a_job_without_the_policy_rejects_converted_norms) {
  expect_all_say(on_ranks(2,
                          [](ranks::Shared& comm) {
                            const auto net =
                                convert_sync_batchnorm(norm_mlp(train::norm_cases().front()));
                            DistributedDataParallel<MlpModel> ddp(comm, MlpModel(net));
                            ddp.step(train::norm_cases().front().samples(0, 0, 2));
                          }),
                 "the norms of this job do not share their statistics");
}

// Each replica has a copy of the module, whose norms are converted as well.
BOOST_AUTO_TEST_CASE(replicas_of_one_process_train_as_in_pytorch) {
  at::set_num_threads(1);
  for (const NormCase& c : train::norm_cases()) {
    for (const std::size_t replicas : {1, 2, 3}) {
      DataParallel<MlpModel, Optimizer<SGDMomentum>, Norms<Synced>, LossOnReplica> dp(
          {.replicas = replicas}, MlpModel(norm_mlp(c)));
      BOOST_CHECK_NO_THROW(train_case(dp, c, 0, 1, [](double loss) { return loss; }));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

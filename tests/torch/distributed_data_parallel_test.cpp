// SPDX-License-Identifier: Apache-2.0
// A module in the program's own loop, with LibTorch's optimizers: ranks train like one process.
#include "lockstep/torch/distributed_data_parallel.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/hook/compress_to.hpp"
#include "lockstep/hook/power_sgd.hpp"

BOOST_AUTO_TEST_SUITE(torch_distributed_data_parallel)

namespace {

using namespace ranks;
namespace loops = lockstep::torch;

/// Two layers, a frozen one between, and one that is used only when it is asked for.
struct Net : torch::nn::Cloneable<Net> {
  torch::nn::Linear in{nullptr}, frozen{nullptr}, out{nullptr}, extra{nullptr};

  void reset() override {
    in = register_module("in", torch::nn::Linear(5, 7));
    frozen = register_module("frozen", torch::nn::Linear(7, 7));
    out = register_module("out", torch::nn::Linear(7, 3));
    extra = register_module("extra", torch::nn::Linear(7, 3));
    frozen->weight.requires_grad_(false);
    frozen->bias.requires_grad_(false);
  }
  Net() { reset(); }
  at::Tensor forward(const at::Tensor& x, bool with_extra = true) {
    const at::Tensor hidden = at::tanh(frozen(at::tanh(in(x))));
    return with_extra ? out(hidden) + 0.5 * extra(hidden) : out(hidden);
  }
};

/// The same module on all ranks, or not the same: ranks get rank 0's values.
template <class Module = Net>
std::shared_ptr<Module> make_net(std::size_t seed = 3) {
  torch::manual_seed(seed);
  return std::make_shared<Module>();
}
at::Tensor inputs_of(std::size_t step, std::size_t rank, std::int64_t rows = 4) {
  torch::manual_seed(1000 + step * 10 + rank);
  return at::randn({rows, 5});
}
at::Tensor loss_of(const at::Tensor& y) { return (y - 0.3).pow(2).mean(); }

void require_close(const torch::nn::Module& a, const torch::nn::Module& b, const std::string& when,
                   double tolerance = 1e-6) {
  const auto as = a.named_parameters(), bs = b.named_parameters();
  for (const auto& each : as) {
    const double apart = (each.value() - bs[each.key()]).abs().max().item<double>();
    require(apart <= tolerance, when + ": " + each.key() + " is " + std::to_string(apart) + " off");
  }
}

/// What one process does in a step of W ranks: `backward(net, r)` for each, and the mean.
void step_alone(Net& net, torch::optim::Optimizer& optimizer, std::size_t world,
                const auto& backward) {
  for (std::size_t r = 0; r != world; ++r) backward(net, r);
  for (auto& parameter : net.parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().div_(static_cast<double>(world));
  }
  optimizer.step();
  optimizer.zero_grad();
}

void all_well(std::size_t world, auto f, As as = As::processes) {
  const Ends ends = ranks::run(as, world, f);
  for (std::size_t r = 0; r < world; ++r)
    BOOST_TEST(ends[r] == "", "rank " << r << " of " << world << ": " << ends[r]);
}
void all_say(const Ends& ends, const std::string& words) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r].find(words) != std::string::npos, "rank " << r << ": " << ends[r]);
}

using Ddp = loops::DistributedDataParallel<Net>;

/// Trains both for a few steps. `backward(forward, r, s)` runs what a rank does before an update,
/// where `forward` is the wrapper's or the module's.
void compare(const std::string& what, const auto& backward, double tolerance = 1e-6,
             bool clips = false) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto alone = make_net();
      torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      auto net = make_net(3 + rank);
      Ddp ddp(net, comm);
      torch::optim::SGD optimizer(net->parameters(),
                                  torch::optim::SGDOptions(0.1).momentum(0.9));
      for (std::size_t s = 0; s != 5; ++s) {
        step_alone(*alone, plain, world, [&](Net& each, std::size_t r) {
          backward(each, [&](auto&&... x) { return each.forward(x...); }, r, s, nullptr);
        });
        backward(*net, [&](auto&&... x) { return ddp(x...); }, rank, s, &ddp);
        if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
        optimizer.step();
        optimizer.zero_grad(s % 2 == 0);
        require_close(*net, *alone, what + ", step " + std::to_string(s), tolerance);
      }
    });
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_train_like_one_process) {
  compare("plain", [](Net&, const auto& forward, std::size_t r, std::size_t s, Ddp*) {
    loss_of(forward(inputs_of(s, r))).backward();
  });
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// LibTorch's modules under DDP train as PyTorch's DDP does in Python, which runs in the same test,
// and as one process does that has all samples.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "temporary_folder.hpp"
#include "torch/cases.hpp"
#include "train/python.hpp"

#if LOCKSTEP_HAS_GLOO
#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#endif

BOOST_AUTO_TEST_SUITE(torch_parity)

namespace {

using namespace torch_tests;
using ranks::Ends;
using ranks::require;

constexpr std::size_t case_count = 9;

/// What Python trained, once for all cases and worlds. Empty where there is no PyTorch.
class Peer {
 public:
  static const Peer& get() {
    static const Peer peer;
    return peer;
  }
  bool is_there() const { return is_there_; }
  std::vector<float> values(const std::string& name, std::size_t world) const {
    std::ifstream file(folder_ / (name + "." + std::to_string(world)), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    std::vector<float> values(bytes.size() / sizeof(float));
    std::copy_n(bytes.data(), values.size() * sizeof(float),
                reinterpret_cast<char*>(values.data()));
    return values;
  }

 private:
  Peer() {
    const std::string python = train::python_with_torch();
    if (python.empty()) return;
    is_there_ = train::ask_torch(python, "../torch/ddp_peer.py", folder_.path, folder_ / "peer");
  }
  TemporaryFolder folder_;
  bool is_there_ = false;
};

double largest_difference(const std::vector<float>& have, const std::vector<float>& want,
                          const std::string& whose) {
  require(have.size() == want.size(), "there are " + std::to_string(have.size()) + " values and " +
                                          std::to_string(want.size()) + " of " + whose);
  double largest = 0;
  for (std::size_t i = 0; i != want.size(); ++i) {
    require(std::isfinite(have[i]), "a value is not finite");
    largest = std::max(largest, std::abs(static_cast<double>(have[i]) - want[i]));
  }
  return largest;
}

/// One process with LibTorch's own optimizer and the samples of all ranks.
std::vector<float> train_alone(const Case& each, std::size_t world) {
  Model model = make_model(each.name);
  std::vector<at::Tensor> trained;
  for (const auto& parameter : lockstep::detail::module_parameters(model.module()))
    if (parameter.tensor.requires_grad()) trained.push_back(parameter.tensor);
  std::unique_ptr<::torch::optim::Optimizer> optimizer;
  if (each.adamw) {
    optimizer = std::make_unique<::torch::optim::AdamW>(trained, each.lr);
  } else {
    optimizer = std::make_unique<::torch::optim::SGD>(
        trained, ::torch::optim::SGDOptions(each.lr).momentum(each.momentum));
  }
  for (int step = 0; step != each.steps; ++step) {
    optimizer->zero_grad();
    at::Tensor sum;
    // A penalty is not a mean over samples, so ranks have a loss each.
    for (std::size_t rank = 0; rank != world; ++rank) {
      const at::Tensor loss =
          model.loss(batch_of(each.name, static_cast<std::size_t>(step), rank)) /
          static_cast<double>(world);
      sum = sum.defined() ? sum + loss : loss;
    }
    sum.backward();
    optimizer->step();
  }
  return values_of(model.module());
}

struct Differences {
  std::array<double, case_count> to_python;
  std::array<double, case_count> to_one_process;
};

template <class... Ps>
std::vector<float> train_under(auto& comm, const Case& each) {
  DistributedDataParallel<Model, Ps...> ddp(comm, make_model(each.name));
  ddp.optimizer().lr = each.lr;
  if constexpr (requires { ddp.optimizer().momentum; }) ddp.optimizer().momentum = each.momentum;
  for (int step = 0; step != each.steps; ++step)
    ddp.step(batch_of(each.name, static_cast<std::size_t>(step), comm.rank().value()));
  return values_of(ddp.model().module());
}

template <class Rendezvous, class... Ps>
void compare_all_cases() {
  const Peer& peer = Peer::get();
  // The line by which ./x counts what was left out, whatever Boost.Test's level of messages is.
  if (!peer.is_there())
    std::printf("skipped: comparison with Python's DDP (no PyTorch for Python here)\n");
  BOOST_TEST_REQUIRE(cases().size() == case_count);
  for (const std::size_t world : {1u, 2u, 4u}) {
    const ranks::Common<Differences> differences;
    const Ends ends = ranks::run_processes<Rendezvous>(
        world, std::chrono::seconds(30),
        [&](auto& comm) {
          at::set_num_threads(1);
          for (std::size_t i = 0; i != case_count; ++i) {
            const Case& each = cases()[i];
            const std::vector<float> have =
                each.adamw ? train_under<Optimizer<AdamW>, Ps...>(comm, each)
                           : train_under<Optimizer<SGDMomentum>, Ps...>(comm, each);
            if (comm.rank() != Rank{0}) continue;
            if (peer.is_there())
              differences->to_python[i] =
                  largest_difference(have, peer.values(each.name, world), "Python's " + each.name);
            if (each.divides || world == 1)
              differences->to_one_process[i] =
                  largest_difference(have, train_alone(each, world), "one process's " + each.name);
          }
        },
        std::chrono::seconds(120));
    for (std::size_t rank = 0; rank != world; ++rank)
      BOOST_TEST(ends[rank] == "", "rank " << rank << " of " << world << ": " << ends[rank]);
    for (std::size_t i = 0; i != case_count; ++i) {
      const Case& each = cases()[i];
      BOOST_TEST_MESSAGE(each.name << ", " << world << " ranks: Python "
                                   << (peer.is_there() ? std::to_string(differences->to_python[i])
                                                       : "not compared")
                                   << ", one process " << differences->to_one_process[i]);
      // Adam divides small numbers by small ones; that it is off by as much in every world shows
      // that this comes from the update, not from the ranks.
      const double allowed = each.adamw ? 3e-7 : 1e-7;
      BOOST_TEST(differences->to_python[i] <= allowed, each.name << " on " << world
                                                                 << " ranks is off Python by "
                                                                 << differences->to_python[i]);
      BOOST_TEST(differences->to_one_process[i] <= 1e-6,
                 each.name << " on " << world << " ranks is off one process by "
                           << differences->to_one_process[i]);
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(modules_in_shared_memory_train_as_pythons_ddp_and_as_one_process) {
  compare_all_cases<ranks::SharedMemory>();
}

BOOST_AUTO_TEST_CASE(replicated_modules_train_as_pythons_ddp_and_as_one_process) {
  compare_all_cases<ranks::SharedMemory, Sharding<Replicated>, Buckets<BucketLimits{64, 400}>>();
}

#if LOCKSTEP_HAS_GLOO
BOOST_AUTO_TEST_CASE(modules_through_gloo_train_as_pythons_ddp_and_as_one_process) {
  compare_all_cases<ranks::Sockets, Backend<Gloo>>();
}
#endif

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// What a program keeps of a module when the job that had its memory has ended: parameters, views,
// gradients, graphs, optimizers. All go on with their values, or say that there was no memory.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"
#include "torch/small_net.hpp"

BOOST_AUTO_TEST_SUITE(torch_kept_tensors)

namespace {

using lockstep::Session;
using lockstep::Trainer;
using torch_net::inputs_of;
using torch_net::loss_of;
using torch_net::require;
using torch_tests::batch_of;
using torch_tests::contains;
using torch_tests::run_sessions;
using Loop = lockstep::torch::DistributedDataParallel<torch_net::Net>;
using Job = Trainer<torch_tests::Model, lockstep::Optimizer<lockstep::SGD>>;

/// Tensors, and the values that they had.
struct Kept {
  std::vector<at::Tensor> tensors, values;

  void keep(const at::Tensor& tensor) {
    tensors.push_back(tensor);
    values.push_back(tensor.detach().clone());
  }
  void keep_aliases(const at::Tensor& tensor) {
    keep(tensor);
    keep(tensor.detach());
    keep(tensor.view(-1));
    keep(tensor.narrow(0, 1, 1));
  }
  void require_values() const {
    for (std::size_t i = 0; i != tensors.size(); ++i)
      require(at::equal(tensors[i].detach(), values[i]),
              "tensor " + std::to_string(i) + " has other values");
  }
};

/// While it exists, LibTorch has no memory on the host for more than `most` bytes at a time.
class NoMemory : public c10::Allocator {
 public:
  explicit NoMemory(std::size_t most = 0) : most_(most), before_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this);
  }
  ~NoMemory() override { c10::SetCPUAllocator(before_); }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes > most_) throw std::bad_alloc();
    return before_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  std::size_t most_;
  c10::Allocator* before_;
};

void require_lost(const at::Tensor& tensor) {
  std::string said;
  try {
    tensor.sum();
  } catch (const c10::Error& error) {
    said = error.what();
  }
  require(contains(said, "this tensor has lost its values"), "an access is no error: " + said);
}

}  // namespace

BOOST_AUTO_TEST_CASE(what_a_program_keeps_of_its_loop_outlives_wrapper_and_communicator) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    BOOST_CHECK_NO_THROW(run_sessions(world, [](Session& session) {
      const std::size_t rank = session.rank().value();
      Kept kept;
      at::Tensor y, weight;
      std::optional<torch::optim::SGD> optimizer;
      std::shared_ptr<torch_net::Net> copy;
      {
        auto net = torch_net::make_net();
        Loop ddp(net, session);
        optimizer.emplace(net->parameters(), 0.1);
        for (std::size_t s = 0; s != 2; ++s) {
          optimizer->zero_grad();
          loss_of(ddp(inputs_of(s, rank))).backward();
          optimizer->step();
        }
        weight = net->in->weight;
        for (const at::Tensor& parameter : net->parameters()) {
          kept.keep_aliases(parameter);
          if (parameter.grad().defined()) kept.keep_aliases(parameter.grad());
        }
        copy = std::dynamic_pointer_cast<torch_net::Net>(net->clone());
        y = ddp(inputs_of(7, rank));
      }
      kept.require_values();
      const at::Tensor before = weight.detach().clone(), average = weight.grad().clone();
      optimizer->zero_grad();
      loss_of(y).backward();  // of a graph that has saved parameters
      loss_of(copy->forward(inputs_of(7, rank))).backward();
      require(at::allclose(weight.grad(), copy->in->weight.grad()), "another gradient");
      weight.mutable_grad() = average;
      optimizer->step();
      require(at::allclose(weight.detach(), before - 0.1 * average), "another update");
      require(at::equal(kept.tensors[1], weight.detach()), "an alias is none any more");
      weight.detach().resize_({90, 90});  // its memory is LibTorch's
    }));
  }
}

BOOST_AUTO_TEST_CASE(what_a_program_keeps_of_its_module_outlives_the_job) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    for (const bool keeps_module : {false, true}) {
      BOOST_CHECK_NO_THROW(run_sessions(world, [&](Session& session) {
        const std::size_t rank = session.rank().value();
        Kept kept;
        auto net = torch_tests::make_net("norm");
        {
          Job job(session, torch_tests::Model(net));
          for (std::size_t s = 0; s != 3; ++s) job.step(batch_of("norm", s, rank));
          for (const at::Tensor& parameter : net->parameters()) kept.keep_aliases(parameter);
          for (const at::Tensor& buffer : net->buffers()) kept.keep(buffer);
          if (!keeps_module) net.reset();
        }
        kept.require_values();
        if (keeps_module) torch_tests::cross_entropy(*net, batch_of("norm", 0, 0)).backward();
      }));
    }
  }
}

BOOST_AUTO_TEST_CASE(tensors_that_nobody_keeps_are_not_copied) {
  BOOST_CHECK_NO_THROW(run_sessions(1, [](Session& session) {
    lockstep::detail::LateFailures late;
    std::optional<Loop> ddp;
    ddp.emplace(torch_net::make_net(), session);
    loss_of((*ddp)(inputs_of(0, 0))).backward();
    std::optional<Job> job;
    job.emplace(session, torch_tests::Model(torch_tests::make_net("norm")));
    job->step(batch_of("norm", 0, 0));
    {
      const NoMemory none;
      ddp.reset();
      job.reset();
    }
    require(!late.take(), "a copy is made that nobody uses");
  }));
}

BOOST_AUTO_TEST_CASE(no_memory_at_the_end_of_a_loop_is_an_error_and_leaves_no_pointers) {
  for (const std::size_t world : {1u, 2u}) {
    BOOST_CHECK_NO_THROW(run_sessions(world, [](Session& session) {
      lockstep::detail::LateFailures late;
      auto net = torch_net::make_net();
      std::optional<Loop> ddp;
      ddp.emplace(net, session);
      loss_of((*ddp)(inputs_of(0, session.rank().value()))).backward();
      Kept biases;
      biases.keep(net->in->bias);
      biases.keep(net->in->bias.grad());
      const at::Tensor alias = net->in->weight.detach(), gradient = net->in->weight.grad();
      {
        const NoMemory no_more_than(7 * sizeof(float));
        ddp.reset();
      }
      biases.require_values();
      for (const at::Tensor& lost : {net->in->weight, alias, gradient}) require_lost(lost);
      const auto failure = late.take();
      require(failure.has_value(), "nothing is reported");
      require(contains(failure->problem(), "7 tensors of the program lost values") &&
                  contains(failure->problem(), "bad_alloc"),
              failure->problem());
      for (at::Tensor parameter : net->parameters()) {
        parameter.mutable_grad() = at::Tensor();
        parameter.set_data(at::zeros_like(parameter, at::kFloat));
      }
      loss_of(net->forward(inputs_of(0, 0))).backward();
    }));
  }
}

BOOST_AUTO_TEST_CASE(no_memory_at_the_end_of_a_job_is_an_error_and_leaves_no_pointers) {
  for (const std::size_t world : {1u, 2u}) {
    BOOST_CHECK_NO_THROW(run_sessions(world, [](Session& session) {
      lockstep::detail::LateFailures late;
      auto net = torch_tests::make_net("norm");
      std::optional<Job> job;
      job.emplace(session, torch_tests::Model(net));
      job->step(batch_of("norm", 0, session.rank().value()));
      {
        const NoMemory none;
        job.reset();
      }
      for (const at::Tensor& lost : net->parameters()) require_lost(lost);
      for (const at::Tensor& lost : net->buffers()) require_lost(lost);
      const auto failure = late.take();
      require(failure && contains(failure->problem(), "lost values at the end of the job"),
              "nothing is reported");
    }));
  }
}

BOOST_AUTO_TEST_CASE(no_memory_while_an_exception_ends_the_job_leaves_that_exception) {
  BOOST_CHECK_NO_THROW(run_sessions(1, [](Session& session) {
    lockstep::detail::LateFailures late;
    auto net = torch_net::make_net();
    try {
      std::optional<NoMemory> none;
      Loop ddp(net, session);
      const std::shared_ptr<void> at_end(nullptr, [&](void*) { none.emplace(); });
      throw std::runtime_error("no luck");
    } catch (const std::runtime_error& error) {
      require(std::string(error.what()) == "no luck", error.what());
    }
    require_lost(net->in->weight);
    require(!late.take(), "the second failure is reported");
  }));
}

BOOST_AUTO_TEST_SUITE_END()

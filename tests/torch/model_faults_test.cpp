// SPDX-License-Identifier: Apache-2.0
// What goes wrong with a LibTorch module in a job: it is found, and the words name the tensor.
#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_model_faults)

namespace {

using namespace torch_tests;

/// What was thrown on one rank by the second of two steps, between which
/// `change(module)` is made.
std::string words_after(const std::string& name, const auto& change, std::size_t steps = 2) {
  const Ends ends = run(1, [&](Shared& comm) {
    const auto net = make_net(name);
    Ddp ddp(comm, Model(net));
    ddp.step(batch_of(name, 0, 0));
    change(*net);
    for (std::size_t s = 1; s <= steps; ++s) ddp.step(batch_of(name, s, 0));
    throw std::runtime_error("nothing was thrown");
  });
  return ends[0];
}

}  // namespace

BOOST_AUTO_TEST_CASE(memory_that_is_replaced_is_found_and_the_tensor_is_named) {
  const auto says = [](const std::string& words, const std::string& part) {
    BOOST_TEST(contains(words, part), words);
  };
  const std::string replaced = words_after("plain", [](Net& net) {
    at::Tensor weight = net.named_parameters()["last.weight"];
    weight.set_data(weight.detach().clone());
  });
  says(replaced, "the memory of last.weight was replaced after training had begun");
  says(replaced, "load_state_dict");
  says(words_after("plain",
                   [](Net& net) {  // as torch::load does
                     ::torch::serialize::OutputArchive saved;
                     net.save(saved);
                     std::stringstream file;
                     saved.save_to(file);
                     ::torch::serialize::InputArchive loaded;
                     loaded.load_from(file);
                     net.load(loaded);
                   }),
       "the memory of first.weight was replaced");
  says(words_after("plain", [](Net& net) { net.to(at::kDouble); }),
       "the memory of first.weight was replaced");
  says(words_after("norm",
                   [](Net& net) {
                     at::Tensor mean = net.named_buffers()["norm.running_mean"];
                     mean.set_data(at::zeros({16}));
                   }),
       "the memory of norm.running_mean was replaced");
  says(words_after("plain",
                   [](Net& net) {
                     const at::NoGradGuard quiet;  // values may be set, where they are
                     net.named_parameters()["last.weight"].fill_(0.5);
                   }),
       "nothing was thrown");
}

BOOST_AUTO_TEST_CASE(tensors_that_are_registered_later_are_found_and_named) {
  const std::string words =
      words_after("plain", [](Net& net) { net.register_parameter("scale", at::ones({3})); }, 4);
  BOOST_TEST(contains(words, "parameter scale was registered, replaced or removed"), words);
  const std::string removed =
      words_after("plain", [](Net& net) { net.unregister_module("last"); }, 4);
  BOOST_TEST(contains(removed, "parameter last.weight was registered, replaced or removed"),
             removed);
  const std::string buffer =
      words_after("plain", [](Net& net) { net.register_buffer("seen", at::ones({3})); }, 4);
  BOOST_TEST(contains(buffer, "buffer seen was registered, replaced or removed"), buffer);
}

BOOST_AUTO_TEST_CASE(values_that_are_set_before_the_first_step_and_would_be_lost_are_rejected) {
  const auto words = [](const auto& change) {
    return run(1, [&](Shared& comm) {
      const auto net = make_net("plain");
      Ddp ddp(comm, Model(net));
      change(net->named_parameters()["last.weight"]);
      ddp.step(batch_of("plain", 0, 0));
      throw std::runtime_error("nothing was thrown");
    });
  };
  const std::string rejected =
      "the values of last.weight were changed after the job was made and before its first step";
  all_say(words([](at::Tensor weight) {
            const at::NoGradGuard quiet;
            weight.fill_(0.5);
          }),
          rejected);
  all_say(words([](at::Tensor weight) { weight.set_data(weight.detach().clone()); }), rejected);
  all_say(words([](const at::Tensor&) {}), "nothing was thrown");
}

BOOST_AUTO_TEST_CASE(a_graph_that_is_kept_over_a_step_is_rejected) {
  all_say(run(1,
              [](Shared& comm) {
                const auto net = make_net("plain");
                Ddp ddp(comm, Model(net));
                ddp.step(batch_of("plain", 0, 0));
                const at::Tensor kept = cross_entropy(*net, batch_of("plain", 1, 0));
                ddp.step(batch_of("plain", 2, 0));
                kept.backward();
              }),
          "modified by an inplace operation");
}

BOOST_AUTO_TEST_CASE(ranks_with_different_modules_name_the_difference) {
  for (const std::size_t world : {2u, 4u}) {
    all_say(run(world,
                [](Shared& comm) {
                  Ddp ddp(comm, make_model(comm.rank() == Rank{1} ? "sparse" : "plain"));
                }),
            "rank 0 has \"parameter first.weight float 16 x 12\" and rank 1 "
            "has \"parameter "
            "table.weight float 30 x 12\"");
  }
}

BOOST_AUTO_TEST_CASE(an_exception_in_the_loss_ends_all_ranks_with_its_words) {
  const auto fails = [](Net& net, const Batch& batch) -> at::Tensor {
    if (batch.labels[0].item<std::int64_t>() == 3) throw std::runtime_error("label 3 is unknown");
    return cross_entropy(net, batch);
  };
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_say(run(world,
                [&](Shared& comm) {
                  Ddp ddp(comm, Model(make_net("plain"), fails));
                  for (std::size_t s = 0; s != 40; ++s)
                    ddp.step(batch_of("plain", s, comm.rank().value()));
                }),
            "label 3 is unknown");
  }
}

BOOST_AUTO_TEST_CASE(losses_and_types_that_make_no_sense_are_rejected) {
  const auto several = [](Net& net, const Batch& batch) { return net.forward(batch.inputs); };
  all_say(run(1,
              [&](Shared& comm) {
                Ddp ddp(comm, Model(make_net("plain"), several));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "the model's loss has 20 elements");
  all_say(run(1,
              [](Shared& comm) {
                const auto net = make_net("plain");
                net->to(at::kDouble);
                Ddp ddp(comm, Model(net));
              }),
          "first.weight has elements of Double, which the model does not list");
  const auto detached = [](Net& net, const Batch& batch) {
    return cross_entropy(net, batch).detach();
  };
  all_say(run(1,
              [&](Shared& comm) {
                Ddp ddp(comm, Model(make_net("plain"), detached));
                ddp.step(batch_of("plain", 0, 0));
              }),
          "requires no gradient");
}

BOOST_AUTO_TEST_SUITE_END()

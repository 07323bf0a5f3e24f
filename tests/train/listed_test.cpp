// SPDX-License-Identifier: Apache-2.0
// Models that list their tensors at run time train to the bits of the same models with
// declarations.
#include "train/listed.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(listed)

namespace {

using namespace train;
using Network = PlainMlp<7, 9, 4>;
using ListedNetwork = ListedModel<Network, double>;
using Types = Sheet<float, double, float>;
using ListedTypes = ListedModel<Types, float, double, std::int32_t>;

static_assert(TensorListing<ListedNetwork> && !TensorListing<Network>);

/// All parameters of a declared model, and of a listed one.
std::string bits_of_declared(const auto& ddp, auto for_each) {
  std::string bits;
  for_each(ddp, [&](const auto& view) {
    bits.append(reinterpret_cast<const char*>(view.data_handle()), view.size() * sizeof(view(0)));
  });
  return bits;
}
std::string bits_of(const auto& ddp) {
  return bits_of_declared(ddp, [](const auto& step, auto f) {
    Network::for_each_parameter(step, [&](const auto& view) {
      f(HostView<const double, dynamic>(view.data_handle(), view.size()));
    });
  });
}
std::string bits_of_listed(const auto& ddp) {
  return bits_of(ByName<Network, std::decay_t<decltype(ddp)>>(ddp));
}

/// Every tensor that is handed out by name: parameters, gradients, buffers and states.
std::map<std::string, std::vector<double>> tensors_of(const auto& ddp) {
  std::map<std::string, std::vector<double>> all;
  const auto note = [&](const std::string& name, auto view, std::size_t first) {
    auto& values =
        all[name + " of " +
            std::string(detail::element_name(element_kind<typename decltype(view)::value_type>()))];
    values.push_back(static_cast<double>(first));
    for (std::size_t i = 0; i < view.size(); ++i)
      values.push_back(static_cast<double>(view.data_handle()[i]));
  };
  const auto noted_as = [&](const std::string& kind) {
    return [&, kind](std::string_view name, auto view) { note(kind + std::string(name), view, 0); };
  };
  ddp.for_each_parameter(noted_as("parameter "));
  ddp.for_each_gradient(noted_as("gradient "));
  ddp.for_each_buffer(noted_as("buffer "));
  ddp.for_each_state(
      [&](std::string_view parameter, std::string_view state, auto view, std::size_t first) {
        note("state " + std::string(parameter) + " " + std::string(state), view, first);
      });
  return all;
}

/// Trains two wrapped models with the same batches.
void train_both(auto& declared, auto& listed, std::size_t rank, const auto& compare) {
  declared.optimizer().lr = listed.optimizer().lr = 0.05;
  for (std::size_t s = 0; s < 6; ++s) {
    const Samples batch = reference_batch(5, 7, 4, s, rank);
    require(declared.step(batch) == listed.step(batch), "the losses differ");
    compare(s);
  }
}

template <class... Ps>
void compare_on_ranks() {
  for (const std::size_t world : {1u, 2u, 3u}) {
    all_well(world, [](Shared& comm) {
      DistributedDataParallel<Network, Ps...> declared(comm);
      DistributedDataParallel<ListedNetwork, Ps...> listed(comm);
      train_both(declared, listed, comm.rank().value(), [&](std::size_t s) {
        require(bits_of(declared) == bits_of_listed(listed),
                "other bits after step " + std::to_string(s));
      });
      require(declared.param("fc1.bias"_p)(3) != wave(3, 2, 0.2), "nothing was trained");
    });
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(sgd_of_shared_parameters_has_the_same_bits) {
  compare_on_ranks<Accumulate<2>, Clip<0.05>>();
  compare_on_ranks<>();
}

BOOST_AUTO_TEST_CASE(adamw_of_shared_parameters_has_the_same_bits) {
  compare_on_ranks<Optimizer<AdamW>, Accumulate<2>, Clip<0.05>>();
}

BOOST_AUTO_TEST_CASE(replicated_parameters_have_the_same_bits) {
  using Pieces = Buckets<BucketLimits{200, 600}>;
  compare_on_ranks<Sharding<Replicated>, Pieces, Accumulate<2>, Clip<0.05>>();
  compare_on_ranks<Sharding<Replicated>, Pieces, Optimizer<AdamW>, Accumulate<2>, Clip<0.05>>();
}

BOOST_AUTO_TEST_CASE(a_world_of_one_has_the_same_bits) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Network, World<1>, Optimizer<AdamW>> declared(nobody);
  DistributedDataParallel<ListedNetwork, World<1>, Optimizer<AdamW>> listed(nobody);
  train_both(declared, listed, 0,
             [&](std::size_t) { BOOST_TEST((bits_of(declared) == bits_of_listed(listed))); });
  const auto tensors = tensors_of(declared);
  BOOST_TEST(tensors.size() == 6u * 4u);
  BOOST_TEST((tensors == tensors_of(listed)));
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_have_the_same_bits) {
  DataParallel<Network> declared({.replicas = 3});
  DataParallel<ListedNetwork> listed({.replicas = 3});
  train_both(declared, listed, 0,
             [&](std::size_t) { BOOST_TEST((bits_of(declared) == bits_of_listed(listed))); });
}

BOOST_AUTO_TEST_CASE(ranks_that_declare_and_ranks_that_list_train_together) {
  all_well(2, [](Shared& comm) {
    const auto train = [&](auto& ddp, auto bits) {
      for (std::size_t s = 0; s < 4; ++s)
        ddp.step(reference_batch(5, 7, 4, s, comm.rank().value()));
      const auto all = all_gather_objects(comm, bits(ddp));
      require(all[0] == all[1], "rank 1 has other bits");
    };
    if (comm.rank() == Rank{0}) {
      DistributedDataParallel<Network, Sharding<Replicated>> ddp(comm);
      train(ddp, [](auto& each) { return bits_of(each); });
    } else {
      DistributedDataParallel<ListedNetwork, Sharding<Replicated>> ddp(comm);
      train(ddp, [](auto& each) { return bits_of_listed(each); });
    }
  });
}

BOOST_AUTO_TEST_CASE(several_element_types_and_unused_parameters_have_the_same_bits) {
  all_well(2, [](Shared& comm) {
    using Unused = UnusedParameters<Zero>;
    DistributedDataParallel<Types, Unused, Optimizer<Adam>> declared(comm);
    DistributedDataParallel<ListedTypes, Unused, Optimizer<Adam>> listed(comm);
    const ByName<Types, decltype(listed)> named(listed);
    for (std::size_t s = 0; s < 5; ++s) {
      Entry entry{.gradient = {0.5, 0.25 + static_cast<double>(s), -1}};
      entry.used = {s % 2 == 0, comm.rank() == Rank{1}, s != 3};
      declared.step(entry);
      listed.step(entry);
      compare(
          declared, [&](std::size_t p, std::size_t i) { return value(named, p, i); },
          "step " + std::to_string(s), 0);
    }
    require(value(declared, 1, 3) != start(1, 3), "nothing was trained");
    const auto tensors = tensors_of(declared);
    require(tensors == tensors_of(listed), "other tensors are handed out");
    require(tensors.size() > 6 + 2, "tensors are missing");
  });
}

BOOST_AUTO_TEST_CASE(phases_and_a_trainer_take_such_a_model) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<ListedNetwork, World<1>> ddp(nobody), stepping(nobody);
  const Samples batch = reference_batch(5, 7, 4, 0, 0);
  auto averaged = ddp.forward(batch).backward().reduce();
  BOOST_TEST(averaged.grad(1).size() == 9u);
  const double loss = std::move(averaged).update();
  BOOST_TEST(loss == stepping.step(batch));
  BOOST_TEST((bits_of_listed(ddp) == bits_of_listed(stepping)));

  Session session = detail::join_alone();
  Trainer<ListedNetwork> job(session);
  BOOST_TEST(job.step(batch) == loss);
  BOOST_TEST(job.param(1).size() == 9u);
  BOOST_TEST(detail::Composed<ListedNetwork>::fingerprint({}) ==
             detail::Composed<Network>::fingerprint());
}

// ---- What can go wrong

namespace {

/// Lists what it is told to list.
struct Lister {
  using Elements = ElementList<float, std::int32_t>;
  void (*listing)(TensorList&);
  void tensors(TensorList& list) const { listing(list); }
  double forward(auto&, int) { return 0; }
  void backward(auto& step, int) { step.ready(0); }
};

std::string message_of(void (*listing)(TensorList&)) {
  LoopbackCommunicator nobody;
  try {
    DistributedDataParallel<Lister, World<1>, Accumulate<2>> ddp(nobody, Lister{listing});
    ddp.step(1);
    return "nothing went wrong";
  } catch (const Error& error) {
    return error.what();
  }
}

constexpr ElementKind f32 = element_kind<float>();

}  // namespace

BOOST_AUTO_TEST_CASE(lists_that_make_no_sense_are_rejected_with_the_tensors_name) {
  const auto says = [](const std::string& words, const std::string& part) {
    BOOST_TEST(words.find(part) != std::string::npos, words);
  };
  says(message_of([](TensorList&) {}), "the model lists no parameter");
  says(message_of([](TensorList& list) { list.parameter("", f32, {2}); }), "has no name");
  says(message_of([](TensorList& list) {
         list.parameter("w", f32, {2});
         list.buffer("w", f32, {2});
       }),
       "tensor 'w' is listed twice");
  says(message_of([](TensorList& list) { list.parameter("n", element_kind<std::int32_t>(), {2}); }),
       "tensor 'n' is a parameter of integers");
  says(message_of([](TensorList& list) { list.parameter("w", element_kind<double>(), {2}); }),
       "tensor 'w' has an element type that the model's Elements do not list");
  says(message_of(
           [](TensorList& list) { list.parameter("w", f32, std::vector<std::size_t>(9, 1)); }),
       "tensor 'w' has more than eight extents");
  says(message_of([](TensorList& list) { list.parameter("w", f32, {std::size_t(-1), 2}); }),
       "tensor 'w' is larger than memory can be");
  says(message_of([](TensorList& list) {
         list.parameter("w", f32, {2});
         list.parameter("v", f32, {});
       }),
       "no gradient came for v");
  says(message_of([](TensorList& list) { list.parameter("w", f32, {2}); }), "nothing went wrong");
}

BOOST_AUTO_TEST_CASE(a_tensor_that_is_asked_for_in_another_type_or_does_not_exist_is_named) {
  LoopbackCommunicator nobody;
  const Lister lister{[](TensorList& list) { list.parameter("w", f32, {2}); }};
  DistributedDataParallel<Lister, World<1>> ddp(nobody, lister);
  BOOST_TEST(ddp.param(Listed<float>{0}).size() == 2u);
  const auto says = [](const auto& f, const std::string& part) {
    BOOST_CHECK_EXCEPTION(f(), Error, [&](const Error& error) {
      return std::string(error.what()).find(part) != std::string::npos;
    });
  };
  says([&] { ddp.param(Listed<std::int32_t>{0}); }, "w has elements of float");
  says([&] { ddp.param(Listed<float>{1}); }, "tensor 1 of 1");
}

BOOST_AUTO_TEST_CASE(ranks_that_list_other_tensors_name_the_difference) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    const Lister lister{comm.rank() == Rank{1}
                            ? [](TensorList& list) { list.parameter("w", f32, {2, 5}); }
                            : [](TensorList& list) { list.parameter("w", f32, {2, 4}); }};
    DistributedDataParallel<Lister> ddp(comm, lister);
  });
  all_say(ends,
          "rank 0 has \"parameter w float 2 x 4\" and rank 1 has \"parameter w float 2 x 5\"");
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// The checked mode: a program of its own, because all files of a program have it or none.
#include <boost/test/unit_test.hpp>
#include <string>

#include "lockstep/lockstep.hpp"
#include "message_of.hpp"

#if !defined(LOCKSTEP_CHECKED)
#error "this file is to be compiled with LOCKSTEP_CHECKED"
#endif

using namespace lockstep;

namespace {

/// Writes what it is told, and marks both gradients as ready.
template <class T>
struct Writer {
  using Parameters = ParameterList<Parameter<"weight", T, 3, 4>, Parameter<"bias", T, 3>>;

  float forward(auto& step, int) { return static_cast<float>(step.param("weight"_p)(0, 0)); }
  void backward(auto& step, int batch) {
    auto weight = step.grad("weight"_p);
    for (std::size_t i = 0; i != 3; ++i)
      for (std::size_t j = 0; j != 4; ++j)
        if (batch != skipped || i != 2 || j < 1) weight(i, j) = T(1.f);
    auto bias = step.grad("bias"_p);
    for (std::size_t i = 0; i != 3; ++i) {
      if (batch == added) {
        bias(i) = static_cast<T>(static_cast<float>(bias(i)) + 1);
      } else {
        bias(i) = T(1.f);
      }
    }
    step.ready("bias"_p);
    step.ready("weight"_p);
  }

  static constexpr int skipped = 1;  // this batch leaves a part of the last row out
  static constexpr int added = 2;    // this one adds to its gradient instead of writing it
};

template <class T, class... Ps>
void check_gradients() {
  LoopbackCommunicator nobody;
  // A gradient that was found to be unwritten has been added to the others, which shows afterwards.
  DistributedDataParallel<Writer<T>, World<1>, Anomaly<Ignore>, Ps...> ddp(nobody);
  const int whole = 0;
  const int skipped = Writer<T>::skipped;
  ddp.step(whole);
  ddp.step(whole);
  // With Accumulate<2> this is the first micro-batch of a step, then the second, which adds.
  for (int repetition = 0; repetition != 2; ++repetition) {
    BOOST_TEST(message_of([&] { ddp.step(skipped); }) ==
               "lockstep: backward: the gradient of weight was marked ready, and its element "
               "(2, 1) had not been written; write every element with =, before step.ready; += "
               "adds to what nobody has cleared");
    ddp.step(whole);
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_gradient_that_is_not_written_whole_is_named) {
  check_gradients<float>();
  check_gradients<double>();
  check_gradients<Half>();
  check_gradients<BFloat16>();
  check_gradients<float, Accumulate<2>>();
  check_gradients<float, UnusedParameters<Zero>>();
}

BOOST_AUTO_TEST_CASE(a_gradient_that_is_added_to_is_named) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Writer<float>, World<1>> ddp(nobody);
  const int added = Writer<float>::added;
  BOOST_TEST(message_of([&] { ddp.step(added); })
                 .find("the gradient of bias was marked ready, and "
                       "its element (0) had not been written") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(two_ranks_are_told_which_gradient_is_not_whole) {
  spawn<2>(AsProcesses{}, [](const Membership& me, Store& store) {
    auto comm = make_shm_communicator<2>(me, store);
    DistributedDataParallel<Writer<float>, World<2>> ddp(comm);
    const int batch = me.rank == Rank{1} ? Writer<float>::skipped : 0;
    const std::string words = message_of([&] { ddp.step(batch); });
    if (words.find("the gradient of weight was marked ready") == std::string::npos)
      throw Error("test", words, "expect the message about the gradient");
  });
}

BOOST_AUTO_TEST_CASE(an_index_out_of_range_is_named_with_its_tensor) {
  LoopbackCommunicator nobody;
  const DistributedDataParallel<Writer<float>, World<1>> ddp(nobody);
  BOOST_TEST(message_of([&] { ddp.param("weight"_p)(2, 4); }) ==
             "lockstep: weight: index 4 of axis 1 is out of range, its extent is 4; count indices "
             "from 0, and end loops at view.extent(axis)");
  BOOST_TEST(message_of([&] {
               ddp.param("bias"_p)(-1);
             }).starts_with("lockstep: bias: index -1 of axis 0 is out of range"));
  BOOST_TEST(message_of([&] { ddp.param("bias"_p)(2); }) == "nothing was thrown");
}

BOOST_AUTO_TEST_CASE(views_of_ones_own_are_checked_too) {
  float data[6] = {};
  const HostView<float, dynamic, 3> view(data, 2);
  BOOST_TEST(message_of([&] { view(1, 2); }) == "nothing was thrown");
  BOOST_TEST(message_of([&] {
               view(2, 0);
             }).starts_with("lockstep: view: index 2 of axis 0 is out of range, its extent is 2"));
  const HostView<const float, dynamic, 3> looking = view;
  BOOST_TEST(message_of([&] { looking(0, 3); }).starts_with("lockstep: view: index 3 of axis 1"));
}

namespace {

/// Reads the first layer's weight when the others have been asked for.
struct Late {
  using Layer = ParameterList<Parameter<"weight", float, 4>>;
  using Parameters = ParameterList<Repeat<"layers", 4, Layer>>;

  float forward(auto& step, int read_after) {
    const auto first = step.param("layers"_p / at<0> / "weight"_p);
    if (read_after > 0) static_cast<void>(step.param("layers"_p / at<1> / "weight"_p));
    if (read_after > 1) static_cast<void>(step.param("layers"_p / at<2> / "weight"_p));
    if (read_after > 2) step.done("layers"_p / at<0>);
    return first(0);
  }
  void backward(auto&, int) {}
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_view_that_is_read_after_its_unit_was_released_is_named) {
  LoopbackCommunicator nobody;
  Replica<Late, CanonicalPolicies<Backend<Gloo>, Sharding<FullyShard, Units<"layers.*">>>,
          LoopbackCommunicator>
      replica(nobody);
  const auto message = [&](int read_after) {
    return message_of([&] { replica.forward(read_after, detail::Sync::no); });
  };
  BOOST_TEST(message(0) == "nothing was thrown");
  BOOST_TEST(message(1) == "nothing was thrown");
  for (const int read_after : {2, 3})
    BOOST_TEST(message(read_after) ==
               "lockstep: layers.0.weight: this view is read after its unit was released; ask for "
               "parameters again by step.param when a layer needs them, or keep more units by "
               "Sharding<FullyShard, GatheredUnits<N>>");
}

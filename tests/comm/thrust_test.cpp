// SPDX-License-Identifier: Apache-2.0
// Thrust's vectors as arguments of collectives and views. Thrust's device is the host here; on a
// GPU the same is tested by gpu/thrust_test.cu.
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#include <thrust/device_vector.h>
#include <thrust/host_vector.h>
#include <thrust/universal_vector.h>

#include <boost/test/unit_test.hpp>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/data/dataset.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_thrust)

/// Each collective of the front, on vectors of this kind.
template <template <class...> class Vector>
void collectives_of(Shared& comm) {
  const std::size_t world = comm.world_size().value();
  const auto me = static_cast<float>(comm.rank().value());
  const auto all = static_cast<float>(world);
  Vector<float> own(100, me + 1);
  Vector<float> pieces(100 * world, me + 1);
  comm.all_reduce(own);
  for (const float x : std::vector<float>(own.begin(), own.end()))
    require(x == all * (all + 1) / 2, "all_reduce");
  comm.all_reduce_async(own, Max{}).wait();
  own.assign(100, me);
  comm.broadcast(own, Rank{world - 1});
  require(float(own[99]) == all - 1, "broadcast");
  own.assign(100, me);
  const Vector<float> given = own;  // a vector of const elements is read
  comm.all_gather(given, pieces);
  for (std::size_t w = 0; w < world; ++w)
    require(float(pieces[100 * w + 99]) == static_cast<float>(w), "all_gather");
  comm.reduce_scatter(pieces, own);
  require(float(own[0]) == me * all, "reduce_scatter");
  comm.all_gather_variable(given, pieces);
  if (comm.rank() == Rank{0}) comm.send(given, Rank{1});
  if (comm.rank() == Rank{1}) {
    comm.receive(own, Rank{0});
    require(float(own[7]) == 0, "receive");
  }
}

BOOST_AUTO_TEST_CASE(collectives_take_thrusts_vectors) {
  expect_all_fine(run(As::threads, 2, [](Shared& comm) {
    collectives_of<thrust::device_vector>(comm);
    collectives_of<thrust::universal_vector>(comm);
    collectives_of<thrust::host_vector>(comm);
  }));
}

BOOST_AUTO_TEST_CASE(data_sets_are_made_of_thrusts_vectors) {
  const auto last_of = [](const auto& inputs, const auto& labels) {
    LabelledSample<float, int> sample;
    const InMemoryDataset data(inputs, labels);
    data.read(data.size() - 1, sample);
    return sample.inputs[1] + static_cast<float>(sample.label);
  };
  const std::vector<float> inputs{1, 2, 3, 4};
  const std::vector<int> labels{10, 20};
  BOOST_TEST(last_of(thrust::device_vector<float>(inputs), thrust::device_vector<int>(labels)) ==
             24);
  BOOST_TEST(last_of(thrust::universal_vector<float>(inputs), labels) == 24);
  BOOST_TEST(last_of(thrust::host_vector<float>(inputs), labels) == 24);
}

BOOST_AUTO_TEST_CASE(a_view_is_made_of_thrusts_pointers) {
  thrust::device_vector<float> values(6, 1.0f);
  values[5] = 7;
  const DeviceView<float, 2, 3> fixed(values.data());
  const DeviceView<const float, dynamic, 3> sized(values.data(), 2, 3);
  BOOST_TEST(fixed.data_handle()[5] == 7);  // its device is the host here
  BOOST_TEST(sized.extent(0) == 2);
  BOOST_TEST(flat(sized).size() == 6u);
}

BOOST_AUTO_TEST_SUITE_END()

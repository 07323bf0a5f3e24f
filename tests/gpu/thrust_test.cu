// SPDX-License-Identifier: Apache-2.0
// Thrust's vectors of device and of managed memory as arguments of collectives and views.
#include <thrust/device_vector.h>
#include <thrust/host_vector.h>
#include <thrust/universal_vector.h>

#include <boost/test/unit_test.hpp>
#include <type_traits>
#include <vector>

#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/data/resident.cuh"
#include "thread_ranks.cuh"

using namespace thread_ranks;

namespace {

__global__ void double_elements(DeviceView<float, dynamic> view) {
  for (std::size_t i = threadIdx.x; i < view.size(); i += blockDim.x) view(i) *= 2;
}

template <class Vector>
void collectives_of(ThreadCommunicator<>& comm) {
  const std::size_t world = comm.world_size().value();
  const auto me = static_cast<float>(comm.rank().value());
  const auto all = static_cast<float>(world);
  const auto expect = [&](const Vector& vector, std::size_t i, float value, const char* call) {
    comm.synchronize();
    const thrust::host_vector<float> host(vector.begin(), vector.end());
    require(host[i] == value, call);
  };
  Vector own(1000, me + 1);
  Vector pieces(1000 * world);
  cudaDeviceSynchronize();  // Thrust has filled them on a stream of its own
  comm.all_reduce(own);
  expect(own, 999, all * (all + 1) / 2, "all_reduce");
  comm.broadcast(own, Rank{0});
  const Vector& given = own;
  comm.all_gather(given, pieces);
  expect(pieces, 1000 * world - 1, all * (all + 1) / 2, "all_gather");
  comm.reduce_scatter(pieces, own, Max{});
  double_elements<<<1, 64, 0, comm.gpu().stream()>>>(
      DeviceView<float, dynamic>(own.data(), own.size()));
  expect(own, 500, all * (all + 1), "reduce_scatter");
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_thrust)

BOOST_FIXTURE_TEST_CASE(collectives_take_thrusts_vectors_of_device_and_managed_memory, GpuCase) {
  if (no_gpu()) return;
  for (const std::size_t world : {1, 2, 4}) {
    expect_all_fine(run(world, [](ThreadCommunicator<>& comm) {
      collectives_of<thrust::device_vector<float>>(comm);
      collectives_of<thrust::universal_vector<float>>(comm);
    }));
  }
}

BOOST_FIXTURE_TEST_CASE(a_resident_data_set_is_made_of_thrusts_vectors, GpuCase) {
  if (no_gpu()) return;
  const std::vector<float> inputs{1, 2, 3, 4};
  const std::vector<int> labels{10, 20};
  const auto check = [&](const auto& there, const auto& their_labels) {
    const DeviceResident data(there, their_labels);
    typename std::remove_cvref_t<decltype(data)>::batch_type batch;
    data.load(std::vector<std::size_t>{1}, batch);
    const CudaStream stream;
    BatchUpload<decltype(batch)> upload;
    const DeviceBatch<float, int> on_device = upload(batch, stream);
    stream.synchronize();
    float input = 0;
    int label = 0;
    cudaMemcpy(&input, on_device.inputs + 1, sizeof input, cudaMemcpyDefault);
    cudaMemcpy(&label, on_device.labels, sizeof label, cudaMemcpyDefault);
    BOOST_TEST(input == 4);
    BOOST_TEST(label == 20);
  };
  check(thrust::device_vector<float>(inputs), thrust::device_vector<int>(labels));
  check(thrust::universal_vector<float>(inputs), labels);
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/view.hpp"

#include <boost/test/unit_test.hpp>
#include <concepts>
#include <cuda/std/mdspan>
#include <numeric>
#include <type_traits>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_view)

BOOST_AUTO_TEST_CASE(views_are_row_major_and_static_extents_cost_nothing) {
  std::vector<float> data(6);
  std::iota(data.begin(), data.end(), 0.f);
  const HostView<float, 2, 3> view(data.data());
  BOOST_TEST(view(1, 2) == 5.f);
  BOOST_TEST(view.extent(1) == 3u);
  const HostView<const float, dynamic, 3> partly(data.data(), Extents<dynamic, 3>(2));
  BOOST_TEST(partly(1, 0) == 3.f);
  static_assert(sizeof(view) == sizeof(float*));
  // Without LOCKSTEP_CHECKED there is nothing of the checked mode.
  static_assert(!detail::is_checked && std::is_empty_v<detail::IndexCheck>);
  const HostView<double> scalar(nullptr);
  BOOST_TEST(scalar.size() == 1u);
}

BOOST_AUTO_TEST_CASE(a_view_becomes_a_view_of_const_but_never_changes_its_memory) {
  static_assert(std::convertible_to<HostView<float, 4>, HostView<const float, 4>>);
  static_assert(std::convertible_to<DeviceView<float, 4>, DeviceView<const float, 4>>);
  static_assert(!std::convertible_to<HostView<const float, 4>, HostView<float, 4>>);
  static_assert(!std::constructible_from<HostView<float, 4>, DeviceView<float, 4>>);
  static_assert(!std::constructible_from<DeviceView<float, 4>, HostView<float, 4>>);
  float data[4];
  const DeviceView<float, 4> device(data);  // the host may carry and ask, only not look
  BOOST_TEST(device.data_handle() == data);
  BOOST_TEST(device.extent(0) == 4u);
}

namespace {

template <class T>
using Matrix = cuda::std::mdspan<T, cuda::std::dextents<int, 2>>;
using ColumnMajor =
    cuda::std::mdspan<float, cuda::std::extents<std::size_t, 2, 3>, cuda::std::layout_left>;

float last(cuda::std::mdspan<const float, cuda::std::extents<std::size_t, 2, 3>> tensor) {
  return tensor(1, 2);
}
float last_of(Matrix<const float> tensor) {
  return tensor(tensor.extent(0) - 1, tensor.extent(1) - 1);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_view_is_an_mdspan_where_one_is_wanted) {
  float data[] = {0, 1, 2, 3, 4, 5};
  const HostView<float, 2, 3> view(data);
  BOOST_TEST(last(view) == 5.f);
  BOOST_TEST(last_of(view) == 5.f);
  BOOST_TEST(last_of(HostView<const float, dynamic, 2>(data, 2)) == 3.f);
  static_assert(std::convertible_to<HostView<float, 2, 3>, Matrix<float>>);
  static_assert(!std::convertible_to<HostView<const float, 2, 3>, Matrix<float>>);
  static_assert(!std::convertible_to<HostView<float, 2, 3>, ColumnMajor>);
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Packing: the same bits as plain conversions on device and host, and nothing written beside.
#include "lockstep/detail/bucket/pack.cuh"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu/device.cuh"

using namespace lockstep;
using namespace gpu_test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// Ordinary numbers of many magnitudes, with what is special in between.
struct WildNumbers {
  std::uint64_t seed;
  LOCKSTEP_HOST_DEVICE double operator()(std::size_t i) const {
    constexpr double special[] = {0.0,  -0.0, infinity, -infinity, 65504, 65520,
                                  6e-8, 3e-8, 1e-40,    -1e39,     3e-39, 1.00390625};
    constexpr std::size_t specials = sizeof special / sizeof special[0];
    if (i % 101 == 100) return not_a_number;
    if (i % 7 == 6) return special[i / 7 % specials];
    return random_number(seed, i) * exp2(static_cast<double>(i % 61) - 30);
  }
};

template <class T>
std::vector<T> wild_values(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i != count; ++i) values[i] = rounded<T>(WildNumbers{count}(i));
  return values;
}

/// What a plain conversion makes of one element.
template <class To, class From>
LOCKSTEP_HOST_DEVICE To cast_plainly(From from, double factor) {
  using A = detail::CastArithmetic<From, To>;
  const A product =
      static_cast<A>(factor) * static_cast<A>(static_cast<detail::Accumulator<From>>(from));
  return static_cast<To>(static_cast<detail::Accumulator<To>>(product));
}

/// Of 16 bits, all must be the same; else NaN is as good as any other NaN.
template <class T>
LOCKSTEP_HOST_DEVICE bool is_same(T a, T b) {
  if constexpr (sizeof(T) == 2) {
    return a.bits() == b.bits();
  } else {
    return a == b || (a != a && b != b);
  }
}

template <class From, class To>
struct CastJudge {
  const From* from;
  const To* to;
  double factor;
  __device__ CompositionCheck operator()(std::size_t i) const {
    const To want = cast_plainly<To>(from[i], factor);
    return {!is_same(to[i], want), "the element", number(to[i]), number(want)};
  }
};

template <class From, class To, std::size_t Count = dynamic>
void check_cast(std::size_t count, double factor) {
  BOOST_TEST_CONTEXT(detail::element_name(element_kind<From>())
                     << " to " << detail::element_name(element_kind<To>()) << ", count " << count) {
    CudaStream stream;
    DeviceArray<From> from(count);
    from.write(WildNumbers{count});
    const DeviceArray<To> to(count);
    detail::launch_cast<Count>(stream, from.data(), to.data(), factor, count);
    BOOST_TEST(first_wrong(count, CastJudge<From, To>{from.data(), to.data(), factor}) == "");
    BOOST_TEST(to.stray_write() == "");
  }
}

/// The host, too, makes the same of each element.
template <class From, class To>
void check_cast_by_host(std::size_t count, double factor) {
  const auto from = wild_values<From>(count);
  const DeviceArray<From> device_from(from);
  const DeviceArray<To> device_to(count);
  CudaStream stream;
  detail::launch_cast(stream, device_from.data(), device_to.data(), factor, count);
  const auto have = device_to.download();
  for (std::size_t i = 0; i != count; ++i) {
    const To want = cast_plainly<To>(from[i], factor);
    BOOST_REQUIRE_MESSAGE(is_same(have[i], want), "element " << i << ": the device has "
                                                             << number(have[i]) << ", the host "
                                                             << number(want));
  }
}

template <class From, class To>
void check_cast_sizes() {
  if (!has_gpu()) return;
  for (const std::size_t count : sizes()) check_cast<From, To>(count, 0.3);
  check_cast<From, To>(777, 1);
  check_cast<From, To, 777>(777, 0.3);
  check_cast_by_host<From, To>(20000, 0.3);
}

template <class T>
struct AddJudge {
  using A = detail::Accumulator<T>;
  const T* before;
  const T* more;
  const T* sum;
  __device__ CompositionCheck operator()(std::size_t i) const {
    const auto want = static_cast<T>(static_cast<A>(before[i]) + static_cast<A>(more[i]));
    return {!is_same(sum[i], want), "the sum", number(sum[i]), number(want)};
  }
};

template <class T>
void check_add() {
  if (!has_gpu()) return;
  for (const std::size_t count : sizes()) {
    BOOST_TEST_CONTEXT(detail::element_name(element_kind<T>()) << ", count " << count) {
      DeviceArray<T> before(count), sum(count), more(count);
      before.write(RandomNumbers{2 * count, 100});
      sum.write(RandomNumbers{2 * count, 100});
      more.write(RandomNumbers{2 * count + 1, 100});
      CudaStream stream;
      detail::launch_add(stream, sum.data(), more.data(), count);
      BOOST_TEST(first_wrong(count, AddJudge<T>{before.data(), more.data(), sum.data()}) == "");
      BOOST_TEST(sum.stray_write() == "");
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_pack)

BOOST_AUTO_TEST_CASE(floats_to_bfloat16) { check_cast_sizes<float, BFloat16>(); }
BOOST_AUTO_TEST_CASE(floats_to_half) { check_cast_sizes<float, Half>(); }
BOOST_AUTO_TEST_CASE(floats_to_floats) { check_cast_sizes<float, float>(); }
BOOST_AUTO_TEST_CASE(doubles_to_bfloat16) { check_cast_sizes<double, BFloat16>(); }
BOOST_AUTO_TEST_CASE(doubles_to_half) { check_cast_sizes<double, Half>(); }
BOOST_AUTO_TEST_CASE(doubles_to_floats) { check_cast_sizes<double, float>(); }
BOOST_AUTO_TEST_CASE(bfloat16_to_floats) { check_cast_sizes<BFloat16, float>(); }
BOOST_AUTO_TEST_CASE(halves_to_floats) { check_cast_sizes<Half, float>(); }
BOOST_AUTO_TEST_CASE(halves_to_doubles) { check_cast_sizes<Half, double>(); }
BOOST_AUTO_TEST_CASE(halves_to_bfloat16) { check_cast_sizes<Half, BFloat16>(); }

BOOST_AUTO_TEST_CASE(micro_batches_are_summed) {
  check_add<double>();
  check_add<float>();
  check_add<Half>();
  check_add<BFloat16>();
}

BOOST_AUTO_TEST_SUITE_END()

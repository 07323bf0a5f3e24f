// SPDX-License-Identifier: Apache-2.0
// Passes and collectives over 2^31 + 64 elements of bfloat16, which are more than 4 GiB.
#include "gpu/large.cuh"

#include <boost/test/unit_test.hpp>
#include <numeric>
#include <span>
#include <vector>

#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/bucket/pack.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/optim/constants.cuh"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/optim/update.cuh"

using namespace lockstep;
using namespace thread_ranks;
using large::Pattern;

namespace {

/// The pattern of elements behind an array.
struct Behind {
  Pattern pattern;
  LOCKSTEP_HOST_DEVICE float operator()(std::size_t i) const { return pattern(i + large::count); }
};

/// An array on the GPU, with elements behind it that nobody may touch.
template <class T>
class Array {
 public:
  explicit Array(Pattern pattern) : memory_((large::count + behind) * sizeof(T)) {
    large::write(data(), large::count + behind, pattern);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

  /// Empty if all elements are `value(i)`, and those behind as they were written.
  template <class Value>
  std::string difference(const Value& value, Pattern written) const {
    const std::string inside = large::difference(data(), large::count, value);
    if (!inside.empty()) return inside;
    return large::difference(data() + large::count, behind, Behind{written});
  }

 private:
  static constexpr std::size_t behind = 4096;
  DeviceArena memory_;
};

struct Scaled {
  Pattern pattern;
  float factor;
  LOCKSTEP_HOST_DEVICE float operator()(std::size_t i) const { return factor * pattern(i); }
};
struct Added {
  Pattern a;
  Pattern b;
  float factor = 1;  // of b
  LOCKSTEP_HOST_DEVICE float operator()(std::size_t i) const { return a(i) + factor * b(i); }
};
/// Other numbers for the elements from `border` on.
struct Halved {
  Added first;
  Added second;
  std::size_t border;
  LOCKSTEP_HOST_DEVICE float operator()(std::size_t i) const {
    return i < border ? first(i) : second(i);
  }
};

/// One group's numbers for each rate, on the GPU.
DeviceArena numbers_of(cudaStream_t stream, const std::vector<double>& rates) {
  using Numbers = detail::StepNumbers<SGD>;
  DeviceArena numbers(rates.size() * sizeof(Numbers));
  for (std::size_t group = 0; group != rates.size(); ++group) {
    detail::launch_store(stream, reinterpret_cast<Numbers*>(numbers.data()) + group,
                         detail::step_numbers<SGD>({}, rates[group], 1, 1.0));
  }
  return numbers;
}
const detail::StepNumbers<SGD>* as_numbers(const DeviceArena& numbers) {
  return reinterpret_cast<const detail::StepNumbers<SGD>*>(numbers.data());
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(gpu_large, GpuCase)

BOOST_AUTO_TEST_CASE(gradients_are_packed_unpacked_and_added) {
  if (no_gpu()) return;
  const CudaStream stream;
  const Array<float> wide(Pattern{0});
  const Array<BFloat16> narrow(Pattern{100});
  detail::launch_cast(stream, wide.data(), narrow.data(), 2, large::count);
  BOOST_TEST(narrow.difference(Scaled{Pattern{0}, 2}, Pattern{100}) == "");
  detail::launch_cast(stream, narrow.data(), wide.data(), 0.25, large::count);
  BOOST_TEST(wide.difference(Scaled{Pattern{0}, 0.5f}, Pattern{0}) == "");
  const Array<BFloat16> more(Pattern{7});
  detail::launch_add(stream, narrow.data(), more.data(), large::count);
  BOOST_TEST(narrow.difference(Added{Pattern{7}, Pattern{0}, 2}, Pattern{100}) == "");
}

BOOST_AUTO_TEST_CASE(the_norm_counts_every_element_once) {
  if (no_gpu()) return;
  const CudaStream stream;
  const Array<BFloat16> values(Pattern{5});
  const std::size_t parts = detail::square_partials<BFloat16>(large::count);
  const DeviceArena partials(parts * sizeof(double));
  detail::launch_squares(stream, values.data(), reinterpret_cast<double*>(partials.data()),
                         large::count);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<double> sums(parts);
  detail::copy_now(sums.data(), partials.data(), partials.bytes());
  double period = 0, rest = 0;  // whole numbers below 2^53: all of it is exact
  for (std::size_t i = 0; i != Pattern::period; ++i) {
    const double square = double{Pattern{5}(i)} * Pattern{5}(i);
    period += square;
    if (i < large::count % Pattern::period) rest += square;
  }
  const double want = period * static_cast<double>(large::count / Pattern::period) + rest;
  BOOST_TEST(std::accumulate(sums.begin(), sums.end(), 0.0) == want);
}

BOOST_AUTO_TEST_CASE(parameters_are_updated_with_masters_and_in_groups) {
  if (no_gpu()) return;
  const CudaStream stream;
  const Array<BFloat16> gradients(Pattern{3}), parameters(Pattern{50});
  {
    const Array<float> masters(Pattern{-20});
    const DeviceArena numbers = numbers_of(stream, {1});
    detail::launch_update<SGD, float, BFloat16, BFloat16>(stream, as_numbers(numbers),
                                                          masters.data(), gradients.data(), {},
                                                          parameters.data(), large::count);
    const Added want{Pattern{-20}, Pattern{3}, -1};
    BOOST_TEST(masters.difference(want, Pattern{-20}) == "");
    BOOST_TEST(parameters.difference(want, Pattern{50}) == "");
  }
  // The border between two groups is the first multiple of 256 bytes inside of the last 128.
  constexpr std::size_t border = (std::size_t{1} << 32) / sizeof(BFloat16);
  const std::vector<detail::TablePiece> pieces{{border * sizeof(BFloat16), 0},
                                               {large::count * sizeof(BFloat16) + 128, 1}};
  const DeviceArena on_gpu(pieces.size() * sizeof(detail::TablePiece));
  detail::copy_now(on_gpu.data(), pieces.data(), on_gpu.bytes());
  large::write(parameters.data(), large::count, Pattern{10});
  const DeviceArena numbers = numbers_of(stream, {1, 2});
  detail::launch_update_by_table<SGD, BFloat16, BFloat16>(
      stream, as_numbers(numbers), as_numbers(numbers),
      {reinterpret_cast<const detail::TablePiece*>(on_gpu.data()), pieces.size(), 0,
       sizeof(BFloat16)},
      parameters.data(), gradients.data(), {}, parameters.data(), large::count);
  BOOST_TEST(parameters.difference(
                 Halved{{Pattern{10}, Pattern{3}, -1}, {Pattern{10}, Pattern{3}, -2}, border},
                 Pattern{50}) == "");
  BOOST_TEST(gradients.difference(Pattern{3}, Pattern{3}) == "");
}

BOOST_AUTO_TEST_CASE(threads_reduce_and_broadcast) {
  if (no_gpu()) return;
  expect_all_fine(run(2, [](auto& comm) {
    const int rank = static_cast<int>(comm.rank().value());
    const std::span<BFloat16> data = comm.template allocate<BFloat16>(large::count);
    large::write(data.data(), data.size(), Pattern{rank});
    comm.all_reduce(data, Sum{});
    comm.synchronize();
    std::string wrong = large::difference(data.data(), data.size(), Added{Pattern{0}, Pattern{1}});
    require(wrong.empty(), "sum: " + wrong);
    comm.barrier();
    large::write(data.data(), data.size(), Pattern{5 + rank});
    comm.broadcast(data, Rank{1});
    comm.synchronize();
    wrong = large::difference(data.data(), data.size(), Pattern{6});
    require(wrong.empty(), "broadcast: " + wrong);
  }));
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
// Initial values on GPUs that the host plays: how much host memory which rank takes for them.
#include "gpu/emulated/kernels.hpp"
//
#include <malloc.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

namespace {

/// What this thread has asked of the heap in requests of a MiB and more, how much of that it has,
/// and the most that it had.
thread_local std::size_t large_requests = 0;
thread_local std::size_t large_now = 0;
thread_local std::size_t large_most = 0;

constexpr std::size_t large = std::size_t{1} << 20;

void* counted(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  void* const data = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  if (bytes >= large) large_requests += bytes;
  if (::malloc_usable_size(data) >= large) large_now += ::malloc_usable_size(data);
  large_most = std::max(large_most, large_now);
  return data;
}
void uncounted(void* data) {
  // Memory of another thread may be freed here, which has been counted there.
  if (data != nullptr && ::malloc_usable_size(data) >= large)
    large_now -= std::min(large_now, ::malloc_usable_size(data));
  std::free(data);
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* data) noexcept { uncounted(data); }
void operator delete(void* data, std::size_t) noexcept { uncounted(data); }
void operator delete(void* data, std::align_val_t) noexcept { uncounted(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { uncounted(data); }

BOOST_AUTO_TEST_SUITE(gpu_played_initial_values)

namespace {

using namespace lockstep;
using namespace thread_ranks;

constexpr std::size_t rows = 257;
constexpr std::size_t columns = 4096;  // a matrix takes 4 MiB and a little: more than the window

struct Default {
  using Parameters = ParameterList<Parameter<"a", float, rows, columns>,
                                   Parameter<"b", float, rows, columns>, Parameter<"c", float, 3>>;
  using Buffers = BufferList<Buffer<"d", std::int32_t, 2>>;
  float forward(auto&, const int&) { return 0; }
  void backward(auto& step, const int&) {
    step.ready("c"_p);
    step.ready("b"_p);
    step.ready("a"_p);
  }
};

bool on_gpu = false;  // does a model initialize itself on a GPU? There its tensors are copies

/// A matrix on the host, and a little more than that where the heap rounds up.
constexpr std::size_t matrix = rows * columns * sizeof(float) + 8192;

/// Every element its place, tensor after tensor.
void count_up(const auto& view, float first) {
  for (std::size_t i = 0; i != view.size(); ++i)
    view.data_handle()[i] = first + static_cast<float>(i % 256);
}

struct OneByOne : Default {
  void initialize(auto& initial) {
    initial.for_each_parameter([](auto, const auto&) {});  // windows are there from now on
    const std::size_t before = large_now;
    initial.for_each_parameter([&](auto, const auto& view) {
      count_up(view, 1);
      if (on_gpu) require(large_now <= before + matrix, "the one before stayed");
    });
    if (on_gpu) require(large_now <= before, "the last one stayed");
    initial.buffer("d"_p)(1) = 7;
  }
};

struct ByName : Default {
  void initialize(auto& initial) {
    initial.for_each_parameter([](auto, const auto&) {});
    const std::size_t before = large_now;
    const auto c = initial.param("c"_p);
    const auto a = initial.param("a"_p);
    count_up(a, 1);
    count_up(c, 1);
    if (on_gpu) require(large_now > before, "a is not there");
    // What a program has asked for by name stays where it is.
    initial.for_each_parameter([](auto, const auto&) {});
    require(a(0, 5) == 6, "a was given back");
    initial.flush();
    if (on_gpu) require(large_now <= before, "a stayed");
    count_up(initial.param("b"_p), 2);
    require(initial.param("a"_p)(0, 5) == 6, "a is not what was written");
    count_up(initial.param("b"_p), 1);
    initial.buffer("d"_p)(1) = 7;
  }
};

/// A model's parameters as float, those of a GPU by their masters.
std::vector<float> parameters_of(auto& ddp) {
  std::vector<float> all;
  ddp.initialize([&](auto& initial) {
    initial.for_each_parameter([&](auto, const auto& view) {
      all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
    });
  });
  return all;
}

template <class Model>
void check_model(std::size_t ranks) {
  on_gpu = false;
  LoopbackCommunicator nobody;
  large_requests = 0;
  DistributedDataParallel<Model, World<1>, Optimizer<SGD>> on_host(nobody, Model{}, Seed{3});
  // On the host there are parameters and gradients, and nothing beside.
  BOOST_TEST(large_requests == 2 * detail::Layout<Model>::plan().bytes);
  const std::vector<float> want = parameters_of(on_host);
  on_gpu = true;
  const emulated::Machine machine(ranks);
  expect_all_fine(run(ranks, [&](auto& comm) {
    const std::size_t before = large_now;
    large_requests = 0;
    large_most = large_now;
    DistributedDataParallel<Model, Device<Cuda>, Backend<Shm>, Precision<Mixed<BFloat16>>,
                            Optimizer<SGD>>
        ddp(comm, Model{}, Seed{3});
    if (comm.rank() == Rank{0}) {
      // Two windows, and what the model asks for at a time.
      constexpr std::size_t asked = std::is_same_v<Model, Default> ? 0 : 2;
      const std::size_t took = large_most - before;
      require(took <= 8 * large + asked * matrix + 16384, "rank 0 took " + std::to_string(took));
    } else {
      require(large_requests == 0, "another rank took " + std::to_string(large_requests));
    }
    std::size_t i = 0, wrong = 0;
    ddp.for_each_parameter([&](auto, const auto& view) {
      const auto* const values = view.data_handle();
      for (std::size_t k = 0; k != view.size(); ++k, ++i)
        wrong += static_cast<float>(values[k]) != static_cast<float>(BFloat16(want[i])) ? 1 : 0;
    });
    require(i == want.size() && wrong == 0, std::to_string(wrong) + " elements are wrong");
    ddp.for_each_buffer([&](auto, const auto& view) {
      if constexpr (!std::is_same_v<Model, Default>)
        require(view.data_handle()[1] == 7, "the buffer");
    });
    const std::vector<float> masters = parameters_of(ddp);
    require(comm.rank() == Rank{0} ? masters == want : masters.empty(), "masters");
  }));
}

}  // namespace

BOOST_AUTO_TEST_CASE(only_rank_0_takes_host_memory_and_only_a_window_of_it) {
  check_model<Default>(2);
  check_model<OneByOne>(2);
  check_model<ByName>(2);
}

BOOST_AUTO_TEST_SUITE_END()

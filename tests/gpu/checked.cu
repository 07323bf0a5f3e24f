// SPDX-License-Identifier: Apache-2.0
// The checked mode on a GPU: checked. The last check ends the GPU's context, and with it the
// program.
#include <cstdio>
#include <string>

#include "lockstep/lockstep.cuh"
#include "message_of.hpp"

#if !defined(LOCKSTEP_CHECKED)
#error "this file is to be compiled with LOCKSTEP_CHECKED"
#endif

using namespace lockstep;

namespace {

/// Leaves the elements from `end` on as they were.
template <class View>
__global__ void set_some(View view, std::size_t end) {
  const std::size_t i = threadIdx.x;
  if (i < end) view(i / 4, i % 4) = 1;
}

struct Batch {
  std::size_t written = 12;  // elements of 12
};

struct Writer {
  using Parameters = ParameterList<Parameter<"weight", float, 3, 4>>;
  void forward(auto& step, const Batch&) {
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "loss");
  }
  void backward(auto& step, const Batch& batch) {
    set_some<<<1, 64, 0, step.stream()>>>(step.grad("weight"_p), batch.written);
    step.ready("weight"_p);
  }
};

bool expect(const std::string& words, const std::string& part) {
  if (words.find(part) != std::string::npos) return true;
  std::printf("expected \"%s\", and not: %s\n", part.c_str(), words.c_str());
  return false;
}

template <class... Ps>
bool finds_what_is_not_written() {
  DataParallel<Writer, Device<Cuda>, World<1>, Ps...> dp;
  bool good = true;
  for (int i = 0; i != 4; ++i) dp.step(Batch{});
  const std::string message =
      "the gradient of weight was marked ready, and its element (2, 1) had not been written";
  for (int i = 0; i != 2; ++i) {  // with Accumulate<2>, in each micro-batch
    good = expect(message_of([&] { dp.step(Batch{9}); }), message) && good;
    dp.step(Batch{});
  }
  dp.synchronize();
  return good;
}

bool ends_at_an_index_out_of_range() {
  DataParallel<Writer, Device<Cuda>, World<1>> dp;
  return expect(message_of([&] { dp.step(Batch{13}); }), "cuda");  // the kernel prints the message
}

}  // namespace

int main() {
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const bool good = finds_what_is_not_written<>() && finds_what_is_not_written<Accumulate<2>>() &&
                    ends_at_an_index_out_of_range();
  std::puts(good ? "checked" : "failed");
  std::fflush(stdout);
  std::_Exit(good ? 0 : 1);  // the context is gone: destructors would report it
}

// SPDX-License-Identifier: Apache-2.0
// A fuzz target (clang's libFuzzer): the bytes are a .npy file. Its header ends with an error in
// words or with a shape that the bytes fill; nothing else.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/data.hpp"
#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/data/npy.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::detail;
  try {
    const NpyHeader header = parse_npy(std::as_bytes(std::span(data, size)), "fuzz");
    std::size_t bytes = element_size(header.kind);
    if (bytes == 0 || header.begin % bytes != 0) std::abort();
    for (const std::size_t extent : header.shape) bytes = saturating_product(bytes, extent);
    if (bytes != size - header.begin || npy_shape_text(header.shape).size() < 2) std::abort();
  } catch (const lockstep::Error&) {
  }
  return 0;
}

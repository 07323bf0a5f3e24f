// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A bucket of made-up gradients that goes through hooks, without a job.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/hook/pipeline.hpp"

namespace piped {

using namespace lockstep;

struct Shape {
  std::size_t rows = 1;
  std::size_t columns = 1;
};

/// A bucket of such gradients on one rank, with a pipeline.
template <class Comm, class T, class... Hook>
struct Bucket {
  using Device = lockstep::detail::HookDevice<Cpu>;

  Bucket(Comm& comm, const std::vector<Shape>& shapes) : device(comm) {
    for (const Shape& shape : shapes) {
      tensors.push_back({tensors.size(), count, shape.rows, shape.columns});
      count += shape.rows * shape.columns + 5;  // as plans do, with a gap
    }
    values = comm.template allocate<T>(count);
    bucket.emplace(comm, device, 0, count, std::span<const HookedTensor>(tensors), step, bytes);
    pipeline.emplace(*bucket);
  }

  /// One reduction of what `gradient(tensor, element)` says.
  template <class F>
  void reduce(const F& gradient) {
    for (const HookedTensor& tensor : tensors) {
      for (std::size_t i = 0; i != tensor.count(); ++i)
        values[tensor.first + i] =
            static_cast<T>(static_cast<lockstep::detail::Accumulator<T>>(gradient(tensor, i)));
    }
    pipeline->begin(values);
    pipeline->finish(values);
    ++step;
  }
  double at(const HookedTensor& tensor, std::size_t i) const {
    return static_cast<double>(
        static_cast<lockstep::detail::Accumulator<T>>(values[tensor.first + i]));
  }
  /// What this rank keeps of a gradient, not sent yet.
  double residual(const HookedTensor& of, std::size_t i) {
    double found = 0;
    pipeline->for_each_state([&](std::size_t parameter, std::string_view state, auto kept, auto) {
      if (parameter == of.parameter && state.ends_with("residual")) found = kept[i];
    });
    return found;
  }

  Device device;
  std::uint64_t step = 0;
  std::uint64_t bytes = 0;
  std::size_t count = 0;
  std::vector<HookedTensor> tensors;
  std::span<T> values;
  std::optional<HookedBucket<Comm, Device>> bucket;
  std::optional<lockstep::detail::Pipeline<T, Comm, Device, lockstep::detail::HookList<Hook...>>>
      pipeline;
};

/// Any number that depends on all of these.
inline double noise(std::size_t salt, std::size_t rank, std::size_t step, std::size_t tensor,
                    std::size_t element) {
  RandomStream stream(Seed{salt * 1000003 + rank * 10007 + step * 101 + tensor});
  stream.discard(element);
  return stream.uniform() * 2 - 1;
}

inline void require_near(double have, double want, double tolerance, const std::string& what) {
  ranks::require(std::abs(have - want) <= tolerance * std::max(1.0, std::abs(want)),
                 what + ": " + std::to_string(have) + " instead of " + std::to_string(want));
}

}  // namespace piped

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's algorithms that move elements, as functions of spans. They run inside a call that
/// all ranks have agreed on.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/backends/gloo/library.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::over_gloo {

/// Gloo takes pointers to what it only reads without their const.
template <class T>
T* unguarded(std::span<const T> values) {
  return const_cast<T*>(values.data());
}

template <class T>
void broadcast(Engine& engine, std::span<T> data, Rank root) {
  if (data.empty()) return;
  ::gloo::BroadcastOptions options(engine.connections());
  options.setOutput(data.data(), data.size());
  options.setRoot(static_cast<int>(root.value()));
  options.setTag(engine.tag());
  ::gloo::broadcast(options);
}

template <class T>
void all_gather(Engine& engine, std::span<const T> in, std::span<T> out) {
  if (in.empty()) return;
  ::gloo::AllgatherOptions options(engine.connections());
  options.setInput(unguarded(in), in.size());
  options.setOutput(out.data(), out.size());
  options.setTag(engine.tag());
  ::gloo::allgather(options);
}

template <class T>
void gather(Engine& engine, std::span<const T> in, std::span<T> out, Rank root) {
  if (in.empty()) return;
  ::gloo::GatherOptions options(engine.connections());
  options.setInput(unguarded(in), in.size());
  if (engine.rank() == root) options.setOutput(out.data(), out.size());
  options.setRoot(static_cast<int>(root.value()));
  options.setTag(engine.tag());
  ::gloo::gather(options);
}

template <class T>
void scatter(Engine& engine, std::span<const T> in, std::span<T> out, Rank root) {
  if (out.empty()) return;
  ::gloo::ScatterOptions options(engine.connections());
  if (engine.rank() == root) {
    std::vector<T*> pieces;
    for (std::size_t w = 0; w < engine.world(); ++w)
      pieces.push_back(unguarded(in) + w * out.size());
    options.setInputs(pieces, out.size());
  }
  options.setOutput(out.data(), out.size());
  options.setRoot(static_cast<int>(root.value()));
  options.setTag(engine.tag());
  ::gloo::scatter(options);
}

template <class T>
void all_to_all(Engine& engine, std::span<const T> in, std::span<T> out) {
  if (in.empty()) return;
  ::gloo::AlltoallOptions options(engine.connections());
  options.setInput(unguarded(in), in.size());
  options.setOutput(out.data(), out.size());
  options.setTag(engine.tag());
  ::gloo::alltoall(options);
}

/// How many elements each rank has of something that is divided.
using Counts = std::vector<std::int64_t>;

/// `all_to_all` of pieces of different sizes: `sent[w]` elements of `in` go to rank w, and
/// `received[w]` come from it.
template <class T>
void all_to_all(Engine& engine, std::span<const T> in, const Counts& sent, std::span<T> out,
                const Counts& received) {
  ::gloo::AlltoallvOptions options(engine.connections());
  options.setInput(unguarded(in), sent);
  options.setOutput(out.data(), received);
  options.setTag(engine.tag());
  ::gloo::alltoallv(options);
}

/// `all_gather` of pieces of different sizes.
template <class T>
void all_gather(Engine& engine, std::span<const T> in, std::span<T> out, const Counts& counts) {
  ::gloo::AllgathervOptions options(engine.connections());
  options.setInput(unguarded(in), in.size());
  options.setOutput(out.data(), std::vector<std::size_t>(counts.begin(), counts.end()));
  options.setTag(engine.tag());
  ::gloo::allgatherv(options);
}

}  // namespace lockstep::over_gloo

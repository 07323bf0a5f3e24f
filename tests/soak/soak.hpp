// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What every training of a soak has in common: what a trial has drawn, the samples, how a
/// job trains, and what it says at its end.

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/detail/core/hash.hpp"
#include "lockstep/lockstep.hpp"

namespace soak {

using namespace lockstep;

/// What a trial has drawn: words `name=value` behind `--`, which tests/soak/run writes.
struct Drawn {
  std::string kind;
  std::vector<std::size_t> shape{3, 4, 2};  // widths, from the inputs to the outputs
  std::size_t branches = 0;                 // tensors of which a batch uses some
  std::size_t samples = 60, batch = 2, epochs = 2, workers = 0, seed = 0;
  std::size_t plain = 0;  // not 0: train in this process alone, as so many ranks would
  std::size_t pause = 0;  // microseconds before every step, so that there is time for a signal
  double drop = 0;        // of a dropout
  std::string out;        // where the parameters go, as doubles

  Drawn(int argc, char** argv) {
    std::map<std::string, std::string> words;
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      const std::size_t equals = word.find('=');
      if (!word.starts_with("--") && equals != std::string::npos)
        words[word.substr(0, equals)] = word.substr(equals + 1);
    }
    const auto number = [&](const char* name, std::size_t otherwise) {
      return words.contains(name) ? std::stoul(words[name]) : otherwise;
    };
    kind = words["kind"];
    out = words["out"];
    branches = number("branches", branches);
    samples = number("samples", samples);
    batch = number("batch", batch);
    epochs = number("epochs", epochs);
    workers = number("workers", workers);
    seed = number("seed", seed);
    plain = number("plain", plain);
    pause = number("pause", pause);
    if (words.contains("drop")) drop = std::stod(words["drop"]);
    if (words.contains("shape")) {
      shape.clear();
      std::string text = words["shape"] + '-';
      for (std::size_t at = 0; at != text.size(); at = text.find('-', at) + 1)
        shape.push_back(std::stoul(text.substr(at)));
    }
  }
};

/// A number in [-1, 1) for every place.
inline double noise_at(std::uint64_t stream, std::uint64_t place) {
  return 2 * LayerRandom(detail::mix_bits(stream)).uniform<double>(place) - 1;
}

/// The first value of element i of parameter p.
inline double first_value(std::size_t p, std::size_t i) { return 0.5 * noise_at(1000 + p, i); }

/// Samples that are computed and not kept. Each is a little different in every epoch, as augmented
/// ones are: by the job's seed, the epoch and its own number.
template <class Input, class Label>
struct Samples {
  using batch_type = LabelledBatch<Input, Label>;
  std::size_t count = 0, width = 0;
  std::size_t classes = 7;

  std::size_t size() const { return count; }
  void load(std::span<const std::size_t> indices, Pass pass, batch_type& out) const {
    out.resize(indices.size(), width);
    for (std::size_t i = 0; i != indices.size(); ++i) {
      const std::uint64_t sample = indices[i];
      const std::uint64_t epoch = pass.seed.value() * 1000 + pass.epoch.value();
      for (std::size_t j = 0; j != width; ++j) {
        out.row(i)[j] =
            static_cast<Input>(noise_at(sample, j) + 0.05 * noise_at(epoch, sample * 100 + j));
      }
      out.labels[i] = static_cast<Label>(sample % classes);
    }
  }
};

inline std::uint64_t mixed(std::uint64_t hash, const void* data, std::size_t bytes) {
  return hash * 31 + detail::hash_of(std::string_view(static_cast<const char*>(data), bytes));
}

inline void write_numbers(const std::string& path, const std::vector<double>& numbers) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(numbers.data()),
             static_cast<std::streamsize>(numbers.size() * sizeof(double)));
}

/// The elements of a view, on the host. A job on GPUs has its own way.
struct HostElements {
  template <class View>
  static auto of(const View& view) {
    using T = typename View::value_type;
    return std::vector<T>(view.data_handle(), view.data_handle() + view.size());
  }
};

/// Trains as drawn. A rank's line at the end has a hash of all that it holds, and the sum of all
/// its losses, which goes on from checkpoints as parameters do. Rank 0 writes the parameters.
template <class From>
void train(auto& job, const Drawn& drawn, const auto& data) {
  job.arguments();  // `main` has read them
  job.checkpoints();
  job.loader_options().workers = drawn.workers;
  RandomStream stream = job.random();
  std::uint64_t mark = 1;
  double losses = 0;
  job.keep("stream", stream);
  job.keep("mark", mark);
  job.keep("losses", losses);
  for (auto epoch : job.epochs(drawn.epochs)) {
    for (const auto& batch : epoch.batches(data, drawn.batch)) {
      if (drawn.pause != 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn.pause));
      losses += static_cast<double>(job.step(batch));
      mark = mark * 31 + stream();
    }
    // In batches of the same size: a captured step keeps the addresses that its model had.
    job.evaluate(data, drawn.batch);
  }
  // A job that was resumed at its end has no epoch in which it would evaluate.
  const double score = job.evaluate(data, drawn.batch)["loss"];
  std::uint64_t hash = mark;
  std::vector<double> numbers;
  const auto add = [&](const auto& view) {
    const auto values = From::of(view);
    hash = mixed(hash, values.data(), values.size() * sizeof(values[0]));
    return values;
  };
  job.for_each_parameter([&](std::string_view, auto view) {
    using T = typename decltype(view)::value_type;
    for (const auto& value : add(view))
      numbers.push_back(static_cast<double>(static_cast<detail::Accumulator<T>>(value)));
  });
  job.for_each_buffer([&](std::string_view, auto view) { add(view); });
  job.for_each_state([&](std::string_view, std::string_view, auto view) { add(view); });
  hash = mixed(hash, &losses, sizeof losses);
  hash = mixed(hash, &score, sizeof score);
  if (job.rank() == Rank{0} && !drawn.out.empty()) write_numbers(drawn.out, numbers);
  std::printf("end of rank %zu: %016llx losses %.17g\n", job.rank().value(),
              static_cast<unsigned long long>(hash), losses);
}

}  // namespace soak

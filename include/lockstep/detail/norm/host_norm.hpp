// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms in host memory: loops are vectorised over positions, or over channels of rows.

#include "lockstep/detail/norm/host_sums.hpp"
#include "lockstep/detail/norm/work.hpp"

namespace lockstep::detail {

/// One channel's constants, in the accumulator type.
template <class A>
struct HostChannel {
  A high;
  A low;
  A scale;
  A shift;
  A gradient;
  A slope;

  A deviation(A x) const { return (x - high) - low; }
  /// Normalised x, bitwise the same in forward and backward.
  A normal(A x) const { return deviation(x) * scale + shift; }
  /// The gradient of x, from the output's gradient g before the ReLU.
  A input_gradient(A x, A g) const { return ((g - gradient) - deviation(x) * slope) * scale; }
};

/// The constants of all channels, each in an array of its own.
template <class A>
struct HostChannels {
  A* high;
  A* low;
  A* scale;
  A* shift;
  A* gradient;
  A* slope;

  HostChannels(std::vector<A>& memory, std::size_t channels) {
    if (memory.size() < 6 * channels) memory.resize(6 * channels);
    high = memory.data();
    low = high + channels;
    scale = low + channels;
    shift = scale + channels;
    gradient = shift + channels;
    slope = gradient + channels;
  }

  HostChannel<A> operator[](std::size_t c) const {
    return {high[c], low[c], scale[c], shift[c], gradient[c], slope[c]};
  }
};

/// Calls `f(channel, first value)` for every run.
inline void for_each_run(const NormShape& shape, const auto& f) {
  std::size_t at = 0;
  for (std::size_t n = 0; n != shape.samples; ++n) {
    for (std::size_t c = 0; c != shape.channels; ++c, at += shape.positions) f(c, at);
  }
}

/// Channels per tile of rows: their sums stay in the L1 cache.
inline constexpr std::size_t norm_tile = 256;

/// Calls `f(first row, rows, first channel, channels)` for cache-sized tiles, rows in order.
inline void for_each_tile(const NormShape& shape, const auto& f) {
  const std::size_t width = std::max<std::size_t>(1, std::min(shape.channels, norm_tile));
  const std::size_t rows = std::clamp<std::size_t>(4 * norm_piece / width, 16, 128);
  for (std::size_t n = 0; n < shape.samples; n += rows) {
    for (std::size_t c = 0; c < shape.channels; c += norm_tile)
      f(n, std::min(rows, shape.samples - n), c, std::min(norm_tile, shape.channels - c));
  }
}

/// Calls `f(constants of the channel, i)` for all values, which are independent.
template <class A, class F>
inline void map_values(const NormShape& shape, const HostChannels<A>& channels, const F& f) {
  if (shape.positions == 1) {
    const std::size_t width = shape.channels;
    for (std::size_t n = 0; n != shape.samples; ++n) {
      const std::size_t at = n * width;
#pragma GCC ivdep
      for (std::size_t c = 0; c != width; ++c) f(channels[c], at + c);
    }
  } else {
    for_each_run(shape, [&](std::size_t c, std::size_t at) {
      const HostChannel<A> channel = channels[c];
#pragma GCC ivdep
      for (std::size_t i = at; i != at + shape.positions; ++i) f(channel, i);
    });
  }
}

/// The output as it is stored. NaN stays NaN.
template <Fusion Fused, class T, class A>
inline T stored_output(A normal, [[maybe_unused]] A residual) {
  if constexpr (Fused == Fusion::none) return static_cast<T>(normal);
  const A value = Fused == Fusion::add_relu ? normal + residual : normal;
  return static_cast<T>(value < 0 ? A(0) : value);
}

/// The output's gradient before the ReLU: g of `NormWork`.
template <Fusion Fused, class T, class A>
inline A gradient_before(const HostChannel<A>& channel, A x, const T* y, std::size_t i, A dy) {
  if constexpr (Fused == Fusion::relu)
    return is_stopped(static_cast<T>(channel.normal(x))) ? A(0) : dy;
  if constexpr (Fused == Fusion::add_relu) return is_stopped(y[i]) ? A(0) : dy;
  return dy;
}

/// The moments of runs. `mean` and `m2` must be zero.
void measure_runs(const NormShape& shape, const auto* x, double* mean, double* m2) {
  for (std::size_t n = 0; n != shape.samples; ++n) {
    const auto before = static_cast<double>(n * shape.positions);
    for (std::size_t c = 0; c != shape.channels; ++c, x += shape.positions) {
      const Moments all = more_moments({mean[c], m2[c]}, before, x, shape.positions);
      mean[c] = all.mean;
      m2[c] = all.m2;
    }
  }
}

/// The moments of rows. `mean` and `m2` must be zero.
template <class T>
void measure_rows(const NormShape& shape, const T* x, double* mean, double* m2) {
  using A = Accumulator<T>;
  const std::size_t stride = shape.channels;
  for_each_tile(shape, [&](std::size_t n, std::size_t rows, std::size_t c, std::size_t width) {
    const T* const tile = x + n * stride + c;
    const double inverse = 1 / static_cast<double>(rows);
    A about[norm_tile] = {};
    if (n == 0) {  // the mean of the first tile; later tiles use the mean so far
      for (std::size_t row = 0; row != rows; ++row) {
        for (std::size_t i = 0; i != width; ++i) about[i] += static_cast<A>(tile[row * stride + i]);
      }
      for (std::size_t i = 0; i != width; ++i) about[i] *= static_cast<A>(inverse);
    } else {
      for (std::size_t i = 0; i != width; ++i) about[i] = static_cast<A>(mean[c + i]);
    }
    A sum[norm_tile] = {};
    A squares[norm_tile] = {};
    std::size_t row = 0;
    for (; row + 4 <= rows; row += 4) {  // four rows per load and store of a sum
      const T* const a = tile + row * stride;
      for (std::size_t i = 0; i != width; ++i) {
        const A first = static_cast<A>(a[i]) - about[i];
        const A second = static_cast<A>(a[stride + i]) - about[i];
        const A third = static_cast<A>(a[2 * stride + i]) - about[i];
        const A fourth = static_cast<A>(a[3 * stride + i]) - about[i];
        sum[i] += (first + second) + (third + fourth);
        squares[i] += (first * first + second * second) + (third * third + fourth * fourth);
      }
    }
    for (; row != rows; ++row) {
      for (std::size_t i = 0; i != width; ++i) {
        const A deviation = static_cast<A>(tile[row * stride + i]) - about[i];
        sum[i] += deviation;
        squares[i] += deviation * deviation;
      }
    }
    // The factors of Chan's formula are the same for all channels.
    const auto before = static_cast<double>(n);
    const double share = static_cast<double>(rows) / (before + static_cast<double>(rows));
    const double spread = before * share;
    for (std::size_t i = 0; i != width; ++i) {
      const Moments more = moments_about(about[i], sum[i], squares[i], inverse);
      const double deviation = more.mean - mean[c + i];
      mean[c + i] += deviation * share;
      m2[c + i] += more.m2 + deviation * deviation * spread;
    }
  });
}

/// Sums of g and of g * (x - mean) over a piece of a run. Not inlined, as `moments_about`.
template <Fusion Fused, class T, class A>
[[gnu::noinline]] TwoSums<A> piece_sums(const T* x, const T* dy, std::size_t count,
                                        HostChannel<A> channel) {
  return lane_sums<A>(count, [x, dy, channel](std::size_t i, A& gradients, A& products) {
    const A value = static_cast<A>(x[i]);
    const A g = gradient_before<Fused, T>(channel, value, static_cast<const T*>(nullptr), i,
                                          static_cast<A>(dy[i]));
    gradients += g;
    products += g * channel.deviation(value);
  });
}

template <Fusion Fused, class T, class A>
void reduce_runs(const NormShape& shape, const HostChannels<A>& channels, const T* x,
                 [[maybe_unused]] const T* y, const T* dy, [[maybe_unused]] T* dresidual,
                 double* sums) {
  for_each_run(shape, [&](std::size_t c, std::size_t at) {
    const HostChannel<A> channel = channels[c];
    for (std::size_t done = 0; done < shape.positions; done += norm_piece) {
      const std::size_t first = at + done;
      const std::size_t count = std::min(shape.positions - done, norm_piece);
      TwoSums<A> piece;
      if constexpr (Fused == Fusion::add_relu) {
#pragma GCC ivdep
        for (std::size_t i = first; i != first + count; ++i)
          dresidual[i] = static_cast<T>(is_stopped(y[i]) ? A(0) : static_cast<A>(dy[i]));
        piece = piece_sums<Fusion::none>(x + first, dresidual + first, count, channel);
      } else {
        piece = piece_sums<Fused>(x + first, dy + first, count, channel);
      }
      sums[c] += piece.first;
      sums[shape.channels + c] += piece.second;
    }
  });
}

template <Fusion Fused, class T, class A>
void reduce_rows(const NormShape& shape, const HostChannels<A>& channels, const T* x, const T* y,
                 const T* dy, [[maybe_unused]] T* dresidual, double* sums) {
  for_each_tile(shape, [&](std::size_t n, std::size_t rows, std::size_t first, std::size_t width) {
    A gradients[norm_tile] = {};
    A products[norm_tile] = {};
    for (std::size_t row = n; row != n + rows; ++row) {
      const std::size_t at = row * shape.channels + first;
#pragma GCC ivdep
      for (std::size_t i = 0; i != width; ++i) {
        const HostChannel<A> channel = channels[first + i];
        const A value = static_cast<A>(x[at + i]);
        const A g =
            gradient_before<Fused, T>(channel, value, y, at + i, static_cast<A>(dy[at + i]));
        if constexpr (Fused == Fusion::add_relu) dresidual[at + i] = static_cast<T>(g);
        gradients[i] += g;
        products[i] += g * channel.deviation(value);
      }
    }
    for (std::size_t i = 0; i != width; ++i) {
      sums[first + i] += gradients[i];
      sums[shape.channels + first + i] += products[i];
    }
  });
}

template <>
class NormWork<HostMemory> : public HostStatistics {
 public:
  NormWork() = default;

  void measure(HostStream, const NormShape& shape, const auto* x) {
    double* const mean = own().data();
    double* const m2 = mean + channels();
    std::fill(mean, m2 + channels(), 0.0);
    if (shape.positions == 1) {
      measure_rows(shape, x, mean, m2);
    } else if (shape.positions != 0) {
      measure_runs(shape, x, mean, m2);
    }
    own().back() = static_cast<double>(shape.count());
  }

  template <class R>
  void finalize(HostStream, const NormShape&, std::size_t world, const BatchNormOptions& options,
                const NormRunning<R>& running, std::string_view name) {
    finalize_packets(all(world).data(), world, options, running, name);
  }

  template <class T, class R>
  void measure_alone(HostStream stream, const NormShape& shape, const T* x,
                     const BatchNormOptions& options, const NormRunning<R>& running) {
    measure(stream, shape, x);
    finalize_packets(own().data(), 1, options, running, {});
  }

  template <class R>
  void finalize_from_running(HostStream, const NormShape&, const BatchNormOptions& options,
                             const NormRunning<R>& running) {
    use_running(running.mean, running.variance, options.eps);
  }

  template <Fusion Fused, class T, class W>
  void normalise(HostStream, const NormShape& shape, const T* x, const NormAffine<const W>& affine,
                 [[maybe_unused]] const T* residual, T* y) {
    using A = Accumulator<T>;
    map_values(shape, forward_channels<A>(affine), [=](const auto& channel, std::size_t i) {
      A other = 0;
      if constexpr (Fused == Fusion::add_relu) other = static_cast<A>(residual[i]);
      y[i] = stored_output<Fused, T>(channel.normal(static_cast<A>(x[i])), other);
    });
  }

  template <Fusion Fused, class T, class W, class G>
  void reduce_backward(HostStream, const NormShape& shape, const T* x, const T* y, const T* dy,
                       const NormAffine<const W>& affine, const NormAffine<G>& gradients,
                       T* dresidual) {
    const HostChannels<Accumulator<T>> numbers = forward_channels<Accumulator<T>>(affine);
    std::ranges::fill(sums(), 0.0);
    if (shape.positions == 1) {
      reduce_rows<Fused>(shape, numbers, x, y, dy, dresidual, sums().data());
    } else {
      reduce_runs<Fused>(shape, numbers, x, y, dy, dresidual, sums().data());
    }
    for (std::size_t c = 0; c != channels(); ++c) {
      if (gradients.weight != nullptr)
        gradients.weight[c] = converted<G>(sums()[channels() + c] * inverses()[c]);
      if (gradients.bias != nullptr) gradients.bias[c] = converted<G>(sums()[c]);
    }
  }

  template <Fusion Fused, class T, class W>
  void input_gradient(HostStream, const NormShape& shape, const T* x, const T* dy,
                      const NormAffine<const W>& affine, T* dx) {
    using A = Accumulator<T>;
    HostChannels<A> numbers = forward_channels<A>(affine);
    const double share = count() == 0 ? 0 : 1 / count();
    for (std::size_t c = 0; c != channels(); ++c) {
      const double inverse = inverses()[c];
      numbers.gradient[c] = static_cast<A>(sums()[c] * share);
      numbers.slope[c] = static_cast<A>(sums()[channels() + c] * share * (inverse * inverse));
    }
    map_values(shape, numbers, [=](const auto& channel, std::size_t i) {
      const A value = static_cast<A>(x[i]);
      const A g = gradient_before<Fused, T>(channel, value, static_cast<const T*>(nullptr), i,
                                            static_cast<A>(dy[i]));
      dx[i] = static_cast<T>(channel.input_gradient(value, g));
    });
  }

 private:
  template <class R>
  void finalize_packets(const double* packets, std::size_t world, const BatchNormOptions& options,
                        const NormRunning<R>& running, std::string_view name) {
    merge(packets, world, options.eps, name);
    if (count() == 0) return;
    track(running.mean, running.variance, running_share(options.momentum, *running.batches));
    ++*running.batches;
  }

  /// The constants of forward, recomputed with the same bits in backward.
  template <class A, class W>
  HostChannels<A> forward_channels(const NormAffine<const W>& affine) {
    HostChannels<A> numbers(std::get<std::vector<A>>(numbers_), channels());
    for (std::size_t c = 0; c != channels(); ++c) {
      const SplitMean<A> mean(means()[c]);
      numbers.high[c] = mean.high;
      numbers.low[c] = mean.low;
      numbers.scale[c] = static_cast<A>(converted<double>(affine.weight[c]) * inverses()[c]);
      numbers.shift[c] = converted<A>(affine.bias[c]);
    }
    return numbers;
  }

  std::tuple<std::vector<float>, std::vector<double>> numbers_;
};

}  // namespace lockstep::detail

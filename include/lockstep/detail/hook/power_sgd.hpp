// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `PowerSGD<Rank>`: gradients are reduced as low-rank factors.

#include <cmath>

#include "lockstep/detail/hook/pipeline.hpp"

namespace lockstep::detail {

/// A gradient M that is sent as P and Q, with M close to P Q^T. P and Q are column-major.
struct LowRankMatrix {
  std::size_t parameter = 0;
  std::size_t first = 0;  ///< its first element in the bucket
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t rank = 0;
  std::size_t p = 0;          ///< offset in the array of all P of the bucket
  std::size_t q = 0;          ///< offset in the array of all Q
  std::size_t residual = 0;   ///< offset in the array of all residuals
  std::size_t first_row = 0;  ///< its first row among the rows of all matrices
  std::size_t first_column = 0;

  constexpr std::size_t count() const { return rows * columns; }
};

/// A gradient that is sent uncompressed.
struct WholeTensor {
  std::size_t first = 0;  ///< its first element in the bucket
  std::size_t count = 0;
  std::size_t at = 0;  ///< its offset in the send buffer
};

/// The gradients of one bucket. Round one sends the whole tensors and all P, round two all Q.
struct LowRankPlan {
  std::vector<LowRankMatrix> matrices;
  std::vector<WholeTensor> whole;
  std::size_t whole_count = 0;  ///< elements of all whole tensors
  std::size_t p_count = 0;
  std::size_t q_count = 0;
  std::size_t residual_count = 0;
  std::size_t rows = 0;  ///< of all matrices
  std::size_t columns = 0;
  std::size_t rank = 1;  ///< the largest
  double epsilon = 0;    ///< added to the norm by which a column is divided
  bool feedback = true;  ///< error feedback: is what was not sent added to the next gradient?
  std::uint64_t seed = 0;

  std::size_t first_round() const { return whole_count + p_count; }

  void add_matrix(const HookedTensor& tensor, std::size_t most) {
    const std::size_t own = std::min({most, tensor.rows, tensor.columns});
    matrices.push_back({tensor.parameter, tensor.first, tensor.rows, tensor.columns, own, p_count,
                        q_count, residual_count, rows, columns});
    p_count += tensor.rows * own;
    q_count += tensor.columns * own;
    residual_count += tensor.count();
    rows += tensor.rows;
    columns += tensor.columns;
    rank = std::max(rank, own);
  }
  void add_whole(const HookedTensor& tensor) {
    whole.push_back({tensor.first, tensor.count(), whole_count});
    whole_count += tensor.count();
  }
};

/// A random number in [-1, 1) that depends on the arguments alone, so that all ranks draw the same.
LOCKSTEP_HOST_DEVICE constexpr double drawn_element(std::uint64_t seed, std::uint64_t step,
                                                    std::uint64_t column, std::uint64_t i) {
  const std::uint64_t bits = random_at(random_at(random_at(seed, step), column), i);
  return static_cast<double>(bits >> 11) * 0x1p-52 - 1;
}

/// The factors and residuals of a bucket, in the memory of a `HookDevice`.
template <class T, class Device>
class LowRankState {
 public:
  using A = Accumulator<T>;

  LowRankState(Device& device, LowRankPlan plan)
      : device_(device),
        plan_(std::move(plan)),
        p_(plan_.p_count),
        q_(plan_.q_count),
        residual_(plan_.feedback ? plan_.residual_count : 0) {}

  const LowRankPlan& plan() const { return plan_; }
  /// Resets Q: the next `project` draws it anew.
  void forget_q() { device_.zero(std::span<A>(q_)); }
  std::span<A> q_of(const LowRankMatrix& matrix) {
    return std::span<A>(q_).subspan(matrix.q, matrix.rank * matrix.columns);
  }
  std::span<A> residual_of(const LowRankMatrix& matrix) {
    return std::span<A>(residual_).subspan(matrix.residual, matrix.count());
  }

 protected:
  using Elements = typename Device::template Elements<A>;

  Device& device_;
  LowRankPlan plan_;
  Elements p_;
  Elements q_;
  Elements residual_;  // error feedback: gradients not sent so far
};

/// The passes over a bucket, specialised for devices: the host's below, a GPU's in power_sgd.cuh.
template <class T, class Device>
class LowRank;

/// Orthonormalizes the columns (up to `epsilon`) by Gram-Schmidt, as PyTorch does, with the
/// operations of `threads` (see `OneThread`). A column that is not finite or lies in the span of
/// those before it is drawn anew with `draw(column, i)` if `draws`; otherwise it becomes zero.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class A, class Threads, class Draw>
LOCKSTEP_HOST_DEVICE void orthogonalize(A* columns, std::size_t length, std::size_t rank, A epsilon,
                                        bool draws, const Threads& threads, const Draw& draw) {
  constexpr A least = 32 * std::numeric_limits<A>::epsilon();
  constexpr A most = std::numeric_limits<A>::max();
  for (std::size_t k = 0; k != rank; ++k) {
    A* const own = columns + k * length;
    for (bool drawn = false;; drawn = true) {
      const A before = std::sqrt(threads.dot(own, own, length));
      A after = before;
      // A second pass removes what rounding has left of the other columns.
      for (int pass = 0; pass != 2 && k != 0; ++pass) {
        const A norm = after;
        for (std::size_t j = 0; j != k; ++j) {
          const A* const other = columns + j * length;
          threads.add_multiple(own, -threads.dot(other, own, length), other, length);
        }
        after = std::sqrt(threads.dot(own, own, length));
        if (after > norm / 2) break;
      }
      if (after > least * before && after <= most) {
        const A factor = 1 / (after + epsilon);
        threads.for_each(length, [&](std::size_t i) { own[i] *= factor; });
        break;
      }
      if (drawn || !draws) {
        threads.for_each(length, [&](std::size_t i) { own[i] = A(0); });
        break;
      }
      threads.for_each(length, [&](std::size_t i) { own[i] = static_cast<A>(draw(k, i)); });
    }
  }
}

/// Serial operations of `orthogonalize` for the host.
struct OneThread {
  /// The dot product, in SIMD lanes that compilers vectorise.
  template <class M, class A>
  LOCKSTEP_HOST_DEVICE static A dot(const M* a, const A* b, std::size_t count) {
    constexpr std::size_t lanes = 16;
    A lane[lanes] = {};
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      for (std::size_t l = 0; l != lanes; ++l) lane[l] += static_cast<A>(a[i + l]) * b[i + l];
    }
    A sum = 0;
    for (; i != count; ++i) sum += static_cast<A>(a[i]) * b[i];
    for (const A part : lane) sum += part;
    return sum;
  }
  template <class A, class M>
  LOCKSTEP_HOST_DEVICE static void add_multiple(A* to, A factor, const M* from, std::size_t count) {
    for (std::size_t i = 0; i != count; ++i) to[i] += factor * static_cast<A>(from[i]);
  }
  template <class F>
  LOCKSTEP_HOST_DEVICE static void for_each(std::size_t count, const F& f) {
    for (std::size_t i = 0; i != count; ++i) f(i);
  }
};

template <class T>
class LowRank<T, HookDevice<Cpu>> : public LowRankState<T, HookDevice<Cpu>> {
  using Base = LowRankState<T, HookDevice<Cpu>>;
  using Base::plan_, Base::p_, Base::q_, Base::residual_;

 public:
  using Base::Base;
  using typename Base::A;

  /// Adds the gradients to the residual and computes P = M Q. `sent` gets the first round's data.
  void project(std::span<const T> values, std::span<T> sent, std::uint64_t step) {
    for (const WholeTensor& tensor : plan_.whole)
      std::copy_n(values.data() + tensor.first, tensor.count, sent.data() + tensor.at);
    for (const LowRankMatrix& matrix : plan_.matrices) {
      const std::uint64_t seed = random_at(plan_.seed, matrix.parameter);
      orthogonalize(q_.data() + matrix.q, matrix.columns, matrix.rank,
                    static_cast<A>(plan_.epsilon), true, OneThread{},
                    [&](std::size_t k, std::size_t i) { return drawn_element(seed, step, k, i); });
      for (std::size_t row = 0; row != matrix.rows; ++row) {
        if (plan_.feedback) {
          A* const kept = residual_.data() + matrix.residual + row * matrix.columns;
          const T* const given = values.data() + matrix.first + row * matrix.columns;
          for (std::size_t j = 0; j != matrix.columns; ++j) kept[j] += static_cast<A>(given[j]);
        }
        with_row(matrix, row, values.data(), [&](const auto* own) {
          for (std::size_t k = 0; k != matrix.rank; ++k)
            p_[matrix.p + k * matrix.rows + row] =
                OneThread::dot(own, q_.data() + matrix.q + k * matrix.columns, matrix.columns);
        });
      }
    }
    convert(sent.data() + plan_.whole_count, p_.data(), p_.size());
  }

  /// P is the received average, orthogonalized; Q = M^T P. `sent` gets the second round's data.
  void project_back(std::span<const T> values, std::span<const T> come, std::span<T> sent) {
    convert(p_.data(), come.data() + plan_.whole_count, p_.size());
    std::ranges::fill(q_, A(0));
    for (const LowRankMatrix& matrix : plan_.matrices) {
      orthogonalize(p_.data() + matrix.p, matrix.rows, matrix.rank, static_cast<A>(plan_.epsilon),
                    false, OneThread{}, [](std::size_t, std::size_t) { return 0.0; });
      for (std::size_t row = 0; row != matrix.rows; ++row) {
        with_row(matrix, row, values.data(), [&](const auto* own) {
          for (std::size_t k = 0; k != matrix.rank; ++k)
            OneThread::add_multiple(q_.data() + matrix.q + k * matrix.columns,
                                    p_[matrix.p + k * matrix.rows + row], own, matrix.columns);
        });
      }
    }
    convert(sent.data(), q_.data(), q_.size());
  }

  /// values = P Q^T with the received average of Q; whole tensors come from the first round. The
  /// residual keeps the difference; a residual that is not finite is reset, or it would persist.
  void restore(std::span<T> values, std::span<const T> first, std::span<const T> come) {
    convert(q_.data(), come.data(), q_.size());
    for (const WholeTensor& tensor : plan_.whole)
      std::copy_n(first.data() + tensor.at, tensor.count, values.data() + tensor.first);
    for (const LowRankMatrix& matrix : plan_.matrices) {
      sum_.resize(std::max(sum_.size(), matrix.columns));
      for (std::size_t row = 0; row != matrix.rows; ++row) {
        std::fill_n(sum_.begin(), matrix.columns, A(0));
        for (std::size_t k = 0; k != matrix.rank; ++k)
          OneThread::add_multiple(sum_.data(), p_[matrix.p + k * matrix.rows + row],
                                  q_.data() + matrix.q + k * matrix.columns, matrix.columns);
        T* const to = values.data() + matrix.first + row * matrix.columns;
        for (std::size_t j = 0; j != matrix.columns; ++j) to[j] = static_cast<T>(sum_[j]);
        if (!plan_.feedback) continue;
        A* const kept = residual_.data() + matrix.residual + row * matrix.columns;
        for (std::size_t j = 0; j != matrix.columns; ++j) {
          const A rest = kept[j] - static_cast<A>(to[j]);
          kept[j] = rest - rest == 0 ? rest : A(0);
        }
      }
    }
  }

 private:
  /// Calls `f` with a row of M, which is the residual with error feedback, else the gradient.
  void with_row(const LowRankMatrix& matrix, std::size_t row, const T* values,
                const auto& f) const {
    if (plan_.feedback) {
      f(static_cast<const A*>(residual_.data() + matrix.residual + row * matrix.columns));
    } else {
      f(values + matrix.first + row * matrix.columns);
    }
  }
  std::vector<A> sum_;  // a row of P Q^T
};

}  // namespace lockstep::detail

namespace lockstep {

/// PyTorch's options: `PowerSGD<2, PowerSgdOptions{.start = 100}>`.
struct PowerSgdOptions {
  /// The first `start` steps are not compressed: early gradients suffer most from compression.
  std::uint64_t start = 1000;
  double least_compression = 2;  ///< a gradient is compressed if that saves more than this factor
  bool error_feedback = true;    ///< is what was not sent added to the next gradient?
  bool warm_start = true;        ///< does a step start from the Q of the previous step?
  double epsilon = 0;            ///< added to the norm by which Gram-Schmidt divides
  std::uint64_t seed = 0;
};

/// PyTorch's `powerSGD_hook`: gradients of matrices are sent as P and Q of `Rank` columns each
/// (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727), those of vectors and small matrices
/// uncompressed. A step has two rounds; the first includes the uncompressed tensors.
template <std::size_t Rank = 1, PowerSgdOptions Options = PowerSgdOptions{}>
struct PowerSGD {
  static constexpr std::string_view name = "PowerSGD";
  static constexpr bool well_formed =
      Rank > 0 && Options.least_compression >= 0 && Options.epsilon >= 0;
  static constexpr std::size_t rounds = 2;
  static constexpr bool is_alone_of_its_kind = true;
  static constexpr std::uint64_t phase(std::uint64_t step) {
    return detail::has_begun<Options.start>(step) ? 1 : 0;
  }
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.number(Rank).number(Options.start).number(Options.seed);
    hash.number(__builtin_bit_cast(std::uint64_t, Options.least_compression));
    hash.number(__builtin_bit_cast(std::uint64_t, Options.epsilon));
    hash.number(Options.error_feedback ? 1 : 0).number(Options.warm_start ? 1 : 0);
  }

  template <class T, class Device>
  class Bucket {
   public:
    explicit Bucket(auto& bucket)
        : step_(bucket.step()),
          count_(bucket.count()),
          passes_(bucket.device(), make_plan(bucket.tensors())),
          first_(bucket.template allocate<T>(compresses() ? passes_.plan().first_round() : 0)),
          second_(bucket.template allocate<T>(passes_.plan().q_count)) {}

    void begin(std::span<T> values, auto& next) {
      in_flight_ = compresses() && detail::has_begun<Options.start>(step_);
      if (!in_flight_) return next.begin(values);
      if constexpr (!Options.warm_start) passes_.forget_q();
      passes_.project(values, first_, step_);
      next.begin(first_);
    }
    void finish(std::span<T> values, auto& next) {
      if (!in_flight_) return next.finish(values);
      next.finish(first_);
      passes_.project_back(values, first_, second_);
      next.begin(second_);
      next.finish(second_);
      passes_.restore(values, first_, second_);
    }

    /// Steps before the start send the whole bucket.
    std::size_t most_sent() const { return std::max({count_, first_.size(), second_.size()}); }

    /// Residuals differ among ranks; Q is the same on all.
    void for_each_state(const auto& f) {
      for (const detail::LowRankMatrix& matrix : passes_.plan().matrices) {
        if constexpr (Options.error_feedback)
          f(matrix.parameter, "PowerSGD.residual", passes_.residual_of(matrix),
            detail::Keeper::each_rank);
        if constexpr (Options.warm_start)
          f(matrix.parameter, "PowerSGD.q", passes_.q_of(matrix), detail::Keeper::all_ranks);
      }
    }

   private:
    bool compresses() const { return !passes_.plan().matrices.empty(); }

    static detail::LowRankPlan make_plan(std::span<const HookedTensor> tensors) {
      detail::LowRankPlan plan;
      plan.epsilon = Options.epsilon;
      plan.feedback = Options.error_feedback;
      plan.seed = Options.seed;
      for (const HookedTensor& tensor : tensors) {
        const std::size_t rank = std::min({Rank, tensor.rows, tensor.columns});
        const auto compressed = static_cast<double>((tensor.rows + tensor.columns) * rank);
        if (compressed * Options.least_compression < static_cast<double>(tensor.count())) {
          plan.add_matrix(tensor, Rank);
        } else {
          plan.add_whole(tensor);
        }
      }
      return plan;
    }

    const std::uint64_t& step_;
    std::size_t count_;
    detail::LowRank<T, Device> passes_;
    std::span<T> first_;   // whole tensors and P
    std::span<T> second_;  // Q
    bool in_flight_ = false;
  };
};

}  // namespace lockstep

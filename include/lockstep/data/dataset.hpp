// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Data sets and sources of samples: the concepts, how a batch is loaded, and what is said
/// where that fails.

#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// Which pass over the data a batch belongs to. A loader hands over its sampler's, so that what a
/// data set draws at random follows from the seed, the epoch and the sample alone.
struct Pass {
  Seed seed{};
  Epoch epoch{};

  friend bool operator==(const Pass&, const Pass&) = default;
};

namespace detail {

/// Loads batches of type B that are the same in every pass.
template <class D, class B>
concept Loading = requires(const D& dataset, std::span<const std::size_t> indices, B& out) {
  { dataset.load(indices, out) } -> std::same_as<void>;
};

/// Loads batches of type B that depend on the pass.
template <class D, class B>
concept PassLoading =
    requires(const D& dataset, std::span<const std::size_t> indices, Pass pass, B& out) {
      { dataset.load(indices, pass, out) } -> std::same_as<void>;
    };

}  // namespace detail

/// `load(indices, out)` replaces what `out` held by the samples of `indices`, in that order, and
/// reuses its memory. It is const and is called by several threads at once. A data set that draws
/// random numbers has `load(indices, pass, out)`, which is then the one that loaders call.
template <class D>
concept Dataset = requires(const D& dataset) {
  requires std::default_initializable<typename D::batch_type>;
  { dataset.size() } -> std::convertible_to<std::size_t>;
  requires detail::Loading<D, typename D::batch_type> ||
               detail::PassLoading<D, typename D::batch_type>;
};

/// A batch with a weight for each of its samples; `Masked` needs one.
template <class B>
concept WeightedBatch = requires(B& batch, std::size_t i) { batch.weights[i] = 0.f; };

/// A sample that lies in its source's memory.
template <class X, class Y>
struct LabelledSample {
  std::span<const X> inputs;
  Y label{};
};

/// A sample with memory of its own, which is used again for the next.
template <class X, class Y>
struct OwnedSample {
  std::vector<X> inputs;
  Y label{};
};

namespace detail {

/// Reads samples that are the same in every pass.
template <class S>
concept Reading = requires(const S& source, std::size_t index, typename S::sample_type& out) {
  { source.read(index, out) } -> std::same_as<void>;
};

/// Reads samples that depend on the pass.
template <class S>
concept PassReading =
    requires(const S& source, std::size_t index, Pass pass, typename S::sample_type& out) {
      { source.read(index, pass, out) } -> std::same_as<void>;
    };

/// Whether every pass has other samples, because something draws random numbers for them. A type
/// that takes a pass only to hand it on says so itself, by its member of this name.
template <class S>
constexpr bool changes_by_pass() {
  if constexpr (requires { S::changes_by_pass; }) {
    return S::changes_by_pass;
  } else if constexpr (requires { typename S::batch_type; }) {
    return PassReading<S> || PassLoading<S, typename S::batch_type>;
  } else {
    return PassReading<S>;
  }
}

/// A sample that can be a row of a batch.
template <class S>
concept Labelled = requires(const S& sample) {
  std::begin(sample.inputs);
  std::size(sample.inputs);
  sample.label;
};

template <Labelled S>
using InputOf = std::remove_cvref_t<decltype(*std::begin(std::declval<const S&>().inputs))>;
template <Labelled S>
using LabelOf = std::remove_cvref_t<decltype(std::declval<const S&>().label)>;

}  // namespace detail

/// `read(index, out)` replaces what `out` held by one sample, and reuses its memory. It is const
/// and is called by several threads at once, each with an `out` of its own. A sample may point into
/// the source. A source that draws random numbers has `read(index, pass, out)`. One that has work
/// to do once for a batch, before its samples are read, may have `prepare(indices)`: a mapped file
/// is looked at there, to see that it has not changed.
template <class S>
concept SampleSource = requires(const S& source) {
  requires std::default_initializable<typename S::sample_type>;
  { source.size() } -> std::convertible_to<std::size_t>;
  requires detail::Reading<S> || detail::PassReading<S>;
};

namespace detail {

/// What reading or changing one sample threw, with its number. The first exception is nested in it.
class SampleError : public Error {
 public:
  [[gnu::cold]] SampleError(std::size_t sample, std::size_t draw, const Error& error);
  SampleError(const SampleError& other);
  ~SampleError() override;

  std::size_t sample() const { return sample_; }
  /// Its place in the batch, from 0.
  std::size_t draw() const { return draw_; }

 private:
  std::size_t sample_;
  std::size_t draw_;
};

/// For handlers: throws what is being handled as the failure of a sample, the `draw`-th of its
/// batch. A job's end, `Stopped`, is thrown as it is.
[[noreturn, gnu::cold]] void rethrow_of_sample(std::size_t sample, std::size_t draw);

/// Where a batch stands in an epoch: its pass, and its number on this rank, from 0.
struct BatchPlace {
  Pass pass{};
  std::size_t number = 0;
};

/// For handlers: throws what is being handled as the failure of a batch. It names the sample that
/// failed, where that is known, or else all samples of the batch.
[[noreturn, gnu::cold]] void rethrow_of_batch(std::span<const std::size_t> indices,
                                              BatchPlace place);

/// Loads the samples of `indices` by the data set's own `load`.
template <Dataset Source, class Batch>
void load_batch(const Source& dataset, std::span<const std::size_t> indices, BatchPlace place,
                Batch& out) {
  try {
    if constexpr (PassLoading<Source, Batch>) {
      dataset.load(indices, place.pass, out);
    } else {
      dataset.load(indices, out);
    }
  } catch (...) {
    rethrow_of_batch(indices, place);
  }
}

/// As many objects as were ever borrowed at a time. Unlike thread-local ones they end with their
/// owner, and a thread may borrow two. A copy of an owner begins with none.
template <class T>
class Spares {
 public:
  Spares() = default;
  Spares(const Spares&) noexcept {}
  Spares& operator=(const Spares&) noexcept { return *this; }
  ~Spares() = default;

  class Loan {
   public:
    explicit Loan(Spares& spares) : spares_(spares), object_(spares.take()) {}
    ~Loan() { spares_.give_back(std::move(object_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

    T& operator*() const { return *object_; }
    T* operator->() const { return object_.get(); }

   private:
    Spares& spares_;
    std::unique_ptr<T> object_;
  };

  Loan borrow() { return Loan(*this); }

 private:
  std::unique_ptr<T> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!spares_.empty()) {
        std::unique_ptr<T> object = std::move(spares_.back());
        spares_.pop_back();
        return object;
      }
      ++made_;
      spares_.reserve(made_);  // so that giving back cannot fail
    }
    return std::make_unique<T>();
  }
  void give_back(std::unique_ptr<T> object) noexcept {
    const std::lock_guard lock(mutex_);
    spares_.push_back(std::move(object));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> spares_;
  std::size_t made_ = 0;
};

}  // namespace detail

}  // namespace lockstep

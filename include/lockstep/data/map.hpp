// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `source | map(f)`: a source whose samples went through a function, with random numbers
/// that belong to the sample.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/data/pipeline.hpp"
#include "lockstep/data/sample.hpp"

namespace lockstep {

namespace detail {

/// The random numbers of a sample in a pass, for the `place`-th function of a pipeline that draws.
/// Nothing else enters: no worker, no rank, no position.
constexpr Seed sample_seed(Pass pass, std::size_t sample, std::size_t place) {
  const std::uint64_t job = mix_bits(pass.seed.value() + golden_step);
  return Seed{random_at(random_at(random_at(job, pass.epoch.value()), sample), place)};
}

/// How many functions that draw a source has.
template <class Source>
constexpr std::size_t drawing_maps() {
  if constexpr (requires { Source::drawing_maps; }) return Source::drawing_maps;
  return 0;
}

/// Whether `map(f)` can call f with a sample, given as an `In`.
template <class F, class In>
struct MapTakes : std::bool_constant<std::is_invocable_v<const F&, In, RandomStream&> ||
                                     std::is_invocable_v<const F&, In>> {};

/// What f returns for a sample; a sample where f cannot be called.
template <class F, class Sample>
struct MapResult {
  using type = Sample;
};
template <class F, class Sample>
  requires std::is_invocable_v<const F&, Sample&, RandomStream&>
struct MapResult<F, Sample> : std::invoke_result<const F&, Sample&, RandomStream&> {};
template <class F, class Sample>
  requires(!std::is_invocable_v<const F&, Sample&, RandomStream&> &&
           std::is_invocable_v<const F&, Sample&>)
struct MapResult<F, Sample> : std::invoke_result<const F&, Sample&> {};

/// How `map<Out>(f)` calls f with samples of a type.
template <class F, class Sample, class Out>
struct MapCall {
  static constexpr bool draws = std::is_invocable_v<const F&, Sample&, Out&, RandomStream&>;
  static constexpr bool is_callable = draws || std::is_invocable_v<const F&, Sample&, Out&>;
  static constexpr bool fills = true;
  static constexpr bool is_in_place = false;
  static constexpr bool changes_a_copy = false;
  using sample_type = Out;
};

/// How `map(f)` does.
template <class F, class Sample>
struct MapCall<F, Sample, void> {
  using Result = typename MapResult<F, Sample>::type;

  static constexpr bool draws = std::is_invocable_v<const F&, Sample&, RandomStream&>;
  static constexpr bool is_callable = MapTakes<F, Sample&>::value;
  static constexpr bool fills = false;
  static constexpr bool is_in_place = std::is_void_v<Result>;
  /// It returns nothing, and what it takes is no reference to the sample.
  static constexpr bool changes_a_copy =
      std::conjunction_v<std::is_void<Result>, MapTakes<F, Sample>>;
  using sample_type = std::conditional_t<is_in_place, Sample, std::remove_cvref_t<Result>>;
};

/// The samples of a source after a function. `Held` is the source's type, or a reference to it.
template <class Held, class F, class Out>
class Mapped;

template <class Held, class F, class Out>
using SampleOfMapped =
    typename MapCall<F, typename std::remove_cvref_t<Held>::sample_type, Out>::sample_type;

/// What one sample needs on its way through `Mapped`: what the source needs, and its sample.
template <class Source, bool IsInPlace>
struct MapChain {
  ChainOf<Source> before{};
  typename Source::sample_type sample{};
};
template <class Source>
struct MapChain<Source, true> {
  ChainOf<Source> before{};
};

template <class Held, class F, class Out>
using ChainOfMapped =
    MapChain<std::remove_cvref_t<Held>,
             MapCall<F, typename std::remove_cvref_t<Held>::sample_type, Out>::is_in_place>;

template <class Held, class F, class Out>
class Mapped : public LoadsSamples<Mapped<Held, F, Out>, SampleOfMapped<Held, F, Out>,
                                   ChainOfMapped<Held, F, Out>> {
  using Source = std::remove_cvref_t<Held>;
  using Call = MapCall<F, typename Source::sample_type, Out>;
  static constexpr std::size_t place = detail::drawing_maps<Source>();

 public:
  using sample_type = typename Call::sample_type;
  using chain_type = ChainOfMapped<Held, F, Out>;
  static constexpr std::size_t drawing_maps = place + (Call::draws ? 1 : 0);
  static constexpr bool changes_by_pass = Call::draws || detail::changes_by_pass<Source>();

  template <class Given>
  Mapped(Given&& source, F f) : source_(std::forward<Given>(source)), f_(std::move(f)) {}

  std::size_t size() const { return source_.get().size(); }
  void prepare(std::span<const std::size_t> indices) const {
    prepare_samples(source_.get(), indices);
  }

  void read(std::size_t index, sample_type& out) const { read(index, Pass{}, out); }
  /// Do not keep a sample that points into another one longer than until the next call.
  void read(std::size_t index, Pass pass, sample_type& out) const {
    this->with_chain([&](chain_type& chain) { read(index, pass, chain, out); });
  }

  /// `chain` is memory that is used again.
  void read(std::size_t index, Pass pass, chain_type& chain, sample_type& out) const {
    if constexpr (Call::is_in_place) {
      read_sample(source_.get(), index, pass, chain.before, out);
      call(index, pass, out);
    } else {
      read_sample(source_.get(), index, pass, chain.before, chain.sample);
      if constexpr (Call::fills) {
        call(index, pass, chain.sample, out);
      } else {
        out = call(index, pass, chain.sample);
      }
    }
  }

 private:
  template <class... Samples>
  decltype(auto) call([[maybe_unused]] std::size_t index, [[maybe_unused]] Pass pass,
                      Samples&... samples) const {
    if constexpr (Call::draws) {
      RandomStream random(sample_seed(pass, index, place));
      return f_(samples..., random);
    } else {
      return f_(samples...);
    }
  }

  KeptSource<Held> source_;
  F f_;
};

/// Says what is wrong with a function of `map`; whether nothing is.
template <class Call>
constexpr bool require_map() {
  static_assert(Call::is_callable,
                "lockstep: map cannot call its function with the samples of this source; write "
                "map(f) with f(sample) or f(sample, random), which returns the new sample or "
                "changes the one it has, or map<Out>(f) with f(sample, out) or f(sample, out, "
                "random). Several threads call it, so it must be const");
  static_assert(!Call::changes_a_copy,
                "lockstep: map's function returns nothing and takes the sample by value, so that "
                "what it does is lost; take `auto& sample`, or return the new sample");
  return Call::is_callable && !Call::changes_a_copy;
}

template <class Out, class F>
struct MapStage {
  F f;
};

template <class Given, class Out, class F>
auto operator|(Given&& source, MapStage<Out, F> stage) {
  using Source = std::remove_cvref_t<Given>;
  if constexpr (require_source<Source>()) {
    if constexpr (require_map<MapCall<F, typename Source::sample_type, Out>>()) {
      return Mapped<HeldAs<Given>, F, Out>(std::forward<Given>(source), std::move(stage.f));
    } else {
      return RejectedPipeline{};
    }
  } else {
    return RejectedPipeline{};
  }
}

}  // namespace detail

/// `source | map(f)` reads samples of a source and calls `f(sample)`, or `f(sample, random)` with a
/// `RandomStream&`. f returns the new sample, or returns nothing and changes the one it is given.
/// `map<Out>(f)` calls `f(sample, out)` or `f(sample, out, random)`, and reuses the memory of
/// `out`. The random numbers are the same for any number of workers and ranks, and after a restart:
/// they follow from the job's seed, the epoch, the sample's index, and the function's place among
/// those of the pipeline that draw. What f returns may point into what it was given. Several
/// threads call f at once.
template <class Out = void, class F>
auto map(F f) {
  return detail::MapStage<Out, F>{std::move(f)};
}

}  // namespace lockstep

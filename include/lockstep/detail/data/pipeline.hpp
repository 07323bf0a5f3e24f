// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Pipelines: `map` transforms samples; `stacked`, `padded` and others make batches.

#include <mutex>
#include <tuple>

#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/data/dataset.hpp"

namespace lockstep {

namespace detail {

/// How a stage holds the source of `source | stage`; `Given` is the type of a forwarding reference.
/// A temporary is moved in; an lvalue is referenced and must outlive the pipeline.
template <class Given>
using HeldAs = std::conditional_t<std::is_lvalue_reference_v<Given>,
                                  const std::remove_cvref_t<Given>&, std::remove_cvref_t<Given>>;

/// The intermediate samples of a sample, kept until the batch is made: samples may point into them.
template <class Source>
auto make_chain() {
  if constexpr (requires { typename Source::chain_type; }) {
    return typename Source::chain_type();
  } else {
    return std::tuple<>();
  }
}
template <class Source>
using ChainOf = decltype(make_chain<Source>());

template <class Source>
void read_sample(const Source& source, std::size_t index, [[maybe_unused]] Pass pass,
                 [[maybe_unused]] auto& chain, auto& out) {
  if constexpr (requires { source.read(index, pass, chain, out); }) {
    source.read(index, pass, chain, out);
  } else if constexpr (PassReading<Source>) {
    source.read(index, pass, out);
  } else {
    source.read(index, out);
  }
}

void prepare_samples(const auto& source, std::span<const std::size_t> indices) {
  if constexpr (requires { source.prepare(indices); }) source.prepare(indices);
}

/// `require<Sample>()` rejects samples. A stage that maps has `behind<Held>(source)`; a collate has
/// `batch<Sample>()` and makes batches by `put`, row by row, or by a call with all samples.
struct PipelineStage {};

/// Makes a `Batch` of labelled samples as `F` does; others get any batch, to give only one error.
template <template <class, class> class Batch, class F>
struct LabelledCollate : PipelineStage, F {
  template <class Sample>
  static auto batch() {
    if constexpr (Labelled<Sample>) {
      return Batch<InputOf<Sample>, LabelOf<Sample>>();
    } else {
      return LabelledBatch<float, std::int32_t>();
    }
  }
  template <class Sample>
  static constexpr bool require() {
    static_assert(Labelled<Sample>,
                  "lockstep: stacked, padded and ragged take samples with `inputs` (a range) and "
                  "`label`; give samples both with map, or say collate<Batch>(c)");
    return Labelled<Sample>;
  }
};

/// Samples of one width become rows, each written as soon as it is read.
struct PutRows {
  template <Labelled Sample, LabelledRows Batch>
  static void put(const Sample& sample, std::size_t i, std::size_t count, Batch& out) {
    const std::size_t width = std::size(sample.inputs);
    if (i == 0) out.resize(count, width);
    const auto row = out.row(i);
    if (row.size() != width) [[unlikely]]
      fail("stacked",
           {"it has ", width, " inputs and the first sample of its batch has ", row.size()},
           "give all samples one width with map, or say | padded(fill) or | ragged()");
    std::copy(std::begin(sample.inputs), std::end(sample.inputs), row.data());
    out.labels[i] = sample.label;
  }
};

using RowCollate = LabelledCollate<LabelledBatch, PutRows>;

/// A user's function, which fills a batch, or returns one if `Batch` is void.
template <class Batch, class C>
struct OwnCollate : PipelineStage {
  template <class Sample>
  static constexpr bool returns =
      std::is_void_v<Batch> && std::is_invocable_v<const C&, std::span<const Sample>>;
  template <class Sample>
  static constexpr bool fills =
      !std::is_void_v<Batch> &&
      std::is_invocable_v<const C&, std::span<const Sample>, std::add_lvalue_reference_t<Batch>>;

  template <class Sample>
  static auto batch() {
    if constexpr (returns<Sample>) {
      return std::remove_cvref_t<std::invoke_result_t<const C&, std::span<const Sample>>>();
    } else {
      return Batch();
    }
  }
  template <class Sample>
  static constexpr bool require() {
    static_assert(returns<Sample> || fills<Sample>,
                  "lockstep: collate cannot call its function with the samples of this source; "
                  "write collate<Batch>(c) with c(std::span<const Sample>, Batch&), or collate(c) "
                  "with c(std::span<const Sample>), which returns the batch. Several threads call "
                  "it, so it must be const");
    return returns<Sample> || fills<Sample>;
  }

  template <class Sample>
  void operator()(std::span<const Sample> samples, auto& out) const {
    if constexpr (returns<Sample>) {
      out = c(samples);
    } else {
      c(samples, out);
    }
  }

  C c;
};

/// A pool of scratch objects, which end with their owner. A thread may use two; a copy is empty.
template <class T>
class Spares {
 public:
  Spares() = default;
  Spares(const Spares&) noexcept {}
  Spares& operator=(const Spares&) noexcept { return *this; }
  ~Spares() = default;

  /// Calls `f(object)`. An object with which `f` throws is discarded.
  void with(const auto& f) {
    std::unique_ptr<T> object;
    {
      const std::lock_guard lock(mutex_);
      if (!spares_.empty()) {
        object = std::move(spares_.back());
        spares_.pop_back();
      }
    }
    if (!object) object = std::make_unique<T>();
    f(*object);
    const std::lock_guard lock(mutex_);
    spares_.push_back(std::move(object));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> spares_;
};

/// Makes a derived class with `read(index, pass, chain, out)`, or a simpler `read`, a data set.
template <class Source, class Sample, class Collating = RowCollate>
class LoadsSamples {
  static constexpr bool is_known = !std::is_same_v<Collating, RowCollate> || Labelled<Sample>;

 public:
  using batch_type = decltype(Collating::template batch<Sample>());

  void load(std::span<const std::size_t> indices, auto& out) const { load(indices, Pass{}, out); }

  template <class Batch>
  void load(std::span<const std::size_t> indices, Pass pass, Batch& out) const {
    static_assert(
        is_known,
        "lockstep: these samples are no rows of a LabelledBatch, which takes samples with `inputs` "
        "(a range) and `label`; say how they become a batch: source | collate<Batch>(c), where c "
        "is called as c(std::span<const Sample>, batch)");
    prepare_samples(source(), indices);
    if constexpr (requires(const Sample& sample) { collate_.put(sample, 0, 0, out); }) {
      load_rows(indices, pass, out);
    } else if constexpr (is_known) {  // all samples are read before they become a batch
      spares_.with([&](Scratch& scratch) {
        scratch.reserve(indices.size());
        for (std::size_t i = 0; i != indices.size(); ++i)
          read_draw(indices, i, pass, scratch.chains[i], scratch.samples[i], [] {});
        collate_(std::span<const Sample>(scratch.samples).first(indices.size()), out);
      });
    }
  }

 protected:
  explicit LoadsSamples(Collating collate = {}) : collate_(std::move(collate)) {}

  void with_chain(const auto& f) const {
    spares_.with([&](Scratch& scratch) {
      scratch.reserve(1);
      f(scratch.chains.front());
    });
  }

 private:
  struct Scratch {
    std::vector<ChainOf<Source>> chains;
    std::vector<Sample> samples;

    /// Never shrinks: the memory inside of samples is reused.
    void reserve(std::size_t count) {
      if (chains.size() < count) chains.resize(count);
      if (samples.size() < count) samples.resize(count);
    }
  };

  const Source& source() const { return static_cast<const Source&>(*this); }

  void read_draw(std::span<const std::size_t> indices, std::size_t draw, Pass pass, auto& chain,
                 Sample& out, const auto& then) const {
    try {
      read_sample(source(), indices[draw], pass, chain, out);
      then();
    } catch (...) {
      rethrow_of_sample(indices[draw], draw);
    }
  }

  void load_rows(std::span<const std::size_t> indices, Pass pass, auto& out) const {
    if (indices.empty()) {
      if constexpr (requires { out.clear(); }) {
        out.clear();
      } else {
        out.resize(0, 0);
      }
    }
    spares_.with([&](Scratch& scratch) {
      scratch.reserve(1);
      Sample& sample = scratch.samples.front();
      for (std::size_t i = 0; i != indices.size(); ++i) {
        read_draw(indices, i, pass, scratch.chains.front(), sample,
                  [&] { collate_.put(sample, i, indices.size(), out); });
      }
    });
  }

  Collating collate_;
  mutable Spares<Scratch> spares_;
};

/// The batches of a source. `Held` is the source's type or a reference to it.
template <class Held, class Collating>
class Collated : public LoadsSamples<Collated<Held, Collating>,
                                     typename std::remove_cvref_t<Held>::sample_type, Collating> {
  using Source = std::remove_cvref_t<Held>;

 public:
  using chain_type = ChainOf<Source>;
  static constexpr bool changes_by_pass = detail::changes_by_pass<Source>();

  template <class Given>
  Collated(Given&& source, Collating collate)
      : Collated::LoadsSamples(std::move(collate)), source_(std::forward<Given>(source)) {}

  std::size_t size() const { return source_.size(); }
  void prepare(std::span<const std::size_t> indices) const { prepare_samples(source_, indices); }

  /// For the base class only: batches are no samples, so that `map` must come before.
  void read(std::size_t index, Pass pass, chain_type& chain, auto& out) const {
    read_sample(source_, index, pass, chain, out);
  }

 private:
  Held source_;
};

template <class Given, std::derived_from<PipelineStage> Stage>
auto operator|(Given&& source, Stage stage) {
  using Source = std::remove_cvref_t<Given>;
  static_assert(
      SampleSource<Source>,
      "lockstep: this has no samples that map, stacked, padded, ragged or collate could take; give "
      "them a type with size(), sample_type and `void read(std::size_t index, sample_type& out) "
      "const`, and put map before the stage that makes batches");
  // A rejected pipeline is an empty data set, whose use gives no further errors.
  if constexpr (!SampleSource<Source>) {
    return InMemoryDataset<float, std::int32_t>({}, {});
  } else if constexpr (!Stage::template require<typename Source::sample_type>()) {
    return InMemoryDataset<float, std::int32_t>({}, {});
  } else if constexpr (requires { Stage::template batch<typename Source::sample_type>(); }) {
    return Collated<HeldAs<Given>, Stage>(std::forward<Given>(source), std::move(stage));
  } else {
    return stage.template behind<HeldAs<Given>>(std::forward<Given>(source));
  }
}

/// The seed of a sample in a pass, for the `depth`-th drawing function, on any worker or rank.
constexpr Seed sample_seed(Pass pass, std::size_t sample, std::size_t depth) {
  const std::uint64_t job = mix_bits(pass.seed.value() + golden_step);
  return Seed{random_at(random_at(random_at(job, pass.epoch.value()), sample), depth)};
}

template <class Source>
constexpr std::size_t drawing_maps() {
  if constexpr (requires { Source::drawing_maps; }) return Source::drawing_maps;
  return 0;
}

/// How `map<Out>(f)`, or `map(f)` if `Out` is void, calls f with a sample.
template <class F, class Sample, class Out>
struct MapCall {
  static constexpr bool fills = !std::is_void_v<Out>;

  template <class... Random>
  static constexpr bool takes() {
    if constexpr (fills) return std::is_invocable_v<const F&, Sample&, Out&, Random...>;
    return std::is_invocable_v<const F&, Sample&, Random...>;
  }
  static constexpr bool draws = takes<RandomStream&>();
  static constexpr bool is_callable = draws || takes<>();

  /// The type of the new sample; `Sample` if f cannot be called.
  static constexpr auto result() {
    if constexpr (fills) {
      return std::type_identity<Out>{};
    } else if constexpr (draws) {
      return std::invoke_result<const F&, Sample&, RandomStream&>{};
    } else if constexpr (is_callable) {
      return std::invoke_result<const F&, Sample&>{};
    } else {
      return std::type_identity<Sample>{};
    }
  }
  using Result = typename decltype(result())::type;

  static constexpr bool is_in_place = std::is_void_v<Result>;
  /// f returns nothing and takes the sample by value.
  static constexpr bool changes_a_copy = [] {
    if constexpr (is_in_place) {
      return std::is_invocable_v<const F&, Sample, RandomStream&> ||
             std::is_invocable_v<const F&, Sample>;
    }
    return false;
  }();
  using sample_type = std::conditional_t<is_in_place, Sample, std::remove_cvref_t<Result>>;
};

/// The samples of a source after a function. `Held` is the source's type or a reference to it.
template <class Held, class F, class Out>
class Mapped
    : public LoadsSamples<
          Mapped<Held, F, Out>,
          typename MapCall<F, typename std::remove_cvref_t<Held>::sample_type, Out>::sample_type> {
  using Source = std::remove_cvref_t<Held>;
  using Call = MapCall<F, typename Source::sample_type, Out>;
  static constexpr std::size_t depth = detail::drawing_maps<Source>();

 public:
  using sample_type = typename Call::sample_type;
  /// The source's chain and its sample, unless f changes that in place.
  using chain_type =
      std::pair<ChainOf<Source>,
                std::conditional_t<Call::is_in_place, std::tuple<>, typename Source::sample_type>>;
  static constexpr std::size_t drawing_maps = depth + (Call::draws ? 1 : 0);
  static constexpr bool changes_by_pass = Call::draws || detail::changes_by_pass<Source>();

  template <class Given>
  Mapped(Given&& source, F f) : source_(std::forward<Given>(source)), f_(std::move(f)) {}

  std::size_t size() const { return source_.size(); }
  void prepare(std::span<const std::size_t> indices) const { prepare_samples(source_, indices); }

  void read(std::size_t index, sample_type& out) const { read(index, Pass{}, out); }
  /// A sample that points into another one is valid until the next call.
  void read(std::size_t index, Pass pass, sample_type& out) const {
    this->with_chain([&](chain_type& chain) { read(index, pass, chain, out); });
  }

  void read(std::size_t index, Pass pass, chain_type& chain, sample_type& out) const {
    auto& [before, sample] = chain;
    if constexpr (Call::is_in_place) {
      read_sample(source_, index, pass, before, out);
      call(index, pass, out);
    } else {
      read_sample(source_, index, pass, before, sample);
      if constexpr (Call::fills) {
        call(index, pass, sample, out);
      } else {
        out = call(index, pass, sample);
      }
    }
  }

 private:
  template <class... Samples>
  decltype(auto) call([[maybe_unused]] std::size_t index, [[maybe_unused]] Pass pass,
                      Samples&... samples) const {
    if constexpr (Call::draws) {
      RandomStream random(sample_seed(pass, index, depth));
      return f_(samples..., random);
    } else {
      return f_(samples...);
    }
  }

  Held source_;
  F f_;
};

template <class Out, class F>
struct MapStage : PipelineStage {
  /// Rejects a function that cannot be called or has no effect.
  template <class Sample>
  static constexpr bool require() {
    using Call = MapCall<F, Sample, Out>;
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

  template <class Held, class Given>
  auto behind(Given&& source) {
    return Mapped<Held, F, Out>(std::forward<Given>(source), std::move(f));
  }

  F f;
};

}  // namespace detail

/// `source | map(f)` calls `f(sample)`, or `f(sample, random)` with a `RandomStream&`, for every
/// sample that is read. f returns the new sample, which may point into the old one, or changes it
/// in place. `map<Out>(f)` calls `f(sample, out)` or `f(sample, out, random)` and reuses the memory
/// of `out`. Random numbers depend on seed, epoch, sample and the position of f among the drawing
/// functions alone, not on workers, ranks or restarts. Several threads call f concurrently.
template <class Out = void, class F>
auto map(F f) {
  return detail::MapStage<Out, F>{{}, std::move(f)};
}

/// `source | stacked()`, the default: `LabelledBatch`es of `label`s and `inputs` of one length.
inline auto stacked() { return detail::RowCollate(); }

/// `source | padded(fill)` makes `PaddedBatch`es: rows are as long as the longest sample of the
/// batch, rounded up to a multiple, and shorter samples are padded with `fill`.
auto padded(auto fill, std::size_t multiple = 1) {
  if (multiple == 0)
    detail::fail("padded", {"rows of a multiple of 0"}, "set multiple to 1 or more");
  auto pad = [=]<class Sample>(std::span<const Sample> samples, auto& out) {
    std::size_t longest = 0;
    for (const Sample& sample : samples) longest = std::max(longest, std::size(sample.inputs));
    out.resize(samples.size(), (longest + multiple - 1) / multiple * multiple);
    for (std::size_t i = 0; i != samples.size(); ++i) {
      const auto& inputs = samples[i].inputs;
      const auto row = out.row(i);
      std::fill(std::copy(std::begin(inputs), std::end(inputs), row.begin()), row.end(),
                static_cast<detail::InputOf<Sample>>(fill));
      out.lengths[i] = std::size(inputs);
      out.labels[i] = samples[i].label;
    }
  };
  return detail::LabelledCollate<PaddedBatch, decltype(pad)>{{}, std::move(pad)};
}

/// `source | ragged()` makes `RaggedBatch`es of concatenated samples.
inline auto ragged() {
  auto concatenate = []<class Sample>(std::span<const Sample> samples, auto& out) {
    out.inputs.clear();
    out.offsets.assign(1, 0);
    out.labels.resize(samples.size());
    out.weights.assign(samples.size(), 1.f);
    for (std::size_t i = 0; i != samples.size(); ++i) {
      const auto& inputs = samples[i].inputs;
      out.inputs.insert(out.inputs.end(), std::begin(inputs), std::end(inputs));
      out.offsets.push_back(out.inputs.size());
      out.labels[i] = samples[i].label;
    }
  };
  return detail::LabelledCollate<RaggedBatch, decltype(concatenate)>{{}, concatenate};
}

/// `source | collate<Batch>(c)` calls `c(std::span<const Sample>, Batch& out)` for every batch and
/// reuses `out`; for `collate(c)`, `c(samples)` returns the batch. Several threads call c.
template <class Batch = void, class C>
auto collate(C c) {
  return detail::OwnCollate<Batch, C>{{}, std::move(c)};
}

}  // namespace lockstep

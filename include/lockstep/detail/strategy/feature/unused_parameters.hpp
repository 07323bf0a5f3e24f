// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Steps that do not use all parameters: `UnusedParameters<Zero>` and sub-graphs.

#include "lockstep/detail/strategy/replica_traits.hpp"

namespace lockstep::detail {

template <class Traits>
class UsedParameters {
  using layout = typename Traits::layout;

 public:
  using Usage = typename Traits::Usage;

  explicit UsedParameters(const layout& where)
      : used_(make_small_table<std::uint8_t, layout::count>(where.infos().size())) {}

  const Usage& used() const { return used_; }

  /// Which parameters any rank has used. **Ranks** all. **Host** blocks. Pending buckets are waited
  /// for first: a communicator that finishes them inside of another call does not know their types.
  const Usage& agree_on_usage(auto& gradients) {
    if constexpr (!Traits::alone && !Traits::subgraphs_agree) {
      if constexpr (Traits::reduces_early) gradients.reduce();
      gradients.comm().all_reduce(used_, Max{}, step_call<Traits, JobCall::backward>());
    }
    return used_;
  }

 protected:
  void forget_usage() { std::ranges::fill(used_, std::uint8_t{0}); }

  Usage used_;
};

template <class Traits, class Comm>
class UnusedParametersAsZero : public Stages<UnusedParametersAsZero<Traits, Comm>>,
                               public UsedParameters<Traits> {
 public:
  explicit UnusedParametersAsZero(const auto& gradients)
      : UsedParameters<Traits>(gradients.layout()) {}

  template <class T>
  void gradient_ready(auto& /*gradients*/, std::size_t parameter) {
    this->used_[parameter] = 1;
  }
  static void after_backward(auto& gradients) { gradients.take_missing_as_zero(); }
  void after_update() { this->forget_usage(); }
};

/// What a backward pass of one sub-graph needs to know.
struct SubgraphTable {
  std::vector<std::uint8_t> uses;    // by parameter; 1 for members that are trained
  std::vector<std::size_t> members;  // by bucket
  std::vector<Placement> unused;     // adjacent ones joined
  std::size_t parameters = 0;        // in all buckets

  SubgraphTable(const auto& plan, const auto& contains)
      : uses(plan.placements.size()), members(plan.bucket_count) {
    bool after_unused = false;
    for (std::size_t b = 0; b != plan.bucket_count; ++b) {
      for (const std::size_t p : plan.members(b)) {
        const Placement& placement = plan.placements[p];
        if (contains(p)) {
          uses[p] = 1;
          ++members[b];
          ++parameters;
        } else {
          if (!after_unused) unused.push_back({no_bucket, placement.offset, 0});
          unused.back().bytes = placement.offset + placement.bytes - unused.back().offset;
        }
        after_unused = uses[p] == 0;
      }
    }
  }
  bool contains(std::size_t parameter) const { return uses[parameter] != 0; }
};

template <class Traits, class Comm>
class SubgraphUsage : public Stages<SubgraphUsage<Traits, Comm>>, public UsedParameters<Traits> {
  using List = typename Traits::subgraphs;

 public:
  explicit SubgraphUsage(const auto& gradients) : UsedParameters<Traits>(gradients.layout()) {
    const auto& layout = gradients.layout();
    for (std::size_t set = 0; set != List::count; ++set) {
      tables_.emplace_back(layout.plan(),
                           [&](std::size_t p) { return List::contains(set, layout.name(p)); });
      // A model may list its tensors at run time, so that a sub-graph can be empty.
      if (tables_.back().parameters == 0) {
        fail("Subgraphs",
             {"sub-graph ", List::name_of(set), " contains no parameter that is trained"},
             "compare its patterns with the names that the model lists, and with Frozen");
      }
    }
  }

  void choose_subgraph(std::size_t set) { set_ = set; }
  std::size_t subgraph() const { return set_; }
  /// The sub-graphs since the last update, this one included, as bits.
  std::uint32_t chosen_subgraphs() const { return chosen_ | 1U << set_; }
  /// Counts the parameters of the next pass's sub-graph as used.
  void note_subgraph() {
    chosen_ |= 1U << set_;
    for (std::size_t p = 0; p != this->used_.size(); ++p) this->used_[p] |= table().uses[p];
  }

  /// Zeroes gradients outside of the sub-graph, unless earlier micro-batches have added some; a
  /// ring zeroes them last. Where passes are captured, `note_subgraph` was called before.
  void before_backward(auto& gradients, bool live) {
    if (!Traits::captures && (live || Traits::subgraphs_agree)) note_subgraph();
    if constexpr (!Traits::frees_gradients) {
      gradients.readiness().reset(table());
      if (gradients.adds()) return;
      for (const Placement& piece : table().unused)
        gradients.execution().zero(gradients.arena() + piece.offset, piece.bytes);
    }
  }
  /// All buckets are needed, unless every rank knows that no rank has used a member.
  bool needs_bucket([[maybe_unused]] const auto& gradients,
                    [[maybe_unused]] std::size_t bucket) const {
    if constexpr (!Traits::subgraphs_agree || Traits::frees_gradients) return true;
    return std::ranges::any_of(gradients.layout().plan().members(bucket),
                               [&](std::size_t p) { return this->used_[p] != 0; });
  }
  void after_backward(auto& gradients) {
    for (std::size_t p = 0; p != table().uses.size(); ++p) {
      if (table().contains(p) && !gradients.readiness().is_ready(p)) reject_missing(gradients);
    }
    if constexpr (Traits::frees_gradients) gradients.take_missing_as_zero();
  }
  void after_update() {
    this->forget_usage();
    chosen_ = 0;
  }

  std::uint64_t graph_key() const { return std::uint64_t{set_} << 32 | chosen_subgraphs(); }
  void snapshot() { before_ = {this->used_, chosen_}; }
  void rollback() { std::tie(this->used_, chosen_) = before_; }

 private:
  const SubgraphTable& table() const { return tables_[set_]; }

  [[noreturn, gnu::cold, gnu::noinline]] void reject_missing(const auto& gradients) const {
    const std::string names =
        gradients.readiness().missing_names([&](std::size_t p) { return table().contains(p); });
    const std::string set =
        set_ == whole_model ? "the whole model" : "sub-graph " + std::string(List::name_of(set_));
    fail("backward",
         {"no gradient came for ", std::string_view(names), " of ", std::string_view(set)},
         "let backward write and mark every parameter of the sub-graph that the step uses");
  }

  std::vector<SubgraphTable> tables_;  // the whole model's first
  std::size_t set_ = whole_model;
  std::uint32_t chosen_ = 0;
  std::pair<typename Traits::Usage, std::uint32_t> before_;  // a micro-batch that is captured
};

/// RAII: evaluations and predictions of a wrapper use a sub-graph.
template <class Wrapper>
class EvaluatedSubgraph {
 public:
  EvaluatedSubgraph(Wrapper& wrapper, const auto& set) : wrapper_(wrapper) {
    wrapper.evaluate_subgraph(subgraph_number<typename Wrapper::subgraphs>(set));
  }
  ~EvaluatedSubgraph() { wrapper_.evaluate_subgraph(whole_model); }
  EvaluatedSubgraph(const EvaluatedSubgraph&) = delete;
  EvaluatedSubgraph& operator=(const EvaluatedSubgraph&) = delete;

 private:
  Wrapper& wrapper_;
};

/// A step that knows its sub-graph. To ask for or mark another parameter's gradient is an error.
template <class Step, class List, std::size_t Set>
class SubgraphStep : public Step {
 public:
  explicit SubgraphStep(const Step& step) : Step(step) {}

  /// The sub-graph of this step: `step.subgraph() == "with_adapter"_s`.
  static constexpr UsedSubgraph<List, Set> subgraph() { return {}; }

  template <class Key>
    requires NameKey<Key>
  static constexpr bool uses(Key key) {
    static_cast<void>(Step::uses(key));  // rejects a name that is not declared
    return List::contains(Set, Key::name);
  }
  template <class Key>
    requires(!NameKey<Key>)
  bool uses(Key key) const {
    const std::string_view name = this->name_of(key);
    return name.empty() || List::contains(Set, name);  // unlisted names are rejected elsewhere
  }

  constexpr auto grad(auto key) const {
    require_used(key);
    return Step::grad(key);
  }
  constexpr void ready(auto key) const {
    require_used(key);
    Step::ready(key);
  }
  template <class Key, class Value = std::initializer_list<double>>
  constexpr void set_grad(Key key, const Value& value) const {
    require_used(key);
    Step::set_grad(key, value);
  }

 private:
  constexpr void require_used(auto key) const {
    if (!uses(key)) [[unlikely]]
      reject(this->name_of(key));
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void reject(std::string_view parameter) {
    fail("backward",
         {"the gradient of ", parameter, " was written or marked ready, and sub-graph ",
          List::name_of(Set), " does not contain it"},
         "ask step.uses(\"name\"_p) before, or add the parameter to the sub-graph");
  }
};

}  // namespace lockstep::detail

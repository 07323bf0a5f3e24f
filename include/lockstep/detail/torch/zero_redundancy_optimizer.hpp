// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::ZeroRedundancyOptimizer`: LibTorch's optimizers, whose states and
/// updates are divided among the ranks.

#include <ATen/ops/_foreach_copy.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <numeric>

#include "lockstep/detail/strategy/agreement.hpp"
#include "lockstep/detail/strategy/ddp.hpp"
#include "lockstep/detail/torch/loop_gradients.hpp"
#include "lockstep/detail/torch/optimizer_state.hpp"
#include "lockstep/detail/trainer/process_group.hpp"

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

namespace lockstep {

namespace detail {

/// The collectives between an optimizer's ranks, behind function pointers, so that an optimizer's
/// type does not depend on its communicator. Memory is the communicator's: a GPU's, if it has one.
class OptimizerRanks {
 public:
  using Bytes = std::span<std::uint8_t>;

  template <class Comm>
  explicit OptimizerRanks(Comm& comm, std::shared_ptr<void> owned = nullptr)
      : rank_(comm.rank()),
        world_(comm.world_size().value()),
        on_gpu_(Connected<Comm>::on_gpu),
        owned_(std::move(owned)),
        connected_(std::make_shared<Connected<Comm>>(comm)),
        calls_(&calls<Connected<Comm>>) {}

  Rank rank() const { return rank_; }
  std::size_t world() const { return world_; }
  bool on_gpu() const { return on_gpu_; }
  void abort(std::string_view reason) const { calls_->abort(self(), reason); }

  /// Memory for collectives, which lives as long as the communicator. **Ranks** all.
  Bytes allocate(std::size_t bytes) const { return calls_->allocate(self(), bytes); }
  /// Runs collectives. **Stream** after the work of LibTorch's current stream, whose later work
  /// sees the results.
  void in_order(FunctionRef<void()> f) const { calls_->in_order(self(), f); }
  /// Gathers pieces of equal length, of which this rank's is in place. **Ranks** all.
  void all_gather(Bytes all) const { calls_->all_gather(self(), all); }
  void broadcast(Bytes data, std::size_t root) const { calls_->broadcast(self(), data, root); }
  /// Every rank's text. **Ranks** all. **Host** blocks.
  std::vector<std::string> all_gather_objects(std::string object) const {
    return calls_->all_gather_objects(self(), std::move(object));
  }
  /// On `to`, the bytes of the one rank that gives some, in host memory. **Ranks** all. **Host**
  /// blocks.
  std::vector<std::uint8_t> gather(std::span<const std::uint8_t> bytes, Rank to) const {
    return calls_->gather(self(), bytes, to);
  }

 private:
  template <class Comm>
  struct Connected {
    static constexpr bool on_gpu = requires(Comm& comm) { comm.gpu(); };
    using Chosen = std::conditional_t<on_gpu, Cuda, Cpu>;

    explicit Connected(Comm& of) : comm(of), streams(of) {}
    Bytes allocate(std::size_t bytes) {
      if constexpr (ArenaAllocating<Comm>) {
        return comm.template allocate<std::uint8_t>(bytes);
      } else {
        return memory.emplace_back(bytes);
      }
    }
    Comm& comm;
    std::vector<std::vector<std::uint8_t>> memory;  // where the communicator has none
    LoopStreams<Chosen, Comm> streams;
  };
  struct Calls {
    void (*abort)(void*, std::string_view);
    Bytes (*allocate)(void*, std::size_t);
    void (*in_order)(void*, FunctionRef<void()>);
    void (*all_gather)(void*, Bytes);
    void (*broadcast)(void*, Bytes, std::size_t);
    std::vector<std::string> (*all_gather_objects)(void*, std::string);
    std::vector<std::uint8_t> (*gather)(void*, std::span<const std::uint8_t>, Rank);
  };
  template <class To>
  static auto& comm(void* self) {
    return static_cast<To*>(self)->comm;
  }
  template <class To>
  static constexpr Calls calls = {
      [](void* self, std::string_view reason) { comm<To>(self).abort(reason); },
      [](void* self, std::size_t bytes) { return static_cast<To*>(self)->allocate(bytes); },
      [](void* self, FunctionRef<void()> f) { static_cast<To*>(self)->streams.in_order(f); },
      [](void* self, Bytes all) {
        auto& ranks = comm<To>(self);
        const std::size_t piece = all.size() / ranks.world_size().value();
        ranks.all_gather(
            std::span<const std::uint8_t>(all.subspan(ranks.rank().value() * piece, piece)), all);
      },
      [](void* self, Bytes data, std::size_t root) { comm<To>(self).broadcast(data, Rank{root}); },
      [](void* self, std::string object) {
        return lockstep::all_gather_objects(comm<To>(self), std::move(object));
      },
      [](void* self, std::span<const std::uint8_t> bytes, Rank to) {
        return comm<To>(self).gather_variable(bytes, to).values;
      }};
  void* self() const { return connected_.get(); }

  Rank rank_;
  std::size_t world_;
  bool on_gpu_;
  std::shared_ptr<void> owned_;  // a communicator of the optimizer's own
  std::shared_ptr<void> connected_;
  const Calls* calls_;
};

template <class Group>
OptimizerRanks optimizer_ranks(Group& group) {
  if constexpr (std::is_same_v<Group, Session>) {
    using Policies = CanonicalPolicies<>;
    const std::shared_ptr<CommunicatorOf<Policies>> own(
        new CommunicatorOf<Policies>(make_communicator<Policies>(group)));
    return OptimizerRanks(*own, own);
  } else if constexpr (Communicator<Group>) {
    return OptimizerRanks(group);
  } else if constexpr (requires { group.communicator(); }) {
    return OptimizerRanks(group.communicator());
  } else if constexpr (requires { *group; }) {
    return OptimizerRanks(*group);
  } else {
    static_assert(sizeof(Group) == 0,
                  "lockstep: a ZeroRedundancyOptimizer takes the DistributedDataParallel of its "
                  "module, a session, a process group or a communicator after the parameters");
    std::terminate();  // never reached: the assertion above fails
  }
}

/// Divides whole parameters among ranks as PyTorch does: the largest first, each to the rank that
/// has the fewest elements so far. `sums` are the elements of the groups before.
inline std::vector<std::size_t> divide_parameters(const std::vector<std::size_t>& elements,
                                                  std::vector<std::size_t>& sums) {
  std::vector<std::size_t> order(elements.size()), owners(elements.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](std::size_t i) { return elements[i]; });
  for (const std::size_t i : order) {
    owners[i] = static_cast<std::size_t>(std::ranges::min_element(sums) - sums.begin());
    sums[owners[i]] += elements[i];
  }
  return owners;
}

/// Gives all ranks the parameters that their owners have updated.
///
/// Small parameters are packed, since a collective costs as much as a small one, and the pieces of
/// all ranks go in one all-gather, which moves the fewest bytes on every backend; if only few ranks
/// have small ones left, by a broadcast from each of these. A large parameter is broadcast from
/// where it is: to pack it would cost two copies and memory, of which this optimizer is to save.
class ParameterExchange {
 public:
  struct Limits {
    std::size_t large = std::size_t{1} << 20;    ///< bytes from which a parameter is not packed
    std::size_t staging = std::size_t{1} << 25;  ///< bytes of all ranks in one all-gather
  };

  ParameterExchange() = default;
  /// **Ranks** all.
  ParameterExchange(std::vector<at::Tensor> parameters, std::vector<std::size_t> owners,
                    const OptimizerRanks& ranks, const Limits& limits)
      : parameters_(std::move(parameters)), owners_(std::move(owners)) {
    const std::size_t world = ranks.world();
    const std::size_t most = std::max(limits.large, limits.staging / world);
    std::vector<std::size_t> round_of(world), used(world);
    for (std::size_t i = 0; i != parameters_.size(); ++i) {
      const std::size_t w = owners_[i], bytes = parameters_[i].nbytes();
      types_.push_back(parameters_[i].scalar_type());
      if (bytes == 0) continue;
      if (bytes >= limits.large) {
        large_.push_back(i);
        continue;
      }
      if (used[w] + align_up(bytes) > most && used[w] != 0) {
        ++round_of[w];
        used[w] = 0;
      }
      if (round_of[w] == rounds_.size())
        rounds_.push_back({{}, {}, std::vector<std::size_t>(world)});
      Round& round = rounds_[round_of[w]];
      round.parameters.push_back(i);
      round.offsets.push_back(used[w]);
      round.bytes[w] = used[w] += align_up(bytes);
    }
    std::size_t longest = 0;
    for (const Round& round : rounds_) longest = std::max(longest, round.piece());
    if (longest != 0) staging_ = ranks.allocate(longest * world);
  }

  /// **Ranks** all. **Host** as the communicator. **Stream** LibTorch's current one.
  void run(const OptimizerRanks& ranks) const {
    const at::NoGradGuard quiet;
    require_unchanged(ranks);
    for (const Round& round : rounds_) {
      const std::size_t piece = round.piece();
      std::vector<at::Tensor> own, own_staged, others, others_staged;
      for (std::size_t k = 0; k != round.parameters.size(); ++k) {
        const std::size_t i = round.parameters[k];
        const at::Tensor& parameter = parameters_[i];
        const at::Tensor staged =
            tensor_at(staging_.data() + owners_[i] * piece + round.offsets[k], parameter.sizes(),
                      parameter.scalar_type(), parameter.device());
        const bool is_own = Rank{owners_[i]} == ranks.rank();
        (is_own ? own : others).push_back(parameter);
        (is_own ? own_staged : others_staged).push_back(staged);
      }
      if (!own.empty()) at::_foreach_copy_(own_staged, own);
      ranks.in_order([&] {
        const std::size_t sum = std::reduce(round.bytes.begin(), round.bytes.end());
        if (2 * sum >= ranks.world() * piece)
          return ranks.all_gather(staging_.first(ranks.world() * piece));
        for (std::size_t w = 0; w != ranks.world(); ++w)
          if (round.bytes[w] != 0) ranks.broadcast(staging_.subspan(w * piece, round.bytes[w]), w);
      });
      if (!others.empty()) at::_foreach_copy_(others, others_staged);
    }
    if (large_.empty()) return;
    std::vector<at::Tensor> sent;  // in logical order, also where one rank has other strides
    for (const std::size_t i : large_) sent.push_back(parameters_[i].detach().contiguous());
    ranks.in_order([&] {
      for (std::size_t k = 0; k != large_.size(); ++k)
        ranks.broadcast({static_cast<std::uint8_t*>(sent[k].mutable_data_ptr()), sent[k].nbytes()},
                        owners_[large_[k]]);
    });
    for (std::size_t k = 0; k != large_.size(); ++k) {
      const at::Tensor& parameter = parameters_[large_[k]];
      if (sent[k].const_data_ptr() == parameter.const_data_ptr()) {
        parameter.unsafeGetTensorImpl()->bump_version();  // autograd must see the change
      } else if (Rank{owners_[large_[k]]} != ranks.rank()) {
        at::Tensor(parameter).copy_(sent[k]);
      }
    }
  }

 private:
  struct Round {
    std::vector<std::size_t> parameters;
    std::vector<std::size_t> offsets;  // in the owner's piece
    std::vector<std::size_t> bytes;    // of each rank
    std::size_t piece() const { return *std::ranges::max_element(bytes); }
  };

  /// A wrapper moves parameters, which is fine, but `module.to(type)` would change their sizes.
  void require_unchanged(const OptimizerRanks& ranks) const {
    for (std::size_t i = 0; i != parameters_.size(); ++i) {
      if (parameters_[i].scalar_type() != types_[i]) [[unlikely]]
        fail("ZeroRedundancyOptimizer::step",
             {"parameter ", i, " is of ", c10::toString(parameters_[i].scalar_type()),
              " and was of ", c10::toString(types_[i]), " when the optimizer was made"},
             "convert the module before the optimizer is made", ranks.rank());
      if (parameters_[i].is_cuda() != ranks.on_gpu()) [[unlikely]]
        fail("ZeroRedundancyOptimizer::step",
             {"parameter ", i, " is on ", parameters_[i].device().str(),
              ranks.on_gpu() ? ", and the ranks communicate between GPUs"
                             : ", and the ranks communicate between CPUs"},
             "give the optimizer the DistributedDataParallel of the module, or a process group for "
             "the same device",
             ranks.rank());
    }
  }

  std::vector<at::Tensor> parameters_;  // each once
  std::vector<std::size_t> owners_;
  std::vector<at::ScalarType> types_;
  std::vector<Round> rounds_;
  std::vector<std::size_t> large_;
  OptimizerRanks::Bytes staging_;
};

/// What ranks must have in common, a line for each part.
inline std::string optimizer_description(std::string_view name,
                                         const ::torch::optim::Optimizer& optimizer,
                                         const OptimizerGroups& groups) {
  std::ostringstream out;
  out << name << '\n';
  const OptimizerClass* const known = find_class(optimizer);
  for (std::size_t g = 0; g != groups.size(); ++g) {
    const auto options = groups[g].options().clone();
    if (known != nullptr) {
      for (const OptimizerField& field :
           group_options(*known, *options, g, "ZeroRedundancyOptimizer"))
        out << "group " << g << ": " << field.name << " = " << field.read() << '\n';
    }
    out << "group " << g << ": " << groups[g].params().size() << " parameters\n";
    for (std::size_t i = 0; i != groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      out << "group " << g << ", parameter " << i << ": " << c10::toString(parameter.scalar_type())
          << ' ' << shape_text(shape_of(parameter)) << '\n';
    }
  }
  return out.str();
}

/// Throws the first line in which a rank differs from rank 0. **Ranks** all. **Host** blocks.
inline void require_same_optimizer(const OptimizerRanks& ranks, const std::string& description) {
  const std::string hash = std::to_string(hash_of(description));
  const std::vector<std::string> hashes = ranks.all_gather_objects(hash);
  const auto other =
      std::ranges::find_if(hashes, [&](const auto& each) { return each != hashes[0]; });
  if (other == hashes.end()) return;
  const std::size_t rank = static_cast<std::size_t>(other - hashes.begin());
  const std::vector<std::string> all = ranks.all_gather_objects(description);
  std::istringstream first(all[0]), second(all[rank]);
  std::string a, b;
  do {
    if (!std::getline(first, a)) a = "nothing more";
    if (!std::getline(second, b)) b = "nothing more";
  } while (a == b && a != "nothing more");
  fail("ZeroRedundancyOptimizer",
       {"ranks have different optimizers: rank 0 has \"", a, "\" and rank ", rank, " has \"", b,
        "\""},
       "make the optimizer with the same parameters, groups and options on all ranks",
       ranks.rank());
}

}  // namespace detail

inline namespace torch_modules {

/// PyTorch's wrapper of an optimizer: every rank keeps the states of its share of the parameters,
/// updates these, and gets the others from their owners. Results are those of the optimizer itself.
///
///     lockstep::torch::DistributedDataParallel<Net> ddp(net, session);
///     lockstep::torch::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
///         net->parameters(), ddp, torch::optim::AdamOptions(1e-3));
///
/// It is an optimizer for LibTorch: schedulers and the program change the options of
/// `param_groups()`, which hold all parameters, and the next step takes them. All ranks must make
/// the same changes. `Wrapped` updates each element for itself, as all of LibTorch's do but
/// LBFGS.
template <class Wrapped>
class ZeroRedundancyOptimizer : public ::torch::optim::Optimizer, public detail::ShardedOptimizer {
  static_assert(std::derived_from<Wrapped, ::torch::optim::Optimizer>,
                "lockstep: a ZeroRedundancyOptimizer is made of an optimizer of LibTorch, such as "
                "torch::optim::AdamW");
  static_assert(!std::is_same_v<Wrapped, ::torch::optim::LBFGS>,
                "lockstep: LBFGS looks at all parameters together, so that its states cannot be "
                "divided among ranks; use it as it is");
  using Base = ::torch::optim::Optimizer;
  using Group = ::torch::optim::OptimizerParamGroup;

 public:
  /// Takes what the optimizer takes, and after the parameters the wrapper of the module, a session,
  /// a process group or a communicator, which must outlive it. Compares parameters, groups and
  /// options over ranks. **Ranks** all. **Host** blocks.
  template <class Ranks, class... Options>
  ZeroRedundancyOptimizer(const std::vector<Group>& groups, Ranks& ranks, const Options&... options)
      : Base(std::vector<Group>(), Wrapped(std::vector<Group>(), options...).defaults().clone()),
        ranks_(detail::optimizer_ranks(ranks)),
        sums_(ranks_.world()) {
    guarded([&] {
      for (const Group& group : groups) Base::add_param_group(group);
      optim_ = std::make_unique<Wrapped>(std::vector<Group>(), options...);
      compare();
      std::vector<Group> shares;
      for (const Group& group : param_groups_) shares.push_back(share_of(group));
      optim_ = std::make_unique<Wrapped>(shares, options...);
      plan();
    });
  }
  template <class Ranks, class... Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, Ranks& ranks,
                          const Options&... options)
      : ZeroRedundancyOptimizer(std::vector<Group>{Group(std::move(parameters))}, ranks,
                                options...) {}
  ZeroRedundancyOptimizer(const ZeroRedundancyOptimizer&) = delete;
  ZeroRedundancyOptimizer& operator=(const ZeroRedundancyOptimizer&) = delete;

  /// The optimizer of this rank's share, as in PyTorch.
  Wrapped& optim() { return *optim_; }
  const Wrapped& optim() const { return *optim_; }

  /// **Ranks** all. **Host** blocks.
  void add_param_group(const Group& group) {
    guarded([&] {
      Base::add_param_group(group);
      adopt_new_groups();
    });
  }

  /// Updates this rank's share and gets the others. A parameter that has no gradient on its owner
  /// stays as it is. **Ranks** all. **Host** blocks on CPUs. **Stream** LibTorch's current one.
  at::Tensor step(LossClosure closure = nullptr) override {
    return guarded([&] {
      if (param_groups_.size() != sizes_.size()) adopt_new_groups();
      require_same_groups();
      give_options();
      gathered_.reset();
      at::Tensor loss = optim_->Wrapped::step(std::move(closure));
      if (ranks_.world() != 1) exchange_.run(ranks_);
      return loss;
    });
  }

  /// Gathers copies of all states in the host memory of one rank, for `state_dict`. **Ranks** all.
  /// **Host** blocks.
  void consolidate_state_dict(Rank to = Rank{0}) override {
    guarded([&] {
      const auto& kind = detail::class_of(*optim_, "consolidate_state_dict");
      gathered_.reset();
      detail::PythonDict own =
          detail::states_of(kind, param_groups_, optim_->state(), /*copies=*/true);
      for (std::size_t w = 0; w != ranks_.world(); ++w) {
        if (Rank{w} == to) continue;
        std::vector<char> bytes;
        if (Rank{w} == ranks_.rank()) bytes = ::torch::jit::pickle_save(own);
        const std::vector<std::uint8_t> received =
            ranks_.gather({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, to);
        if (ranks_.rank() != to) continue;
        for (const auto& item :
             ::torch::jit::pickle_load({received.begin(), received.end()}).toGenericDict())
          own.insert(item.key(), item.value());
      }
      if (ranks_.rank() == to) gathered_ = std::move(own);
    });
  }

  /// The state_dict of the whole, as Python's optimizer has it, for any number of ranks. **Ranks**
  /// the one that has gathered it since the last step.
  c10::IValue state_dict() const override {
    if (!gathered_)
      detail::fail("state_dict",
                   {"the states lie on several ranks, and this one has not gathered them since the "
                    "last step"},
                   "call consolidate_state_dict(rank) on all ranks, and then state_dict() on that "
                   "rank",
                   ranks_.rank());
    return detail::state_dict_with(detail::class_of(*optim_, "state_dict"), param_groups_,
                                   *gathered_);
  }

  void check_state_dict(const c10::IValue& state_dict) const override {
    detail::StateDictLoad(detail::class_of(*optim_, "load_state_dict"), param_groups_, state_dict,
                          [](const at::Tensor&) { return true; });
  }

  /// Takes the options, and the states of this rank's share, from a state_dict of any number of
  /// ranks, or of the optimizer without this wrapper, or of Python. **Ranks** all, with the same.
  void load_state_dict(const c10::IValue& state_dict) override {
    guarded([&] {
      detail::StateDictLoad(
          detail::class_of(*optim_, "load_state_dict"), param_groups_, state_dict,
          [&](const at::Tensor& parameter) { return owner_of(parameter) == ranks_.rank(); })
          .copy_to(param_groups_, optim_->state());
      gathered_.reset();
      give_options();
    });
  }

  /// LibTorch's archives would hold the states of one rank.
  void save(::torch::serialize::OutputArchive&) const override { reject_archive(); }
  void load(::torch::serialize::InputArchive&) override { reject_archive(); }

 private:
  template <class F>
  auto guarded(const F& f) {
    return detail::abort_on_exception_of<false>(ranks_, f);
  }
  Rank owner_of(const at::Tensor& parameter) const {
    return Rank{owners_.at(parameter.unsafeGetTensorImpl())};
  }
  void compare() {
    detail::require_same_optimizer(
        ranks_, detail::optimizer_description(detail::spelling<Wrapped>(), *optim_, param_groups_));
  }

  /// This rank's share of a group, after those of the groups before. A parameter that the group has
  /// twice has one owner, whose optimizer updates it twice, too.
  Group share_of(const Group& group) {
    std::vector<at::Tensor> unique;
    std::vector<std::size_t> elements;
    std::unordered_map<const void*, std::size_t> places;
    for (const at::Tensor& parameter : group.params()) {
      if (!places.try_emplace(parameter.unsafeGetTensorImpl(), unique.size()).second) continue;
      unique.push_back(parameter);
      elements.push_back(static_cast<std::size_t>(parameter.numel()));
    }
    const std::vector<std::size_t> owners = detail::divide_parameters(elements, sums_);
    for (std::size_t i = 0; i != unique.size(); ++i) {
      all_.push_back(unique[i]);
      owners_.emplace(unique[i].unsafeGetTensorImpl(), owners[i]);
    }
    std::vector<at::Tensor> own;
    for (const at::Tensor& parameter : group.params())
      if (owner_of(parameter) == ranks_.rank()) own.push_back(parameter);
    sizes_.push_back(group.params().size());
    return Group(std::move(own), group.options().clone());
  }
  void plan() {
    if (ranks_.world() == 1) return;
    std::vector<std::size_t> owners;
    for (const at::Tensor& parameter : all_) owners.push_back(owner_of(parameter).value());
    exchange_ = detail::ParameterExchange(all_, std::move(owners), ranks_, {});
  }
  /// Groups that were added, also by `torch::optim::Optimizer::add_param_group`.
  void adopt_new_groups() {
    compare();
    for (std::size_t g = sizes_.size(); g != param_groups_.size(); ++g)
      optim_->add_param_group(share_of(param_groups_[g]));
    plan();
  }
  void require_same_groups() const {
    for (std::size_t g = 0; g != sizes_.size(); ++g) {
      if (param_groups_[g].params().size() != sizes_[g]) [[unlikely]]
        detail::fail("ZeroRedundancyOptimizer::step",
                     {"group ", g, " has ", param_groups_[g].params().size(),
                      " parameters, and was divided with ", sizes_[g]},
                     "add parameters with add_param_group", ranks_.rank());
    }
  }
  void give_options() {
    for (std::size_t g = 0; g != param_groups_.size(); ++g)
      optim_->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
  [[noreturn]] void reject_archive() const {
    detail::fail("ZeroRedundancyOptimizer",
                 {"torch::save and torch::load would have the states of one rank"},
                 "use consolidate_state_dict(), state_dict() and load_state_dict(...)",
                 ranks_.rank());
  }

  detail::OptimizerRanks ranks_;
  std::unique_ptr<Wrapped> optim_;
  std::vector<std::size_t> sums_;   // elements of each rank's share
  std::vector<std::size_t> sizes_;  // of the groups that are divided
  std::vector<at::Tensor> all_;     // each once
  std::unordered_map<const void*, std::size_t> owners_;
  detail::ParameterExchange exchange_;
  std::optional<detail::PythonDict> gathered_;
};

}  // namespace torch_modules

}  // namespace lockstep

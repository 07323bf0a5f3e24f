// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job's part in feeding its ranks, by its policy `Feed`.

#include <type_traits>

#include "lockstep/data/fed_batches.hpp"
#include "lockstep/data/feed.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/tell_others.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/connection.hpp"

namespace lockstep::detail {

/// Every rank reads its own batches.
template <class Policies, class Wrapper>
class JobFeed {
 public:
  static constexpr bool sends = false;
  template <class Source, class Sampler>
  using loader = LoaderFor<Source, Sampler>;

  constexpr JobFeed(Session&, const Wrapper&) {}
  /// `f()`, a step.
  template <class F>
  static constexpr auto tell_others(const F& f) -> decltype(f()) {
    return f();
  }
};

/// Some ranks read for others, through a communicator beside the job's: of the same kind, with
/// threads, connections and on GPUs a stream of its own, so that batches come while ranks compute.
template <class Policies, class Wrapper>
  requires(Pick<axes::Feed, Policies>::sends)
class JobFeed<Policies, Wrapper> {
  using Joined = CanonicalPolicies<Pick<axes::Device, Policies>, Pick<axes::Backend, Policies>,
                                   Pick<axes::World, Policies>>;
  using Topo = typename Pick<axes::Groups,
                             Policies>::template in_world<Pick<axes::World, Policies>::static_size>;
  struct Select {
    const Wrapper* wrapped;
    auto operator()() const { return wrapped->on_device(); }
  };
  using Line = FeedLine<CommunicatorOf<Joined>, Select>;
  template <class Source, class Sampler>
  struct Fed : std::type_identity<FedLoader<Source, Sampler, Line>> {
    static_assert(std::is_same_v<LoaderFor<Source, Sampler>, DataLoader<Source, Sampler>>,
                  "lockstep: this data set has a loader of its own, because every rank has its "
                  "samples where it needs them; leave Feed out, or give the job a plain data set");
  };

 public:
  static constexpr bool sends = true;
  template <class Source, class Sampler>
  using loader = typename Fed<Source, Sampler>::type;

  /// **Ranks** all. **Host** blocks until all have come.
  JobFeed(Session& session, const Wrapper& wrapped)
      : line_(ConnectionOf<Joined>::template make<Joined>(session, "feed"),
              feed_route<typename Pick<axes::Feed, Policies>::choice>(
                  topology_for<Topo>(session.world()), session.rank()),
              Select{&wrapped}) {}

  Line& line() { return line_; }
  /// `f()`, a step. Where it throws, ranks that wait for a batch hear the same words as those that
  /// wait for a gradient.
  template <class F>
  auto tell_others(const F& f) -> decltype(f()) {
    return tell_others_of<false>(line_, f);
  }

 private:
  Line line_;
};

}  // namespace lockstep::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which ranks are on which host, and when ranks of one process may allocate device memory.

#include <charconv>
#include <numeric>

#include "lockstep/detail/comm/combine.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"

namespace lockstep::detail {

/// Does this communicator work on host memory, which can be allocated at any time?
template <class Comm>
inline constexpr bool works_on_host =
    std::is_same_v<std::remove_cvref_t<decltype(passes_of(std::declval<Comm&>()))>, HostPasses>;

/// Calls `allocate()` while no GPU of this host works for `inside`. **Ranks** all. **Host** blocks.
template <class Inside, class F>
void allocate_quietly(Inside& inside, const F& allocate) {
  if constexpr (works_on_host<Inside>) {
    allocate();
  } else {
    inside.barrier();  // its streams are empty
    allocate();
    inside.barrier();
  }
}

/// Calls `f()` on the ranks of this host one after the other: NCCL's first call connects hosts and
/// allocates, while no other GPU of the host may work. Ranks that connect with each other have the
/// same turn on all hosts; a turn of `turns` is none. **Ranks** all of `inside`. **Host** blocks.
template <class Inside, class F>
void by_turns(Inside& inside, std::size_t turn, std::size_t turns, const F& f) {
  inside.barrier();
  for (std::size_t t = 0; t < turns; ++t) {
    if (t == turn) f();
    inside.barrier();
  }
}

/// A rank's membership in its group; its GPU is as in the job. **Ranks** members. **Host** blocks.
Membership membership_in_group(const Membership& member, Store& store,
                               const GroupPosition& position, const std::string& name);

/// A name that is the same on all members, and differs for other members.
std::string group_name(const std::vector<Rank>& members);

/// Ranks of a host wait longer than hosts do: none blames a neighbour that awaits a lost host. If
/// the store is lost with it, an error between hosts takes three answers' time to come.
inline constexpr std::chrono::milliseconds inside_margin{1500};

/// The hosts in the order of their first ranks, with the ranks of each in order.
class Hosts {
 public:
  /// Ranks with the same label, such as a name, are on one host.
  template <class Label>
  explicit Hosts(const std::vector<Label>& host_of_rank) {
    std::vector<Label> names;
    for (std::size_t r = 0; r < host_of_rank.size(); ++r) {
      const auto found = std::find(names.begin(), names.end(), host_of_rank[r]);
      const auto host = static_cast<std::size_t>(found - names.begin());
      if (found == names.end()) {
        names.push_back(host_of_rank[r]);
        ranks_.emplace_back();
      }
      positions_.emplace_back(host, ranks_[host].size());
      ranks_[host].push_back(r);
    }
  }

  /// Each rank on a host of its own.
  static Hosts one_each(std::size_t ranks) {
    std::vector<std::size_t> own(ranks);
    std::iota(own.begin(), own.end(), std::size_t{0});
    return Hosts(own);
  }

  /// The hosts of some ranks, which are numbered anew in the given order.
  Hosts of(const std::vector<Rank>& members) const {
    std::vector<std::size_t> hosts;
    hosts.reserve(members.size());
    for (const Rank member : members) hosts.push_back(host(member));
    return Hosts(hosts);
  }

  std::size_t count() const { return ranks_.size(); }
  std::size_t host(Rank rank) const { return positions_[rank.value()].first; }
  std::size_t local_rank(Rank rank) const { return positions_[rank.value()].second; }
  const std::vector<std::size_t>& ranks(std::size_t host) const { return ranks_[host]; }

  bool is_even() const { return odd_host() == nullptr; }
  /// Are the ranks of every host consecutive?
  bool is_in_order() const { return std::is_sorted(positions_.begin(), positions_.end()); }

  /// For each local rank, the ranks that have it.
  std::vector<std::vector<std::size_t>> columns() const {
    std::vector<std::vector<std::size_t>> columns(ranks_.front().size());
    for (const auto& ranks : ranks_)
      for (std::size_t position = 0; position < ranks.size(); ++position)
        columns[position].push_back(ranks[position]);
    return columns;
  }

  // A level numbers its ranks from 0. These give an error of it the job's numbers.

  std::string text_inside(Rank rank, std::string_view error) const {
    const std::vector<std::size_t>& ranks = ranks_[host(rank)];
    return "on the host, " +
           renumbered(error, ranks.size(), [&](std::size_t n) { return text({ranks[n]}); });
  }
  /// A rank that another host waits for may itself wait for a neighbour, which is named as well.
  std::string text_between(Rank rank, std::string_view error) const {
    const bool is_timeout = error.find("waited ") != std::string_view::npos;
    const auto name = [&](std::size_t host) {
      const std::size_t awaited = ranks_[host][local_rank(rank)];
      std::string others;
      for (const std::size_t other : ranks_[host]) {
        if (!is_timeout || other == awaited) continue;
        others += text({others.empty() ? " (which may wait for rank " : " or rank ", other});
      }
      return text({awaited, others, others.empty() ? "" : " of its host)"});
    };
    return "between the hosts, " + renumbered(error, count(), name);
  }

  void check_even(Rank rank) const {
    const auto odd = odd_host();
    if (odd == nullptr) return;
    fail("Backend<Hierarchical<...>>",
         {"the host of rank 0 has ", ranks_[0].size(), " ranks and the host of rank ", odd->front(),
          " has ", odd->size()},
         "start equally many ranks on every host, or use one backend for all", rank);
  }

 private:
  /// The ranks of the first host whose number of ranks differs from that of the first host.
  const std::vector<std::size_t>* odd_host() const {
    for (const auto& ranks : ranks_)
      if (ranks.size() != ranks_[0].size()) return &ranks;
    return nullptr;
  }

  /// Replaces each N of `rank N` and of `ranks N, N` by `name(N)`, up to what another rank has
  /// said, which knows the job.
  static std::string renumbered(std::string_view error, std::size_t count, const auto& name) {
    const std::size_t said = std::min(error.find(" failed: "), error.find("'s process ended: "));
    std::string out;
    std::size_t at = 0;
    for (std::size_t found = error.find("rank"); found < said; found = error.find("rank", at)) {
      found = std::min(error.find(' ', found), error.size() - 1) + 1;
      out += error.substr(at, found - at);
      at = found;
      for (std::size_t n = count;; n = count) {
        const char* const digits = error.data() + at;
        const auto end = std::from_chars(digits, error.data() + error.size(), n).ptr;
        if (n >= count) break;
        out += name(n);
        at += static_cast<std::size_t>(end - digits);
        if (!error.substr(at).starts_with(", ")) break;
        out += ", ";
        at += 2;
      }
    }
    return out += error.substr(at);
  }

  std::vector<std::vector<std::size_t>> ranks_;
  std::vector<std::pair<std::size_t, std::size_t>> positions_;  // host and position on it, by rank
};

/// **Ranks** all. **Host** blocks until all have joined.
inline Hosts discover_hosts(const Membership& member, Store& store, const std::string& prefix) {
  return Hosts(
      store.gather(prefix + "hosts", member.rank, member.world, host_identity(), member.timeout));
}

}  // namespace lockstep::detail

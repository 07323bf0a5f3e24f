// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A group of a communicator's ranks, made of its messages: for backends that have no groups
/// of their own.

#include <chrono>
#include <cstddef>
#include <string_view>
#include <vector>

#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/group_place.hpp"
#include "lockstep/comm/host_allocating.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

/// The communicator of the listed ranks of `Parent`, which must outlive it. A failure in the group
/// is a failure of the parent. **Host** and **Stream** as the parent has them.
template <class Parent, std::size_t Ranks = dynamic>
class Subgroup : public Collectives<Subgroup<Parent, Ranks>>, public detail::HostAllocating {
 public:
  static constexpr std::size_t most_under_way = static_cast<std::size_t>(-1);

  Subgroup(Parent& parent, const detail::GroupPlace& place)
      : parent_(&parent), rank_(place.rank), members_(place.members) {}
  Subgroup(Subgroup&&) noexcept = default;
  Subgroup& operator=(Subgroup&&) = delete;

  Rank rank() const { return rank_; }
  WorldSize world_size() const { return WorldSize{Ranks == dynamic ? members_.size() : Ranks}; }
  std::chrono::milliseconds timeout() const { return parent_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { parent_->set_timeout(timeout); }
  void abandon(std::string_view reason) { parent_->abandon(reason); }
  void give_up() { parent_->give_up(); }
  bool is_broken() const { return parent_->is_broken(); }

  // For the front.

  template <class T>
  void execute(detail::calls::Send<T> message) {
    message.root = members_[message.root.value()];
    parent_->perform(message);
  }
  template <class T>
  void execute(detail::calls::Receive<T> message) {
    message.root = members_[message.root.value()];
    parent_->perform(message);
  }

 private:
  Parent* parent_;
  Rank rank_;
  std::vector<Rank> members_;
};

}  // namespace lockstep

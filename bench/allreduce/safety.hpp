// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The all-reduce of an arena with and without the comparison of calls, on the same memory.
/// The communicator has no switch for it, so both loops are written here with its engine.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/detail/comm/combine.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "measure.hpp"

namespace bench {

/// `checked` does what `ShmCommunicator::all_reduce` does. `unchecked` posts an empty call, reads
/// nothing that another rank has posted and knows where everybody's data is: what is left are two
/// synchronisations and the arithmetic.
template <std::size_t Ranks>
class Safety {
 public:
  Safety(const std::string& address, std::size_t rank, std::size_t bytes)
      : engine_({"safety", lockstep::Rank{rank}, lockstep::WorldSize{Ranks}, lockstep::Rank{rank}},
                lockstep::detail::shm::Engine::open(address), std::chrono::minutes(1)),
        data_{reinterpret_cast<float*>(engine_.allocate(bytes, false)), bytes / sizeof(float)} {
    const auto ticket = post(data_.size());
    unchecked_targets_ = targets(ticket);
    work(ticket, unchecked_targets_, 0);
  }

  Contestant checked() {
    return {"checked", data_, [this](std::size_t count, std::size_t iterations) {
              for (std::size_t i = 0; i < iterations; ++i) {
                const auto ticket = post(count);
                const auto everybody = targets(ticket);
                work(ticket, everybody, count);
              }
            }};
  }

  Contestant unchecked() {
    return {"unchecked", data_, [this](std::size_t count, std::size_t iterations) {
              const lockstep::detail::Call none;
              for (std::size_t i = 0; i < iterations; ++i) {
                const auto ticket = engine_.post(none, 0, {});
                for (std::size_t w = 0; w < Ranks; ++w) {
                  if (lockstep::Rank{w} != engine_.rank()) {
                    engine_.wait(w, engine_.block(w).state.arrived, ticket + 1, none);
                  }
                }
                work(ticket, unchecked_targets_, count);
              }
            }};
  }

 private:
  std::uint64_t post(std::size_t count) {
    const lockstep::detail::calls::AllReduce<float, lockstep::Sum> call{{}, {}, count};
    const auto offset = engine_.locate(data_.data(), count * sizeof(float));
    const auto ticket = engine_.post(call.call(), *offset, {});
    engine_.wait_arrived(ticket);
    return ticket;
  }

  std::vector<float*> targets(std::uint64_t ticket) const {
    std::vector<float*> all(Ranks);
    for (std::size_t w = 0; w < Ranks; ++w) {
      all[w] = reinterpret_cast<float*>(engine_.data_in_arena(w, ticket));
    }
    return all;
  }

  void work(std::uint64_t ticket, const std::vector<float*>& everybody, std::size_t count) {
    const auto [begin, end] =
        lockstep::detail::slice_of<float>(count, engine_.rank().value(), Ranks);
    lockstep::detail::push<Ranks, float>(everybody, begin, end, lockstep::Sum{});
    engine_.finish(ticket);
    engine_.wait_finished(ticket);
  }

  lockstep::detail::shm::Engine engine_;
  std::span<float> data_;
  std::vector<float*> unchecked_targets_;
};

}  // namespace bench

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A step of ranks in a ring, captured once: compute, a collective, a message, and so on.

#include <cstddef>
#include <span>
#include <vector>

#include "gpu/exercise.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"

namespace thread_ranks {

/// Every replay stores the rank as the first number of `n`, averages all of them over ranks and
/// passes the result on to the right.
template <class Comm>
class RingStep {
 public:
  RingStep(Comm& comm, std::size_t n)
      : comm_(comm),
        data_(comm.template allocate<float>(n)),
        from_left_(comm.template allocate<float>(n)),
        graph_(comm.capture([this] { run(); })) {
    require(static_cast<bool>(graph_), graph_.reason());
  }

  /// Replays the step on other numbers in every round, while `beside(replay)` may do more.
  template <class Beside>
  void check(int round, const Beside& beside) {
    const float mean = static_cast<float>(comm_.world_size().value() - 1) / 2;
    const auto start = static_cast<float>(comm_.rank().value() + static_cast<std::size_t>(round));
    upload(comm_, std::vector<float>(data_.size(), start), data_);
    beside([this] { comm_.replay(graph_); });
    std::vector<float> want(data_.size(), mean + static_cast<float>(round));
    want[0] = mean;
    require_equal(download(comm_, data_), want, "reduced");
    require_equal(download(comm_, from_left_), want, "from the left");
  }

 private:
  void run() {
    const std::size_t me = comm_.rank().value();
    const std::size_t world = comm_.world_size().value();
    detail::launch_store(comm_.gpu().stream(), data_.data(), static_cast<float>(me));
    auto work = comm_.all_reduce_async(data_, Average{});
    work.wait();
    if (me % 2 == 0) comm_.send(data_, Rank{(me + 1) % world});
    comm_.receive(from_left_, Rank{(me + world - 1) % world});
    if (me % 2 != 0) comm_.send(data_, Rank{(me + 1) % world});
  }

  Comm& comm_;
  std::span<float> data_;
  std::span<float> from_left_;
  decltype(comm_.capture([] {})) graph_;
};

}  // namespace thread_ranks

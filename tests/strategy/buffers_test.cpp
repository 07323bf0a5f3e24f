// SPDX-License-Identifier: Apache-2.0
// Initial values, and the state that is not trained.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <vector>

#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(buffers_and_initial_values)

namespace {

using namespace train;

/// Counts its batches in a buffer, by its rank's own measure.
struct Counting {
  using Parameters = ParameterList<Parameter<"w", float, 2, 9>, Parameter<"norm.weight", float, 3>,
                                   Parameter<"b", float, 3>>;
  using Buffers = BufferList<Buffer<"seen", double, 2>, Buffer<"batches", std::int64_t, 1>,
                             Buffer<"short", BFloat16, 1>>;

  double increment = 1;
  std::int64_t counts = 1;

  double forward(auto& step, int) {
    step.buffer("seen"_p)(1) += increment;
    step.buffer("batches"_p)(0) += counts;
    step.buffer("short"_p)(0) = BFloat16(static_cast<float>(step.buffer("seen"_p)(1)));
    return 0;
  }
  void backward(auto& step, int) {
    const auto zero = [&](auto key) {
      const auto view = step.grad(key);
      for (std::size_t i = 0; i < view.size(); ++i) view.data_handle()[i] = 0;
      step.ready(key);
    };
    zero("b"_p);
    zero("norm.weight"_p);
    zero("w"_p);
  }
};

template <class... Ps>
void buffers_case(const auto& expected) {
  all_well(3, [&](Shared& comm) {
    const std::size_t me = comm.rank().value();
    DistributedDataParallel<Counting, Ps...> ddp(comm, Counting{1.0 + static_cast<double>(me)});
    ddp.initialize([](auto& initial) {
      initial.fill_by_default();
      initial.buffer("seen"_p)(1) = 100;
    });
    for (std::size_t s = 0; s < 3; ++s) {
      ddp.step(0);
      const double want = expected(me, s);
      require(ddp.buffer("seen"_p)(1) == want, "step " + std::to_string(s) + ": " +
                                                   std::to_string(ddp.buffer("seen"_p)(1)) +
                                                   " instead of " + std::to_string(want));
      require(ddp.buffer("seen"_p)(0) == 0, "its neighbour is not touched");
      require(ddp.buffer("batches"_p)(0) == static_cast<std::int64_t>(s + 1), "batches counted");
    }
    ddp.synchronize_buffers();
    require(ddp.buffer("seen"_p)(1) == expected(0, 2), "after the last synchronisation");
  });
}

void gather_equal(Shared& comm, const auto& view, const std::string& what) {
  using T = std::remove_const_t<typename std::decay_t<decltype(view)>::element_type>;
  const std::vector<T> mine(view.data_handle(), view.data_handle() + view.size());
  std::vector<T> all(mine.size() * comm.world_size().value());
  comm.all_gather(mine, all);
  for (std::size_t i = 0; i < all.size(); ++i)
    require(all[i] == mine[i % mine.size()], what + " differs over ranks");
}

template <class... Ps>
void initial_case() {
  all_well(3, [](Shared& comm) {
    const Seed seed{7 + comm.rank().value()};  // rank 0's counts
    DistributedDataParallel<Counting, Ps...> ddp(comm, Counting{}, seed);
    const auto w = ddp.param("w"_p);
    gather_equal(comm, w, "w");
    float largest = 0;
    for (std::size_t i = 0; i < 18; ++i) largest = std::max(largest, std::abs(w.data_handle()[i]));
    require(largest > 0 && largest <= 1.f / 3, "w is uniform within 1/sqrt(9)");
    require(ddp.param("norm.weight"_p)(1) == 1, "a scale starts as one");
    require(ddp.param("b"_p)(1) == 0, "a bias starts as zero");
    const auto before = w(1, 3);
    ddp.initialize([&](auto& initial) {
      initial.param("w"_p)(1, 3) = 5 + static_cast<float>(comm.rank().value());
      initial.buffer("seen"_p)(0) = 8 + static_cast<double>(comm.rank().value());
    });
    require(before != 5 && ddp.param("w"_p)(1, 3) == 5, "rank 0's values, on all ranks");
    require(ddp.buffer("seen"_p)(0) == 8, "buffers too");
    gather_equal(comm, ddp.param("w"_p), "w, written again,");
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(broadcast_takes_rank_0s_before_every_forward) {
  const auto expected = [](std::size_t rank, std::size_t step) {
    return 100 + static_cast<double>(step) + 1 + static_cast<double>(rank);
  };
  buffers_case<>(expected);
  buffers_case<Sharding<Replicated>>(expected);
}

BOOST_AUTO_TEST_CASE(local_buffers_are_left_alone) {
  const auto expected = [](std::size_t rank, std::size_t step) {
    return 100 + static_cast<double>(step + 1) * (1 + static_cast<double>(rank));
  };
  buffers_case<Buffers<Local>>(expected);
}

BOOST_AUTO_TEST_CASE(synced_buffers_are_averaged_when_that_is_asked_for) {
  for (const std::size_t world : {1, 2, 4}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t me = comm.rank().value();
      const auto ranks = static_cast<double>(world);
      DistributedDataParallel<Counting, Buffers<Synced>> ddp(
          comm, Counting{1.0 + static_cast<double>(me), 1 + static_cast<std::int64_t>(me)});
      ddp.initialize([&](auto& initial) {
        initial.fill_by_default();
        initial.buffer("seen"_p)(1) = 100 + static_cast<double>(me);  // rank 0's goes to all
      });
      double seen = 100;
      std::int64_t batches = 0;
      for (std::size_t round = 0; round < 2; ++round) {
        for (std::size_t s = 1; s < 4; ++s) {
          ddp.step(0);
          require(ddp.buffer("seen"_p)(1) == seen + static_cast<double>(s * (me + 1)),
                  "a step has changed another rank's buffer");
        }
        ddp.synchronize_buffers();
        seen += 3 * (ranks + 1) / 2;
        batches += 3 * static_cast<std::int64_t>(world);
        require(ddp.buffer("seen"_p)(1) == seen, "no average");
        require(ddp.buffer("seen"_p)(0) == 0, "its neighbour is not touched");
        require(ddp.buffer("batches"_p)(0) == batches, "not the largest count");
        require(static_cast<float>(ddp.buffer("short"_p)(0)) ==
                    static_cast<float>(BFloat16(static_cast<float>(seen))),
                "no average of 16 bits");
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(all_ranks_start_with_rank_0s_values) {
  initial_case<>();
  initial_case<Sharding<Replicated>>();
}

BOOST_AUTO_TEST_SUITE_END()

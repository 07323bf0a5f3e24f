// SPDX-License-Identifier: Apache-2.0
// Accumulation, clipping and element types, against sums that are made by hand.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <string>

#include "optim/plain.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(accumulation)

namespace {

using namespace train;

Entry entry_of(std::size_t rank, std::size_t step) {
  const auto r = static_cast<double>(rank);
  const auto s = static_cast<double>(step);
  return {.gradient = {0.5 + 0.25 * r - 0.125 * s, 0.75 - 0.5 * r * s, 0.25 * s}, .loss = s};
}

/// The sum over ranks and steps [begin, end) of parameter p's gradient.
double sum_of(std::size_t world, std::size_t begin, std::size_t end, std::size_t p) {
  double sum = 0;
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t s = begin; s < end; ++s) sum += entry_of(r, s).gradient[p];
  }
  return sum;
}

constexpr plain::Sgd momentum{.lr = 0.0625, .momentum = 0.5};

void set_momentum(auto& ddp) {
  ddp.optimizer().lr = momentum.lr;
  ddp.optimizer().momentum = momentum.momentum;
}

template <class... Ps>
void accumulation_case() {
  all_well(3, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Accumulate<3>, Ps...> ddp(comm);
    set_momentum(ddp);
    PlainSheet plain(momentum);
    for (std::size_t s = 0; s < 9; ++s) {
      require(ddp.step(entry_of(comm.rank().value(), s)) == static_cast<double>(s), "its own loss");
      if (s % 3 == 2) {
        for (std::size_t p = 0; p < 3; ++p) plain.update(p, sum_of(3, s - 2, s + 1, p) / 9);
      }
      require(ddp.updates() == (s + 1) / 3, "an update with every third");
      compare(ddp, plain, "step " + std::to_string(s));
    }
  });
}

/// As in PyTorch, what was added up under no_sync is neither averaged nor forgotten.
template <class... Ps>
void no_sync_case(bool by_step) {
  all_well(2, [&](Shared& comm) {
    const std::size_t me = comm.rank().value();
    DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Ps...> ddp(comm);
    set_momentum(ddp);
    PlainSheet plain(momentum);
    auto local = ddp.no_sync();
    for (std::size_t round = 0; round < 2; ++round) {
      for (std::size_t s = 0; s < 2; ++s) {
        const Entry entry = entry_of(me, s);
        require(local.forward(entry).backward() == static_cast<double>(s), "the loss");
        compare(ddp, plain, "no_sync");
      }
      const Entry last = entry_of(me, 2);
      if (by_step) {
        ddp.step(last);
      } else {
        auto averaged = ddp.forward(last).backward().reduce();
        require(std::abs(averaged.grad("b"_p)(1) - slope(sum_of(2, 0, 3, 1) / 2, 1)) < 1e-12,
                "the average of sums can be seen");
        std::move(averaged).update();
      }
      for (std::size_t p = 0; p < 3; ++p) plain.update(p, sum_of(2, 0, 3, p) / 2);
      compare(ddp, plain, "round " + std::to_string(round));
    }
  });
}

/// Eight batches in steps of three: two whole steps, and two batches that are left.
template <class... Ps>
void tail_case(bool steps) {
  all_well(3, [&](Shared& comm) {
    DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Accumulate<3>, Ps...> ddp(comm);
    set_momentum(ddp);
    PlainSheet plain(momentum);
    ddp.step_tail();  // there is none
    for (std::size_t epoch = 0; epoch < 2; ++epoch) {
      for (std::size_t s = 0; s < 8; ++s) {
        ddp.step(entry_of(comm.rank().value(), s));
        if (s % 3 != 2) continue;
        for (std::size_t p = 0; p < 3; ++p) plain.update(p, sum_of(3, s - 2, s + 1, p) / 9);
      }
      if (steps) {
        ddp.step_tail();
        for (std::size_t p = 0; p < 3; ++p) plain.update(p, sum_of(3, 6, 8, p) / 6);
      } else {
        ddp.drop_tail();
      }
      compare(ddp, plain, "epoch " + std::to_string(epoch), 1e-10);
      require(ddp.updates() == (epoch + 1) * (steps ? 3 : 2), "updates");
    }
  });
}

double norm_of(const std::array<double, 3>& gradient) {
  double squares = 0;
  for (std::size_t p = 0; p < 3; ++p) {
    for (std::size_t i = 0; i < sheet_sizes[p]; ++i) squares += std::pow(slope(gradient[p], i), 2);
  }
  return std::sqrt(squares);
}

constexpr plain::Sgd damped{.lr = 0.0625, .momentum = 0.5, .dampening = 0.5};

/// A step that is not finite on one rank is no step on any.
template <class... Ps>
void skip_case() {
  all_well(3, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Anomaly<Skip>, Ps...> ddp(comm);
    set_momentum(ddp);
    ddp.optimizer().dampening = 0.5;  // the first update differs from later ones
    PlainSheet plain(damped);
    for (std::size_t s = 0; s < 5; ++s) {
      Entry entry = entry_of(comm.rank().value(), s);
      const bool bad = s == 0 || s == 3;
      if (bad && comm.rank() == Rank{1}) entry.gradient[s % 3] = s == 0 ? NAN : INFINITY;
      ddp.step(entry);
      if (!bad)
        for (std::size_t p = 0; p < 3; ++p) plain.update(p, sum_of(3, s, s + 1, p) / 3);
      compare(ddp, plain, "step " + std::to_string(s), 1e-10);
    }
    require(ddp.skipped_steps() == 2, "two were skipped");
  });
}

template <std::size_t Micro, class... Ps>
void clip_case() {
  all_well(3, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Optimizer<SGDMomentum>, Clip<2.0>, Accumulate<Micro>, Ps...>
        ddp(comm);
    set_momentum(ddp);
    PlainSheet plain(momentum);
    std::size_t clipped = 0;
    for (const double size : {1.0, 0.0, 0.01, 4.0}) {  // over, zero, below, over
      std::array<double, 3> mean{};
      for (std::size_t p = 0; p < 3; ++p)
        mean[p] = size * sum_of(3, 0, Micro, p) / static_cast<double>(3 * Micro);
      const double norm = norm_of(mean);
      clipped += norm > 2 ? 1 : 0;
      for (std::size_t p = 0; p < 3; ++p)
        plain.update(p, mean[p] * std::min(1.0, 2.0 / (norm + 1e-6)));
      for (std::size_t m = 0; m < Micro; ++m) {
        Entry entry = entry_of(comm.rank().value(), m);
        for (double& gradient : entry.gradient) gradient *= size;
        ddp.step(entry);
      }
      compare(ddp, plain, "gradients times " + std::to_string(size), 1e-10);
    }
    require(clipped == 2, "two of four are over the limit");
  });
}

/// Values and gradients are such that every sum is exact in every type, except the last rounding
/// to BFloat16.
template <class Net, class... Ps>
void types_case(double within) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      DistributedDataParallel<Net, Optimizer<SGDMomentum>, Ps...> ddp(comm);
      set_momentum(ddp);
      PlainSheet plain(momentum);
      compare(ddp, plain, "the start", 0);
      for (std::size_t s = 0; s < 3; ++s) {
        ddp.step(entry_of(comm.rank().value(), s));
        for (std::size_t p = 0; p < 3; ++p)
          plain.update(p, sum_of(world, s, s + 1, p) / static_cast<double>(world));
        compare(ddp, plain, "step " + std::to_string(s), within);
      }
    });
  }
}

using Pieces = Buckets<BucketLimits{0, 0}>;

}  // namespace

BOOST_AUTO_TEST_CASE(accumulation_averages_and_waits_for_the_last) {
  accumulation_case<>();
  accumulation_case<Sharding<Replicated>, Pieces>();
}

BOOST_AUTO_TEST_CASE(no_sync_adds_up) {
  no_sync_case<>(false);
  no_sync_case<Sharding<Replicated>, Pieces>(false);
}

BOOST_AUTO_TEST_CASE(a_step_after_no_sync_takes_what_was_added_up) { no_sync_case<>(true); }

BOOST_AUTO_TEST_CASE(clipping_is_by_the_norm_of_the_average_over_everything) {
  clip_case<1>();
  clip_case<2>();
  clip_case<2, Sharding<Replicated>, Pieces>();
}

BOOST_AUTO_TEST_CASE(a_gradient_that_is_no_number_is_not_trained_past) {
  all_well(2, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Clip<1.0>, Anomaly<Ignore>> ddp(comm);
    Entry entry = entry_of(0, 0);
    if (comm.rank() == Rank{1}) entry.gradient[1] = std::nan("");
    ddp.step(entry);
    require(std::isnan(value(ddp, 0, 0)) && std::isnan(value(ddp, 2, 2)), "it shows everywhere");
  });
}

BOOST_AUTO_TEST_CASE(mixed_element_types_train_together) {
  types_case<Sheet<float, double, BFloat16>, Pieces>(2e-2);
  types_case<Sheet<float, double, BFloat16>, Sharding<Replicated>>(2e-2);
}

BOOST_AUTO_TEST_CASE(sixteen_bits_train_with_states_of_float) {
  types_case<Sheet<Half>>(2e-3);
  types_case<Sheet<BFloat16>, Clip<1e9>>(2e-2);
}

BOOST_AUTO_TEST_CASE(the_tail_of_an_accumulation_is_a_step_of_its_own_or_none) {
  tail_case<>(true);
  tail_case<>(false);
  tail_case<Sharding<Replicated>, Buckets<BucketLimits{0, 0}>>(true);
  tail_case<Sharding<Replicated>, UnusedParameters<Zero>>(true);
  tail_case<Clip<1000.0>>(true);
}

BOOST_AUTO_TEST_CASE(a_step_that_is_not_finite_is_skipped_on_all_ranks) {
  skip_case<>();
  skip_case<Sharding<Replicated>>();
  skip_case<UnusedParameters<Zero>>();
  skip_case<Clip<1000.0>>();
}

BOOST_AUTO_TEST_CASE(a_schedule_of_epochs_decays_in_a_hand_written_loop) {
  all_well(2, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Schedule<StepDecay>> ddp(comm);
    ddp.optimizer().lr = 1;
    ddp.schedule() = {.epochs = 2, .factor = 0.5};
    for (std::size_t epoch = 0; epoch < 6; ++epoch) {
      ddp.set_epoch(epoch);
      ddp.step(entry_of(comm.rank().value(), epoch));
      require(ddp.learning_rate() == std::pow(0.5, static_cast<double>(epoch / 2)), "the rate");
    }
  });
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    DistributedDataParallel<Sheet<>, Schedule<StepDecay>> ddp(comm);
    ddp.step(entry_of(0, 0));
  });
  all_say(ends, "it counts epochs, and none has begun");
}

BOOST_AUTO_TEST_SUITE_END()

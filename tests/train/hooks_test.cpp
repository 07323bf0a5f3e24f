// SPDX-License-Identifier: Apache-2.0
// Gradient hooks on real ranks: what each hands to the wire, what comes back, and that nothing is
// lost on the way.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "comm/repeat.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "skipped.hpp"
#include "train/checkpoint_files.hpp"
#include "train/closeness.hpp"
#include "train/piped.hpp"
#include "train/plain_mlp.hpp"
#include "train/python.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(hooks)

namespace {

using namespace train;
using checkpoints::Folder;
using checkpoints::tensors_of;

// Pipelines alone, on gradients that tests make up.

template <class T, class... Hook>
using Piped = piped::Bucket<Shared, T, Hook...>;
using piped::noise;
using piped::require_near;
using piped::Shape;

/// Runs `f(comm)` on so many ranks, none of which may fail.
template <class F>
void on_ranks(std::size_t world, const std::string& what, const F& f, As as = As::processes) {
  const Ends ends = ranks::run(as, world, f);
  for (std::size_t r = 0; r < world; ++r)
    BOOST_TEST(ends[r] == "", what << ", " << world << " ranks: rank " << r << ": " << ends[r]);
}

/// Ranks are processes or threads.
As any_kind(ranks::Chance& chance) { return chance(2) == 0 ? As::threads : As::processes; }

/// Shapes with matrices of all kinds: wide, tall, of one row, and vectors.
std::vector<Shape> random_shapes(ranks::Chance& chance) {
  std::vector<Shape> shapes;
  for (std::size_t n = 1 + chance(4); n != 0; --n)
    shapes.push_back({1 + chance(20), chance(3) == 0 ? 1 : 1 + chance(30)});
  return shapes;
}

using FullRank = PowerSGD<64, PowerSgdOptions{.start = 1, .least_compression = 0}>;
using Rank1 = PowerSGD<1, PowerSgdOptions{.start = 2}>;

/// A user's hook: negates on the way, and back.
struct Negate {
  static constexpr std::string_view name = "Negate";
  template <class T>
  struct Bucket {
    void begin(std::span<T> values, auto& next) {
      for (T& value : values) value = -value;
      next.begin(values);
    }
    void finish(std::span<T> values, auto& next) {
      next.finish(values);
      for (T& value : values) value = 3 * -value;
    }
  };
};

}  // namespace

BOOST_AUTO_TEST_CASE(power_sgd_of_full_rank_is_the_average) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 40); ++i) {
    const std::vector<Shape> shapes = random_shapes(chance);
    const std::size_t salt = chance(10000);
    const std::size_t rank_of_gradients = chance(3);  // 0: full; else so many outer products
    const std::size_t world = 1 + static_cast<std::size_t>(i) % 4;
    on_ranks(
        world, "salt " + std::to_string(salt),
        [&](Shared& comm) {
          Piped<double, FullRank> piped(comm, shapes);
          const auto gradient = [&](std::size_t rank, std::size_t step, const HookedTensor& tensor,
                                    std::size_t element) {
            if (step == 3) return 0.0;  // columns lose their directions, and find others
            if (rank_of_gradients == 0) return noise(salt, rank, step, tensor.parameter, element);
            double sum = 0;
            for (std::size_t k = 0; k != rank_of_gradients; ++k) {
              sum += noise(salt + k, rank, step, tensor.parameter, element / tensor.columns) *
                     noise(salt - k, 7 + rank, step, tensor.parameter, element % tensor.columns);
            }
            return sum;
          };
          for (std::size_t step = 0; step != 6; ++step) {
            piped.reduce([&](const HookedTensor& tensor, std::size_t element) {
              return gradient(comm.rank().value(), step, tensor, element);
            });
            for (const HookedTensor& tensor : piped.tensors) {
              for (std::size_t e = 0; e != tensor.count(); ++e) {
                double mean = 0;
                for (std::size_t r = 0; r != world; ++r)
                  mean += gradient(r, step, tensor, e) / static_cast<double>(world);
                require_near(piped.at(tensor, e), mean, 1e-9, "step " + std::to_string(step));
              }
            }
          }
        },
        any_kind(chance));
  }
}

namespace {

/// What has come and what ranks keep is what they have given.
template <class Hook>
void check_feedback(const std::vector<Shape>& shapes, std::size_t salt, std::size_t world, As as) {
  on_ranks(
      world, std::string(Hook::name) + ", salt " + std::to_string(salt),
      [&](Shared& comm) {
        Piped<double, Hook> piped(comm, shapes);
        std::vector<double> given(piped.count), come(piped.count);
        bool has_kept = false;
        for (std::size_t step = 0; step != 7; ++step) {
          piped.reduce([&](const HookedTensor& tensor, std::size_t e) {
            const double own = noise(salt, comm.rank().value(), step, tensor.parameter, e);
            given[tensor.first + e] += own;
            return own;
          });
          for (const HookedTensor& tensor : piped.tensors) {
            std::vector<double> sums;
            for (std::size_t e = 0; e != tensor.count(); ++e) {
              come[tensor.first + e] += piped.at(tensor, e) * static_cast<double>(world);
              const double kept = piped.residual(tensor, e);
              has_kept = has_kept || kept != 0;
              sums.push_back(given[tensor.first + e] - kept);
            }
            comm.all_reduce(sums, Sum{});
            for (std::size_t e = 0; e != tensor.count(); ++e)
              require_near(come[tensor.first + e], sums[e], 1e-9, "step " + std::to_string(step));
          }
        }
        require(has_kept, "nothing was kept, so nothing was compressed");
      },
      as);
}

}  // namespace

BOOST_AUTO_TEST_CASE(what_was_sent_and_what_is_kept_is_what_was_given) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 40); ++i) {
    const std::size_t world = 1 + static_cast<std::size_t>(i) % 4;
    std::vector<Shape> shapes = random_shapes(chance);
    shapes.push_back({8 + chance(10), 9 + chance(20)});  // one that is worth compressing
    check_feedback<Rank1>(shapes, chance(10000), world, any_kind(chance));
  }
}

BOOST_AUTO_TEST_CASE(bytes_on_the_wire_are_counted) {
  const std::vector<Shape> shapes{{40, 30}, {40, 1}, {3, 2}};
  on_ranks(2, "bytes", [&](Shared& comm) {
    const auto one = [](const HookedTensor& tensor, std::size_t e) {
      return noise(1, 0, 0, tensor.parameter, e);
    };
    Piped<float, Rank1> low_rank(comm, shapes);
    low_rank.reduce(one);
    low_rank.reduce(one);
    const std::uint64_t whole = low_rank.count * sizeof(float);
    require(low_rank.bytes == 2 * whole, "the first two steps are not compressed");
    low_rank.reduce(one);
    require(low_rank.bytes - 2 * whole == (40 + 30 + 40 + 3 * 2) * sizeof(float),
            "P, Q, a vector and a small matrix");
    Piped<float, CompressTo<BFloat16>> halved(comm, shapes);
    halved.reduce(one);
    require(halved.bytes == whole / 2, "half");
    Piped<float, Rank1, CompressTo<Half>> both(comm, shapes);
    for (int step = 0; step != 3; ++step) both.reduce(one);
    require(both.bytes == low_rank.bytes / 2, "half of P and Q");
    Piped<float, LocalSGD<2>> none(comm, shapes);
    none.reduce(one);
    require(none.bytes == 0, "nothing");
  });
}

BOOST_AUTO_TEST_CASE(hooks_follow_each_other_from_left_to_right) {
  on_ranks(3, "order", [&](Shared& comm) {
    // Rounded to what -x/3 is in 16 bits, and not rounded again on the way back.
    Piped<float, Negate, CompressTo<BFloat16>> piped(comm, {{1, 4}});
    piped.reduce([&](const HookedTensor&, std::size_t e) {
      return static_cast<double>(comm.rank().value() + e) + 0.001;
    });
    for (std::size_t e = 0; e != 4; ++e)
      require(piped.at(piped.tensors[0], e) == 3.0 * static_cast<double>(1 + e), "three times");
  });
}

BOOST_AUTO_TEST_CASE(sums_of_halves_do_not_leave_their_range) {
  on_ranks(4, "halves", [&](Shared& comm) {
    Piped<float, CompressTo<Half>> piped(comm, {{1, 400}});
    piped.reduce([&](const HookedTensor&, std::size_t e) { return e % 2 == 0 ? 60000 : 1e-4; });
    require(piped.at(piped.tensors[0], 0) == 60000, "60000");
    require_near(piped.at(piped.tensors[0], 1), 1e-4, 1e-7, "a small one");
  });
}

namespace {

template <class Hook>
void check_recovery() {
  on_ranks(2, std::string(Hook::name), [&](Shared& comm) {
    Piped<float, Hook> piped(comm, {{30, 20}});
    for (std::size_t step = 0; step != 8; ++step) {
      piped.reduce([&](const HookedTensor&, std::size_t e) {
        const bool broken = step == 3 && comm.rank().value() == 1 && e == 77;
        return broken ? std::numeric_limits<double>::infinity() : noise(1, 0, step, 0, e);
      });
      bool finite = true;
      for (std::size_t e = 0; e != 600; ++e)
        finite = finite && std::isfinite(piped.at(piped.tensors[0], e));
      require(finite == (step != 3), "step " + std::to_string(step));
    }
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_gradient_that_is_not_finite_shows_once_and_is_forgotten) {
  check_recovery<Rank1>();
}

// PyTorch's hooks, where there is a PyTorch: hooks_peer.py has the same gradients.

namespace {

/// Averages by hook, step and parameter: "rank2 3 0".
using Averages = std::map<std::string, std::vector<double>>;

Averages read_averages(const std::string& path) {
  Averages all;
  std::ifstream lines(path);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hook, step, parameter, number;
    words >> hook >> step >> parameter;
    std::vector<double>& numbers = all[hook + " " + step + " " + parameter];
    while (words >> number) numbers.push_back(std::stod(number));
  }
  return all;
}

const std::vector<Shape> peer_shapes{{40, 30}, {40, 1}, {12, 25}, {3, 2}};

double peer_gradient(std::size_t rank, std::size_t step, const HookedTensor& tensor,
                     std::size_t i) {
  const auto r = static_cast<double>(rank), s = static_cast<double>(step);
  const auto row = static_cast<double>(i / tensor.columns);
  const auto column = static_cast<double>(i % tensor.columns);
  return std::sin(0.37 * row * static_cast<double>(tensor.parameter + 1) + s + 0.5 * r) *
             std::cos(0.11 * column * (r + 1)) +
         0.25 * std::sin(0.9 * static_cast<double>(i) + 3 * s + r);
}

template <class Hook>
void compare_with_torch(Shared& comm, const Averages& torch, const std::string& name,
                        double tolerance) {
  Piped<float, Hook> piped(comm, peer_shapes);
  for (std::size_t step = 0; step != 6; ++step) {
    piped.reduce([&](const HookedTensor& tensor, std::size_t i) {
      return peer_gradient(comm.rank().value(), step, tensor, i);
    });
    for (const HookedTensor& tensor : piped.tensors) {
      const std::string key =
          name + " " + std::to_string(step) + " " + std::to_string(tensor.parameter);
      const std::vector<double>& want = torch.at(key);
      require(want.size() == tensor.count(), key + ": another size");
      for (std::size_t i = 0; i != want.size(); ++i)
        require_near(piped.at(tensor, i), want[i], tolerance, key + ", " + std::to_string(i));
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(averages_are_those_of_pytorchs_hooks) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    say_skipped("PyTorch's hooks (there is no PyTorch here)");
    return;
  }
  const Folder folder;
  const std::string path = folder / "averages";
  if (!ask_torch(python, "hooks_peer.py", path + " 2 3", path)) return;  // worlds of two and three
  for (const std::size_t world : {2, 3}) {
    const Averages torch = read_averages(folder / ("averages." + std::to_string(world)));
    // Of two ranks both round the same sums once. Of more, PyTorch's Gloo rounds every sum.
    const bool exact = world == 2;
    on_ranks(world, "PyTorch", [&](Shared& comm) {
      compare_with_torch<CompressTo<BFloat16>>(comm, torch, "bf16", exact ? 0 : 0x1p-7);
      compare_with_torch<CompressTo<Half>>(comm, torch, "fp16", exact ? 0 : 0x1p-10);
      compare_with_torch<PowerSGD<2, PowerSgdOptions{.start = 2}>>(comm, torch, "rank2", 1e-5);
      compare_with_torch<PowerSGD<4, PowerSgdOptions{.start = 2}>>(comm, torch, "rank4", 1e-5);
    });
  }
}

// Jobs. Each type of job costs seconds to compile: there is one for every question.

namespace {

using Network = PlainMlp<dynamic, dynamic, dynamic>;
using Pieces = Buckets<BucketLimits{200, 3000}>;

Network network_of(std::size_t in, std::size_t hidden, std::size_t out) {
  Network network;
  network.in = in;
  network.hidden = hidden;
  network.out = out;
  return network;
}

std::vector<double> numbers_of(const auto& job) {
  std::vector<double> all;
  Network::for_each_parameter(job, [&](const auto& view) {
    all.insert(all.end(), view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

/// Have all ranks the same parameters?
void require_same(Shared& comm, const auto& job, const std::string& when) {
  const std::vector<double> own = numbers_of(job);
  std::vector<double> all(own.size() * comm.world_size().value());
  comm.all_gather(own, all);
  for (std::size_t i = 0; i != all.size(); ++i)
    require(all[i] == own[i % own.size()], "ranks differ " + when);
}

// Updates are linear in gradients. What a step of PowerSGD loses where columns nearly depend on
// each other comes with the next step, and Adam would have made a whole update of it.
using PlainJob = DistributedDataParallel<Network, Sharding<Replicated>, Pieces,
                                         Optimizer<SGDMomentum>, Accumulate<2>, Clip<0.3>>;
/// A rank that is more than enough, and ranks that update their shares.
using FullRankJob =
    DistributedDataParallel<Network, Hooks<FullRank>, Sharding<ZeroRedundancy>, Pieces,
                            Optimizer<SGDMomentum>, Accumulate<2>, Clip<0.3>>;

}  // namespace

BOOST_AUTO_TEST_CASE(power_sgd_of_full_rank_trains_like_plain_ddp) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 40); ++i) {
    const std::size_t in = 1 + chance(30), hidden = 1 + chance(30), out = 2 + chance(10);
    const std::size_t world = 1 + static_cast<std::size_t>(i) % 4;
    on_ranks(
        world, std::to_string(in) + "-" + std::to_string(hidden) + "-" + std::to_string(out),
        [&](Shared& comm) {
          PlainJob plain(comm, network_of(in, hidden, out));
          FullRankJob hooked(comm, network_of(in, hidden, out));
          plain.optimizer().lr = hooked.optimizer().lr = 0.05;
          for (std::size_t s = 0; s != 8; ++s) {
            const auto batch = reference_batch(3, in, out, s, comm.rank().value());
            plain.step(batch);
            hooked.step(batch);
            require_same(comm, hooked, "after batch " + std::to_string(s));
          }
          const auto want = numbers_of(plain), have = numbers_of(hooked);
          for (std::size_t k = 0; k != want.size(); ++k)
            require_near(have[k], want[k], 1e-6, "parameter " + std::to_string(k));
          require(hooked.bytes_sent() != 0, "nothing was counted");
        },
        any_kind(chance));
  }
}

namespace {

using LowRankJob = DistributedDataParallel<Network, Hooks<PowerSGD<2, PowerSgdOptions{.start = 2}>>,
                                           Pieces, Optimizer<SGDMomentum>>;
using LocalJob =
    DistributedDataParallel<Network, Hooks<LocalSGD<3, 1>>, Pieces, Optimizer<SGDMomentum>>;

/// A job that goes on from a file, which another wrote after `stop` steps, ends as that one does.
template <class Job>
void check_resume(std::size_t world, std::size_t stop) {
  const Folder folder;
  on_ranks(world, "resumed after " + std::to_string(stop), [&](Shared& comm) {
    const auto train = [&](Job& job, std::size_t begin, std::size_t end) {
      for (std::size_t s = begin; s != end; ++s)
        job.step(reference_batch(4, 24, 6, s, comm.rank().value()));
    };
    Job job(comm, network_of(24, 20, 6));
    job.optimizer().lr = 0.05;
    train(job, 0, stop);
    save(job, folder / "stop.safetensors");
    train(job, stop, stop + 5);
    save(job, folder / "end.safetensors");
    Job again(comm, network_of(24, 20, 6));
    train(again, 0, 3);  // what it has of its own must be forgotten
    resume(again, folder / "stop.safetensors");
    train(again, stop, stop + 5);
    save(again, folder / "again.safetensors");
    require(numbers_of(job) == numbers_of(again), "other parameters on this rank");
  });
  BOOST_TEST((tensors_of(folder / "end.safetensors") == tensors_of(folder / "again.safetensors")),
             world << " ranks, resumed after " << stop << ": other tensors");
}

}  // namespace

BOOST_AUTO_TEST_CASE(hooks_go_on_from_checkpoints_with_the_same_bits) {
  for (const std::size_t world : {1, 2, 3}) {
    check_resume<LowRankJob>(world, 1);
    check_resume<LowRankJob>(world, 5);
    check_resume<LocalJob>(world, 5);  // in the middle of a period
  }
}

BOOST_AUTO_TEST_CASE(residuals_and_local_parameters_keep_their_means_in_another_world) {
  for (const std::size_t world : {1, 2, 4}) {
    const Folder folder;
    const std::string low_rank = folder / "low_rank.safetensors";
    const std::string local = folder / "local.safetensors";
    on_ranks(3, "saving", [&](Shared& comm) {
      LowRankJob one(comm, network_of(24, 20, 6));
      LocalJob other(comm, network_of(24, 20, 6));
      one.optimizer().lr = other.optimizer().lr = 0.05;
      for (std::size_t s = 0; s != 6; ++s) {
        const auto batch = reference_batch(4, 24, 6, s, comm.rank().value());
        one.step(batch);
        other.step(batch);
      }
      save(one, low_rank);
      save(other, local);
    });
    // The means over ranks of what was saved and of what was loaded, summed over some elements.
    const auto mean_in = [](const std::string& path, const std::string& name,
                            std::size_t replicas) {
      const auto tensors = tensors_of(path);
      double mean = 0;
      for (std::size_t r = 0; r != replicas; ++r) {
        const std::string& bytes = tensors.at("lockstep/local/" + std::to_string(r) + "/" + name);
        std::array<double, 100> values;  // the last ones
        std::memcpy(values.data(), bytes.data() + bytes.size() - sizeof values, sizeof values);
        for (const double value : values) mean += value / static_cast<double>(replicas);
      }
      return mean;
    };
    const std::string again = folder / "again.safetensors";
    const std::string local_again = folder / "local_again.safetensors";
    on_ranks(world, "loading", [&](Shared& comm) {
      LowRankJob one(comm, network_of(24, 20, 6));
      LocalJob other(comm, network_of(24, 20, 6));
      load(one, low_rank);
      load(other, local);
      save(one, again);
      save(other, local_again);
      require_same(comm, other, "although all go on with the mean");
    });
    const std::string residual = "fc2.weight/PowerSGD.residual";
    BOOST_TEST(mean_in(low_rank, residual, 3) != 0);
    BOOST_TEST(std::abs(mean_in(low_rank, residual, 3) - mean_in(again, residual, world)) < 1e-12);
    for (const std::string name : {"fc1.weight/parameter", "fc1.weight/momentum_buffer"}) {
      BOOST_TEST(std::abs(mean_in(local, name, 3) - mean_in(local_again, name, world)) < 1e-12,
                 name << " in a world of " << world);
    }
  }
}

BOOST_AUTO_TEST_CASE(local_sgd_averages_parameters_after_every_period) {
  for (const std::size_t world : {1, 2, 4}) {
    on_ranks(world, "local", [&](Shared& comm) {
      LocalJob job(comm, network_of(8, 6, 3));
      job.optimizer().lr = 0.05;
      const auto differ = [&] {
        const double own = numbers_of(job)[3];
        return comm.all_reduce(own, Max{}) != comm.all_reduce(own, Min{});
      };
      for (std::size_t s = 1; s != 9; ++s) {
        job.step(reference_batch(4, 8, 3, s, comm.rank().value()));
        const bool averaged = s == 1 || s == 4 || s == 7;  // the first with gradients
        require(differ() == (!averaged && world != 1), "after step " + std::to_string(s));
      }
      job.average_parameters();
      require_same(comm, job, "after an average that was asked for");
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()

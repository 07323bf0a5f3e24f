// SPDX-License-Identifier: Apache-2.0
// Scaled losses in a program's own loop: number by number as Python's GradScaler, on all ranks.
#include "lockstep/detail/torch/grad_scaler.hpp"

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/torch/autocast.hpp"
#include "temporary_folder.hpp"
#include "torch/small_net.hpp"
#include "train/python.hpp"

BOOST_AUTO_TEST_SUITE(torch_grad_scaler)

namespace {

using namespace ranks;
using namespace torch_net;
namespace loops = lockstep::torch;

template <class... Policies>
using Wrapped = loops::DistributedDataParallel<Net, Anomaly<Ignore>, Policies...>;

constexpr float infinity = std::numeric_limits<float>::infinity();

// ---- What grad_scaler_peer.py does.

std::optional<float> bad(std::size_t step) {
  if (step == 3 || step == 17 || step == 18) return infinity;
  if (step == 4) return std::numeric_limits<float>::quiet_NaN();
  if (step == 40) return -infinity;
  return std::nullopt;
}
at::Tensor pattern(at::IntArrayRef sizes, std::int64_t number, double scale) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes));
  return ((i * i * 37 + i * 7919 + number * 104729).remainder(2001) - 1000)
      .to(at::kFloat)
      .mul(scale / 1024)
      .view(sizes);
}

std::vector<float> floats_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
  return values;
}
void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct Layer : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", pattern({3, 5}, 1, 0.25));
  at::Tensor bias = register_parameter("bias", pattern({3}, 2, 0.25));
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x, weight, bias)); }
};

constexpr loops::GradScalerOptions peer_options{
    .init_scale = 1024, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 5};

/// The numbers of all iterations. `forward` is the layer's, or that of its wrapper; gradients
/// become infinite where `spoils`. `middle()` is called after iteration 19.
std::vector<float> train_as_python(Layer& layer, const auto& forward, auto& scaler, bool spoils,
                                   const auto& middle) {
  using torch::optim::SGDOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{layer.weight});
  groups.emplace_back(std::vector<at::Tensor>{layer.bias},
                      std::make_unique<SGDOptions>(SGDOptions(0.03125).momentum(0.875)));
  torch::optim::SGD optimizer(groups, SGDOptions(0.0625).momentum(0.875));
  std::vector<float> numbers;
  for (std::size_t step = 0; step != 60; ++step) {
    optimizer.zero_grad();
    const at::Tensor x = pattern({4, 5}, static_cast<std::int64_t>(10 + step), 1);
    const at::Tensor loss = forward(x).square().mean();
    const std::optional<float> value = spoils ? bad(step) : std::nullopt;
    const auto hook = layer.weight.register_hook([&](const at::Tensor& gradient) {
      at::Tensor other = gradient.clone();
      if (value) other[1][2] = *value;
      return other;
    });
    scaler.scale(loss).backward();
    layer.weight.remove_hook(hook);
    if (step % 3 == 1) {
      scaler.unscale_(optimizer);
      torch::nn::utils::clip_grad_norm_(layer.parameters(), 0.25);
    }
    require(scaler.step(optimizer) == !bad(step), "another decision in " + std::to_string(step));
    if (step == 30) {
      scaler.update(512);
    } else {
      scaler.update();
    }
    const c10::impl::GenericDict state = scaler.state_dict().toGenericDict();
    numbers.push_back(static_cast<float>(scaler.get_scale()));
    numbers.push_back(static_cast<float>(state.at("_growth_tracker").toInt()));
    for (const at::Tensor& each : layer.parameters())
      numbers.insert(numbers.end(), each.data_ptr<float>(), each.data_ptr<float>() + each.numel());
    if (step == 19) middle();
  }
  return numbers;
}

double largest_difference(const std::vector<float>& have, const std::vector<float>& want) {
  require(have.size() == want.size() && have.size() == 60 * (2 + 15 + 3), "another number of them");
  double largest = 0;
  for (std::size_t i = 0; i != want.size(); ++i) {
    require(std::isfinite(have[i]), "a number is not finite");
    largest = std::max(largest, std::abs(static_cast<double>(have[i]) - want[i]));
  }
  return largest;
}

std::string words_of(const auto& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}
void says(const auto& f, const std::string& words) {
  const std::string said = words_of(f);
  BOOST_TEST(said.find(words) != std::string::npos, said);
}

}  // namespace

BOOST_AUTO_TEST_CASE(sixty_iterations_have_the_numbers_of_pythons_scaler) {
  const TemporaryFolder folder;
  std::vector<float> saved;
  Layer layer;
  loops::GradScaler alone(peer_options);
  const std::vector<float> numbers = train_as_python(
      layer, [&](const at::Tensor& x) { return layer.forward(x); }, alone, true,
      [&] {
        const c10::IValue state = alone.state_dict();
        write(folder / "cpp.state", torch::pickle_save(state));
        for (const auto& item : state.toGenericDict())
          saved.push_back(item.value().toScalar().toFloat());
      });
  // Ranks have the same batch, so that averages are the gradients of one process; the infinities
  // are on one rank.
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const auto net = std::make_shared<Layer>();
      loops::DistributedDataParallel<Layer, Anomaly<Ignore>> ddp(net, comm);
      loops::GradScaler scaler(ddp, peer_options);
      const bool spoils = comm.rank().value() + 1 == world;
      const double difference = largest_difference(
          train_as_python(
              *net, [&](const at::Tensor& x) { return ddp(x); }, scaler, spoils, [] {}),
          numbers);
      require(difference == 0, "numbers differ by " + std::to_string(difference));
    });
  }
  const std::string python = train::python_with_torch();
  if (python.empty()) {
    std::printf("skipped: comparison with Python's GradScaler (no PyTorch for Python here)\n");
    return;
  }
  BOOST_TEST_REQUIRE(
      train::ask_torch(python, "../torch/grad_scaler_peer.py", folder.path, folder / "peer"));
  const double difference = largest_difference(numbers, floats_of(folder / "numbers"));
  BOOST_TEST(difference == 0, "numbers differ from Python's by " << difference);
  // Each reads the other's state_dict.
  BOOST_TEST(floats_of(folder / "cpp.numbers") == saved, boost::test_tools::per_element());
  std::ifstream file(folder / "python.state", std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  loops::GradScaler scaler;
  scaler.load_state_dict(torch::pickle_load(bytes));
  std::vector<float> loaded;
  for (const auto& item : scaler.state_dict().toGenericDict())
    loaded.push_back(item.value().toScalar().toFloat());
  BOOST_TEST(loaded == saved, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_state_dict_goes_on_where_it_was_saved) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1);
  const auto iterate = [&](auto& scaler, bool is_bad) {
    optimizer.zero_grad();
    scaler.scale(weight.sum()).backward();
    if (is_bad) weight.mutable_grad()[0] = infinity;
    const bool made = scaler.step(optimizer);
    scaler.update();
    return made;
  };
  const loops::GradScalerOptions options{.init_scale = 8, .growth_interval = 3};
  loops::GradScaler first(options);
  BOOST_TEST(!iterate(first, true));
  BOOST_TEST(iterate(first, false));
  BOOST_TEST(first.get_scale() == 4);
  loops::GradScaler second, third;
  static_cast<void>(third.scale(weight.sum()));  // its tensors are there when it loads
  second.load_state_dict(first.state_dict());
  third.load_state_dict(first.state_dict());
  for (const int i : {0, 1}) {
    for (auto* scaler : {&first, &second, &third}) {
      iterate(*scaler, false);
      BOOST_TEST(scaler->get_scale() == (i == 0 ? 4 : 8));
    }
  }
  c10::impl::GenericDict part(c10::StringType::get(), c10::AnyType::get());
  says([&] { first.load_state_dict(part); },
       "The source state dict is empty, possibly because it was saved from a disabled instance");
  part.insert("scale", 2.0);
  says([&] { first.load_state_dict(part); }, "there is no \"growth_factor\"");
  BOOST_TEST(first.get_scale() == 8);
}

BOOST_AUTO_TEST_CASE(calls_out_of_order_have_pythons_words) {
  at::Tensor weight = at::ones({2}).requires_grad_(), other = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.1), second({other}, 0.1);
  loops::GradScaler scaler;
  says([&] { scaler.unscale_(optimizer); }, "Attempted unscale_ but the scale is not known yet");
  says([&] { scaler.step(optimizer); }, "Attempted step but the scale is not known yet");
  says([&] { scaler.update(); }, "Attempted update but the scale is not known yet");
  BOOST_TEST(scaler.get_scale() == 65536);
  const at::Tensor loss = scaler.scale(weight.sum());
  says([&] { scaler.update(); }, "No inf checks were recorded prior to update");
  says([&] { scaler.step(optimizer); }, "No inf checks were recorded for this optimizer");
  scaler.update(4);
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(optimizer);
  BOOST_TEST(weight.grad()[0].item<float>() == 1);
  says([&] { scaler.unscale_(optimizer); },
       "unscale_() has already been called on this optimizer since the last update()");
  scaler.step(optimizer);
  says([&] { scaler.unscale_(optimizer); }, "unscale_() is being called after step()");
  says([&] { scaler.step(optimizer); }, "step() has already been called since the last update()");
  // Each optimizer has its own order, and one that skips lowers the scale of all.
  scaler.scale(other.sum()).backward();
  other.mutable_grad()[1] = infinity;
  BOOST_TEST(!scaler.step(second));
  scaler.update();
  BOOST_TEST(scaler.get_scale() == 2);
  scaler.step(optimizer);

  weight.mutable_grad().reset();
  at::Tensor half = at::ones({2}, at::kHalf).requires_grad_();
  torch::optim::SGD third({half}, 0.1);
  half.mutable_grad() = at::ones({2}, at::kHalf);
  says([&] { scaler.unscale_(third); }, "Attempting to unscale FP16 gradients");
  says([] { const loops::GradScaler wrong({.growth_factor = 1}); }, "growth factor must be > 1.0");
  says([] { const loops::GradScaler wrong({.backoff_factor = 1}); },
       "backoff factor must be < 1.0");
}

BOOST_AUTO_TEST_CASE(a_disabled_scaler_does_nothing) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  loops::GradScaler scaler({.enabled = false});
  BOOST_TEST(!scaler.is_enabled());
  const at::Tensor loss = weight.sum();
  BOOST_TEST(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  BOOST_TEST(scaler.step(optimizer));
  scaler.update();
  scaler.update(3);
  BOOST_TEST(weight[0].item<float>() == 0.5);
  BOOST_TEST(scaler.get_scale() == 1);
  BOOST_TEST(scaler.state_dict().toGenericDict().empty());
  scaler.load_state_dict(scaler.state_dict());
}

BOOST_AUTO_TEST_CASE(outputs_and_gradients_of_several_types_are_scaled) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  at::Tensor wide = at::ones({2}, at::kDouble).requires_grad_();
  at::Tensor table = at::ones({4, 2}).requires_grad_();
  torch::optim::SGD optimizer({weight, wide, table}, 0.5);
  loops::GradScaler scaler({.init_scale = 8});
  const auto backward = [&] {
    const auto losses = scaler.scale(std::vector<at::Tensor>{weight.sum(), wide.sum()});
    at::Tensor rows = at::embedding(table, at::arange(2), -1, false, /*sparse=*/true);
    (losses[0] + losses[1] + scaler.scale(rows.sum())).backward();
  };
  backward();
  BOOST_TEST(weight.grad()[0].item<float>() == 8);
  BOOST_TEST(table.grad().is_sparse());
  scaler.unscale_(optimizer);
  BOOST_TEST(weight.grad()[0].item<float>() == 1);
  BOOST_TEST(wide.grad()[0].item<double>() == 1);
  BOOST_TEST(table.grad().to_dense()[1][0].item<float>() == 1);
  optimizer.zero_grad();
  scaler.update();
  backward();
  wide.mutable_grad()[1] = infinity;  // only the gradients of the second type are not finite
  BOOST_TEST(!scaler.step(optimizer));
  BOOST_TEST(weight[0].item<float>() == 1);
}

namespace {

/// Steps with an infinity on one rank, compared with a process that has all samples.
void train_scaled(auto& ddp, auto& scaler, Shared& comm) {
  const std::size_t rank = comm.rank().value(), world = comm.world_size().value();
  auto& net = ddp.module();
  auto alone = make_net();
  torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto is_bad = [](std::size_t s) { return s == 2 || s == 3 || s == 7; };
  double scale = 1024;
  for (std::size_t s = 0; s != 10; ++s) {
    if (!is_bad(s)) {
      step_alone(*alone, plain, world, 0.1, [&](Net& each, std::size_t r) {
        loss_of(each.forward(inputs_of(s, r))).backward();
      });
    }
    at::Tensor x = inputs_of(s, rank);
    if (is_bad(s) && rank + 1 == world) x[0][0] = infinity;
    scaler.scale(loss_of(ddp(x))).backward();
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(net.parameters(), 0.1);
    require(scaler.step(optimizer) == !is_bad(s), "another decision in step " + std::to_string(s));
    scaler.update();
    optimizer.zero_grad();
    if (is_bad(s)) scale /= 2;
    require(scaler.get_scale() == scale, "another scale in step " + std::to_string(s));
    require_close(net, *alone, "step " + std::to_string(s));
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(all_ranks_leave_out_the_same_steps) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const loops::GradScalerOptions options{.init_scale = 1024};
      Wrapped<> ddp(make_net(), comm);
      loops::GradScaler scaler(ddp, options);
      train_scaled(ddp, scaler, comm);
      Wrapped<> other(make_net(), comm);
      loops::GradScaler alone(options);  // averages are the same on all ranks
      train_scaled(other, alone, comm);
    });
  }
}

BOOST_AUTO_TEST_CASE(ranks_agree_about_gradients_that_are_not_averaged) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto net = make_net();
      Wrapped<> ddp(net, comm);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      loops::GradScaler scaler(ddp, {.init_scale = 16});
      const at::Tensor before = net->in->weight.detach().clone();
      for (std::size_t s = 0; s != 2; ++s) {
        const auto local = ddp.no_sync();
        at::Tensor x = inputs_of(s, rank);
        if (rank == 0 && s == 0) x[0][0] = infinity;
        // Rank 1 has no gradients at all.
        const at::Tensor loss = scaler.scale(loss_of(ddp(x)));
        if (rank != 1) loss.backward();
        require(scaler.step(optimizer) == (s != 0), "another decision");
        scaler.update();
        optimizer.zero_grad();
        require(scaler.get_scale() == 8, "another scale");
        require(s != 0 || at::equal(before, net->in->weight), "a parameter has moved");
      }
      require((rank == 1) == at::equal(before, net->in->weight), "another update");
    });
  }
}

BOOST_AUTO_TEST_CASE(a_rank_without_batches_scales_as_the_others) {
  for (const std::size_t world : {2u, 4u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t rank = comm.rank().value();
      auto net = make_net();
      Wrapped<UnevenInputs<Join>> ddp(net, comm);
      torch::optim::AdamW optimizer(net->parameters(), 0.01);
      loops::GradScaler scaler(ddp, {.init_scale = 64});
      std::size_t made = 0;
      const auto update = [&] {
        if (scaler.step(optimizer)) ++made;
        scaler.update();
        optimizer.zero_grad();
      };
      auto joined = ddp.join(update);
      for (std::size_t s = 0; s != 2 * rank; ++s) {  // rank 0 has none
        at::Tensor x = inputs_of(s, rank);
        if (s == 1 && rank + 1 == world) x[0][0] = infinity;
        scaler.scale(loss_of(ddp(x))).backward();
        update();
      }
      joined.finish();
      require(made == 2 * (world - 1) - 1, "another number of steps");
      require(scaler.get_scale() == 32, "another scale");
      for (const at::Tensor& parameter : net->parameters()) {
        at::Tensor first = parameter.detach().clone();
        comm.broadcast(std::span(first.data_ptr<float>(), static_cast<std::size_t>(first.numel())),
                       Rank{0});
        require(at::equal(first, parameter), "ranks have different parameters");
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(half_precision_trains_with_a_scale) {
  all_well(2, [](Shared& comm) {
    auto net = make_net();
    Wrapped<> ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    loops::GradScaler scaler(ddp);
    const at::Tensor x = inputs_of(0, comm.rank().value());
    double first = 0, last = 0;
    for (std::size_t s = 0; s != 40; ++s) {
      at::Tensor loss;
      {
        const Autocast in_half(at::kCPU, at::kHalf);
        loss = loss_of(ddp(x).to(at::kFloat));
      }
      last = loss.item<double>();
      if (s == 0) first = last;
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    require(last < 0.3 * first, "it does not train");
  });
}

BOOST_AUTO_TEST_SUITE_END()

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms on GPUs, whatever their ranks communicate through: PyTorch's figures in
/// `syncbn.json`, `syncbn_train.json` and `convnet.json`, at every world that divides a case's
/// rows. Every check is a function of a communicator that throws what is wrong.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "convnet.cuh"
#include "gpu/check_names.hpp"
#include "gpu/norm_models.cuh"
#include "gpu/plain_layers.cuh"
#include "lockstep/lockstep.cuh"
#include "reference.hpp"
#include "require.hpp"
#if LOCKSTEP_HAS_CUDNN
#include "cudnn_convolution.cuh"
#endif

namespace norm_test {

using namespace lockstep;
using namespace train;

template <class T>
std::vector<double> downloaded(const T* data, std::size_t count) {
  std::vector<T> values(count);
  if (count != 0)
    check_cuda(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return {values.begin(), values.end()};
}
template <class View>
std::vector<double> downloaded(const View& view) {
  return downloaded(view.data_handle(), view.size());
}

/// Throws unless numbers are PyTorch's: to rounding in double, which is what PyTorch has used, and
/// nearly so in float.
template <class T>
void require_figures(const std::string& what, const std::vector<double>& have,
                     const std::vector<double>& want) {
  require(have.size() == want.size(), what + " has " + std::to_string(have.size()) +
                                          " numbers, PyTorch's " + std::to_string(want.size()));
  constexpr bool exact = std::is_same_v<T, double>;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double scale = std::max(std::abs(want[i]), exact ? 1e-3 : 1.0);
    if (std::abs(have[i] - want[i]) <= (exact ? 1e-9 : 1e-3) * scale) continue;
    char numbers[96];
    std::snprintf(numbers, sizeof numbers, "[%zu] is %.12g, PyTorch has %.12g", i, have[i],
                  want[i]);
    throw std::runtime_error(what + numbers);
  }
}
template <class T>
void require_figure(const std::string& what, double have, double want) {
  require_figures<T>(what, {have}, {want});
}

template <class Model, class Comm, class... Ps>
using Ddp = detail::BasicDdp<Model, CanonicalPolicies<Device<Cuda>, Ps...>, Comm>;

/// Can its steps be graphs?
template <class Comm>
concept Capturing = requires(Comm& comm, void (*step)()) { comm.capture(step); };

template <class... Ps>
inline constexpr bool captures = (std::is_same_v<Ps, CapturedStep> || ...);

/// How a case is called in errors.
template <class T, class... Ps>
std::string title(const std::string& file, std::size_t number) {
  return file + ", case " + std::to_string(number) +
         (std::is_same_v<T, float> ? " in float" : " in double") +
         (captures<Ps...> ? ", captured" : "");
}

/// The check that a program is asked for: `norms_gpu --ranks N BACKEND CHECK`.
inline std::string check_of(const Session& session) {
  return session.arguments().size() > 2 ? session.arguments()[2] : std::string("all");
}

/// Rows of the union of a step's batches, which the case's ranks have had one behind the other.
struct Share {
  std::size_t first, count;
};

/// The samples of a share of step s, where a batch of the case has `rows`.
inline Samples samples_of(const Share& share, std::size_t rows, std::size_t inputs,
                          std::size_t classes, std::size_t s) {
  Samples result{inputs, {}, {}};
  for (std::size_t i = share.first; i < share.first + share.count; ++i) {
    Samples one;
    reference_batch(rows, inputs, classes, s, i / rows).slice(i % rows, 1, one);
    result.x.insert(result.x.end(), one.x.begin(), one.x.end());
    result.y.push_back(one.y[0]);
  }
  return result;
}

inline double averaged(auto& comm, double loss) {
  double values[] = {loss};
  comm.all_reduce(values, Average{});
  return values[0];
}

// ---- A batch norm alone, over batches of any sizes

/// The rows of a rank: as the case has them where it has as many ranks, else cut unevenly, and the
/// last rank of more than two has none.
inline std::vector<std::size_t> rows_of_ranks(const std::vector<std::size_t>& of_case,
                                              std::size_t world) {
  if (of_case.size() == world) return of_case;
  std::size_t all = 0;
  for (const std::size_t rows : of_case) all += rows;
  std::vector<std::size_t> result(world, 0);
  const std::size_t busy = world > 2 ? world - 1 : world;
  for (std::size_t i = 0; i < all; ++i)
    ++result[std::min(i * i / (all * all / busy + 1), busy - 1)];
  return result;
}

template <class T, class... Ps>
std::size_t check_figures(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const nlohmann::json all = reference("syncbn.json");
  const std::size_t world = comm.world_size().value();
  for (std::size_t number = 0; number < all.size(); ++number) {
    const nlohmann::json& c = all[number];
    const std::string name = title<T, Ps...>("syncbn.json", number);
    const std::size_t channels = c.at("channels");
    const std::size_t positions = c.at("spatial");
    const std::vector<std::size_t> of_case = c.at("batch_per_rank");
    const std::size_t width = channels * positions;
    std::vector<T> x;
    std::vector<T> dy;
    for (std::size_t r = 0; r < of_case.size(); ++r) {
      for (std::size_t i = 0; i < of_case[r] * width; ++i) {
        x.push_back(static_cast<T>(wave(i, 20 + static_cast<double>(r), 2)));
        dy.push_back(static_cast<T>(wave(i, 60 + static_cast<double>(r), 1)));
      }
    }
    const std::vector<std::size_t> rows = rows_of_ranks(of_case, world);
    const std::size_t me = comm.rank().value();
    std::size_t first = 0;
    for (std::size_t r = 0; r < me; ++r) first += rows[r] * width;
    const std::size_t own = rows[me] * width;
    const DeviceArray<T> here_x(own), here_dy(own), here_y(own), here_dx(own);
    detail::copy_now(here_x, x.data() + first, own * sizeof(T));
    detail::copy_now(here_dy, dy.data() + first, own * sizeof(T));
    const NormPass<T> pass{here_x, here_dy, here_y, here_dx, rows[me], positions};

    NormAlone<T> model;
    model.channels = channels;
    Ddp<NormAlone<T>, Comm, Norms<Synced>, Optimizer<SGD>, Ps...> ddp(comm, std::move(model));
    ddp.optimizer().lr = 0;
    std::size_t passes = 1;
    if constexpr (captures<Ps...>) {
      for (passes = 0; passes < 5; ++passes) ddp.step(pass);
      require(ddp.template captured_graphs<NormPass<T>>() != 0, name + ": nothing was captured");
      comm.synchronize();
    } else {
      auto averages = ddp.forward(pass).backward().reduce();
      comm.synchronize();
      const auto sums = [&](const auto& view) {  // over ranks, of which `reduce` gives the average
        std::vector<double> values = downloaded(view);
        for (double& value : values) value *= static_cast<double>(world);
        return values;
      };
      require_figures<T>(name + ", dweight", sums(averages.grad("bn.weight"_p)), c.at("dweight"));
      require_figures<T>(name + ", dbias", sums(averages.grad("bn.bias"_p)), c.at("dbias"));
      std::move(averages).update();
      comm.synchronize();
    }
    const auto piece = [&](const char* key) {
      const std::vector<double> values = c.at(key);
      return std::vector<double>(values.begin() + static_cast<std::ptrdiff_t>(first),
                                 values.begin() + static_cast<std::ptrdiff_t>(first + own));
    };
    require_figures<T>(name + ", y", downloaded<T>(here_y, own), piece("y"));
    require_figures<T>(name + ", dx", downloaded<T>(here_dx, own), piece("dx"));
    // PyTorch's are those after one pass. Every pass has the same batch and goes a tenth of the
    // way.
    const auto running = [&](const char* key, double start) {
      std::vector<double> values = c.at(key);
      for (double& value : values) {
        const double batch = start + (value - start) / 0.1;
        value = batch + (start - batch) * std::pow(0.9, static_cast<double>(passes));
      }
      return values;
    };
    require_figures<T>(name + ", running_mean", downloaded(ddp.buffer("bn.running_mean"_p)),
                       running("running_mean", 0));
    require_figures<T>(name + ", running_var", downloaded(ddp.buffer("bn.running_var"_p)),
                       running("running_var", 1));
    require_figure<double>(name + ", num_batches_tracked",
                           downloaded(ddp.buffer("bn.num_batches_tracked"_p))[0],
                           static_cast<double>(passes));
  }
  return all.size();
}

// ---- Networks that train

/// Values as the reference has them: parameter k of the declared ones is a wave, and weights of
/// batch norms are greater by one.
inline void write_waves(std::size_t k, const std::string& name, const auto& view) {
  using T = typename std::remove_cvref_t<decltype(view)>::value_type;
  const double more = name.starts_with("bn") && name.ends_with(".weight") ? 1 : 0;
  for (std::size_t i = 0; i < view.size(); ++i)
    view.data_handle()[i] = static_cast<T>(wave(i, static_cast<double>(k + 1), 0.2) + more);
}

inline std::size_t number_in(const nlohmann::json& c, const char* key) {
  return c.at(key).get<std::size_t>();
}

/// Can ranks of this world have equal shares of every step of a case?
inline bool divides(std::size_t world, const nlohmann::json& c) {
  return number_in(c, "batch") * number_in(c, "world") % world == 0;
}

/// This rank's.
inline Share share_of(const auto& comm, const nlohmann::json& c) {
  const std::size_t own = number_in(c, "batch") * number_in(c, "world") / comm.world_size().value();
  return {own * comm.rank().value(), own};
}

/// Steps of a case from `first_step` on, each rank on its share.
template <class T, class... Ps>
void train_case(auto& comm, auto& ddp, const nlohmann::json& c, const std::string& name,
                std::size_t inputs, std::size_t classes, std::size_t first_step = 0) {
  const std::size_t rows = number_in(c, "batch");
  const std::size_t steps = number_in(c, "steps");
  for (std::size_t s = first_step; s < steps; ++s) {
    const double loss =
        ddp.step(labelled<T>(samples_of(share_of(comm, c), rows, inputs, classes, s)));
    require_figure<T>(name + ", the loss of step " + std::to_string(s), averaged(comm, loss),
                      c.at("mean_loss").at(s));
  }
  comm.synchronize();
  if constexpr (captures<Ps...>) {
    using Batch = LabelledBatch<T, std::int32_t>;
    require(steps < 2 || ddp.template captured_graphs<Batch>() != 0,
            name + ": nothing was captured");
  }
}

template <class T, class... Ps>
std::size_t check_train(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Model = NormMlp<T>;
  const nlohmann::json all = reference("syncbn_train.json");
  std::size_t cases = 0;
  for (std::size_t number = 0; number < all.size(); ++number) {
    const nlohmann::json& c = all[number];
    if (!divides(comm.world_size().value(), c)) continue;
    ++cases;
    const std::string name = title<T, Ps...>("syncbn_train.json", number);
    Model model;
    const std::vector<std::size_t> dims = c.at("dims");
    const std::size_t in = model.in = dims.at(0);
    model.hidden = dims.at(1);
    const std::size_t out = model.out = dims.at(2);
    Ddp<Model, Comm, Norms<Synced>, Optimizer<SGDMomentum>, Ps...> ddp(comm, std::move(model));
    ddp.initialize([](auto& initial) {
      std::size_t k = 0;
      Model::for_each_parameter(
          initial, [&](const std::string& key, const auto& view) { write_waves(k++, key, view); });
    });
    ddp.optimizer().lr = c.at("lr");
    ddp.optimizer().momentum = c.at("momentum");
    train_case<T, Ps...>(comm, ddp, c, name, in, out);
    Model::for_each_parameter(ddp, [&](const std::string& key, const auto& view) {
      require_figures<T>(name + ", " + key, downloaded(view), c.at("params").at(key));
    });
    require_figures<T>(name + ", running_mean", downloaded(ddp.buffer("bn1.running_mean"_p)),
                       c.at("running_mean"));
    require_figures<T>(name + ", running_var", downloaded(ddp.buffer("bn1.running_var"_p)),
                       c.at("running_var"));
    require_figure<double>(name + ", num_batches_tracked",
                           downloaded(ddp.buffer("bn1.num_batches_tracked"_p))[0],
                           c.at("num_batches_tracked"));
    const auto outputs = ddp.predict(labelled<T>(
        reference_batch(number_in(c, "batch"), in, out, number_in(c, "eval_batch_step"), 0)));
    require_figures<T>(name + ", outputs in evaluation", downloaded(outputs), c.at("eval_outputs"));
  }
  return cases;
}

/// The parameters of a `GpuConvNet`, in the order in which it declares them.
void for_each_of_convnet(auto&& f) {
  f("conv1.weight", "conv1.weight"_p);
  f("conv1.bias", "conv1.bias"_p);
  f("bn1.weight", "bn1.weight"_p);
  f("bn1.bias", "bn1.bias"_p);
  f("conv2.weight", "conv2.weight"_p);
  f("conv2.bias", "conv2.bias"_p);
  f("bn2.weight", "bn2.weight"_p);
  f("bn2.bias", "bn2.bias"_p);
  f("fc.weight", "fc.weight"_p);
  f("fc.bias", "fc.bias"_p);
}

template <class T, class Layers, class... Ps>
std::size_t check_convnet(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Model = GpuConvNet<T, Layers, dynamic, dynamic, dynamic, dynamic, dynamic>;
  const nlohmann::json all = reference("convnet.json");
  std::size_t cases = 0;
  for (std::size_t number = 0; number < all.size(); ++number) {
    const nlohmann::json& c = all[number];
    if (!divides(comm.world_size().value(), c)) continue;
    ++cases;
    const std::string name = title<T, Ps...>("convnet.json", number);
    const std::vector<std::size_t> channels = c.at("channels");
    const typename Model::Sizes sizes{channels.at(0), number_in(c, "side"), channels.at(1),
                                      channels.at(2), number_in(c, "classes")};
    const std::size_t inputs = sizes.channels * sizes.side * sizes.side;
    Ddp<Model, Comm, Norms<Synced>, Optimizer<SGD>, Ps...> ddp(comm, Model(sizes));
    ddp.initialize([](auto& initial) {
      std::size_t k = 0;
      for_each_of_convnet([&](const std::string& key, auto parameter) {
        write_waves(k++, key, initial.param(parameter));
      });
    });
    ddp.optimizer().lr = c.at("lr");
    std::size_t first_step = 0;
    if constexpr (!captures<Ps...>) {
      // The first step by hand, to see its gradients.
      const auto batch = labelled<T>(
          samples_of(share_of(comm, c), number_in(c, "batch"), inputs, sizes.classes, 0));
      auto averages = ddp.forward(batch).backward().reduce();
      comm.synchronize();
      for_each_of_convnet([&](const std::string& key, auto parameter) {
        require_figures<T>(name + ", the first gradient of " + key,
                           downloaded(averages.grad(parameter)), c.at("first_gradients").at(key));
      });
      const double loss = std::move(averages).update();
      require_figure<T>(name + ", the loss of step 0", averaged(comm, loss),
                        c.at("mean_loss").at(0));
      first_step = 1;
    }
    train_case<T, Ps...>(comm, ddp, c, name, inputs, sizes.classes, first_step);
    for_each_of_convnet([&](const std::string& key, auto parameter) {
      require_figures<T>(name + ", " + key, downloaded(ddp.param(parameter)),
                         c.at("params").at(key));
    });
    const auto running = [&](const char* key, auto buffer) {
      require_figures<T>(name + ", " + key, downloaded(ddp.buffer(buffer)),
                         c.at("running").at(key));
    };
    running("bn1.running_mean", "bn1.running_mean"_p);
    running("bn1.running_var", "bn1.running_var"_p);
    running("bn2.running_mean", "bn2.running_mean"_p);
    running("bn2.running_var", "bn2.running_var"_p);
  }
  return cases;
}

/// A step of `Norms<Local>` is not one of `Norms<Synced>`, but in a world of one.
void check_local(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const auto losses = [&]<class Choice>(std::type_identity<Choice>) {
    NormMlp<double> model;
    model.in = 12;
    model.hidden = 16;
    model.out = 5;
    Ddp<NormMlp<double>, Comm, Norms<Choice>, Optimizer<SGD>> ddp(comm, std::move(model));
    ddp.optimizer().lr = 0.05;
    std::vector<double> all;
    for (std::size_t s = 0; s < 3; ++s) {
      const double loss =
          ddp.step(labelled<double>(reference_batch(6, 12, 5, s, comm.rank().value())));
      all.push_back(averaged(comm, loss));
    }
    return all;
  };
  const bool same = losses(std::type_identity<Local>{}) == losses(std::type_identity<Synced>{});
  require(same == (comm.world_size().value() == 1),
          same ? "norms of a rank's own rows train as those of all ranks"
               : "in a world of one, norms of all ranks train otherwise than norms of one");
}

#if LOCKSTEP_HAS_CUDNN
/// cuDNN's convolutions, without TF32, and the last layer of the tests.
struct CudnnReferenceLayers : KernelLayers {
  using Library = Cudnn;
  template <class T>
  using Convolution = CudnnConvolution<T, false>;
};
#endif

/// Runs the checks of these names, or all. `Every` is false where the same code is compiled
/// elsewhere.
template <bool Every>
void run_norm_checks(auto& comm, const std::string& list) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  gpu_test::CheckNames names(list);
  const auto run = [&](const char* check, auto f) {
    if (!names.wants(check)) return;
    const std::size_t cases = f();
    require(cases != 0 || names.has_all(), std::string(check) + " has no case of " +
                                               std::to_string(comm.world_size().value()) +
                                               " ranks");
    comm.barrier();
    if (comm.rank() == Rank{0} && cases != 0)
      std::printf("ok %s, %zu ranks, %zu cases\n", check, comm.world_size().value(), cases);
  };
  run("figures", [&] { return check_figures<double>(comm); });
  run("train", [&] { return check_train<double>(comm); });
  run("convnet", [&] { return check_convnet<double, KernelLayers>(comm); });
  if constexpr (Every) {
    run("float", [&] {
      return check_figures<float>(comm) + check_train<float>(comm) +
             check_convnet<float, KernelLayers>(comm);
    });
    run("local", [&] {
      check_local(comm);
      return std::size_t{1};
    });
    if constexpr (Capturing<Comm>) {
      run("captured", [&] {
        return check_figures<double, CapturedStep>(comm) + check_train<double, CapturedStep>(comm) +
               check_convnet<double, KernelLayers, CapturedStep>(comm);
      });
    }
#if LOCKSTEP_HAS_CUDNN
    run("cudnn", [&] {
      std::size_t cases = check_convnet<double, CudnnReferenceLayers>(comm) +
                          check_convnet<float, CudnnReferenceLayers>(comm);
      if constexpr (Capturing<Comm>)
        cases += check_convnet<double, CudnnReferenceLayers, CapturedStep>(comm);
      return cases;
    });
#endif
  }
  names.require_known();
}

}  // namespace norm_test

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file GPT-2 as a model with its own forward and backward pass, in bfloat16.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cudnn_attention.hpp"
#include "device_array.cuh"
#include "gpt2/cross_entropy.cuh"
#include "gpt2/embedding.cuh"
#include "gpt2/hugging_face.hpp"
#include "gpt2/layer_norm.cuh"
#include "gpt2/products.cuh"
#include "lockstep/lockstep.cuh"

namespace gpt2 {

using namespace lockstep;

/// What backward computes again instead of reading it: nothing; the outputs of GELU, a quarter of
/// what a block keeps; or all of a block but its input.
enum class Recompute { none, gelu, block };

/// y = GELU(x), by the tanh that GPT-2 has.
static __global__ void gelu_packets(const Packet* x, Packet* y, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  Packet packet = x[i];
  for (auto& value : packet.at) {
    const auto v = static_cast<float>(value);
    value = BFloat16(0.5f * v * (1 + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))));
  }
  y[i] = packet;
}

/// The scores of one place in each window.
static __global__ void read_scores(const BFloat16* scores, std::size_t stride, std::size_t tokens,
                                   const std::int32_t* places, std::size_t length, float* to) {
  const std::size_t token = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t window = blockIdx.y;
  if (token >= tokens) return;
  const std::size_t row = window * length + static_cast<std::size_t>(places[window]);
  to[window * tokens + token] = static_cast<float>(scores[row * stride + token]);
}

/// GPT-2 with the parameters of Hugging Face's, under their names; the vocabulary's table is padded
/// to a multiple of 128 rows, which matrix products want, and the rows behind its end count in no
/// softmax. No dropout.
///
/// A batch has windows of `Context` tokens and one more, which the last place predicts: `inputs`.
/// For a prediction, `labels` says which place of each window is asked for. Parameters are seen in
/// bfloat16: `Precision<Mixed<BFloat16>>`.
template <std::size_t Layers = 12, std::size_t Width = 768, std::size_t Heads = 12,
          std::size_t Context = 1024, std::size_t Vocabulary = 50257,
          Recompute Again = Recompute::none>
class Gpt2 {
  using Block =
      ParameterList<Parameter<"ln_1.weight", float, Width>, Parameter<"ln_1.bias", float, Width>,
                    Parameter<"attn.c_attn.weight", float, Width, 3 * Width>,
                    Parameter<"attn.c_attn.bias", float, 3 * Width>,
                    Parameter<"attn.c_proj.weight", float, Width, Width>,
                    Parameter<"attn.c_proj.bias", float, Width>,
                    Parameter<"ln_2.weight", float, Width>, Parameter<"ln_2.bias", float, Width>,
                    Parameter<"mlp.c_fc.weight", float, Width, 4 * Width>,
                    Parameter<"mlp.c_fc.bias", float, 4 * Width>,
                    Parameter<"mlp.c_proj.weight", float, 4 * Width, Width>,
                    Parameter<"mlp.c_proj.bias", float, Width>>;

 public:
  static constexpr std::size_t context = Context, vocabulary = Vocabulary;
  static constexpr std::size_t padded = (Vocabulary + 127) / 128 * 128;

  using Parameters =
      ParameterList<Parameter<"wte.weight", float, padded, Width>,
                    Parameter<"wpe.weight", float, Context, Width>, Repeat<"h", Layers, Block>,
                    Parameter<"ln_f.weight", float, Width>, Parameter<"ln_f.bias", float, Width>>;
  using Output = OutputOf<float, Vocabulary>;

  /// `algorithms`: what `choose` has returned; else products take cuBLASLt's first proposals.
  /// `weights`: a file of Hugging Face's to begin with, if any.
  explicit Gpt2(const std::string& algorithms = {}, std::string weights = {})
      : algorithms_(algorithms), weights_(std::move(weights)) {}

  /// The shape that Hugging Face's file has for a parameter: its table of tokens is not padded.
  static std::vector<std::size_t> shape_in_file(std::string_view name, const auto& view) {
    std::vector<std::size_t> shape;
    for (std::size_t axis = 0; axis != view.rank(); ++axis) shape.push_back(view.extent(axis));
    if (name == "wte.weight") shape[0] = Vocabulary;
    return shape;
  }

  /// Without a file, the values that GPT-2 begins with: what is added to the residual stream is
  /// smaller the more layers add to it.
  void initialize(auto& initial) {
    if (!weights_.empty()) {
      HuggingFaceFile file(weights_);
      initial.for_each_parameter([&](std::string_view name, auto view) {
        file.read(name, shape_in_file(name, view), {view.data_handle(), view.size()});
      });
      return;
    }
    const double deep = 0.02 / std::sqrt(2.0 * Layers);
    initial.for_each_parameter([&](std::string_view name, auto view) {
      const bool is_norm = name.find("ln_") != name.npos, is_bias = name.ends_with("bias");
      const double deviation = name.ends_with("c_proj.weight") ? deep : 0.02;
      const std::size_t used = count_of(shape_in_file(name, view));
      for (std::size_t i = 0; i != view.size(); ++i) {
        double value = 0;
        if (is_norm && !is_bias) value = 1;
        if (!is_norm && !is_bias && i < used) value = deviation * initial.random().normal();
        view.data_handle()[i] = static_cast<float>(value);
      }
    });
  }

  /// **Stream** puts the mean loss of all places into `step.loss()`.
  void forward(auto& step, const auto& batch) {
    Plan& plan = plan_for(batch.size());
    run<true>(step, batch, plan);
    add_up(step, batch, plan, step.loss());
  }

  /// **Stream** overwrites all gradients, for the batch that `forward` has just seen.
  void backward(auto& step, const auto& batch) {
    Plan& plan = plan_for(batch.size());
    const cudaStream_t stream = step.stream();
    plan.norms.template backward<false>(
        stream, plan.x.back(), plan.narrow_gradient, plan.last_statistics,
        at(step.param("ln_f.weight"_p)), plan.d,
        {at(step.grad("ln_f.weight"_p)), at(step.grad("ln_f.bias"_p))},
        at(step.grad("h"_p / lockstep::at<Layers - 1> / "mlp.c_proj.bias"_p)));
    step.ready("ln_f.bias"_p);
    step.ready("ln_f.weight"_p);
    for_each_layer([&]<std::size_t L>(std::integral_constant<std::size_t, L>) {
      block_back<Layers - 1 - L>(step, plan);
    });
    plan.embeddings(stream, windows_of(batch), plan.d, plan.scores_by_weight,
                    at(step.grad("wte.weight"_p)), at(step.grad("wpe.weight"_p)), Context);
    step.ready("wpe.weight"_p);
    step.ready("wte.weight"_p);
  }

  /// **Host** waits for the batch's loss.
  void evaluate(auto& step, const auto& batch, auto& tally) {
    Plan& plan = plan_for(batch.size());
    run<false>(step, batch, plan);
    add_up(step, batch, plan, plan.mean);
    step.synchronize();
    double mean = 0;
    float weight = 0;
    check_cuda(cudaMemcpy(&mean, plan.mean, sizeof mean, cudaMemcpyDefault), "cudaMemcpy");
    check_cuda(cudaMemcpy(&weight, plan.weight, sizeof weight, cudaMemcpyDefault), "cudaMemcpy");
    tally.add("loss", mean * weight, static_cast<std::size_t>(weight));
  }

  /// **Stream** writes the scores of the token behind one place of each window.
  void predict(auto& step, const auto& batch, auto outputs) {
    Plan& plan = plan_for(batch.size());
    run<false>(step, batch, plan, [&](std::size_t first, std::size_t count) {
      read_scores<<<dim3((Vocabulary + 255) / 256, static_cast<unsigned>(count)), 256, 0,
                    step.stream()>>>(plan.scores, padded, Vocabulary, batch.labels + first, Context,
                                     at(outputs) + first * Vocabulary);
      check_launch("read_scores");
    });
  }

  /// The fastest algorithms for batches of `windows`, by trying those that are not `known`.
  /// **Host** blocks, for half a second.
  static std::string choose(std::size_t windows, const std::string& known = {}) {
    MatmulAlgorithms algorithms(known, MatmulAlgorithms::Unknown::tried);
    const CublasLt cublas;
    const Products products(cublas, &algorithms, windows * Context, piece(windows) * Context, Width,
                            padded);
    return algorithms.text();
  }

 private:
  /// What a block keeps for its backward pass, beside its input.
  struct Kept {
    explicit Kept(std::size_t rows)
        : normal1(rows * Width),
          qkv(rows * 3 * Width),
          attended(rows * Width),
          middle(rows * Width),
          normal2(rows * Width),
          before_gelu(rows * 4 * Width),
          sums(rows * Heads),
          statistics1(rows),
          statistics2(rows) {}

    DeviceArray<BFloat16> normal1, qkv, attended, middle, normal2, before_gelu;
    DeviceArray<float> sums;  // of attention's softmax
    DeviceArray<Statistics> statistics1, statistics2;
  };

  /// The memory and products for batches of one size, kept, because captured steps refer to them.
  struct Plan {
    Plan(std::size_t windows, const CublasLt& cublas, MatmulAlgorithms* algorithms)
        : rows(windows * Context),
          score_rows(piece(windows) * Context),
          products(cublas, algorithms, rows, score_rows, Width, padded),
          attention({windows, Context, Heads, Width / Heads}),
          attention_memory(attention.workspace_bytes()),
          norms(rows),
          biases(rows, 4 * Width),
          embeddings(rows, padded),
          x(several<DeviceArray<BFloat16>>(Layers + 1, rows * Width)),
          kept(several<Kept>(Again == Recompute::block ? 1 : Layers, rows)),
          after_gelu(several<DeviceArray<BFloat16>>(Again == Recompute::none ? Layers : 1,
                                                    rows * 4 * Width)),
          last_normal(rows * Width),
          last_statistics(rows),
          scores(score_rows * padded),
          scores_by_weight(padded * Width),
          losses(rows),
          mean(1),
          weight(1),
          d(rows * Width),
          narrow_gradient(rows * Width),
          wide_gradient(rows * 4 * Width) {}

    template <class T>
    static std::vector<T> several(std::size_t count, std::size_t size) {
      std::vector<T> all;
      for (std::size_t i = 0; i != count; ++i) all.emplace_back(size);
      return all;
    }
    Kept& kept_of(std::size_t layer) { return kept[layer % kept.size()]; }
    BFloat16* gelu_of(std::size_t layer) { return after_gelu[layer % after_gelu.size()]; }

    std::size_t rows, score_rows;
    Products products;
    CudnnAttention attention;
    DeviceArray<std::byte> attention_memory;
    LayerNorms<Width> norms;
    BiasGradients biases;
    EmbeddingGradients<Width> embeddings;
    std::vector<DeviceArray<BFloat16>> x;  // the inputs of blocks, and the last one's output
    std::vector<Kept> kept;
    std::vector<DeviceArray<BFloat16>> after_gelu;
    DeviceArray<BFloat16> last_normal;
    DeviceArray<Statistics> last_statistics;
    DeviceArray<BFloat16> scores;
    DeviceArray<float> scores_by_weight, losses;
    DeviceArray<double> mean;
    DeviceArray<float> weight;
    // Gradients: of the residual stream, and of what is as wide as it or four times as wide.
    DeviceArray<BFloat16> d, narrow_gradient, wide_gradient;
  };

  /// A block's parameters; the first norm's is read by what comes before the block, too.
  struct Weights {
    ScaleAndShift<const BFloat16> norm1;
    const BFloat16 *attention, *attention_bias, *joined, *joined_bias;
    ScaleAndShift<const BFloat16> norm2;
    const BFloat16 *wide, *wide_bias, *narrow, *narrow_bias;
  };
  template <std::size_t L>
  static Weights weights_of(auto& step) {
    constexpr auto h = "h"_p / lockstep::at<L>;
    return {{at(step.param(h / "ln_1.weight"_p)), at(step.param(h / "ln_1.bias"_p))},
            at(step.param(h / "attn.c_attn.weight"_p)),
            at(step.param(h / "attn.c_attn.bias"_p)),
            at(step.param(h / "attn.c_proj.weight"_p)),
            at(step.param(h / "attn.c_proj.bias"_p)),
            {at(step.param(h / "ln_2.weight"_p)), at(step.param(h / "ln_2.bias"_p))},
            at(step.param(h / "mlp.c_fc.weight"_p)),
            at(step.param(h / "mlp.c_fc.bias"_p)),
            at(step.param(h / "mlp.c_proj.weight"_p)),
            at(step.param(h / "mlp.c_proj.bias"_p))};
  }

  static auto* at(auto view) {
    using T = std::remove_const_t<typename decltype(view)::element_type>;
    static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, float>);
    return view.data_handle();
  }

  static void for_each_layer(const auto& f) {
    [&]<std::size_t... L>(std::index_sequence<L...>) {
      (f(std::integral_constant<std::size_t, L>{}), ...);
    }(std::make_index_sequence<Layers>{});
  }

  static Windows windows_of(const auto& batch) {
    return {batch.inputs, batch.weights, batch.size(), Context};
  }

  /// How many windows are scored at a time: 8 or fewer, so that scores take little memory.
  static std::size_t piece(std::size_t windows) {
    std::size_t some = std::min<std::size_t>(windows, 8);
    while (windows % some != 0) --some;
    return some;
  }

  Plan& plan_for(std::size_t windows) {
    const auto found = plans_.find(windows);
    if (found != plans_.end()) return found->second;
    return plans_.try_emplace(windows, windows, cublas_, &algorithms_).first->second;
  }

  /// Up to the losses of all places and, in training, the gradients by the last norm's outputs and
  /// by the output layer. `scored(first, count)` is called when windows have scores.
  template <bool Trains>
  void run(auto& step, const auto& batch, Plan& plan, auto&& scored) {
    const cudaStream_t stream = step.stream();
    const Windows windows = windows_of(batch);
    {
      const BFloat16* const of_tokens = at(step.param("wte.weight"_p));
      const BFloat16* const of_positions = at(step.param("wpe.weight"_p));
      constexpr auto h = "h"_p / lockstep::at<0>;
      plan.norms.embed(stream, windows, of_tokens, of_positions, plan.x[0],
                       {at(step.param(h / "ln_1.weight"_p)), at(step.param(h / "ln_1.bias"_p))},
                       plan.kept_of(0).normal1, plan.kept_of(0).statistics1);
    }
    for_each_layer([&]<std::size_t L>(std::integral_constant<std::size_t, L>) {
      const Weights weights = weights_of<L>(step);
      if constexpr (L != 0) {
        Kept& kept = plan.kept_of(L);
        plan.norms.forward(stream, plan.x[L], weights.norm1, kept.normal1, kept.statistics1);
      }
      run_block(stream, L, weights, plan);
      narrow(stream, L, weights, plan);
      step.done("h"_p / lockstep::at<L>);
    });
    plan.norms.forward(stream, plan.x.back(),
                       {at(step.param("ln_f.weight"_p)), at(step.param("ln_f.bias"_p))},
                       plan.last_normal, plan.last_statistics);
    const BFloat16* const table = at(step.param("wte.weight"_p));
    for (std::size_t first = 0; first != plan.rows; first += plan.score_rows) {
      const BFloat16* const rows = plan.last_normal + first * Width;
      plan.products.scores(stream, rows, table, plan.scores);
      scored(first / Context, plan.score_rows / Context);
      score_rows<Trains><<<static_cast<unsigned>(plan.score_rows), score_threads, 0, stream>>>(
          plan.scores, padded, Vocabulary, windows, first, plan.losses);
      check_launch("score_rows");
      if constexpr (Trains) {
        plan.products.scores_by_inputs(stream, plan.scores, table,
                                       plan.narrow_gradient + first * Width);
        const float* const before = first == 0 ? nullptr : +plan.scores_by_weight;
        plan.products.scores_by_weight(stream, plan.scores, rows, plan.scores_by_weight,
                                       {.added = before});
      }
    }
  }
  template <bool Trains>
  void run(auto& step, const auto& batch, Plan& plan) {
    run<Trains>(step, batch, plan, [](std::size_t, std::size_t) {});
  }

  static void add_up(auto& step, const auto& batch, Plan& plan, double* mean) {
    add_losses<<<1, score_threads, 0, step.stream()>>>(plan.losses, windows_of(batch), mean,
                                                       plan.weight);
    check_launch("add_losses");
  }

  /// From the first norm's outputs to GELU's.
  static void run_block(cudaStream_t stream, std::size_t layer, const Weights& weights,
                        Plan& plan) {
    Kept& kept = plan.kept_of(layer);
    Products& products = plan.products;
    products.attention.forward(stream, kept.normal1, weights.attention, kept.qkv,
                               {.bias = weights.attention_bias});
    plan.attention.forward(stream, kept.qkv, kept.attended, kept.sums, plan.attention_memory);
    products.joined.forward(stream, kept.attended, weights.joined, kept.middle,
                            {.bias = weights.joined_bias, .added = plan.x[layer]});
    plan.norms.forward(stream, kept.middle, weights.norm2, kept.normal2, kept.statistics2);
    products.wide.forward(stream, kept.normal2, weights.wide, plan.gelu_of(layer),
                          {.bias = weights.wide_bias, .before_gelu = kept.before_gelu});
  }
  /// The rest, up to the next block's input.
  static void narrow(cudaStream_t stream, std::size_t layer, const Weights& weights, Plan& plan) {
    plan.products.narrow.forward(
        stream, plan.gelu_of(layer), weights.narrow, plan.x[layer + 1],
        {.bias = weights.narrow_bias, .added = plan.kept_of(layer).middle});
  }

  /// From the gradient by a block's output, `plan.d`, to that by its input.
  template <std::size_t L>
  void block_back(auto& step, Plan& plan) {
    constexpr auto h = "h"_p / lockstep::at<L>;
    const cudaStream_t stream = step.stream();
    const Weights weights = weights_of<L>(step);
    Kept& kept = plan.kept_of(L);
    Products& products = plan.products;
    if constexpr (Again == Recompute::block && L != Layers - 1) {
      plan.norms.forward(stream, plan.x[L], weights.norm1, kept.normal1, kept.statistics1);
      run_block(stream, L, weights, plan);
    } else if constexpr (Again == Recompute::gelu && L != Layers - 1) {
      constexpr std::size_t packets = 4 * Width / Packet::size;
      gelu_packets<<<static_cast<unsigned>((plan.rows * packets + 255) / 256), 256, 0, stream>>>(
          reinterpret_cast<const Packet*>(+kept.before_gelu),
          reinterpret_cast<Packet*>(plan.gelu_of(L)), plan.rows * packets);
      check_launch("gelu_packets");
    }

    // The bias's gradient was summed by the norm behind it.
    step.ready(h / "mlp.c_proj.bias"_p);
    products.narrow.by_weight(stream, plan.gelu_of(L), plan.d,
                              at(step.grad(h / "mlp.c_proj.weight"_p)));
    step.ready(h / "mlp.c_proj.weight"_p);
    products.narrow.by_inputs(stream, plan.d, weights.narrow, plan.wide_gradient,
                              {.before_gelu = kept.before_gelu});
    plan.biases(stream, plan.wide_gradient, 4 * Width, at(step.grad(h / "mlp.c_fc.bias"_p)));
    step.ready(h / "mlp.c_fc.bias"_p);
    products.wide.by_weight(stream, kept.normal2, plan.wide_gradient,
                            at(step.grad(h / "mlp.c_fc.weight"_p)));
    step.ready(h / "mlp.c_fc.weight"_p);
    products.wide.by_inputs(stream, plan.wide_gradient, weights.wide, plan.narrow_gradient);
    plan.norms.template backward<true>(
        stream, kept.middle, plan.narrow_gradient, kept.statistics2, weights.norm2.scale, plan.d,
        {at(step.grad(h / "ln_2.weight"_p)), at(step.grad(h / "ln_2.bias"_p))},
        at(step.grad(h / "attn.c_proj.bias"_p)));
    step.ready(h / "ln_2.bias"_p);
    step.ready(h / "ln_2.weight"_p);

    step.ready(h / "attn.c_proj.bias"_p);
    products.joined.by_weight(stream, kept.attended, plan.d,
                              at(step.grad(h / "attn.c_proj.weight"_p)));
    step.ready(h / "attn.c_proj.weight"_p);
    products.joined.by_inputs(stream, plan.d, weights.joined, plan.narrow_gradient);
    plan.attention.backward(stream, kept.qkv, kept.attended, plan.narrow_gradient, kept.sums,
                            plan.wide_gradient, plan.attention_memory);
    plan.biases(stream, plan.wide_gradient, 3 * Width, at(step.grad(h / "attn.c_attn.bias"_p)));
    step.ready(h / "attn.c_attn.bias"_p);
    products.attention.by_weight(stream, kept.normal1, plan.wide_gradient,
                                 at(step.grad(h / "attn.c_attn.weight"_p)));
    step.ready(h / "attn.c_attn.weight"_p);
    products.attention.by_inputs(stream, plan.wide_gradient, weights.attention,
                                 plan.narrow_gradient);
    BFloat16* bias = nullptr;
    if constexpr (L != 0) bias = at(step.grad("h"_p / lockstep::at<L - 1> / "mlp.c_proj.bias"_p));
    plan.norms.template backward<true>(
        stream, plan.x[L], plan.narrow_gradient, kept.statistics1, weights.norm1.scale, plan.d,
        {at(step.grad(h / "ln_1.weight"_p)), at(step.grad(h / "ln_1.bias"_p))}, bias);
    step.ready(h / "ln_1.bias"_p);
    step.ready(h / "ln_1.weight"_p);
  }

  MatmulAlgorithms algorithms_;
  std::string weights_;
  CublasLt cublas_;
  std::map<std::size_t, Plan> plans_;
};

}  // namespace gpt2

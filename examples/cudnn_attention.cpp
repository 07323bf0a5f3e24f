// SPDX-License-Identifier: Apache-2.0
#include "cudnn_attention.hpp"

#include <cudnn_frontend.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

namespace fe = cudnn_frontend;

void check(fe::error_t error, const char* what) {
  if (error.is_bad())
    throw std::runtime_error("cuDNN, " + std::string(what) + ": " + error.get_message());
}
void check(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw std::runtime_error("cuDNN, " + std::string(what) + ": " + cudnnGetErrorString(status));
}

/// Tensors of the graphs, by which a call says where each of them lies.
enum Tensor : std::int64_t { q, k, v, outputs, sums, d_outputs, d_q, d_k, d_v };

}  // namespace

class CudnnAttention::Graphs {
 public:
  explicit Graphs(const AttentionShape& shape)
      : windows_(static_cast<std::int64_t>(shape.windows)),
        length_(static_cast<std::int64_t>(shape.length)),
        heads_(static_cast<std::int64_t>(shape.heads)),
        features_(static_cast<std::int64_t>(shape.features)) {
    check(cudnnCreate(&handle_), "cudnnCreate");
    for (Graph* const graph : {&forward_, &backward_})
      graph->set_io_data_type(fe::DataType_t::BFLOAT16)
          .set_intermediate_data_type(fe::DataType_t::FLOAT)
          .set_compute_data_type(fe::DataType_t::FLOAT);
    const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(features_)));
    {
      auto options = fe::graph::SDPA_attributes().set_causal_mask(true).set_attn_scale(scale);
      options.set_generate_stats(true);
      auto [out, log_sums] = forward_.sdpa(given(forward_, q, 3), given(forward_, k, 3),
                                           given(forward_, v, 3), options);
      made(*out, outputs, 1);
      log_sums->set_output(true)
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim(dims_of_sums())
          .set_stride(strides_of_sums())
          .set_uid(sums);
      build(forward_);
    }
    auto options =
        fe::graph::SDPA_backward_attributes().set_causal_mask(true).set_attn_scale(scale);
    options.set_deterministic_algorithm(true);
    auto log_sums = backward_.tensor(fe::graph::Tensor_attributes()
                                         .set_data_type(fe::DataType_t::FLOAT)
                                         .set_dim(dims_of_sums())
                                         .set_stride(strides_of_sums())
                                         .set_uid(sums));
    auto [dq, dk, dv] = backward_.sdpa_backward(
        given(backward_, q, 3), given(backward_, k, 3), given(backward_, v, 3),
        given(backward_, outputs, 1), given(backward_, d_outputs, 1), log_sums, options);
    made(*dq, d_q, 3);
    made(*dk, d_k, 3);
    made(*dv, d_v, 3);
    build(backward_);
  }
  ~Graphs() { static_cast<void>(cudnnDestroy(handle_)); }
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  std::size_t workspace_bytes() const { return workspace_bytes_; }

  void forward(cudaStream_t stream, const void* qkv, void* out, float* log_sums, void* workspace) {
    run(forward_, stream,
        {{q, part(qkv, 0)}, {k, part(qkv, 1)}, {v, part(qkv, 2)}, {outputs, out}, {sums, log_sums}},
        workspace);
  }
  void backward(cudaStream_t stream, const void* qkv, const void* out, const void* d_out,
                const float* log_sums, void* d_qkv, void* workspace) {
    run(backward_, stream,
        {{q, part(qkv, 0)},
         {k, part(qkv, 1)},
         {v, part(qkv, 2)},
         {outputs, const_cast<void*>(out)},
         {d_outputs, const_cast<void*>(d_out)},
         {sums, const_cast<float*>(log_sums)},
         {d_q, part(d_qkv, 0)},
         {d_k, part(d_qkv, 1)},
         {d_v, part(d_qkv, 2)}},
        workspace);
  }

 private:
  using Graph = fe::graph::Graph;
  using Sizes = std::vector<std::int64_t>;

  Sizes dims() const { return {windows_, heads_, length_, features_}; }
  Sizes strides(std::int64_t parts) const {
    const std::int64_t place = parts * heads_ * features_;
    return {length_ * place, features_, place, 1};
  }
  Sizes dims_of_sums() const { return {windows_, heads_, length_, 1}; }
  Sizes strides_of_sums() const { return {heads_ * length_, length_, 1, 1}; }

  /// Of `parts` tensors whose places lie behind each other: 3 for queries, keys and values.
  std::shared_ptr<fe::graph::Tensor_attributes> given(Graph& graph, Tensor tensor,
                                                      std::int64_t parts) const {
    return graph.tensor(
        fe::graph::Tensor_attributes().set_dim(dims()).set_stride(strides(parts)).set_uid(tensor));
  }
  void made(fe::graph::Tensor_attributes& result, Tensor tensor, std::int64_t parts) const {
    result.set_output(true).set_dim(dims()).set_stride(strides(parts)).set_uid(tensor);
  }
  void* part(const void* qkv, std::int64_t index) const {
    constexpr std::int64_t element_bytes = 2;
    return const_cast<char*>(static_cast<const char*>(qkv)) +
           index * heads_ * features_ * element_bytes;
  }

  void build(Graph& graph) {
    check(graph.build(handle_, {fe::HeurMode_t::A}), "attention");
    workspace_bytes_ =
        std::max(workspace_bytes_, static_cast<std::size_t>(graph.get_workspace_size()));
  }
  void run(Graph& graph, cudaStream_t stream, std::unordered_map<std::int64_t, void*> tensors,
           void* workspace) {
    check(cudnnSetStream(handle_, stream), "cudnnSetStream");
    check(graph.execute(handle_, tensors, workspace), "attention");
  }

  std::int64_t windows_, length_, heads_, features_;
  cudnnHandle_t handle_ = nullptr;
  Graph forward_, backward_;
  std::size_t workspace_bytes_ = 0;
};

CudnnAttention::CudnnAttention(const AttentionShape& shape)
    : graphs_(std::make_unique<Graphs>(shape)) {}
CudnnAttention::~CudnnAttention() = default;
CudnnAttention::CudnnAttention(CudnnAttention&&) noexcept = default;

std::size_t CudnnAttention::workspace_bytes() const { return graphs_->workspace_bytes(); }
void CudnnAttention::forward(cudaStream_t stream, const void* qkv, void* out, float* log_sums,
                             void* workspace) const {
  graphs_->forward(stream, qkv, out, log_sums, workspace);
}
void CudnnAttention::backward(cudaStream_t stream, const void* qkv, const void* out,
                              const void* d_out, const float* log_sums, void* d_qkv,
                              void* workspace) const {
  graphs_->backward(stream, qkv, out, d_out, log_sums, d_qkv, workspace);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Products of row-major matrices by cuBLASLt: planned once, run often.

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "lockstep/lockstep.cuh"

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw lockstep::Error(
      call, std::string(cublasLtGetStatusName(status)) + ", " + cublasLtGetStatusString(status),
      "see cuBLAS's documentation of this status", lockstep::rank_of_thread());
}

/// cuBLASLt for the current GPU.
class CublasLt {
 public:
  CublasLt() {
    cublasLtHandle_t handle = nullptr;
    check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
    handle_.reset(handle);
  }
  cublasLtHandle_t get() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(cublasLtHandle_t handle) const { static_cast<void>(cublasLtDestroy(handle)); }
  };
  std::unique_ptr<std::remove_pointer_t<cublasLtHandle_t>, Destroy> handle_;
};

template <class T>
constexpr cudaDataType_t cuda_type() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, lockstep::BFloat16> ||
                    std::is_same_v<T, lockstep::Half>,
                "lockstep: the GPU example computes in float, BFloat16 or Half");
  if (std::is_same_v<T, lockstep::BFloat16>) return CUDA_R_16BF;
  return std::is_same_v<T, lockstep::Half> ? CUDA_R_16F : CUDA_R_32F;
}

enum class Stored { plain, transposed };

/// d = a b, where d has `rows` x `columns` elements and each is a sum of `terms`. Sums are taken in
/// float: not in TF32, which PyTorch does not use either unless told.
///
/// The algorithm is the first that cuBLASLt's heuristics name. It is not chosen by measuring, which
/// could make two runs differ. Every product has its own workspace, so two may run at once.
template <class T>
class Matmul {
 public:
  Matmul(const CublasLt& cublas, std::size_t rows, std::size_t columns, std::size_t terms, Stored a,
         Stored b, cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT)
      : cublas_(cublas.get()) {
    // cuBLASLt counts by columns: what is a row-major matrix here is its transposed matrix there.
    // So it computes d^T = b^T a^T, and its first operand is our b.
    check_cublas(cublasLtMatmulDescInit(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescInit");
    set(CUBLASLT_MATMUL_DESC_TRANSA, b == Stored::plain ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, a == Stored::plain ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (epilogue == CUBLASLT_EPILOGUE_RELU_BIAS) {
      // The heuristics want to know how a bias will be aligned; this one is never read.
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, reinterpret_cast<const T*>(lockstep::arena_alignment));
    }
    a_ = a == Stored::plain ? layout(rows, terms) : layout(terms, rows);
    b_ = b == Stored::plain ? layout(terms, columns) : layout(columns, terms);
    d_ = layout(rows, columns);
    choose();
  }

  /// **Stream** enqueues the product on `stream`. `bias` is for epilogues with one: a number for
  /// each column of d. Matrices start at multiples of 16 bytes.
  void operator()(cudaStream_t stream, const T* a, const T* b, T* d, const T* bias = nullptr) {
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    const float one = 1;
    const float zero = 0;
    check_cublas(cublasLtMatmul(cublas_, &product_, &one, b, &b_, a, &a_, &zero, d, &d_, d, &d_,
                                &algorithm_, workspace_->data(), workspace_->bytes(), stream),
                 "cublasLtMatmul");
  }

 private:
  static constexpr std::size_t most_workspace = std::size_t{4} << 20;

  /// A row-major matrix.
  static cublasLtMatrixLayoutOpaque_t layout(std::size_t rows, std::size_t columns) {
    cublasLtMatrixLayoutOpaque_t result;
    check_cublas(cublasLtMatrixLayoutInit(&result, cuda_type<T>(), columns, rows,
                                          static_cast<std::int64_t>(columns)),
                 "cublasLtMatrixLayoutInit");
    return result;
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check_cublas(cublasLtMatmulDescSetAttribute(&product_, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  }

  void choose() {
    cublasLtMatmulPreferenceOpaque_t preference;
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check_cublas(
          cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
    };
    check_cublas(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace);
    for (const auto alignment :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(alignment, std::uint32_t{16});
    }
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(cublas_, &product_, &b_, &a_, &d_, &d_, &preference,
                                                1, &result, &count),
                 "cublasLtMatmulAlgoGetHeuristic");
    if (count != 1) {
      throw std::runtime_error("cuBLASLt has no algorithm for this product: take another shape");
    }
    algorithm_ = result.algo;
    workspace_ = std::make_unique<lockstep::DeviceArena>(result.workspaceSize);
  }

  cublasLtHandle_t cublas_;
  cublasLtMatmulDescOpaque_t product_;
  cublasLtMatrixLayoutOpaque_t a_, b_, d_;
  cublasLtMatmulAlgo_t algorithm_;
  std::unique_ptr<lockstep::DeviceArena> workspace_;
};

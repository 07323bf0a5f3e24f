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
#include <vector>

#include "lockstep/lockstep.cuh"
#include "matmul_algorithms.cuh"

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
/// The algorithm is the first that cuBLASLt's heuristics name, or the one that `algorithms` have.
/// Every product has its own workspace, so two may run at once.
template <class T, class Out = T>
class Matmul {
 public:
  Matmul(const CublasLt& cublas, std::size_t rows, std::size_t columns, std::size_t terms, Stored a,
         Stored b, cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT,
         MatmulAlgorithms* algorithms = nullptr)
      : cublas_(cublas.get()) {
    // cuBLASLt counts by columns: what is a row-major matrix here is its transposed matrix there.
    // So it computes d^T = b^T a^T, and its first operand is our b.
    check_cublas(cublasLtMatmulDescInit(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                 "cublasLtMatmulDescInit");
    set(CUBLASLT_MATMUL_DESC_TRANSA, b == Stored::plain ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, a == Stored::plain ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    // The heuristics want to know how these will be aligned; they are not read.
    const auto aligned = reinterpret_cast<const void*>(lockstep::arena_alignment);
    if ((epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned);
    if ((epilogue & with_aux) != 0) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aligned);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(columns));
    }
    a_ = a == Stored::plain ? layout<T>(rows, terms) : layout<T>(terms, rows);
    b_ = b == Stored::plain ? layout<T>(terms, columns) : layout<T>(columns, terms);
    d_ = layout<Out>(rows, columns);
    if (algorithms == nullptr) {
      use(ask_heuristics(1).front());
    } else {
      const std::string name =
          std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(terms) +
          (a == Stored::plain ? " a" : " aT") + (b == Stored::plain ? " b" : " bT") + " epilogue " +
          std::to_string(epilogue) + " to " + std::to_string(8 * sizeof(Out)) + " bits";
      choose(*algorithms, name, {rows, columns, terms});
    }
  }

  /// What an epilogue reads or writes beside the operands; all null where there is none.
  struct Epilogue {
    const T* bias = nullptr;     ///< a number for each column of d; written where it is a gradient
    T* before_gelu = nullptr;    ///< of the shape of d: written forward, read back
    const Out* added = nullptr;  ///< of the shape of d, which may be d: d = a b + added
  };

  /// **Stream** enqueues the product on `stream`. Matrices start at multiples of 16 bytes.
  void operator()(cudaStream_t stream, const T* a, const T* b, Out* d,
                  const Epilogue& epilogue = {}) {
    check_cublas(enqueue(stream, a, b, d, epilogue), "cublasLtMatmul");
  }

 private:
  static constexpr std::size_t most_workspace = std::size_t{32} << 20;
  static constexpr int most_tried = 32;
  static constexpr int with_aux = 128;  // the bit of epilogues that have a second matrix

  /// A row-major matrix.
  template <class E>
  static cublasLtMatrixLayoutOpaque_t layout(std::size_t rows, std::size_t columns) {
    cublasLtMatrixLayoutOpaque_t result;
    check_cublas(cublasLtMatrixLayoutInit(&result, cuda_type<E>(), columns, rows,
                                          static_cast<std::int64_t>(columns)),
                 "cublasLtMatrixLayoutInit");
    return result;
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check_cublas(cublasLtMatmulDescSetAttribute(&product_, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  }

  cublasStatus_t enqueue(cudaStream_t stream, const T* a, const T* b, Out* d,
                         const Epilogue& epilogue) {
    if (epilogue.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
    if (epilogue.before_gelu != nullptr)
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.before_gelu);
    const Out* const added = epilogue.added == nullptr ? d : epilogue.added;
    const float one = 1;
    const float share = epilogue.added == nullptr ? 0 : 1;
    return cublasLtMatmul(cublas_, &product_, &one, b, &b_, a, &a_, &share, added, &d_, d, &d_,
                          &algorithm_, workspace_->data(), workspace_->bytes(), stream);
  }

  std::vector<cublasLtMatmulHeuristicResult_t> ask_heuristics(int most) {
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
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(most));
    int count = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(cublas_, &product_, &b_, &a_, &d_, &d_, &preference,
                                                most, results.data(), &count),
                 "cublasLtMatmulAlgoGetHeuristic");
    results.resize(static_cast<std::size_t>(count));
    if (results.empty()) {
      throw std::runtime_error("cuBLASLt has no algorithm for this product: take another shape");
    }
    return results;
  }

  struct Size {
    std::size_t rows, columns, terms;
  };
  void choose(MatmulAlgorithms& algorithms, const std::string& name, const Size& size) {
    if (const auto* const known = algorithms.find(name)) {
      use(*known);
      return;
    }
    const auto candidates = ask_heuristics(algorithms.tries() ? most_tried : 1);
    use(candidates.front());
    if (!algorithms.tries()) return;
    const lockstep::DeviceArena left(size.rows * size.terms * sizeof(T)),
        right(size.terms * size.columns * sizeof(T)),
        result(size.rows * size.columns * sizeof(Out)), aux(size.rows * size.columns * sizeof(T)),
        bias(size.columns * sizeof(T));
    const auto numbers = [&](const lockstep::DeviceArena& memory) {
      return reinterpret_cast<T*>(algorithms.fill(memory));
    };
    const T *const x = numbers(left), *const y = numbers(right);
    const Epilogue beside{numbers(bias), numbers(aux)};
    use(algorithms.choose(name, candidates, [&](const auto& candidate) {
      use(candidate);
      return enqueue(algorithms.stream(), x, y, reinterpret_cast<Out*>(result.data()), beside);
    }));
  }

  void use(const cublasLtMatmulHeuristicResult_t& choice) {
    algorithm_ = choice.algo;
    workspace_ = std::make_unique<lockstep::DeviceArena>(choice.workspaceSize);
  }

  cublasLtHandle_t cublas_;
  cublasLtMatmulDescOpaque_t product_;
  cublasLtMatrixLayoutOpaque_t a_, b_, d_;
  cublasLtMatmulAlgo_t algorithm_;
  std::unique_ptr<lockstep::DeviceArena> workspace_;
};

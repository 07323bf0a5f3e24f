// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The matrix products of a transformer's step, for batches of one size.

#include <cstddef>

#include "gpt2/row.cuh"
#include "matmul.cuh"

namespace gpt2 {

/// outputs = inputs weight + bias, forward and back. A weight has a row for each input, as Hugging
/// Face's GPT-2 has it.
struct Linear {
  struct Epilogues {
    cublasLtEpilogue_t forward = CUBLASLT_EPILOGUE_BIAS;
    cublasLtEpilogue_t by_inputs = CUBLASLT_EPILOGUE_DEFAULT;
  };

  Linear(const CublasLt& cublas, MatmulAlgorithms* algorithms, std::size_t rows, std::size_t in,
         std::size_t out, const Epilogues& epilogues)
      : forward(cublas, rows, out, in, Stored::plain, Stored::plain, epilogues.forward, algorithms),
        by_inputs(cublas, rows, in, out, Stored::plain, Stored::transposed, epilogues.by_inputs,
                  algorithms),
        by_weight(cublas, in, out, rows, Stored::transposed, Stored::plain,
                  CUBLASLT_EPILOGUE_DEFAULT, algorithms) {}

  Matmul<BFloat16> forward, by_inputs, by_weight;
};

/// GELU is made by the product before it, which keeps what it was made of, and its gradient by the
/// product behind it. Gradients of biases are sums of their own (column_sums.cuh): as epilogues
/// they take longer, beside GELU's gradient three times as long.
struct Products {
  Products(const CublasLt& cublas, MatmulAlgorithms* algorithms, std::size_t rows,
           std::size_t score_rows, std::size_t width, std::size_t vocabulary)
      : attention(cublas, algorithms, rows, width, 3 * width, {}),
        joined(cublas, algorithms, rows, width, width, {}),
        wide(cublas, algorithms, rows, width, 4 * width,
             {.forward = CUBLASLT_EPILOGUE_GELU_AUX_BIAS}),
        narrow(cublas, algorithms, rows, 4 * width, width, {.by_inputs = CUBLASLT_EPILOGUE_DGELU}),
        scores(cublas, score_rows, vocabulary, width, Stored::plain, Stored::transposed,
               CUBLASLT_EPILOGUE_DEFAULT, algorithms),
        scores_by_inputs(cublas, score_rows, width, vocabulary, Stored::plain, Stored::plain,
                         CUBLASLT_EPILOGUE_DEFAULT, algorithms),
        scores_by_weight(cublas, vocabulary, width, score_rows, Stored::transposed, Stored::plain,
                         CUBLASLT_EPILOGUE_DEFAULT, algorithms) {}

  Linear attention, joined, wide, narrow;
  Matmul<BFloat16> scores, scores_by_inputs;
  Matmul<BFloat16, float> scores_by_weight;  // summed over pieces of a batch
};

}  // namespace gpt2

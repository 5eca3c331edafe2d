// A matrix of small integers, and all that is computed with it and with heads.
//
// Knows: how export/quantize/quill_layout.py lays weights out. Does not know: ONNX Runtime, processors.
#pragma once
#include <cstdint>

#include "cells.h"
#include "heads.h"

namespace quill {

constexpr int64_t kBlock = 32;    // neighbouring inputs that share a scale
constexpr int64_t kColumns = 16;  // outputs that are computed side by side: a group

// Groups of columns x blocks of inputs x records. A record holds the scales of its 16 columns (for
// 4 bits the minima as well) and then their integers, four neighbouring inputs of each column at a
// time: what processors multiply and add up in one go.
struct Matrix {
  const uint8_t* records;
  int64_t inputs;
  int64_t columns;
  int64_t bits;  // 4: weight = scale * q + minimum. 8: weight = scale * (q - 128). 32: floats
  bool halves;   // scales and minima have 16 bits, not 32. 8 bits then have minima, too
  bool gated;    // groups take turns: the output is silu(first) * second

  int64_t blocks() const { return inputs / kBlock; }
  int64_t groups() const { return (columns + kColumns - 1) / kColumns; }
  int64_t outputs() const { return gated ? columns / 2 : columns; }
  int64_t head_bytes() const { return bits == 8 || halves ? 64 : 128; }
  // Of each input: 4-bit weights meet inputs of 8 bits, and 8-bit weights inputs of 16.
  int64_t input_bytes() const { return bits / 4; }
  int64_t record_bytes() const { return head_bytes() + kBlock * kColumns * bits / 8; }
  int64_t size() const {
    if (bits == 32) return groups() * inputs * kColumns * 4;  // an input's 16 columns side by side
    return groups() * blocks() * record_bytes();
  }
};

// Rows of inputs, rounded to integers with one scale for each block.
struct Rounded {
  uint8_t* q;      // rows x inputs x bytes. Of each four with 16 bits the middle ones are swapped
  float* scale;    // rows x blocks
  float* sum;      // rows x blocks: the sum of what a block's integers stand for
  int32_t* shift;  // rows x blocks: -128 times the sum of a block's integers
};

// What is added to a product, if anything, and where it goes.
struct Output {
  const float* bias;
  const float* residual;
  float* y;
};

// How a token's experts are chosen, by what its router said of each.
struct Routing {
  int64_t number, per_token;
  int64_t groups, top_groups;  // experts come from the best groups
  int64_t group_best;          // a group is as good as so many of its best experts together
  bool sigmoid;                // scores are each for itself, not shares of a whole
  bool normalize;              // weights are divided by their sum
  float scale;
};

constexpr int64_t kMaxExperts = 1 << 12;

// What is computed. Each row is computed as if it were alone, in the same order of operations on
// every processor: neither its company nor the machine can change a bit of it.
struct Kernels {
  // Divides rows by their root mean square if there are gains, and rounds them for a matrix.
  void (*round)(const Matrix& matrix, const float* x, const float* gains, float epsilon,
                int64_t first, int64_t last, const Rounded& to);
  // Multiplies all rows with some pairs of groups.
  void (*multiply)(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t first,
                   int64_t last, const Output& out);
  // The same with a matrix of floats.
  void (*multiply_floats)(const Matrix& matrix, const float* x, int64_t rows, int64_t first,
                          int64_t last, const Output& out);
  // A token's experts, the best first, and what each of them counts for. `balance`, which may be
  // null, is added to scores when they are compared.
  void (*choose)(const Routing& routing, const float* logits, const float* balance,
                 int32_t* chosen, float* weights);
  // Puts a token's keys and values into their block, and its queries where they are looked for.
  void (*append)(const Heads& heads, const Token& token);
  // Lets queries look at a chunk together, and adds that to what they have seen.
  void (*attend)(const Chunk& chunk, const Query* queries, int64_t num);
  // Merges what a query has seen of each chunk, in their order, and divides it by its weights.
  void (*finish)(float* seen, int64_t num_chunks, int64_t size, float* to);
  // Changes a recurrent state by a token.
  void (*update)(const Cell& cell, const Gates& gates);
  // Multiplies one row with weights that aren't rounded.
  void (*multiply_row)(const RowProduct& of, const float* x, float* y);
  // Lets a query look at a source additively. There is room for a score at each position of its blocks.
  void (*attend_additively)(const Heads& heads, const AdditiveQuery& query, float* scores,
                            float* out);
};

Kernels plain_kernels();
#ifdef __x86_64__
Kernels avx2_kernels();
Kernels avx512_kernels();
#endif

}  // namespace quill

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

// A layout is one of GGUF's kinds of blocks, for 16 columns side by side. Integers have `bits` bits;
//
//   weight = scale * (q - middle), or scale * q + minimum if the middle is 0.
//
// A record is some blocks of inputs: 16 scales of float16 (and 16 minima), then what its blocks have
// beside them, then the integers of its blocks. In a record of eight blocks each block and column has
// two small integers: those that the scale and minus the minimum are multiplied with (unsigned), or
// with two scales of a block those of its first and last 16 inputs (signed).
//
// Codes are those of MXFP4: four bits, a sign and one of eight numbers. A scale is a power of two, of
// bfloat16, and q is what kCodes has for the code: the middle plus twice the number.
struct Layout {
  int bits, middle;
  int blocks;  // of a record
  int scales;  // of a block
  bool codes = false;

  constexpr int inputs() const { return static_cast<int>(kBlock) * blocks; }
  constexpr int numbers() const { return middle ? 1 : 2; }
  constexpr int small_at(int block) const { return 32 * (numbers() + block); }
  constexpr int body_at(int block) const {
    return small_at(blocks > 1 ? blocks : 0) + 64 * bits * block;
  }
  constexpr int bytes() const { return body_at(blocks); }
};

// In the order of export/quantize/quill_layout.py.
constexpr int kFloatBits = 32;  // no integers: an input's 16 columns side by side
constexpr Layout kLayouts[] = {
    {4, 8, 1, 1},    // q4_0
    {4, 0, 1, 1},    // q4_1
    {5, 16, 1, 1},   // q5_0
    {5, 0, 1, 1},    // q5_1
    {8, 128, 1, 1},  // q8_0
    {4, 0, 8, 1},    // q4_k
    {5, 0, 8, 1},    // q5_k
    {6, 32, 8, 2},   // q6_k
    {kFloatBits, 0, 1, 1},
    {4, 12, 1, 1, true},  // mxfp4
};
constexpr int64_t kNumLayouts = sizeof kLayouts / sizeof kLayouts[0];
constexpr int64_t kFloats = 8;
static_assert(kLayouts[kFloats].bits == kFloatBits);
constexpr uint8_t kCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Groups of columns x records.
struct Matrix {
  const uint8_t* records;
  int64_t inputs;
  int64_t columns;
  int64_t layout;
  int64_t input_bits;  // that inputs are rounded to; of no meaning with floats
  bool gated;          // groups take turns: the output is silu(first) * second
  float clamp = 0;     // gated: (second + 1) * first / (1 + exp(-slope * first)), both within it
  float slope = 1;

  const Layout& of() const { return kLayouts[layout]; }
  int64_t blocks() const { return inputs / kBlock; }
  int64_t groups() const { return (columns + kColumns - 1) / kColumns; }
  int64_t outputs() const { return gated ? columns / 2 : columns; }
  int64_t input_bytes() const { return input_bits / 8; }
  int64_t group_bytes() const {
    return layout == kFloats ? inputs * kColumns * 4 : inputs / of().inputs() * of().bytes();
  }
  int64_t size() const { return groups() * group_bytes(); }
};

// Rows of inputs, rounded to integers with one scale for each block.
struct Rounded {
  uint8_t* q;      // rows x inputs x bytes. Of each four with 16 bits the middle ones are swapped
  float* scale;    // rows x blocks
  float* sum;      // rows x blocks: the sum of what a block's integers stand for
  int32_t* shift;  // rows x blocks x scales of a block: minus the middle times the sum of integers
};

// What is added to a product, if anything, and where it goes.
struct Output {
  const float* bias;
  const float* residual;
  float* y;
  const float* gate_bias = nullptr;  // added before the gate, in the order of groups
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
  // Merges what a query has seen of each chunk, in their order, and divides it by its weights. `sink`,
  // which may be null, is a score that has a weight and no value.
  void (*finish)(float* seen, int64_t num_chunks, int64_t size, const float* sink, float* to);
  // Changes a recurrent state by a token.
  void (*update)(const Cell& cell, const Gates& gates);
  // Multiplies one row with weights that aren't rounded.
  void (*multiply_row)(const RowProduct& of, const float* x, float* y);
  // Lets a query look at a source additively. There is room for a score at each position of its blocks.
  void (*attend_additively)(const Heads& heads, const AdditiveQuery& query, float* scores,
                            float* out);
  // A token's short convolution with inputs that are in the blocks of its sequence.
  void (*convolve)(const Heads& heads, const Taps& taps, const int32_t* blocks, int64_t position,
                   float* out);
};

Kernels plain_kernels();
#ifdef __x86_64__
Kernels avx2_kernels();
Kernels avxvnni_kernels();
Kernels avx512_kernels();
#endif

}  // namespace quill

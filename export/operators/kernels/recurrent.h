// Recurrent cells and additive attention, written once for all processors.
//
// Knows: lanes, blocks. Does not know: sequences, threads, ONNX Runtime.
//
// Each row is computed as if it were alone, every sum in one order.
#pragma once
#include "attention.h"

namespace quill {
namespace {

// What isn't finite stays so.
INLINE Floats hyperbolic(Floats x) {
  const Floats above = add(exponential(add(x, x)), all(1.f));
  return fused(x, all(0.f), fused(divide(all(2.f), above), all(-1.f), all(1.f)));
}

INLINE Floats sigmoid(Floats x) {
  const Floats above = add(exponential(multiply(x, all(-1.f))), all(1.f));
  return fused(x, all(0.f), divide(all(1.f), above));
}

void update(const Cell& cell, const Gates& gates) {
  const int64_t size = cell.size;
  for (int64_t i = 0; i < size; i += 16) {
    const auto input = [&](int64_t gate) INLINE_LAMBDA { return load(gates.input + gate * size + i); };
    const auto state = [&](int64_t gate) INLINE_LAMBDA { return load(gates.state + gate * size + i); };
    const auto both = [&](int64_t gate) INLINE_LAMBDA { return add(input(gate), state(gate)); };
    Floats h, c;
    if (cell.kind == Cell::kPlain) {
      h = c = hyperbolic(gates.state ? both(0) : input(0));
    } else if (cell.kind == Cell::kGru) {
      const Floats fresh = hyperbolic(fused(sigmoid(both(0)), state(2), input(2)));
      h = c = fused(sigmoid(both(1)), subtracted(load(gates.h + i), fresh), fresh);
    } else {
      const Floats written = multiply(sigmoid(both(0)), hyperbolic(both(2)));
      c = fused(sigmoid(both(1)), load(gates.c + i), written);
      h = multiply(sigmoid(both(3)), hyperbolic(c));
    }
    store(gates.new_h + i, h);
    store(gates.new_c + i, c);
  }
}

template <int WIDE>
INLINE void some_columns(const RowProduct& of, const float* x, int64_t at, float* y) {
  Floats sums[WIDE];
  UNROLLED
  for (int w = 0; w < WIDE; w++) sums[w] = load(of.bias + at + 16 * w);
  for (int64_t i = 0; i < of.inputs; i++) {
    const float* row = of.weights + i * of.columns + at;
    UNROLLED
    for (int w = 0; w < WIDE; w++) sums[w] = fused(all(x[i]), load(row + 16 * w), sums[w]);
  }
  UNROLLED
  for (int w = 0; w < WIDE; w++) store(y + at + 16 * w, sums[w]);
}

void multiply_row(const RowProduct& of, const float* x, float* y) {
  constexpr int kWide = 4;
  int64_t at = 0;
  for (; at + 16 * kWide <= of.columns; at += 16 * kWide) some_columns<kWide>(of, x, at, y);
  for (; at < of.columns; at += 16) some_columns<1>(of, x, at, y);
}

void attend_additively(const Heads& heads, const AdditiveQuery& query, float* scores, float* out) {
  for (int64_t start = 0; start < query.num; start += kPositions) {
    const int32_t block = query.blocks[start / kPositions];
    const float* keys = static_cast<const float*>(heads.keys_of(block, 0));
    Floats sum = all(0.f);
    for (int64_t i = 0; i < heads.size; i++) {
      const Floats suits = hyperbolic(add(load(keys + i * kPositions), all(query.from[i])));
      sum = fused(suits, all(query.score[i]), sum);
    }
    store(scores + start, sum);
  }
  float most, total;
  weigh(scores, 0, query.num, &most, &total);
  const Floats inverse = all(1.f / total);
  for (int64_t at = 0; at < heads.size; at += 16) {
    Floats sum = all(0.f);
    for (int64_t p = 0; p < query.num; p++) {
      const int32_t block = query.blocks[p / kPositions];
      const float* values = static_cast<const float*>(heads.values_of(block, 0));
      sum = fused(all(scores[p]), load(values + p % kPositions * heads.size + at), sum);
    }
    store(out + at, multiply(sum, inverse));
  }
}

}  // namespace
}  // namespace quill

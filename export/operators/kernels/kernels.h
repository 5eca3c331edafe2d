// Rounding and multiplying, written once for all processors.
//
// Knows: the layout of matrices, lanes. Does not know: threads, ONNX Runtime.
#pragma once
#include <type_traits>

#include "lanes.h"
#include "matrix.h"

namespace quill {
namespace {

// Blocks whose largest number is smaller than this count as zeros: its inverse would be infinite.
constexpr float kTiny = 1e-30f;
constexpr float kLargest = 3.402823466e38f;

INLINE float added_up(Floats x) {
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  }
  return v[0];
}

INLINE float inverse_rms(const float* x, float epsilon, int64_t inputs) {
  Floats even = all(0.f), odd = all(0.f);
  for (int64_t i = 0; i < inputs; i += kBlock) {
    const Floats a = load(x + i), b = load(x + i + 16);
    even = fused(a, a, even);
    odd = fused(b, b, odd);
  }
  return 1.f / std::sqrt(added_up(add(even, odd)) / static_cast<float>(inputs) + epsilon);
}

// As integers, so that a NaN is the largest of all and can't get lost.
INLINE float largest(Floats a, Floats b) {
  int32_t v[16];
  store(v, larger(magnitudes(a), magnitudes(b)));
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  }
  float x;
  std::memcpy(&x, v, 4);
  return x;
}

INLINE int32_t added_up(Ints x) {
  int32_t v[16];
  store(v, x);
  int32_t sum = 0;
  for (int32_t each : v) sum += each;
  return sum;
}

template <int BYTES>
INLINE void round_block(Floats a, Floats b, uint8_t* q, float* scale, float* sum, int32_t* shift) {
  constexpr float levels = BYTES == 1 ? 127.f : 32767.f;
  const float most = largest(a, b);
  const bool is_finite = most <= kLargest;  // otherwise zeros: times a scale that isn't finite
  const Floats steps = all(most >= kTiny ? levels / most : 0.f);
  const Ints qa = is_finite ? nearest(multiply(a, steps)) : all(0);
  const Ints qb = is_finite ? nearest(multiply(b, steps)) : all(0);
  if constexpr (BYTES == 1) {
    store_bytes(q, qa);
    store_bytes(q + 16, qb);
  } else {
    store_words(q, qa);
    store_words(q + 32, qb);
  }
  const int32_t total = added_up(add(qa, qb));
  *scale = most / levels;
  *sum = *scale * static_cast<float>(total);
  *shift = -128 * total;
}

template <int BYTES>
void round_rows(const float* x, const float* gains, float epsilon, int64_t inputs, int64_t first,
                int64_t last, const Rounded& to) {
  const int64_t blocks = inputs / kBlock;
  for (int64_t row = first; row < last; row++) {
    const float* from = x + row * inputs;
    const Floats inverse = all(gains ? inverse_rms(from, epsilon, inputs) : 1.f);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t at = block * kBlock, index = row * blocks + block;
      Floats a = load(from + at), b = load(from + at + 16);
      if (gains) {
        a = multiply(multiply(a, inverse), load(gains + at));
        b = multiply(multiply(b, inverse), load(gains + at + 16));
      }
      round_block<BYTES>(a, b, to.q + index * kBlock * BYTES, to.scale + index, to.sum + index,
                         to.shift + index);
    }
  }
}

void round(const Matrix& matrix, const float* x, const float* gains, float epsilon, int64_t first,
           int64_t last, const Rounded& to) {
  if (matrix.bits == 8) round_rows<2>(x, gains, epsilon, matrix.inputs, first, last, to);
  else round_rows<1>(x, gains, epsilon, matrix.inputs, first, last, to);
}

template <int BITS, bool HALVES>
struct Record {
  const uint8_t* p;

  static constexpr int kHead = BITS == 8 || HALVES ? 64 : 128;
  static constexpr bool kHasMinima = BITS == 4 || HALVES;
  static constexpr int kInputBytes = BITS / 4;
  // Each takes four bytes of the inputs: four of 8 bits, or two of 16.
  static constexpr int kSteps = kBlock * kInputBytes / 4;

  INLINE Floats of_head(int index) const {
    if constexpr (HALVES) return load_halves(p + 32 * index);
    else return load(reinterpret_cast<const float*>(p) + 16 * index);
  }
  INLINE Floats scales() const { return of_head(0); }
  INLINE Floats minima() const { return of_head(1); }

  // With 8 bits of inputs 4i and 4i + 2, then of the two beside them. With 4 bits of four inputs;
  // the block's second half is in the high bits of the first.
  using Weights = std::conditional_t<BITS == 8, Words, Bytes>;
  INLINE Weights weights(int step) const {
    if constexpr (BITS == 8) {
      const Bytes four = load_bytes(p + kHead + 64 * (step / 2));
      return step % 2 ? odd_words(four) : even_words(four);
    } else {
      const Bytes both = load_bytes(p + kHead + 64 * (step % 4));
      return step < 4 ? low_halves(both) : high_halves(both);
    }
  }

  // What a block's products are added up in.
  using Sum = std::conditional_t<BITS == 8, Ints, Pairs>;
  // Weights of 8 bits are 128 too large: the sum begins with what that makes too much.
  static INLINE Sum begin(int32_t shift) {
    if constexpr (BITS == 8) return all(shift);
    else return no_pairs();
  }
  static INLINE Sum dot(Sum sum, Weights w, int32_t x) {
    if constexpr (BITS == 8) return dot8(sum, w, x);
    else return dot4(sum, w, x);
  }
  static INLINE Ints end(Sum sum) {
    if constexpr (BITS == 8) return sum;
    else return widened(sum);
  }
};

// The products of a few rows with one or two neighbouring groups.
template <int BITS, bool HALVES, int GROUPS, int ROWS>
INLINE void tile(const Matrix& matrix, int64_t group, const Rounded& x, int64_t row,
                 Floats (&y)[GROUPS][ROWS]) {
  using Of = Record<BITS, HALVES>;
  const int64_t blocks = matrix.blocks(), width = matrix.inputs * Of::kInputBytes;
  constexpr int64_t bytes = Of::kHead + kBlock * kColumns * BITS / 8;
  const uint8_t* p = matrix.records + group * blocks * bytes;
  const uint8_t* q = x.q + row * width;
  UNROLLED
  for (int g = 0; g < GROUPS; g++) {
    UNROLLED
    for (int r = 0; r < ROWS; r++) y[g][r] = all(0.f);
  }
  for (int64_t block = 0; block < blocks; block++, p += bytes, q += 4 * Of::kSteps) {
    const int64_t index = row * blocks + block;  // of the first row's scale
    typename Of::Sum sums[GROUPS][ROWS];
    UNROLLED
    for (int g = 0; g < GROUPS; g++) {
      UNROLLED
      for (int r = 0; r < ROWS; r++) sums[g][r] = Of::begin(x.shift[index + r * blocks]);
    }
    UNROLLED
    for (int step = 0; step < Of::kSteps; step++) {
      typename Of::Weights w[GROUPS];
      UNROLLED
      for (int g = 0; g < GROUPS; g++) w[g] = Of{p + g * blocks * bytes}.weights(step);
      UNROLLED
      for (int r = 0; r < ROWS; r++) {
        int32_t four;
        std::memcpy(&four, q + r * width + 4 * step, 4);
        UNROLLED
        for (int g = 0; g < GROUPS; g++) sums[g][r] = Of::dot(sums[g][r], w[g], four);
      }
    }
    UNROLLED
    for (int g = 0; g < GROUPS; g++) {
      const Of record{p + g * blocks * bytes};
      const Floats scales = record.scales();
      UNROLLED
      for (int r = 0; r < ROWS; r++) {
        const Floats scale = multiply(scales, all(x.scale[index + r * blocks]));
        y[g][r] = fused(floats(Of::end(sums[g][r])), scale, y[g][r]);
      }
      if constexpr (Of::kHasMinima) {
        const Floats minima = record.minima();
        UNROLLED
        for (int r = 0; r < ROWS; r++) {
          y[g][r] = fused(minima, all(x.sum[index + r * blocks]), y[g][r]);
        }
      }
    }
  }
}

// e to the power of x, with a polynomial; what is beyond float's range is cut off.
INLINE Floats exponential(Floats x) {
  x = smaller(larger(x, all(-87.f)), all(88.f));
  const Ints n = nearest(multiply(x, all(1.44269504f)));
  const Floats negative = multiply(floats(n), all(-1.f));
  Floats r = fused(negative, all(0.693145751953125f), x);
  r = fused(negative, all(1.428606765330187e-6f), r);
  Floats y = all(1.9875691500e-4f);
  y = fused(y, r, all(1.3981999507e-3f));
  y = fused(y, r, all(8.3334519073e-3f));
  y = fused(y, r, all(4.1665795894e-2f));
  y = fused(y, r, all(1.6666665459e-1f));
  y = fused(y, r, all(5.0000001201e-1f));
  y = fused(y, multiply(r, r), add(r, all(1.f)));
  return multiply(y, power_of_two(n));
}

INLINE Floats silu(Floats x) {
  return divide(x, add(all(1.f), exponential(multiply(x, all(-1.f)))));
}

INLINE void put(const Matrix& matrix, const Output& out, int64_t row, int64_t group, Floats y) {
  const int64_t outputs = matrix.outputs(), at = group * kColumns, left = outputs - at;
  float* to = out.y + row * outputs + at;
  if (left >= kColumns) {
    if (out.bias) y = add(y, load(out.bias + at));
    if (out.residual) y = add(y, load(out.residual + row * outputs + at));
    store(to, y);
    return;
  }
  float v[16];
  store(v, y);
  for (int64_t i = 0; i < left; i++) {
    if (out.bias) v[i] += out.bias[at + i];
    if (out.residual) v[i] += out.residual[row * outputs + at + i];
    to[i] = v[i];
  }
}

template <int BITS, bool HALVES, int ROWS>
void multiply_tile(const Matrix& matrix, const Rounded& x, int64_t row, int64_t group,
                   const Output& out) {
  Floats y[2][ROWS];
  const bool is_pair = group + 1 < matrix.groups();
  if (kSideBySide == 2 && is_pair) {
    tile<BITS, HALVES, 2, ROWS>(matrix, group, x, row, y);
  } else {
    for (int g = 0; g < 1 + is_pair; g++) {
      Floats one[1][ROWS];
      tile<BITS, HALVES, 1, ROWS>(matrix, group + g, x, row, one);
      for (int r = 0; r < ROWS; r++) y[g][r] = one[0][r];
    }
  }
  for (int r = 0; r < ROWS; r++) {
    if (matrix.gated) {
      put(matrix, out, row + r, group / 2, multiply(silu(y[0][r]), y[1][r]));
    } else {
      put(matrix, out, row + r, group, y[0][r]);
      if (is_pair) put(matrix, out, row + r, group + 1, y[1][r]);
    }
  }
}

template <int BITS, bool HALVES>
void multiply_rows(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t group,
                   const Output& out) {
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = rows * t / tiles;
    switch (rows * (t + 1) / tiles - row) {
      case 1: multiply_tile<BITS, HALVES, 1>(matrix, x, row, group, out); break;
      case 2: multiply_tile<BITS, HALVES, 2>(matrix, x, row, group, out); break;
      case 3: multiply_tile<BITS, HALVES, 3>(matrix, x, row, group, out); break;
      case 4: multiply_tile<BITS, HALVES, 4>(matrix, x, row, group, out); break;
      case 5: multiply_tile<BITS, HALVES, 5>(matrix, x, row, group, out); break;
      case 6: multiply_tile<BITS, HALVES, 6>(matrix, x, row, group, out); break;
    }
  }
}

// Pair by pair: its weights stay in the nearest cache while all rows pass.
void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t first, int64_t last,
              const Output& out) {
  for (int64_t pair = first; pair < last; pair++) {
    if (matrix.bits == 8 && matrix.halves) multiply_rows<8, true>(matrix, x, rows, 2 * pair, out);
    else if (matrix.bits == 8) multiply_rows<8, false>(matrix, x, rows, 2 * pair, out);
    else if (matrix.halves) multiply_rows<4, true>(matrix, x, rows, 2 * pair, out);
    else multiply_rows<4, false>(matrix, x, rows, 2 * pair, out);
  }
}

}  // namespace
}  // namespace quill

// Rounding and multiplying, written once for all processors.
//
// Knows: the layout of matrices, lanes. Does not know: threads, ONNX Runtime.
#pragma once
#include <type_traits>
#include <utility>

#include "lanes.h"
#include "matrix.h"
#include "unpacked.h"

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
  const int32_t most = largest_of(larger(magnitudes(a), magnitudes(b)));
  float x;
  std::memcpy(&x, &most, 4);
  return x;
}

template <int BYTES, int SCALES>
INLINE void round_block(Floats a, Floats b, int32_t middle, uint8_t* q, float* scale, float* sum,
                        int32_t* shift) {
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
  *scale = most / levels;
  if constexpr (SCALES == 2) {
    shift[0] = -middle * added_up(qa);
    shift[1] = -middle * added_up(qb);
  } else {
    const int32_t total = added_up(add(qa, qb));
    *sum = *scale * static_cast<float>(total);
    *shift = -middle * total;
  }
}

template <int BYTES, int SCALES>
void round_rows(const Matrix& matrix, const float* x, const float* gains, float epsilon,
                int64_t first, int64_t last, const Rounded& to) {
  const int64_t inputs = matrix.inputs, blocks = matrix.blocks();
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
      round_block<BYTES, SCALES>(a, b, matrix.of().middle, to.q + index * kBlock * BYTES,
                                 to.scale + index, to.sum + index, to.shift + index * SCALES);
    }
  }
}

void round(const Matrix& matrix, const float* x, const float* gains, float epsilon, int64_t first,
           int64_t last, const Rounded& to) {
  const auto chosen = matrix.input_bits == 8
                          ? (matrix.of().scales == 2 ? round_rows<1, 2> : round_rows<1, 1>)
                          : (matrix.of().scales == 2 ? round_rows<2, 2> : round_rows<2, 1>);
  chosen(matrix, x, gains, epsilon, first, last, to);
}

// One record of 16 columns, whose inputs have so many bytes each.
template <int LAYOUT, int BYTES>
struct Record {
  static constexpr Layout kLayout = kLayouts[LAYOUT];
  static constexpr bool kHasMinima = kLayout.middle == 0;
  // Each takes four bytes of the inputs: four of 8 bits, or two of 16. So many share a scale.
  static constexpr int kSteps = static_cast<int>(kBlock) * BYTES / 4 / kLayout.scales;
  // Steps whose sums of two products fit into 16 bits: 8 * 2 * 15 * 127, 4 * 2 * 31 * 127, …
  static constexpr int kWidth = kLayout.codes ? 5 : kLayout.bits;  // of an integer
  // Sums with weights of 8 bits don't fit at all.
  static constexpr bool kIsNarrow = BYTES == 1 && kWidth < 8;
  static constexpr int kNarrow = !kIsNarrow ? kSteps : kWidth == 4 ? 8 : kWidth == 5 ? 4 : 2;

  const uint8_t* p;

  INLINE Floats number(int index) const {
    return kLayout.codes ? load_bfloats(p) : load_halves(p + 32 * index);
  }
  // What a block's sum of products counts for; `d` is number 0.
  INLINE Floats scale(Floats d, int block, int part) const {
    if constexpr (kLayout.blocks == 1) return d;
    else if constexpr (kHasMinima) return multiply(d, load_unsigned(p + kLayout.small_at(block)));
    else return multiply(d, load_signed(p + kLayout.small_at(block) + 16 * part));
  }
  // What the sum of a block's inputs counts for; `m` is number 1.
  INLINE Floats minimum(Floats m, int block) const {
    if constexpr (kLayout.blocks == 1) return m;
    const Floats small = load_unsigned(p + kLayout.small_at(block) + 16);
    return multiply(multiply(m, all(-1.f)), small);
  }

  // Of four inputs; of 16 bits of the first and third, and then of the two beside them.
  using Weights = std::conditional_t<BYTES == 2, Words, Bytes>;
  INLINE Weights weights(int block, int step) const {
    const uint8_t* body = p + kLayout.body_at(block);
    const auto load = [=](int i) INLINE_LAMBDA { return load_bytes(body + 64 * i); };
    Bytes four = unpacked<kLayout.bits>(load, BYTES == 1 ? step : step / 2);
    if constexpr (kLayout.codes) four = looked_up(kCodes, four);
    if constexpr (BYTES == 1) return four;
    else return step % 2 ? odd_words(four) : even_words(four);
  }

  using Sum = std::conditional_t<kIsNarrow, Pairs, Ints>;
  static INLINE Sum begin(Ints sum) {
    if constexpr (kIsNarrow) return pairs_after(sum);
    else return sum;
  }
  static INLINE Sum dot(Sum sum, Weights w, int32_t x) {
    if constexpr (kIsNarrow) return dot_bytes(sum, w, x);
    else if constexpr (BYTES == 1) return dot_whole_bytes(sum, w, x);
    else return dot_words(sum, w, x);
  }
  static INLINE Ints end(Ints before, Sum sum) {
    if constexpr (kIsNarrow) return with_pairs(before, sum);
    else return sum;
  }
};

// Adds to `y` what some inputs that share a scale give, of a few rows with one or two groups.
template <typename Of, int GROUPS, int ROWS>
INLINE void add_part(const Of (&records)[GROUPS], const Floats (&numbers)[GROUPS][2], int block,
                     int part, const Rounded& x, const uint8_t* q, int64_t width, int64_t index,
                     int64_t blocks, Floats (&y)[GROUPS][ROWS]) {
  constexpr Layout of = Of::kLayout;
  Ints sums[GROUPS][ROWS];
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    const int32_t shift = of.middle ? x.shift[(index + r * blocks) * of.scales + part] : 0;
    UNROLLED
    for (int g = 0; g < GROUPS; g++) sums[g][r] = all(shift);
  }
  UNROLLED
  for (int start = 0; start < Of::kSteps; start += Of::kNarrow) {
    typename Of::Sum narrow[GROUPS][ROWS];
    UNROLLED
    for (int g = 0; g < GROUPS; g++) {
      UNROLLED
      for (int r = 0; r < ROWS; r++) narrow[g][r] = Of::begin(sums[g][r]);
    }
    UNROLLED
    for (int i = 0; i < Of::kNarrow; i++) {
      const int step = part * Of::kSteps + start + i;
      typename Of::Weights w[GROUPS];
      UNROLLED
      for (int g = 0; g < GROUPS; g++) w[g] = records[g].weights(block, step);
      UNROLLED
      for (int r = 0; r < ROWS; r++) {
        int32_t four;
        std::memcpy(&four, q + r * width + 4 * step, 4);
        UNROLLED
        for (int g = 0; g < GROUPS; g++) narrow[g][r] = Of::dot(narrow[g][r], w[g], four);
      }
    }
    UNROLLED
    for (int g = 0; g < GROUPS; g++) {
      UNROLLED
      for (int r = 0; r < ROWS; r++) sums[g][r] = Of::end(sums[g][r], narrow[g][r]);
    }
  }
  UNROLLED
  for (int g = 0; g < GROUPS; g++) {
    const Floats scales = records[g].scale(numbers[g][0], block, part);
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
      const Floats scale = multiply(scales, all(x.scale[index + r * blocks]));
      y[g][r] = fused(floats(sums[g][r]), scale, y[g][r]);
    }
    if constexpr (Of::kHasMinima) {
      const Floats minima = records[g].minimum(numbers[g][1], block);
      UNROLLED
      for (int r = 0; r < ROWS; r++) {
        y[g][r] = fused(minima, all(x.sum[index + r * blocks]), y[g][r]);
      }
    }
  }
}

// Memory that is read next, and how much of it is asked for with each record.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;
};

// The products of a few rows with one or two neighbouring groups.
template <int LAYOUT, int BYTES, int GROUPS, int ROWS>
INLINE void tile(const Matrix& matrix, int64_t group, const Rounded& x, int64_t row,
                 const Ahead& ahead, Floats (&y)[GROUPS][ROWS]) {
  using Of = Record<LAYOUT, BYTES>;
  constexpr Layout of = Of::kLayout;
  const int64_t blocks = matrix.blocks(), width = matrix.inputs * BYTES;
  const int64_t group_bytes = matrix.inputs / of.inputs() * of.bytes();
  const uint8_t* p = matrix.records + group * group_bytes;
  const uint8_t* q = x.q + row * width;
  UNROLLED
  for (int g = 0; g < GROUPS; g++) {
    UNROLLED
    for (int r = 0; r < ROWS; r++) y[g][r] = all(0.f);
  }
  const uint8_t* next = ahead.from;
  int64_t index = row * blocks;  // of the first row's scale
  for (const int64_t last = index + blocks; index < last; p += of.bytes()) {
    Of records[GROUPS];
    Floats numbers[GROUPS][2];
    UNROLLED
    for (int g = 0; g < GROUPS; g++) {
      records[g] = Of{p + g * group_bytes};
      numbers[g][0] = records[g].number(0);
      if (Of::kHasMinima) numbers[g][1] = records[g].number(1);
    }
    for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += ahead.bytes;
    for (int block = 0; block < of.blocks; block++, index++, q += kBlock * BYTES) {
      UNROLLED
      for (int part = 0; part < of.scales; part++) {
        add_part(records, numbers, block, part, x, q, width, index, blocks, y);
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

// What two neighbouring groups give together.
INLINE Floats gated(const Matrix& matrix, const Output& out, int64_t group, Floats gate, Floats value) {
  if (out.gate_bias) {
    gate = add(gate, load(out.gate_bias + group * kColumns));
    value = add(value, load(out.gate_bias + (group + 1) * kColumns));
  }
  if (matrix.clamp == 0) return multiply(silu(gate), value);
  const Floats most = all(matrix.clamp), least = all(-matrix.clamp);
  // What isn't a number stays so.
  gate = fused(gate, all(0.f), smaller(gate, most));
  value = fused(value, all(0.f), larger(smaller(value, most), least));
  const Floats below = exponential(multiply(gate, all(-matrix.slope)));
  return multiply(divide(gate, add(all(1.f), below)), add(value, all(1.f)));
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

template <int LAYOUT, int BYTES, int ROWS>
void multiply_tile(const Matrix& matrix, const Rounded& x, int64_t row, int64_t group,
                   const Ahead& ahead, const Output& out) {
  Floats y[2][ROWS];
  const bool is_pair = group + 1 < matrix.groups();
  if constexpr (kSideBySide == 2) {
    if (is_pair) {
      tile<LAYOUT, BYTES, 2, ROWS>(matrix, group, x, row, ahead, y);
    } else {  // the last of an odd number: row by row, so that there is less to compile
      for (int r = 0; r < ROWS; r++) {
        Floats one[1][1];
        tile<LAYOUT, BYTES, 1, 1>(matrix, group, x, row + r, ahead, one);
        y[0][r] = one[0][0];
      }
    }
  } else {
    for (int g = 0; g < 1 + is_pair; g++) {
      Floats one[1][ROWS];
      tile<LAYOUT, BYTES, 1, ROWS>(matrix, group + g, x, row, ahead, one);
      for (int r = 0; r < ROWS; r++) y[g][r] = one[0][r];
    }
  }
  for (int r = 0; r < ROWS; r++) {
    if (matrix.gated) {
      put(matrix, out, row + r, group / 2, gated(matrix, out, group, y[0][r], y[1][r]));
    } else {
      put(matrix, out, row + r, group, y[0][r]);
      if (is_pair) put(matrix, out, row + r, group + 1, y[1][r]);
    }
  }
}

// Tiles of so many rows at most. Few read small weights with inputs of 16 bits: smaller tiles are
// compiled faster.
template <int LAYOUT, int BYTES>
constexpr int most_rows() {
  return BYTES == 2 && kLayouts[LAYOUT].bits < 8 && kMaxRows > 3 ? 3 : kMaxRows;
}

constexpr int64_t kMaxAhead = 16;  // tiles; with more the rest of the memory has the time

template <int LAYOUT, int BYTES>
void multiply_rows(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t group,
                   const Output& out) {
  constexpr int most = most_rows<LAYOUT, BYTES>();
  const int64_t tiles = (rows + most - 1) / most;
  // While a pair is multiplied with several tiles, the next pair comes from memory.
  const int64_t pair = 2 * matrix.group_bytes(), share = pair / tiles;
  const int64_t records = matrix.inputs / matrix.of().inputs();
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = rows * t / tiles;
    const uint8_t* next = matrix.records + group / 2 * pair + pair + t * share;
    const Ahead ahead{next, tiles > kMaxAhead ? 0 : share / records};
    const auto multiply = [&](auto num) {
      if constexpr (num() <= most) {
        multiply_tile<LAYOUT, BYTES, num()>(matrix, x, row, group, ahead, out);
      }
    };
    switch (rows * (t + 1) / tiles - row) {
      case 1: multiply(std::integral_constant<int, 1>()); break;
      case 2: multiply(std::integral_constant<int, 2>()); break;
      case 3: multiply(std::integral_constant<int, 3>()); break;
      case 4: multiply(std::integral_constant<int, 4>()); break;
      case 5: multiply(std::integral_constant<int, 5>()); break;
      case 6: multiply(std::integral_constant<int, 6>()); break;
    }
  }
}

using MultiplyRows = void (*)(const Matrix&, const Rounded&, int64_t, int64_t, const Output&);

// Floats are multiplied elsewhere.
template <int LAYOUT, int BYTES>
constexpr MultiplyRows rows_of() {
  if constexpr (LAYOUT == kFloats) return nullptr;
  else return multiply_rows<LAYOUT, BYTES>;
}

// For inputs of 8 bits, and of 16.
template <int... LAYOUTS>
MultiplyRows of_layout(const Matrix& matrix, std::integer_sequence<int, LAYOUTS...>) {
  constexpr MultiplyRows functions[][2] = {{rows_of<LAYOUTS, 1>(), rows_of<LAYOUTS, 2>()}...};
  return functions[matrix.layout][matrix.input_bits == 16];
}

// Pair by pair: its weights stay in the nearest cache while all rows pass.
void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t first, int64_t last,
              const Output& out) {
  const MultiplyRows rows_with = of_layout(matrix, std::make_integer_sequence<int, kNumLayouts>());
  for (int64_t pair = first; pair < last; pair++) rows_with(matrix, x, rows, 2 * pair, out);
}

}  // namespace
}  // namespace quill

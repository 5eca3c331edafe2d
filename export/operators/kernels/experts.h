// Experts: which a token has, and products with matrices of floats; written once for all processors.
//
// Knows: scores, lanes. Does not know: threads, ONNX Runtime.
#pragma once
#include "kernels.h"

namespace quill {
namespace {

// Some rows with one or two neighbouring groups: one chain of sums over the inputs.
template <int GROUPS, int ROWS>
INLINE void float_tile(const Matrix& matrix, int64_t group, const float* x, Floats (&y)[GROUPS][ROWS]) {
  const float* p = reinterpret_cast<const float*>(matrix.records) + group * matrix.inputs * kColumns;
  UNROLLED
  for (int g = 0; g < GROUPS; g++) {
    UNROLLED
    for (int r = 0; r < ROWS; r++) y[g][r] = all(0.f);
  }
  for (int64_t i = 0; i < matrix.inputs; i++, p += kColumns) {
    Floats w[GROUPS];
    UNROLLED
    for (int g = 0; g < GROUPS; g++) w[g] = load(p + g * matrix.inputs * kColumns);
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
      const Floats input = all(x[r * matrix.inputs + i]);
      UNROLLED
      for (int g = 0; g < GROUPS; g++) y[g][r] = fused(input, w[g], y[g][r]);
    }
  }
}

template <int ROWS>
void multiply_float_tile(const Matrix& matrix, const float* x, int64_t row, int64_t group,
                         const Output& out) {
  Floats y[2][ROWS];
  const bool is_pair = group + 1 < matrix.groups();
  const float* from = x + row * matrix.inputs;
  if (kSideBySide == 2 && is_pair) {
    float_tile<2, ROWS>(matrix, group, from, y);
  } else {
    for (int g = 0; g < 1 + is_pair; g++) {
      Floats one[1][ROWS];
      float_tile<1, ROWS>(matrix, group + g, from, one);
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

void multiply_floats(const Matrix& matrix, const float* x, int64_t rows, int64_t first,
                     int64_t last, const Output& out) {
  constexpr int kRows = kMaxRows < 4 ? 1 : 4;
  for (int64_t pair = first; pair < last; pair++) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      multiply_float_tile<kRows>(matrix, x, row, 2 * pair, out);
    }
    for (; row < rows; row++) multiply_float_tile<1>(matrix, x, row, 2 * pair, out);
  }
}

// Logits become scores. What isn't finite stays so.
INLINE void score(const Routing& routing, const float* logits, float* scores) {
  const int64_t num = routing.number, whole = num / 16 * 16;
  float most = logits[0];
  for (int64_t i = 1; i < num; i++) most = logits[i] > most ? logits[i] : most;
  const auto of = [&](Floats x) INLINE_LAMBDA {
    if (routing.sigmoid) {
      const Floats y = divide(all(1.f), add(all(1.f), exponential(multiply(x, all(-1.f)))));
      return fused(x, all(0.f), y);
    }
    const Floats below = add(x, all(-most));
    return fused(below, all(0.f), exponential(below));
  };
  for (int64_t i = 0; i < whole; i += 16) store(scores + i, of(load(logits + i)));
  if (whole < num) {
    float last[16] = {};
    for (int64_t i = whole; i < num; i++) last[i - whole] = logits[i];
    store(last, of(load(last)));
    for (int64_t i = whole; i < num; i++) scores[i] = last[i - whole];
  }
  if (routing.sigmoid) return;
  float sum = 0;
  for (int64_t i = 0; i < num; i++) sum += scores[i];
  for (int64_t i = 0; i < num; i++) scores[i] /= sum;
}

// The largest of some that isn't taken yet, of equals the first; it is taken now.
INLINE int64_t take_best(const float* values, bool* taken, int64_t first, int64_t last) {
  int64_t best = -1;
  for (int64_t i = first; i < last; i++) {
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  taken[best] = true;
  return best;
}

void choose(const Routing& routing, const float* logits, const float* balance, int32_t* chosen,
            float* weights) {
  float scores[kMaxExperts], compared[kMaxExperts], of_groups[kMaxExperts];
  bool taken[kMaxExperts];
  const int64_t num = routing.number, size = num / routing.groups;
  score(routing, logits, scores);
  for (int64_t i = 0; i < num; i++) {
    compared[i] = balance ? scores[i] + balance[i] : scores[i];
    taken[i] = false;
  }
  if (routing.groups > 1) {
    bool best_groups[kMaxExperts];
    for (int64_t g = 0; g < routing.groups; g++) {
      of_groups[g] = 0;
      for (int64_t i = 0; i < routing.group_best; i++) {
        of_groups[g] += compared[take_best(compared, taken, g * size, (g + 1) * size)];
      }
      best_groups[g] = false;
    }
    for (int64_t g = 0; g < routing.top_groups; g++) {
      take_best(of_groups, best_groups, 0, routing.groups);
    }
    for (int64_t i = 0; i < num; i++) taken[i] = !best_groups[i / size];
  }
  float sum = 0;
  for (int64_t k = 0; k < routing.per_token; k++) {
    const int64_t best = take_best(compared, taken, 0, num);
    chosen[k] = static_cast<int32_t>(best);
    weights[k] = scores[best];
    sum += scores[best];
  }
  for (int64_t k = 0; k < routing.per_token; k++) {
    weights[k] = (routing.normalize ? weights[k] / sum : weights[k]) * routing.scale;
  }
}

}  // namespace
}  // namespace quill

// Quantizes one block of 32 neighbouring inputs of many rows.
//
// Knows: a block's weights, how much each input counts, GPTQ. Does not know: matrices, formats.
// Written once for all processors, and every one of them computes the same bits: nothing is fused,
// sums go in a fixed order. Eight rows are quantized at once, one in each lane of a vector.
#pragma once
#include <algorithm>
#include <cstdint>

#include "quantize.h"

namespace quill {
namespace {

constexpr int kSize = 32;      // of a block
constexpr int kRows = 8;       // at once
constexpr int kScales = 9;     // tried on either side of the one that the extremes suggest
constexpr float kStep = 0.1f;  // of an integer, at the extremes

using Floats = float __attribute__((vector_size(4 * kRows)));
using Words = uint32_t __attribute__((vector_size(4 * kRows)));

struct Fit {
  Floats scale, minimum;  // weight = scale * q + minimum
};

inline Floats all(float x) { return Floats{} + x; }
inline Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }
inline Floats smaller(const Floats& a, const Floats& b) { return a < b ? a : b; }

template <typename Of>
inline Floats sum(const Of& of) {
  Floats parts[4] = {};
  for (int i = 0; i < kSize; i += 4) {
    for (int j = 0; j < 4; j++) parts[j] += of(i + j);
  }
  return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

// To the nearest whole number, where there is no instruction for it. Of less than 2 ** 22.
inline Floats nearest(const Floats& x) { return (x + 12582912.f) - 12582912.f; }

// The nearest number that float16 has.
inline Floats half(const Floats& x) {
  const Floats size = larger(x, -x), small = (x + 0.75f) - 0.75f;  // steps of 2 ** -24
  const Words bits = (Words)x;
  const Words rounded = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  const Floats normal = larger(all(-65504.f), smaller(all(65504.f), (Floats)rounded));
  return size < 6.103515625e-5f ? small : normal;
}

inline Floats inverse(const Floats& scale) { return scale == 0.f ? Floats{} : 1.f / scale; }

inline Floats step(const Floats& x, const Fit& fit, const Floats& inverse_scale, float most) {
  const Floats q = (x - fit.minimum) * inverse_scale;
  return nearest(larger(Floats{}, smaller(all(most), q)));
}

// The best of several scales, each improved by least squares.
inline Fit find_fit(const Floats* x, const BlockJob& job) {
  const float* counts = job.counts;
  const float most = static_cast<float>((1 << job.bits) - 1);
  const float middle = static_cast<float>(job.middle);
  Floats least = x[0], largest = x[0];
  for (int i = 1; i < kSize; i++) {
    least = smaller(least, x[i]);
    largest = larger(largest, x[i]);
  }
  const Floats extreme = -least > largest ? least : largest;
  const Floats total = sum([=](int i) { return all(counts[i]); });
  const Floats mean_x = sum([=](int i) { return counts[i] * x[i]; }) / total;
  Fit best{};
  Floats smallest = all(__builtin_inff());
  for (int change = -kScales; change <= kScales; change++) {
    const float more = kStep * static_cast<float>(change);
    Fit fit{(largest - least) / (most + more), least};
    if (job.middle) {
      fit.scale = -extreme / (middle + more);
      fit.minimum = -middle * fit.scale;
    }
    Floats q[kSize], inverse_scale = inverse(fit.scale);
    for (int i = 0; i < kSize; i++) q[i] = step(x[i], fit, inverse_scale, most);
    // The best scale and minimum for these integers.
    if (job.middle) {
      const Floats products = sum([&](int i) { return counts[i] * x[i] * (q[i] - middle); });
      const Floats squares = sum([&](int i) {
        return counts[i] * (q[i] - middle) * (q[i] - middle);
      });
      fit.scale = half(squares > 0.f ? products / squares : Floats{});
      fit.minimum = -middle * fit.scale;
    } else {
      const Floats mean_q = sum([&](int i) { return counts[i] * q[i]; }) / total;
      const Floats products = sum([&](int i) {
        return counts[i] * (x[i] - mean_x) * (q[i] - mean_q);
      });
      const Floats squares = sum([&](int i) {
        return counts[i] * (q[i] - mean_q) * (q[i] - mean_q);
      });
      fit.scale = half(squares > 1e-6f * total ? products / squares : Floats{});
      fit.minimum = half(mean_x - fit.scale * mean_q);
    }
    inverse_scale = inverse(fit.scale);
    const Floats error = sum([&](int i) {
      const Floats off = x[i] - (fit.scale * step(x[i], fit, inverse_scale, most) + fit.minimum);
      return counts[i] * off * off;
    });
    best.scale = error < smallest ? fit.scale : best.scale;
    best.minimum = error < smallest ? fit.minimum : best.minimum;
    smallest = smaller(error, smallest);
  }
  return best;
}

// Rounds one input after another. Each error is passed on to the inputs after it.
inline void round_in_turn(Floats* x, const Fit& fit, const BlockJob& job, const int64_t* rows) {
  const float most = static_cast<float>((1 << job.bits) - 1);
  const Floats inverse_scale = inverse(fit.scale);
  for (int i = 0; i < kSize; i++) {
    const Floats q = step(x[i], fit, inverse_scale, most);
    for (int lane = 0; lane < kRows; lane++) {
      job.q[rows[lane] * job.q_stride + i] = static_cast<uint8_t>(q[lane]);
    }
    if (!job.factors) continue;
    const float* factor = job.factors + i * job.factor_stride;
    const Floats error = (x[i] - (fit.scale * q + fit.minimum)) / factor[i];
    for (int lane = 0; lane < kRows; lane++) job.errors[rows[lane] * kSize + i] = error[lane];
    for (int j = i + 1; j < kSize; j++) x[j] -= error * factor[j];
  }
}

void quantize_block(const BlockJob& job) {
  for (int64_t first = 0; first < job.rows; first += kRows) {
    int64_t rows[kRows];
    Floats x[kSize];
    Fit fit;
    for (int lane = 0; lane < kRows; lane++) {
      rows[lane] = std::min(first + lane, job.rows - 1);  // the last row may be in several lanes
      for (int i = 0; i < kSize; i++) x[i][lane] = job.x[rows[lane] * job.stride + i];
      fit.scale[lane] = job.scales[rows[lane] * job.num_blocks];
      fit.minimum[lane] = job.minima[rows[lane] * job.num_blocks];
    }
    if (!job.are_given) fit = find_fit(x, job);
    for (int lane = 0; lane < kRows; lane++) {
      job.scales[rows[lane] * job.num_blocks] = fit.scale[lane];
      job.minima[rows[lane] * job.num_blocks] = fit.minimum[lane];
    }
    if (job.q) round_in_turn(x, fit, job, rows);
  }
}

}  // namespace
}  // namespace quill

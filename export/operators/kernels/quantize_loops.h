// Quantizes one block of 32 neighbouring inputs of many rows.
//
// Knows: a block's weights, how much each input counts, GPTQ. Does not know: matrices, formats.
// Written once for all processors, and every one of them computes the same bits: nothing is fused,
// sums go in a fixed order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quantize.h"

namespace quill {
namespace {

constexpr int kSize = 32;      // of a block
constexpr int kScales = 9;     // tried on either side of the one that the extremes suggest
constexpr float kStep = 0.1f;  // of an integer, at the extremes

struct Fit {
  float scale, minimum;  // weight = scale * q + minimum
};

template <typename Of>
inline float sum(const Of& of) {
  float lanes[8] = {};
  for (int i = 0; i < kSize; i += 8) {
    for (int j = 0; j < 8; j++) lanes[j] += of(i + j);
  }
  for (int j = 0; j < 4; j++) lanes[j] += lanes[j + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// To the nearest whole number, where there is no instruction for it. Of less than 2 ** 22.
inline float nearest(float x) { return (x + 12582912.f) - 12582912.f; }

// The nearest number that float16 has.
inline float half(float x) {
  if (std::fabs(x) < 6.103515625e-5f) return (x + 0.75f) - 0.75f;  // steps of 2 ** -24
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  std::memcpy(&x, &bits, 4);
  return std::max(-65504.f, std::min(65504.f, x));
}

inline float inverse(float scale) { return scale == 0 ? 0 : 1 / scale; }

inline float step(float x, const Fit& fit, float inverse_scale, float most) {
  const float q = (x - fit.minimum) * inverse_scale;
  return nearest(std::max(0.f, std::min(most, q)));
}

// The best scale and minimum for these integers.
inline Fit least_squares(const float* x, const float* q, const float* counts, float total,
                         float middle) {
  if (middle) {
    const float products = sum([=](int i) { return counts[i] * x[i] * (q[i] - middle); });
    const float squares = sum([=](int i) {
      return counts[i] * (q[i] - middle) * (q[i] - middle);
    });
    const float scale = half(squares > 0 ? products / squares : 0);
    return {scale, -middle * scale};
  }
  const float mean_x = sum([=](int i) { return counts[i] * x[i]; }) / total;
  const float mean_q = sum([=](int i) { return counts[i] * q[i]; }) / total;
  const float products = sum([=](int i) { return counts[i] * (x[i] - mean_x) * (q[i] - mean_q); });
  const float squares = sum([=](int i) { return counts[i] * (q[i] - mean_q) * (q[i] - mean_q); });
  const float scale = half(squares > 1e-6f * total ? products / squares : 0);
  return {scale, half(mean_x - scale * mean_q)};
}

// The best of several scales, each improved by least squares.
inline Fit find_fit(const float* x, const float* counts, const BlockJob& job) {
  const float most = static_cast<float>((1 << job.bits) - 1);
  const float middle = static_cast<float>(job.middle);
  const float least = *std::min_element(x, x + kSize), largest = *std::max_element(x, x + kSize);
  const float extreme = -least > largest ? least : largest;
  const float total = sum([=](int i) { return counts[i]; });
  Fit best{0, 0};
  float smallest = INFINITY;
  for (int change = -kScales; change <= kScales; change++) {
    const float more = kStep * static_cast<float>(change);
    Fit fit{(largest - least) / (most + more), least};
    if (job.middle) {
      fit.scale = -extreme / (middle + more);
      fit.minimum = -middle * fit.scale;
    }
    float q[kSize];
    float inverse_scale = inverse(fit.scale);
    for (int i = 0; i < kSize; i++) q[i] = step(x[i], fit, inverse_scale, most);
    fit = least_squares(x, q, counts, total, middle);
    inverse_scale = inverse(fit.scale);
    const float error = sum([=](int i) {
      const float off = x[i] - (fit.scale * step(x[i], fit, inverse_scale, most) + fit.minimum);
      return counts[i] * off * off;
    });
    if (error < smallest) {
      smallest = error;
      best = fit;
    }
  }
  return best;
}

// Rounds one input after another. Each error is passed on to the inputs after it.
inline void round_in_turn(float* x, const Fit& fit, const BlockJob& job, int64_t row) {
  const float most = static_cast<float>((1 << job.bits) - 1), inverse_scale = inverse(fit.scale);
  for (int i = 0; i < kSize; i++) {
    const float q = step(x[i], fit, inverse_scale, most);
    job.q[row * job.q_stride + i] = static_cast<uint8_t>(q);
    if (!job.factors) continue;
    const float* factor = job.factors + i * job.factor_stride;
    const float error = (x[i] - (fit.scale * q + fit.minimum)) / factor[i];
    job.errors[row * kSize + i] = error;
    for (int j = i + 1; j < kSize; j++) x[j] -= error * factor[j];
  }
}

void quantize_block(const BlockJob& job) {
  for (int64_t row = 0; row < job.rows; row++) {
    float x[kSize], &scale = job.scales[row * job.num_blocks];
    float& minimum = job.minima[row * job.num_blocks];
    std::memcpy(x, job.x + row * job.stride, sizeof(x));
    const Fit fit = job.are_given ? Fit{scale, minimum} : find_fit(x, job.counts, job);
    scale = fit.scale;
    minimum = fit.minimum;
    if (job.q) round_in_turn(x, fit, job, row);
  }
}

}  // namespace
}  // namespace quill

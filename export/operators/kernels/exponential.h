// exp, for one number or for some side by side: the same bits either way, on every processor.
//
// Knows: doubles. Does not know: what they stand for. Within 2e-14 of the true value, for exponents
// from -708 to 0.
#pragma once
#include <cstdint>
#include <cstring>

namespace quill {
namespace {

// 2 to the n, where n is in the lowest bits of 1.5 x 2 to the 52, plus n.
constexpr double kShift = 6755399441055744.0;

template <typename Double, typename Bits>
__attribute__((always_inline)) inline Double exponential_of(Double x) {
  const Double shifted = x * 1.4426950408889634 + kShift;
  const Double n = shifted - kShift;
  const Double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  const Double s = r * r;
  // Even and odd powers apart: half as long a chain.
  Double even = s * (1.0 / 3628800) + 1.0 / 40320;
  Double odd = s * (1.0 / 39916800) + 1.0 / 362880;
  even = even * s + 1.0 / 720;
  odd = odd * s + 1.0 / 5040;
  even = even * s + 1.0 / 24;
  odd = odd * s + 1.0 / 120;
  even = even * s + 0.5;
  odd = odd * s + 1.0 / 6;
  even = even * s + 1.0;
  odd = odd * s + 1.0;
  const Double y = even + odd * r;
  Bits power, bits;
  std::memcpy(&power, &shifted, sizeof power);
  std::memcpy(&bits, &y, sizeof bits);
  bits += power << 52;
  Double scaled;
  std::memcpy(&scaled, &bits, sizeof scaled);
  return scaled;
}

// In single precision, for exponents from -87 to 0: within 4 units of the last place.
constexpr float kFloatShift = 12582912.f;

template <typename Float, typename Bits>
__attribute__((always_inline)) inline Float float_exponential_of(Float x) {
  const Float shifted = x * 1.44269504f + kFloatShift;
  const Float n = shifted - kFloatShift;
  const Float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  const Float s = r * r;
  Float even = s * (1.f / 720) + 1.f / 24;
  Float odd = s * (1.f / 120) + 1.f / 6;
  even = even * s + 0.5f;
  odd = odd * s + 1.f;
  const Float y = even * s + 1.f + odd * r;
  Bits power, bits;
  std::memcpy(&power, &shifted, sizeof power);
  std::memcpy(&bits, &y, sizeof bits);
  bits += power << 23;
  Float scaled;
  std::memcpy(&scaled, &bits, sizeof scaled);
  return scaled;
}

}  // namespace
}  // namespace quill

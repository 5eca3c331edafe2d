// Single bytes and halves of floats, where there are no lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace quill {
namespace {

inline uint8_t masked(uint8_t x, int mask) { return static_cast<uint8_t>(x & mask); }
template <int BITS>
inline uint8_t shifted(uint8_t x) {
  return static_cast<uint8_t>(x >> BITS);
}
inline uint8_t chosen(int mask, uint8_t a, uint8_t b) {
  return static_cast<uint8_t>((a & mask) | (b & ~mask));
}

inline float from_bfloat(uint32_t h) {
  const uint32_t bits = h << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float from_half(uint32_t h) {
  const uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(static_cast<float>(fraction), -24);
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace
}  // namespace quill

// The passes of sampling_passes.h, for the instructions that the file including this may use.
//
// Knows: vectors as compilers have them. Does not know: which processor this is.
#pragma once
#include <cstring>
#include <limits>

#include "exponential.h"
#include "sampling_passes.h"

namespace quill {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 8;  // doubles in a register
#elif defined(__AVX2__)
constexpr int kWidth = 4;
#else
constexpr int kWidth = 2;
#endif
constexpr int kVectors = 8 / kWidth;  // sums are of 8 numbers side by side, whatever a register holds

typedef double Doubles __attribute__((vector_size(kWidth * 8)));
typedef uint64_t Bits __attribute__((vector_size(kWidth * 8)));
typedef float HalfFloats __attribute__((vector_size(kWidth * 4)));
typedef int32_t HalfInts __attribute__((vector_size(kWidth * 4)));
typedef float Floats __attribute__((vector_size(kWidth * 8)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 8)));
typedef uint16_t Shorts __attribute__((vector_size(kWidth * 8)));
typedef uint64_t Words __attribute__((vector_size(kWidth * 8)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kFloats = 2 * kWidth, kShorts = 4 * kWidth;

template <typename Vector, typename T>
inline Vector load(const T* p) {
  Vector x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void scan_one(float x, Scan& scan, float& top) {
  top = x > top ? x : top;
  scan.least = x < scan.least && x > -kInfinity ? x : scan.least;
  scan.has_nan |= x != x;
}

Scan scan(const float* x, int64_t size, float* tops) {
  Scan found{-kInfinity, kInfinity, false};
  Floats least = Floats{} + kInfinity;
  Ints nans = {};
  int64_t start = 0;
  for (; start + kGroup <= size; start += kGroup) {
    Floats top = Floats{} - kInfinity;
    for (int64_t i = 0; i < kGroup; i += kFloats) {
      const Floats each = load<Floats>(x + start + i);
      top = each > top ? each : top;
      const Floats finite = each > -kInfinity ? each : least;
      least = finite < least ? finite : least;
      nans |= each != each;
    }
    float most = -kInfinity;
    for (int j = 0; j < kFloats; j++) most = top[j] > most ? top[j] : most;
    *tops++ = most;
    found.top = most > found.top ? most : found.top;
  }
  for (int j = 0; j < kFloats; j++) {
    found.least = least[j] < found.least ? least[j] : found.least;
    found.has_nan |= nans[j] != 0;
  }
  if (start < size) {
    float most = -kInfinity;
    for (; start < size; start++) scan_one(x[start], found, most);
    *tops = most;
    found.top = most > found.top ? most : found.top;
  }
  return found;
}

inline Doubles weight(Doubles exponent) {
  const Doubles least = Doubles{} + kLeast;
  return exponential_of<Doubles, Bits>(exponent > least ? exponent : least);
}

inline void weigh_some(const float* x, const Scale& scale, double* weights, int32_t* buckets) {
  const Doubles last = Doubles{} + (kBuckets - 1);
  const Doubles below = scale.top - __builtin_convertvector(load<HalfFloats>(x), Doubles);
  const Doubles weighed = weight(below * -scale.inverse);
  const Doubles place = below * scale.buckets;
  const HalfInts bucket = __builtin_convertvector(place < last ? place : last, HalfInts);
  std::memcpy(weights, &weighed, sizeof weighed);
  std::memcpy(buckets, &bucket, sizeof bucket);
}

void weigh(const float* x, int64_t size, const Scale& scale, double* weights, int32_t* buckets) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) weigh_some(x + i, scale, weights + i, buckets + i);
  if (i < size) {
    float rest[kWidth] = {};
    std::memcpy(rest, x + i, (size - i) * sizeof(float));
    weigh_some(rest, scale, weights + i, buckets + i);
  }
}

double total(const float* x, int64_t size, double top) {
  Doubles sums[kVectors] = {};
  const auto add = [&](const float* eight) {
    for (int v = 0; v < kVectors; v++) {
      const HalfFloats each = load<HalfFloats>(eight + v * kWidth);
      sums[v] += weight(__builtin_convertvector(each, Doubles) - top);
    }
  };
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) add(x + i);
  if (i < size) {
    float rest[8];
    for (int j = 0; j < 8; j++) rest[j] = i + j < size ? x[i + j] : -kInfinity;
    add(rest);
  }
  double sum = 0;
  for (int j = 0; j < 8; j++) sum += sums[j / kWidth][j % kWidth];
  return sum;
}

int64_t find(const uint16_t* buckets, int64_t size, uint16_t wanted, int32_t* ids) {
  int64_t found = 0, start = 0;
  const auto look = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      ids[found] = static_cast<int32_t>(i);
      found += buckets[i] == wanted;
    }
  };
  const Shorts all = Shorts{} + wanted;
  for (; start + kShorts <= size; start += kShorts) {
    const Words same = reinterpret_cast<Words>(load<Shorts>(buckets + start) == all);
    uint64_t any = 0;
    for (int j = 0; j < kWidth; j++) any |= same[j];
    if (any) look(start, start + kShorts);
  }
  look(start, size);
  return found;
}

}  // namespace
}  // namespace quill

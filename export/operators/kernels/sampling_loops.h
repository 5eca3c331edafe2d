// The passes of sampling_passes.h, for the instructions that the file including this may use.
//
// Knows: vectors as compilers have them. Does not know: which processor this is.
#pragma once
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
typedef uint32_t FloatBits __attribute__((vector_size(kWidth * 8)));
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

// What compilers make of these without being told takes twice as long.
#if defined(__AVX512F__)
inline Doubles doubles(HalfFloats x) { return _mm512_cvtps_pd(x); }
inline Doubles doubles(HalfInts x) { return _mm512_cvtepi32_pd(reinterpret_cast<__m256i>(x)); }
inline Doubles smaller(Doubles a, Doubles b) { return _mm512_min_pd(a, b); }
inline Doubles larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX2__)
inline Doubles doubles(HalfFloats x) { return _mm256_cvtps_pd(x); }
inline Doubles doubles(HalfInts x) { return _mm256_cvtepi32_pd(reinterpret_cast<__m128i>(x)); }
inline Doubles smaller(Doubles a, Doubles b) { return _mm256_min_pd(a, b); }
inline Doubles larger(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#else
inline Doubles doubles(HalfFloats x) { return __builtin_convertvector(x, Doubles); }
inline Doubles doubles(HalfInts x) { return __builtin_convertvector(x, Doubles); }
inline Doubles smaller(Doubles a, Doubles b) { return a < b ? a : b; }
inline Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif  // the second one's where they can't be compared

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
      top = larger(each, top);
      const Floats finite = each > -kInfinity ? each : least;
      least = smaller(finite, least);
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
  return exponential_of<Doubles, Bits>(larger(exponent, least));
}

// Groups are added up side by side, and the groups' sums in double precision.
double estimate(const float* x, int64_t size, float top, float inverse) {
  const Floats least = Floats{} - 87.f;
  const auto weights = [&](const float* some) __attribute__((always_inline)) {
    const Floats exponent = (load<Floats>(some) - top) * inverse;
    return float_exponential_of<Floats, FloatBits>(larger(exponent, least));
  };
  double sum = 0;
  int64_t start = 0;
  const auto add = [&](Floats sums) {
    for (int j = 0; j < kFloats; j++) sum += static_cast<double>(sums[j]);
  };
  Floats sums = {};
  for (; start + kGroup <= size; start += kGroup) {
    Floats group = {};
    for (int64_t i = 0; i < kGroup; i += kFloats) group += weights(x + start + i);
    sums += group;
    if (start % (8 * kGroup) == 0) add(sums), sums = Floats{};
  }
  add(sums);
  for (; start < size; start += kFloats) {
    float rest[kFloats];
    for (int j = 0; j < kFloats; j++) rest[j] = start + j < size ? x[start + j] : -kInfinity;
    add(weights(rest));
  }
  return sum;
}

// A weight is exp(-b * step) * exp(-f * step), where the score is in bucket b, at f of its width. The
// first factor is the bucket's, so it can wait until all are added up; the second is a short series, for
// steps are small.
class Weigher {
 public:
  explicit Weigher(const Scale& scale)
      : scale_(scale), step_(scale.buckets > 0 ? scale.inverse / scale.buckets : 0) {}

  void add(const float* x, int64_t size, uint16_t* buckets) {
    int64_t i = 0;
    for (; i + kChunk <= size; i += kChunk) add_chunk(x + i, kChunk, buckets + i);
    if (i == size) return;
    float rest[kChunk] = {};
    std::memcpy(rest, x + i, (size - i) * sizeof(float));
    add_chunk(rest, size - i, buckets + i);
  }

  void add_masses(double* masses) const {
    for (int b = 0; b < kBuckets - 1; b++) {
      const double exponent = -b * step_;
      const double factor = exponential_of<double, uint64_t>(exponent > kLeast ? exponent : kLeast);
      masses[b] += sums_[b] * factor;
    }
  }

 private:
  static constexpr int64_t kChunk = 1024;  // loops of one kind each, and what they leave stays near

  void add_chunk(const float* x, int64_t size, uint16_t* buckets) {
    alignas(64) double weights[kChunk];
    alignas(64) int32_t places[kChunk];
    weigh_chunk(x, weights, places);
    for (int64_t i = 0; i < size; i++) buckets[i] = static_cast<uint16_t>(places[i]);
    int64_t i = 0;
    for (; i + 4 <= size; i += 4) {
      sums_[places[i]] += weights[i];
      sums_[places[i + 1]] += weights[i + 1];
      sums_[places[i + 2]] += weights[i + 2];
      sums_[places[i + 3]] += weights[i + 3];
    }
    for (; i < size; i++) sums_[places[i]] += weights[i];
  }

  void weigh_chunk(const float* x, double* weights, int32_t* places) const {
    const double c1 = -step_, c2 = c1 * c1 / 2, c3 = c2 * c1 / 3, c4 = c3 * c1 / 4;
    const double c5 = c4 * c1 / 5, top = scale_.top, scale = scale_.buckets;
    const Doubles last = Doubles{} + (kBuckets - 1);
    for (int64_t i = 0; i < kChunk; i += kWidth) {
      const Doubles place = smaller((top - doubles(load<HalfFloats>(x + i))) * scale, last);
      const HalfInts bucket = __builtin_convertvector(place, HalfInts);
      const Doubles f = place - doubles(bucket), s = f * f;
      const Doubles weight = ((s * c4 + c2) * s + 1.0) + f * ((s * c5 + c3) * s + c1);
      std::memcpy(weights + i, &weight, sizeof weight);
      std::memcpy(places + i, &bucket, sizeof bucket);
    }
  }

  const Scale scale_;
  const double step_;
  double sums_[kBuckets] = {};
};

void weigh(const float* x, int64_t size, const Scale& scale, double* masses, uint16_t* buckets) {
  Weigher weigher(scale);
  weigher.add(x, size, buckets);
  weigher.add_masses(masses);
}

double total(const float* x, int64_t size, double top) {
  Doubles sums[kVectors] = {};
  const auto add = [&](const float* eight) {
    for (int v = 0; v < kVectors; v++) {
      const HalfFloats each = load<HalfFloats>(eight + v * kWidth);
      sums[v] += weight(doubles(each) - top);
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

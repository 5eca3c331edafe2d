// Sixteen numbers side by side, as each processor has them.
//
// Knows: instructions. Does not know: matrices. The file that includes this is compiled for one
// kind of processor; what it gets is its own (an unnamed namespace).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "scalars.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline)) inline
#define INLINE_LAMBDA __attribute__((always_inline))
// A loop whose numbers stay in registers.
#if defined(__AVX2__)
#define UNROLLED _Pragma("GCC unroll 16")
#else
#define UNROLLED
#endif

namespace quill {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kSideBySide = 2;  // groups that share each input that was read
constexpr int kMaxRows = 6;     // of a tile: more would not fit into 32 registers
constexpr int kMaxQueries = 6;  // of a tile
constexpr int wide(int) { return 4; }  // sixteens of a tile of so many queries

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;  // four of each column
using Words = __m512i;  // two of each column
using Pairs = __m512i;  // sums of products of bytes

INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Floats load_halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE Floats load_bfloats(const uint8_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
INLINE void store_halves(uint8_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0));
}
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
INLINE Ints nearest(Floats x) { return _mm512_cvtps_epi32(x); }
INLINE Ints all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Floats power_of_two(Ints n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, all(127)), 23));
}
INLINE Ints magnitudes(Floats x) {
  return _mm512_and_si512(_mm512_castps_si512(x), all(0x7fffffff));
}
INLINE Ints larger(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
// The largest lane, without signs; the sum of all.
INLINE int32_t largest_of(Ints x) { return static_cast<int32_t>(_mm512_reduce_max_epu32(x)); }
INLINE int32_t added_up(Ints x) { return _mm512_reduce_add_epi32(x); }
INLINE void store_bytes(uint8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
// The middle ones of each four change places.
INLINE __m256i swapped(__m256i words) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  return _mm256_shuffle_epi8(words, order);
}
INLINE void store_words(uint8_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), swapped(_mm512_cvtsepi32_epi16(x)));
}
INLINE void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// Small integers.
INLINE Floats load_unsigned(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE Floats load_signed(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE Bytes masked(Bytes x, int mask) {
  return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask)));
}
// To the right; what comes into a byte from its neighbour is masked afterwards.
template <int BITS>
INLINE Bytes shifted(Bytes x) {
  return _mm512_srli_epi16(x, BITS);
}
// The bits of `mask` of a, the others of b.
INLINE Bytes chosen(int mask, Bytes a, Bytes b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(mask)), a, b, 0xca);
}
// For each byte, which is below 16, that of a table.
INLINE Bytes looked_up(const uint8_t* table, Bytes x) {
  const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(of), x);
}
INLINE Words even_words(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi16(255)); }
INLINE Words odd_words(Bytes x) { return _mm512_srli_epi16(x, 8); }
// What products are added up in for a while: after some sum, and together with it.
INLINE Pairs pairs_after(Ints sum) { return sum; }
INLINE Ints with_pairs(Ints, Pairs sum) { return sum; }
INLINE Pairs dot_bytes(Pairs sum, Bytes w, int32_t x) {
  return _mm512_dpbusd_epi32(sum, w, all(x));
}
INLINE Ints dot_words(Ints sum, Words w, int32_t x) { return _mm512_dpwssd_epi32(sum, w, all(x)); }
// With weights of 8 bits.
INLINE Ints dot_whole_bytes(Ints sum, Bytes w, int32_t x) { return dot_bytes(sum, w, x); }

// The first `num` lanes of a, the others of b.
INLINE Floats first_of(int64_t num, Floats a, Floats b) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << num) - 1), b, a);
}
INLINE float first(Floats x) { return _mm512_cvtss_f32(x); }
// No lane is NaN.
INLINE float most_of(Floats x) { return _mm512_reduce_max_ps(x); }

#elif defined(__AVX2__)

constexpr int kSideBySide = 1;
constexpr int kMaxRows = 6;  // sums of a block are in registers, those of rows wait beside them
constexpr int kMaxQueries = 6;
constexpr int wide(int queries) { return queries == 1 ? 4 : queries == 2 ? 2 : 1; }

struct Floats { __m256 a, b; };
struct Ints { __m256i a, b; };
using Bytes = Ints;
using Words = Ints;

INLINE __m256i bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE Floats load_halves(const uint8_t* p) {
  const __m128i* eights = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
}
INLINE __m256 load_eight_bfloats(const uint8_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE Floats load_bfloats(const uint8_t* p) {
  return {load_eight_bfloats(p), load_eight_bfloats(p + 16)};
}
INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE void store_halves(uint8_t* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(x.b, 0));
}
INLINE Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
INLINE Floats multiply(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
INLINE Floats divide(Floats x, Floats y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
INLINE Floats fused(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE Floats larger(Floats x, Floats y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
INLINE Floats smaller(Floats x, Floats y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
INLINE Floats floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE Ints nearest(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE Ints all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints add(Ints x, Ints y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
INLINE Floats power_of_two(Ints n) {
  const Ints e = add(n, all(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e.a, 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(e.b, 23))};
}
INLINE Ints magnitudes(Floats x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask),
          _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
INLINE Ints larger(Ints x, Ints y) {
  return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)};
}
template <typename Of>
INLINE int32_t folded(Ints x, Of of) {
  const __m256i eight = of(x.a, x.b);
  __m256i four = of(eight, _mm256_permute2x128_si256(eight, eight, 1));
  four = of(four, _mm256_shuffle_epi32(four, 0x4e));
  return _mm256_cvtsi256_si32(of(four, _mm256_shuffle_epi32(four, 0xb1)));
}
INLINE int32_t largest_of(Ints x) {
  return folded(x, [](__m256i a, __m256i b) INLINE_LAMBDA { return _mm256_max_epu32(a, b); });
}
INLINE int32_t added_up(Ints x) {
  return folded(x, [](__m256i a, __m256i b) INLINE_LAMBDA { return _mm256_add_epi32(a, b); });
}
INLINE void store(int32_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
INLINE void store_bytes(uint8_t* p, Ints x) {
  // Packing works within halves of registers: the second step puts them in order.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i packed =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
// The middle ones of each four change places.
INLINE void store_words(uint8_t* p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shuffle_epi8(words, order));
}
INLINE Bytes load_bytes(const uint8_t* p) { return {bits(p), bits(p + 32)}; }
INLINE Floats load_unsigned(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return floats({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))});
}
INLINE Floats load_signed(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return floats({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
INLINE Bytes masked(Bytes x, int mask) {
  const __m256i bits = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(x.a, bits), _mm256_and_si256(x.b, bits)};
}
template <int BITS>
INLINE Bytes shifted(Bytes x) {
  return {_mm256_srli_epi16(x.a, BITS), _mm256_srli_epi16(x.b, BITS)};
}
INLINE Bytes chosen(int mask, Bytes x, Bytes y) {
  const __m256i bits = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_or_si256(_mm256_and_si256(bits, x.a), _mm256_andnot_si256(bits, y.a)),
          _mm256_or_si256(_mm256_and_si256(bits, x.b), _mm256_andnot_si256(bits, y.b))};
}
INLINE Bytes looked_up(const uint8_t* table, Bytes x) {
  const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i both = _mm256_broadcastsi128_si256(of);
  return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
}
INLINE Words even_words(Bytes x) {
  const __m256i mask = _mm256_set1_epi16(255);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE Words odd_words(Bytes x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
// Sums that are added to one after another. Compilers would rather keep all products and add them
// up as a tree: there aren't registers for so many.
INLINE __m256i one_by_one(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
#if defined(__AVXVNNI__)
using Pairs = Ints;  // sums of products of bytes
INLINE Pairs pairs_after(Ints sum) { return sum; }
INLINE Ints with_pairs(Ints, Pairs sum) { return sum; }
INLINE Pairs dot_bytes(Pairs sum, Bytes w, int32_t x) {
  const __m256i xs = _mm256_set1_epi32(x);
  return {_mm256_dpbusd_avx_epi32(sum.a, w.a, xs), _mm256_dpbusd_avx_epi32(sum.b, w.b, xs)};
}
INLINE Ints dot_words(Ints sum, Words w, int32_t x) {
  const __m256i xs = _mm256_set1_epi32(x);
  return {_mm256_dpwssd_avx_epi32(sum.a, w.a, xs), _mm256_dpwssd_avx_epi32(sum.b, w.b, xs)};
}
INLINE Ints dot_whole_bytes(Ints sum, Bytes w, int32_t x) { return dot_bytes(sum, w, x); }
#else
struct Pairs { __m256i a, b; };  // two sums of 16 bits for each column
// Whoever adds up knows for how long sums of two products fit into 16 bits.
INLINE Pairs pairs_after(Ints) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Ints with_pairs(Ints sum, Pairs pairs) {
  const __m256i ones = _mm256_set1_epi16(1);
  return add(sum, {_mm256_madd_epi16(pairs.a, ones), _mm256_madd_epi16(pairs.b, ones)});
}
INLINE Pairs dot_bytes(Pairs sum, Bytes w, int32_t x) {
  const __m256i xs = _mm256_set1_epi32(x);
  return {one_by_one(_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, xs))),
          one_by_one(_mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, xs)))};
}
INLINE Ints dot_words(Ints sum, Words w, int32_t x) {
  const __m256i xs = _mm256_set1_epi32(x);
  sum = add(sum, {_mm256_madd_epi16(w.a, xs), _mm256_madd_epi16(w.b, xs)});
  return {one_by_one(sum.a), one_by_one(sum.b)};
}
// The sum of two products with weights of 8 bits doesn't fit into 16: inputs are widened, too.
INLINE Ints dot_whole_bytes(Ints sum, Bytes w, int32_t x) {
  const __m256i xs = _mm256_set1_epi32(x), odd = _mm256_srai_epi16(xs, 8);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8);
  const Words low = even_words(w), high = odd_words(w);
  sum = add(sum, {_mm256_madd_epi16(low.a, even), _mm256_madd_epi16(low.b, even)});
  sum = add(sum, {_mm256_madd_epi16(high.a, odd), _mm256_madd_epi16(high.b, odd)});
  return {one_by_one(sum.a), one_by_one(sum.b)};
}
#endif

INLINE Floats first_of(int64_t num, Floats x, Floats y) {
  const __m256i nums = _mm256_set1_epi32(static_cast<int32_t>(num));
  const __m256i a = _mm256_cmpgt_epi32(nums, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i b = _mm256_cmpgt_epi32(nums, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(a)),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(b))};
}
INLINE float first(Floats x) { return _mm256_cvtss_f32(x.a); }
INLINE float most_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

constexpr int kSideBySide = 1;
constexpr int kMaxRows = 1;
constexpr int kMaxQueries = 1;
constexpr int wide(int) { return 1; }

struct Floats { float v[16]; };
struct Ints { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };
struct Words { int16_t v[32]; };
using Pairs = Ints;

template <typename To, typename F>
INLINE To each(F f) {
  To to;
  for (int i = 0; i < 16; i++) to.v[i] = f(i);
  return to;
}
INLINE Floats all(float x) { return each<Floats>([=](int) { return x; }); }
INLINE Floats load(const float* p) { return each<Floats>([=](int i) { return p[i]; }); }
INLINE Floats load_halves(const uint8_t* p) {
  return each<Floats>([=](int i) { return from_half(p[2 * i] | p[2 * i + 1] << 8); });
}
INLINE Floats load_bfloats(const uint8_t* p) {
  return each<Floats>([=](int i) { return from_bfloat(p[2 * i] | p[2 * i + 1] << 8); });
}
INLINE void store(float* p, Floats x) { std::memcpy(p, x.v, sizeof x.v); }
// Rounded to the nearest, to even if there are two.
INLINE uint32_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;   // not a number
  if (size >= 0x477ff000) return sign | 0x7c00;  // too large
  if (size < 0x38800000) {                       // a multiple of 2 to the -24
    return sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(x), 24)));
  }
  return sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}
INLINE void store_halves(uint8_t* p, Floats x) {
  for (int i = 0; i < 16; i++) {
    const uint32_t half = to_half(x.v[i]);
    p[2 * i] = static_cast<uint8_t>(half);
    p[2 * i + 1] = static_cast<uint8_t>(half >> 8);
  }
}
INLINE Floats add(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
INLINE Floats multiply(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
INLINE Floats divide(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
INLINE Floats fused(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
INLINE Floats larger(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
INLINE Floats smaller(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
INLINE Floats floats(Ints x) {
  return each<Floats>([&](int i) { return static_cast<float>(x.v[i]); });
}
INLINE Ints nearest(Floats x) {
  return each<Ints>([&](int i) {
    const float n = std::nearbyint(x.v[i]);
    return n >= -2147483648.f && n < 2147483648.f ? static_cast<int32_t>(n) : INT32_MIN;
  });
}
INLINE Ints all(int32_t x) { return each<Ints>([=](int) { return x; }); }
INLINE int32_t wrapped(uint32_t x) {
  int32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
INLINE Ints add(Ints a, Ints b) {
  return each<Ints>([&](int i) {
    return wrapped(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
  });
}
INLINE Floats power_of_two(Ints n) {
  return each<Floats>([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(n.v[i] + 127) << 23;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  });
}
INLINE Ints magnitudes(Floats x) {
  return each<Ints>([&](int i) {
    int32_t bits;
    std::memcpy(&bits, &x.v[i], 4);
    return bits & 0x7fffffff;
  });
}
INLINE Ints larger(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
INLINE int32_t largest_of(Ints x) {
  int32_t most = x.v[0];
  for (int32_t each : x.v) most = each > most ? each : most;  // none is negative
  return most;
}
INLINE int32_t added_up(Ints x) {
  int32_t sum = 0;
  for (int32_t each : x.v) sum += each;
  return sum;
}
INLINE void store(int32_t* p, Ints x) { std::memcpy(p, x.v, sizeof x.v); }
INLINE void store_bytes(uint8_t* p, Ints x) {
  for (int i = 0; i < 16; i++) {
    p[i] = static_cast<uint8_t>(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
  }
}
// The middle ones of each four change places.
INLINE void store_words(uint8_t* p, Ints x) {
  int16_t words[16];
  for (int i = 0; i < 16; i++) {
    const int32_t of = x.v[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i];
    words[i] = static_cast<int16_t>(of < -32768 ? -32768 : of > 32767 ? 32767 : of);
  }
  std::memcpy(p, words, sizeof words);
}
INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  std::memcpy(x.v, p, 64);
  return x;
}
INLINE Floats load_unsigned(const uint8_t* p) {
  return each<Floats>([=](int i) { return static_cast<float>(p[i]); });
}
INLINE Floats load_signed(const uint8_t* p) {
  return each<Floats>([=](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
INLINE Bytes masked(Bytes x, int mask) {
  for (uint8_t& byte : x.v) byte = masked(byte, mask);
  return x;
}
template <int BITS>
INLINE Bytes shifted(Bytes x) {
  for (uint8_t& byte : x.v) byte = shifted<BITS>(byte);
  return x;
}
INLINE Bytes chosen(int mask, Bytes a, Bytes b) {
  for (int i = 0; i < 64; i++) a.v[i] = chosen(mask, a.v[i], b.v[i]);
  return a;
}
INLINE Bytes looked_up(const uint8_t* table, Bytes x) {
  for (uint8_t& byte : x.v) byte = table[byte];
  return x;
}
INLINE Words words(Bytes x, int first) {
  Words to;
  for (int i = 0; i < 32; i++) to.v[i] = x.v[2 * i + first];
  return to;
}
INLINE Words even_words(Bytes x) { return words(x, 0); }
INLINE Words odd_words(Bytes x) { return words(x, 1); }
INLINE Ints dot_bytes(Ints sum, Bytes w, int32_t x) {
  int8_t four[4];
  std::memcpy(four, &x, 4);
  return each<Ints>([&](int i) {
    const uint8_t* of = w.v + 4 * i;
    return sum.v[i] + of[0] * four[0] + of[1] * four[1] + of[2] * four[2] + of[3] * four[3];
  });
}
INLINE Ints dot_whole_bytes(Ints sum, Bytes w, int32_t x) { return dot_bytes(sum, w, x); }
INLINE Ints dot_words(Ints sum, Words w, int32_t x) {
  int16_t two[2];
  std::memcpy(two, &x, 4);
  return each<Ints>([&](int i) { return sum.v[i] + w.v[2 * i] * two[0] + w.v[2 * i + 1] * two[1]; });
}
INLINE Pairs pairs_after(Ints sum) { return sum; }
INLINE Ints with_pairs(Ints, Pairs sum) { return sum; }

INLINE Floats first_of(int64_t num, Floats a, Floats b) {
  return each<Floats>([&](int i) { return i < num ? a.v[i] : b.v[i]; });
}
INLINE float first(Floats x) { return x.v[0]; }
INLINE float most_of(Floats x) {
  float most = x.v[0];
  for (float each : x.v) most = each > most ? each : most;
  return most;
}

#endif

}  // namespace
}  // namespace quill

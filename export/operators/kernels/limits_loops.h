// The loops of limits.h, written once for all processors.
//
// Knows: lanes. Does not know: which processor this is.
#pragma once
#include "lanes.h"
#include "limits.h"

namespace quill {
namespace {

constexpr int64_t kReadAhead = 4096;    // bytes
constexpr int kSums = 5 * kSideBySide;  // of a round: enough to wait for none, and all in registers
constexpr int32_t kOnes = 0x01010101;

// What the compiler doesn't know any more stays in its registers, and isn't computed only once.
template <typename T>
INLINE void touch(T& x) {
#if defined(__AVX512VNNI__)
  asm volatile("" : "+v"(x));
#elif defined(__AVX2__)
  asm volatile("" : "+x"(x.a), "+x"(x.b));
#else
  asm volatile("" : "+m"(x));
#endif
}

template <int SUMS>
INLINE int64_t total(const Pairs (&sums)[SUMS]) {
  Ints sum = all(0);
  UNROLLED
  for (int i = 0; i < SUMS; i++) sum = add(sum, with_pairs(all(0), sums[i]));
  return added_up(sum);
}

int64_t read_memory(const uint8_t* from, int64_t bytes) {
  Pairs sums[4];
  UNROLLED
  for (int i = 0; i < 4; i++) sums[i] = pairs_after(all(0));
  for (const uint8_t* last = from + bytes; from < last; from += 256) {
    UNROLLED
    for (int i = 0; i < 4; i++) {
      __builtin_prefetch(from + kReadAhead + 64 * i, 0, 2);
      sums[i] = dot_bytes(sums[i], load_bytes(from + 64 * i), kOnes);
      touch(sums[i]);
    }
  }
  return total(sums);
}

int64_t multiply_bytes(int64_t rounds) {
  uint8_t ones[64];
  std::memset(ones, 1, 64);
  Bytes w = load_bytes(ones);
  Pairs sums[kSums];
  UNROLLED
  for (int i = 0; i < kSums; i++) sums[i] = pairs_after(all(0));
  for (int64_t round = 0; round < rounds; round++) {
    UNROLLED
    for (int i = 0; i < kSums; i++) {
      touch(w);
      sums[i] = dot_bytes(sums[i], w, kOnes);
      touch(sums[i]);
    }
  }
  return total(sums);
}

constexpr Limits kLimits = {read_memory, multiply_bytes};

}  // namespace
}  // namespace quill

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

int64_t read_memory(const uint8_t* from, int64_t bytes) {
  Bytes seen[4];
  for (Bytes& each : seen) each = load_bytes(from);
  for (const uint8_t* last = from + bytes; from < last; from += 256) {
    UNROLLED
    for (int i = 0; i < 4; i++) {
      __builtin_prefetch(from + kReadAhead + 64 * i, 0, 2);
      seen[i] = chosen(0x55, seen[i], load_bytes(from + 64 * i));
    }
  }
  int64_t sum = 0;
  for (const Bytes& each : seen) {
    uint8_t bytes_of[64];
    std::memcpy(bytes_of, &each, 64);
    for (uint8_t byte : bytes_of) sum += byte;
  }
  return sum;
}

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

int64_t multiply_bytes(int64_t rounds) {
  uint8_t ones[64];
  std::memset(ones, 1, 64);
  Bytes w = load_bytes(ones);
  Pairs sums[kSums];
  UNROLLED
  for (int s = 0; s < kSums; s++) sums[s] = pairs_after(all(0));
  for (int64_t i = 0; i < rounds; i++) {
    UNROLLED
    for (int s = 0; s < kSums; s++) {
      touch(w);
      sums[s] = dot_bytes(sums[s], w, 0x01010101);
      touch(sums[s]);
    }
  }
  Ints sum = all(0);
  UNROLLED
  for (int s = 0; s < kSums; s++) sum = add(sum, with_pairs(all(0), sums[s]));
  return added_up(sum);
}

constexpr Limits kLimits = {read_memory, multiply_bytes, kSums * 64};

}  // namespace
}  // namespace quill

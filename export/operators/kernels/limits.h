// What a processor does at most: reads memory, and multiplies bytes.
//
// Knows: nothing of matrices. Does not know: threads, time. Whoever calls counts both.
#pragma once
#include <cstdint>

namespace quill {

struct Limits {
  // Adds up all bytes, whose number is a multiple of 256.
  int64_t (*read)(const uint8_t* from, int64_t bytes);
  // Multiplies ones with ones in registers, so many rounds, and adds up: how many products there
  // were. Sums of many overflow.
  int64_t (*multiply)(int64_t rounds);
};

Limits plain_limits();
#ifdef __x86_64__
Limits avx2_limits();
Limits avxvnni_limits();
Limits avx512_limits();
#endif

}  // namespace quill

// What a processor does at most: reads memory, and multiplies bytes.
//
// Knows: nothing of matrices. Does not know: threads, time. Whoever calls counts both.
#pragma once
#include <cstdint>

namespace quill {

struct Limits {
  // Reads memory from one end to the other; a number that depends on all of it.
  int64_t (*read)(const uint8_t* from, int64_t bytes);
  // Multiplies and adds bytes in registers, so many rounds, each with so many products.
  int64_t (*multiply)(int64_t rounds);
  int64_t products;
};

Limits plain_limits();
#ifdef __x86_64__
Limits avx2_limits();
Limits avxvnni_limits();
Limits avx512_limits();
#endif

}  // namespace quill

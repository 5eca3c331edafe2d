// Which instructions this processor has.
//
// Knows: cpuid. Does not know: what they are wanted for. Asked directly: __builtin_cpu_supports
// takes a library that not every compiler brings.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace quill {

enum class Instructions { plain, avx2, avx512 };

#ifdef __x86_64__
inline bool has_bits(uint32_t word, uint32_t wanted) { return (word & wanted) == wanted; }

// Registers that the operating system saves when it changes threads.
inline uint32_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

inline Instructions best_instructions() {
  uint32_t a, b, c, d;
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, kFma | kOsxsave | kAvx | kF16c)) {
    return Instructions::plain;
  }
  const uint32_t saved = saved_registers();
  constexpr uint32_t kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr uint32_t kVnni = 1u << 11;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_bits(b, kAvx2) || !has_bits(saved, 0x06)) {
    return Instructions::plain;
  }
  const bool is_wide = has_bits(b, kF | kDq | kBw | kVl) && has_bits(c, kVnni);
  return is_wide && has_bits(saved, 0xe6) ? Instructions::avx512 : Instructions::avx2;
}
#else
inline Instructions best_instructions() { return Instructions::plain; }
#endif

// The best that this processor has. QUILL_KERNELS, plain or avx2, asks for less, to compare them.
inline Instructions chosen_instructions() {
  const char* named = std::getenv("QUILL_KERNELS");
  const auto is_named = [=](const char* name) { return named && !std::strcmp(named, name); };
  const Instructions best = best_instructions();
  if (is_named("plain")) return Instructions::plain;
  return is_named("avx2") && best == Instructions::avx512 ? Instructions::avx2 : best;
}

}  // namespace quill

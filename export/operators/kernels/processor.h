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

enum class Instructions { plain, avx2, avxvnni, avx512 };

#ifdef __x86_64__
inline bool has_bits(uint32_t word, uint32_t wanted) { return (word & wanted) == wanted; }

// Registers that the operating system saves when it changes threads.
inline uint32_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

inline bool has(Instructions which) {
  uint32_t a, b, c, d;
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  if (which == Instructions::plain) return true;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, kFma | kOsxsave | kAvx | kF16c)) return false;
  const uint32_t saved = saved_registers();
  constexpr uint32_t kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  constexpr uint32_t kVnni = 1u << 11, kAvxVnni = 1u << 4;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has_bits(b, kAvx2) || !has_bits(saved, 0x06)) {
    return false;
  }
  if (which == Instructions::avx2) return true;
  if (which == Instructions::avx512) {
    return has_bits(b, kF | kDq | kBw | kVl) && has_bits(c, kVnni) && has_bits(saved, 0xe6);
  }
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_bits(a, kAvxVnni);
}
#else
inline bool has(Instructions which) { return which == Instructions::plain; }
#endif

struct Named {
  const char* name;
  Instructions which;
};

// The best that this processor has. QUILL_KERNELS names others, to compare them.
inline Named chosen_instructions() {
  constexpr Named all[] = {{"plain", Instructions::plain},
                           {"avx2", Instructions::avx2},
                           {"avxvnni", Instructions::avxvnni},
                           {"avx512", Instructions::avx512}};
  const char* wanted = std::getenv("QUILL_KERNELS");
  Named best = all[0];
  for (const Named& each : all) {
    if (!has(each.which)) continue;
    best = each;
    if (wanted && !std::strcmp(wanted, each.name)) break;
  }
  return best;
}

}  // namespace quill

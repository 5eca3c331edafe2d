// How integers of 4, 5, 6 and 8 bits are packed into the bytes of a record.
//
// Knows: bits. Does not know: processors. Where lanes are known (lanes.h), it works on 64 bytes at a
// time, and otherwise on one.
#pragma once
#include "scalars.h"

namespace quill {
namespace {

// Four neighbouring inputs of each column are a step; a block has eight. With 4 bits the last four
// steps are in the high halves of the first. With 5 and 6 bits there are whole bytes for five of
// eight, or three of four steps, and the others are made of the bits that these leave free.
// `load(i)` gives the i-th 64 bytes, or one of them.
template <int BITS, typename Load>
inline __attribute__((always_inline)) auto unpacked(Load load, int step) {
  if constexpr (BITS == 8) {
    return load(step);
  } else if constexpr (BITS == 4) {
    return masked(step < 4 ? load(step) : shifted<4>(load(step - 4)), 15);
  } else if constexpr (BITS == 5) {
    if (step < 5) return masked(load(step), 31);
    if (step == 7) {
      const auto high = chosen(8, shifted<4>(load(1)), shifted<3>(load(3)));
      return masked(chosen(7, shifted<5>(load(4)), high), 31);
    }
    const int at = 2 * (step - 5);
    return masked(chosen(7, shifted<5>(load(at)), shifted<2>(load(at + 1))), 31);
  } else {
    static_assert(BITS == 6);
    const int at = 3 * (step / 4);
    if (step % 4 < 3) return masked(load(at + step % 4), 63);
    const auto low = chosen(12, shifted<4>(load(at + 1)), shifted<6>(load(at + 2)));
    return masked(chosen(48, shifted<2>(load(at)), low), 63);
  }
}

// The same for any number of bits.
template <typename Load>
inline auto unpacked(int bits, Load load, int step) {
  switch (bits) {
    case 4: return unpacked<4>(load, step);
    case 5: return unpacked<5>(load, step);
    case 6: return unpacked<6>(load, step);
    default: return unpacked<8>(load, step);
  }
}

}  // namespace
}  // namespace quill

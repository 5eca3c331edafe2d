// A short convolution, written once for all processors.
//
// Knows: blocks, lanes. Does not know: sequences, threads, ONNX Runtime.
//
// A token's inputs are kept where keys and values are: the first half of its channels among the
// keys, the others among the values. All of a sum is read from there, so it makes no difference into
// how many pieces a prompt was cut.
#pragma once
#include "attention.h"

namespace quill {
namespace {

template <typename T>
INLINE void convolve_at(const Heads& heads, const Taps& taps, const int32_t* blocks,
                        int64_t position, float* out) {
  const int64_t half = heads.num_kv * heads.size, channels = 2 * half;
  for (int64_t at = 0; at < half; at += 16) {
    const int64_t head = at / heads.size, inner = at % heads.size;
    Floats first = taps.bias ? load(taps.bias + at) : all(0.f);
    Floats second = taps.bias ? load(taps.bias + half + at) : all(0.f);
    const int64_t missing = taps.num - 1 - position;  // taps before the sequence's begin
    for (int64_t tap = missing > 0 ? missing : 0; tap < taps.num; tap++) {
      const int64_t from = position - (taps.num - 1) + tap, lane = from % kPositions;
      const int64_t block = blocks[from / kPositions];
      const T* keys = static_cast<const T*>(heads.keys_of(block, head)) + inner * kPositions + lane;
      const T* values = static_cast<const T*>(heads.values_of(block, head)) + lane * heads.size;
      T column[16];
      for (int64_t i = 0; i < 16; i++) column[i] = keys[i * kPositions];
      const float* weights = taps.weights + tap * channels + at;
      first = fused(load(column), load(weights), first);
      second = fused(load(values + inner), load(weights + half), second);
    }
    store(out + at, first);
    store(out + half + at, second);
  }
}

void convolve(const Heads& heads, const Taps& taps, const int32_t* blocks, int64_t position,
              float* out) {
  if (heads.halves) convolve_at<uint16_t>(heads, taps, blocks, position, out);
  else convolve_at<float>(heads, taps, blocks, position, out);
}

}  // namespace
}  // namespace quill

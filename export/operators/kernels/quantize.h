// What is asked of the quantizer: an argument as export/quantize/native.py makes it.
//
// Knows: the layout. Does not know: what is done with it.
#pragma once
#include <cstdint>

namespace quill {

// One block of 32 neighbouring inputs, of many rows.
struct BlockJob {
  const float* x;  // rows of weights, from the block's first input on
  int64_t stride, rows;
  const float* counts;   // how much each input counts
  const float* factors;  // the upper Cholesky factor of inverse moments, from the block on, or null
  int64_t factor_stride;
  int64_t bits, middle;  // middle 0: there are minima
  uint8_t* q;  // null: only scales and minima are wanted
  int64_t q_stride;
  float *scales, *minima;
  int64_t num_blocks;  // of a row
  int64_t are_given;   // scales and minima
  float* errors;       // rows x 32, to be passed on to the inputs after the block
};

using QuantizeBlock = void (*)(const BlockJob&);

QuantizeBlock avx2_quantize_block();

}  // namespace quill

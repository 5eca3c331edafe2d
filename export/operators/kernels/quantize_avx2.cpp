#include "quantize_loops.h"

quill::QuantizeBlock quill::avx2_quantize_block() { return quantize_block; }

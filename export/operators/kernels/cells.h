// Recurrent cells: what their kernels are given.
//
// Does not know: ONNX Runtime, processors, sequences.
#pragma once
#include <cstdint>

namespace quill {

struct Cell {
  enum Kind : int64_t { kPlain = 0, kGru = 1, kLstm = 2 };
  int64_t kind, size;

  int64_t gates() const { return (kind == kPlain ? 1 : kind == kGru ? 3 : 4) * size; }
};

// What a token and the state before it say to each gate, that state, and where the new one goes.
struct Gates {
  const float* input;
  const float* state;  // null: nothing. A plain cell is then the tanh of its input
  const float* h;
  const float* c;
  float* new_h;
  float* new_c;
};

// A row times weights, inputs x columns, and a bias.
struct RowProduct {
  const float* weights;
  const float* bias;
  int64_t inputs, columns;
};

// A short convolution's weights, taps x channels, the oldest first.
struct Taps {
  const float* weights;
  const float* bias;  // null: there is none
  int64_t num;
};

// Who looks at a source's positions.
struct AdditiveQuery {
  const float* from;
  const float* score;  // how much each number of the sum counts
  const int32_t* blocks;
  int64_t num;  // positions, one at least
};

}  // namespace quill

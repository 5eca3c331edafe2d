// What is asked of the sampler: arrays as server/sampling/native.py makes them.
//
// Knows: layouts. Does not know: what is done with them.
#pragma once
#include <cstdint>

namespace quill {

// One row's next token. The rules are those of model/reference/sampling.py.
struct Draw {
  int64_t row;  // of the logits
  double temperature, top_p, min_p, u;
  int64_t top_k;
  // Tokens that the text or the client says something about, by arrays of `num_adjusted`.
  double repetition_penalty, frequency_penalty, presence_penalty;
  int64_t num_adjusted;
  const int64_t* ids;
  const uint8_t* in_text;  // the prompt or the answer has it
  const double* counts;    // in the answer
  const double* biases;
  const uint32_t* mask;  // a bit for each token that may be chosen, the lowest first; null: all may
};

struct Logits {
  const float* x;
  int64_t stride, vocabulary;

  const float* row(int64_t index) const { return x + index * stride; }
};

enum Outcome : uint8_t {
  kChosen = 0,
  kInDoubt = 1,   // too close to call: the caller decides, by the oracle's own arithmetic
  kNotFinite = 2,  // the greatest logit isn't finite, or one isn't a number
  kNoMemory = 3,
};

// The likeliest tokens of one row.
struct Tops {
  int64_t row, num_wanted, num_found;
  double log_total;  // what to subtract from logits to make log-probabilities of them
};

}  // namespace quill

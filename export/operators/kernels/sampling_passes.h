// Passes over a row of logits: what choosing a token does with every token of the vocabulary.
//
// Knows: a row, the processor. Does not know: rules, other rows. Written once for all processors, and
// every one of them computes the same bits: nothing is fused, sums go in a fixed order.
#pragma once
#include <cstdint>

namespace quill {

constexpr int64_t kGroup = 64;       // neighbouring tokens whose greatest logit is kept
constexpr int kBuckets = 2048;       // of scores, best first
constexpr double kLeast = -708;      // exponents below give as little as this one

// What is known of a row after one look.
struct Scan {
  float top;    // -inf: there is nothing else
  float least;  // of those that are finite; +inf: there are none
  bool has_nan;
};

// How scores become weights and buckets.
struct Scale {
  double top;      // the score whose weight is 1 and whose bucket is 0
  double inverse;  // of the temperature
  double buckets;  // for a difference of 1
};

struct Passes {
  // The greatest of each group go to `tops`.
  Scan (*scan)(const float* x, int64_t size, float* tops);
  // About the sum of exp((x - top) / temperature), in single precision.
  double (*estimate)(const float* x, int64_t size, float top, float inverse);
  // The sum of exp(x - top).
  double (*total)(const float* x, int64_t size, double top);
  // Adds each token's weight to the mass of its bucket. The last one has all that is negligible: its
  // mass isn't touched.
  void (*weigh)(const float* x, int64_t size, const Scale& scale, double* masses, uint16_t* buckets);
  // The ids whose bucket is this one. Their number.
  int64_t (*find)(const uint16_t* buckets, int64_t size, uint16_t wanted, int32_t* ids);
};

Passes plain_passes();
#ifdef __x86_64__
Passes avx2_passes();
Passes avx512_passes();
#endif

}  // namespace quill

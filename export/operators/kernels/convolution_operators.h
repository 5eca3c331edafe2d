// Quill's operator for short convolutions: T packed tokens of S sequences, earlier inputs in blocks.
//
//   quill::ShortConv(x, kernel, key_cache, value_cache, query_starts, past_lengths, block_table,
//                    bias?) -> y, key_cache, value_cache
//
// A causal convolution of each channel for itself: y[t] is the sum of kernel[k] * x[t - taps + 1 + k],
// with nothing before a sequence's begin. Attributes taps, and heads, kv_heads, head_size, scale: half
// of the channels as heads, each with 16 numbers or a multiple.
//
// Knows: the runtime, threads. Does not know: how it is computed.
#pragma once
#include "attention_operators.h"

namespace quill {
namespace {

constexpr int64_t kMaxTaps = 64;

struct Convolving {
  const Attending* of;
  Taps taps;
  float* y;
  int64_t parts;
};

void convolve_part(void* data, size_t part) {
  const Convolving& work = *static_cast<Convolving*>(data);
  const Sequences& all = work.of->all;
  const int64_t index = static_cast<int64_t>(part), tokens = work.of->tokens;
  const int64_t first = tokens * index / work.parts, last = tokens * (index + 1) / work.parts;
  int64_t s = std::upper_bound(all.starts, all.starts + all.num + 1, first) - all.starts - 1;
  for (int64_t t = first; t < last; t++) {
    while (t >= all.starts[s + 1]) s++;
    const int64_t position = t - all.starts[s] + all.lengths[s];
    kernels.convolve(work.of->heads, work.taps, all.blocks(s), position,
                     work.y + t * work.of->key_stride);
  }
}

template <bool HALVES>
class ShortConv : public HeadsOperator {
 public:
  static constexpr const char* kName = "ShortConv";
  static constexpr size_t kNumInputs = 8;
  static constexpr size_t kNumOutputs = 3;
  static int input_type(size_t index) {
    if (index == 2 || index == 3) return kCacheType<HALVES>;
    return index >= 4 && index <= 6 ? runtime::kInt32 : runtime::kFloat;
  }
  static int output_type(size_t index) { return index ? kCacheType<HALVES> : runtime::kFloat; }
  static int input_kind(size_t index) { return index < 7 ? runtime::kRequired : runtime::kOptional; }

  Status* read_attributes(const Info* info) {
    TRY(HeadsOperator::read_attributes(info));
    TRY(ort->int_attribute(info, "taps", &taps_));
    const bool fits = taps_ > 0 && taps_ <= kMaxTaps && heads_.num == heads_.num_kv &&
                      heads_.value_size == heads_.size;
    if (!fits) return failed("no such convolution");
    TRY(kernel_.find(info, 1, taps_ * channels()));
    return bias_.find(info, 7, channels());
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<ShortConv>(context, given));
    Attending work{};
    begin(&work, HALVES);
    Convolving convolving{&work, {nullptr, nullptr, taps_}, nullptr, 1};
    TRY(read_tokens(given[0], channels(), &work.keys, &work.tokens));
    work.key_stride = work.value_stride = channels();
    TRY(kernel_.read(given[1], &convolving.taps.weights));
    TRY(bias_.read(given[7], &convolving.taps.bias));
    Dims dims;
    TRY(read_caches(given[2], given[3], &work.heads, &dims));
    work.all.causal = true;
    TRY(read_starts(given[4], work.tokens, &work.all));
    TRY(read_lengths(given[5], &work.all));
    TRY(read_table(given[6], dims.sizes[0], &work.all));
    TRY(give_back(context, 1, dims, &work.heads));
    const int64_t sizes[2] = {work.tokens, channels()};
    TRY(make_output(context, 0, sizes, 2, &convolving.y));
    if (work.tokens == 0) return nullptr;
    work.values = work.keys + key_width();
    TRY(append_tokens(context, &work));
    return share(context, convolve_part, work.tokens < kTokensToShare ? 1 : work.tokens / 4,
                 &convolving);
  }

 private:
  int64_t channels() const { return 2 * key_width(); }

  int64_t taps_ = 0;
  Constant kernel_, bias_;
};

}  // namespace
}  // namespace quill

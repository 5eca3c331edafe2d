// Quill's operators for attention: T packed tokens of S sequences, keys and values in blocks.
//
//   quill::Attention(qkv, key_cache, value_cache, query_starts, past_lengths, block_table,
//                    cosines?, sines?, sinks?, bias?) -> attended, key_cache, value_cache
//   quill::CrossAttention(q, key_cache, value_cache, query_starts, source_lengths, source_table)
//       -> attended
//   quill::EncoderAttention(qkv, query_starts, cosines?, sines?, bias?) -> attended
//   quill::Store(keys, values, key_cache, value_cache, query_starts, block_table, past_lengths?)
//       -> key_cache, value_cache
//
// Attributes heads, kv_heads, head_size, scale; and if they are there: window (tokens that a token
// sees, itself included), soft_cap (of scores), value_size (of values that are narrower than keys),
// rotary_size (the last so many numbers of a head that are turned). A head's sink is a score that has
// a weight and no value. bias: heads x distances, added to scores. Its last column is of the token
// itself; in an encoder, where tokens look ahead, its middle.
//
// Knows: the runtime. Does not know: threads, how attention is computed.
// Caches that are given back are meant to be the memory of those that came: then nothing is copied.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "attending.h"

namespace quill {
namespace {

constexpr int64_t kMaxHeads = 1 << 12;

// What all of them have in common: heads, and how their inputs are read.
class HeadsOperator {
 public:
  Status* read_attributes(const Info* info) {
    TRY(ort->int_attribute(info, "heads", &heads_.num));
    TRY(ort->int_attribute(info, "kv_heads", &heads_.num_kv));
    TRY(ort->int_attribute(info, "head_size", &heads_.size));
    TRY(ort->float_attribute(info, "scale", &heads_.scale));
    heads_.value_size = heads_.rotary_size = heads_.size;
    TRY(absent(ort->int_attribute(info, "window", &window_)));
    TRY(absent(ort->int_attribute(info, "value_size", &heads_.value_size)));
    TRY(absent(ort->int_attribute(info, "rotary_size", &heads_.rotary_size)));
    TRY(absent(ort->float_attribute(info, "soft_cap", &heads_.soft_cap)));
    const int64_t num = heads_.num, num_kv = heads_.num_kv, size = heads_.size;
    const int64_t width = heads_.value_size, turned = heads_.rotary_size;
    const bool fits = num_kv > 0 && num >= num_kv && num <= kMaxHeads && num % num_kv == 0 &&
                      num / num_kv <= kMaxGroup && size > 0 && size <= kMaxHeadSize &&
                      size % 16 == 0 && width > 0 && width <= size && width % 16 == 0 &&
                      turned >= 0 && turned <= size && turned % 2 == 0 && window_ >= 0 &&
                      heads_.soft_cap >= 0;
    return fits ? nullptr : failed("no such heads");
  }

 protected:
  // Tokens x their numbers. The first that is read says how many tokens there are.
  Status* read_tokens(const Value* value, int64_t width, const float** to, int64_t* tokens) const {
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 2 || dims.sizes[1] != width) {
      return failed("heads of another width than their operator's");
    }
    if (*tokens >= 0 && dims.sizes[0] != *tokens) return failed("values for other tokens");
    *tokens = dims.sizes[0];
    return read_data(value, to);
  }

  Status* read_starts(const Value* value, int64_t tokens, Sequences* all) const {
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 1 || dims.sizes[0] < 1) return failed("no starts of sequences");
    TRY(read_data(value, &all->starts));
    all->num = dims.sizes[0] - 1;
    bool fits = all->starts[0] == 0 && all->starts[all->num] == tokens;
    for (int64_t s = 0; s < all->num; s++) fits = fits && all->starts[s] <= all->starts[s + 1];
    return fits ? nullptr : failed("starts of sequences that aren't those of the tokens");
  }

  Status* read_lengths(const Value* value, Sequences* all) const {
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 1 || dims.sizes[0] != all->num) {
      return failed("lengths for another number of sequences");
    }
    return read_data(value, &all->lengths);
  }

  // `lengths` have been read: a sequence's blocks must hold all that it looks at.
  Status* read_table(const Value* value, int64_t num_blocks, Sequences* all) const {
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 2 || dims.sizes[0] != all->num) {
      return failed("blocks for another number of sequences");
    }
    all->width = dims.sizes[1];
    TRY(read_data(value, &all->table));
    for (int64_t s = 0; s < all->num; s++) {
      const int64_t tokens = all->tokens(s), length = all->seen(s, tokens - 1);
      if (all->lengths[s] < 0 || length > all->width * kPositions) {
        return failed("a sequence that is longer than its blocks");
      }
      if (tokens && length == 0) return failed("a sequence with nothing to look at");
      const int32_t* blocks = all->blocks(s);
      bool fits = true;
      for (int64_t b = 0; b * kPositions < length; b++) {
        fits = fits & (blocks[b] >= 0) & (blocks[b] < num_blocks);
      }
      if (!fits) return failed("a block that isn't there");
    }
    return nullptr;
  }

  // Positions as far as any sequence goes.
  Status* read_tables(const Value* cosines, const Value* sines, const Sequences& all,
                      Heads* heads) const {
    if (!cosines != !sines) return failed("cosines without sines");
    if (!cosines) return nullptr;
    int64_t longest = std::numeric_limits<int64_t>::max();
    for (const Value* value : {cosines, sines}) {
      Dims dims;
      TRY(read_dims(value, &dims));
      if (dims.num != 2 || dims.sizes[1] != heads_.rotary_size / 2) {
        return failed("positions of another width");
      }
      longest = std::min(longest, dims.sizes[0]);
    }
    for (int64_t s = 0; s < all.num; s++) {
      if (all.seen(s, all.tokens(s) - 1) > longest) {
        return failed("a sequence that is longer than its positions");
      }
    }
    TRY(read_data(cosines, &heads->cosines));
    return read_data(sines, &heads->sines);
  }

  Status* read_sinks(const Value* value, Heads* heads) const {
    if (!value) return nullptr;
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 1 || dims.sizes[0] != heads_.num) return failed("sinks of other heads");
    return read_data(value, &heads->sinks);
  }

  // Of distances as far as any sequence goes.
  Status* read_bias(const Value* value, const Sequences& all, Heads* heads) const {
    if (!value) return nullptr;
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.num != 2 || dims.sizes[0] != heads_.num || (!all.causal && dims.sizes[1] % 2 == 0)) {
      return failed("a bias of other heads than its operator's");
    }
    heads->bias_width = dims.sizes[1];
    heads->bias_center = all.causal ? dims.sizes[1] - 1 : dims.sizes[1] / 2;
    for (int64_t s = 0; s < all.num; s++) {
      if (all.seen(s, all.tokens(s) - 1) > heads->bias_center + 1) {
        return failed("a sequence that is longer than its bias");
      }
    }
    return read_data(value, &heads->bias);
  }

  Status* read_caches(const Value* keys, const Value* values, Heads* heads, Dims* dims) const {
    int64_t blocks = 0;
    for (int side = 0; side < 2; side++) {
      TRY(read_dims(side ? values : keys, dims));
      const bool fits = dims->num == 4 && dims->sizes[1] == heads_.num_kv &&
                        dims->sizes[side ? 3 : 2] == (side ? heads_.value_size : heads_.size) &&
                        dims->sizes[side ? 2 : 3] == kPositions &&
                        (side == 0 || dims->sizes[0] == blocks);
      if (!fits) return failed("a cache of another size than its operator's");
      blocks = dims->sizes[0];
    }
    TRY(read_data(keys, &heads->keys));
    return read_data(values, &heads->values);
  }

  // The caches become those that are given back.
  static Status* give_back(Context* context, size_t index, const Dims& of_values, Heads* heads) {
    const int64_t blocks = of_values.sizes[0], num = of_values.sizes[1];
    const int64_t of_keys[4] = {blocks, num, heads->size, kPositions};
    for (void** side : {&heads->keys, &heads->values}) {
      const bool is_keys = side == &heads->keys;
      const int64_t count = blocks * num * (is_keys ? heads->key_block() : heads->value_block());
      void* present;
      TRY(make_output(context, index++, is_keys ? of_keys : of_values.sizes, 4, &present));
      if (present != *side && count) {
        std::memcpy(present, *side, static_cast<size_t>(count * heads->element()));
      }
      *side = present;
    }
    return nullptr;
  }

  Status* give_out(Context* context, Attending* work) const {
    const int64_t sizes[2] = {work->tokens, heads_.num * heads_.value_size};
    TRY(make_output(context, 0, sizes, 2, &work->out));
    static thread_local std::vector<float> turned;  // for all operators
    grow(&turned, {work->tokens, heads_.num, heads_.size});
    work->turned = turned.data();
    return nullptr;
  }

  static Status* run(Context* context, Attending* work) {
    if (work->tokens == 0) return nullptr;
    TRY(append_tokens(context, work));
    return attend_all(context, work);
  }

  // Queries, keys and values of each token, side by side.
  void take_apart(const float* qkv, Attending* work) const {
    work->queries = qkv;
    work->keys = qkv + heads_.num * heads_.size;
    work->values = work->keys + heads_.num_kv * heads_.size;
    work->query_stride = work->key_stride = work->value_stride = qkv_width();
  }
  int64_t key_width() const { return heads_.num_kv * heads_.size; }
  int64_t value_width() const { return heads_.num_kv * heads_.value_size; }
  int64_t qkv_width() const { return heads_.num * heads_.size + key_width() + value_width(); }

  // No tokens yet.
  void begin(Attending* work, bool halves) const {
    work->heads = heads_;
    work->heads.halves = halves;
    work->tokens = -1;
  }

  Heads heads_{};
  int64_t window_ = 0;
};

template <bool HALVES>
constexpr int kCacheType = HALVES ? int{runtime::kHalf} : int{runtime::kFloat};

template <bool HALVES>
class Attention : public HeadsOperator {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr size_t kNumInputs = 10;
  static constexpr size_t kNumOutputs = 3;
  static int input_type(size_t index) {
    if (index == 1 || index == 2) return kCacheType<HALVES>;
    return index >= 3 && index <= 5 ? runtime::kInt32 : runtime::kFloat;
  }
  static int output_type(size_t index) { return index ? kCacheType<HALVES> : runtime::kFloat; }
  static int input_kind(size_t index) { return index < 6 ? runtime::kRequired : runtime::kOptional; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Attention>(context, given));
    Attending work{};
    begin(&work, HALVES);
    const float* qkv = nullptr;
    TRY(read_tokens(given[0], qkv_width(), &qkv, &work.tokens));
    take_apart(qkv, &work);
    Dims dims;
    TRY(read_caches(given[1], given[2], &work.heads, &dims));
    work.all.causal = true;
    work.all.window = window_;
    TRY(read_starts(given[3], work.tokens, &work.all));
    TRY(read_lengths(given[4], &work.all));
    TRY(read_table(given[5], dims.sizes[0], &work.all));
    TRY(read_tables(given[6], given[7], work.all, &work.heads));
    TRY(read_sinks(given[8], &work.heads));
    TRY(read_bias(given[9], work.all, &work.heads));
    TRY(give_back(context, 1, dims, &work.heads));
    TRY(give_out(context, &work));
    return run(context, &work);
  }
};

template <bool HALVES>
class CrossAttention : public HeadsOperator {
 public:
  static constexpr const char* kName = "CrossAttention";
  static constexpr size_t kNumInputs = 6;
  static constexpr size_t kNumOutputs = 1;
  static int input_type(size_t index) {
    if (index == 1 || index == 2) return kCacheType<HALVES>;
    return index ? runtime::kInt32 : runtime::kFloat;
  }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<CrossAttention>(context, given));
    Attending work{};
    begin(&work, HALVES);
    TRY(read_tokens(given[0], heads_.num * heads_.size, &work.queries, &work.tokens));
    work.query_stride = heads_.num * heads_.size;
    Dims dims;
    TRY(read_caches(given[1], given[2], &work.heads, &dims));
    TRY(read_starts(given[3], work.tokens, &work.all));
    TRY(read_lengths(given[4], &work.all));
    TRY(read_table(given[5], dims.sizes[0], &work.all));
    TRY(give_out(context, &work));
    return run(context, &work);
  }
};

// Tokens look at all of their own sequence. The blocks last for this step only.
class EncoderAttention : public HeadsOperator {
 public:
  static constexpr const char* kName = "EncoderAttention";
  static constexpr size_t kNumInputs = 5;
  static constexpr size_t kNumOutputs = 1;
  static int input_type(size_t index) { return index == 1 ? runtime::kInt32 : runtime::kFloat; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t index) { return index < 2 ? runtime::kRequired : runtime::kOptional; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<EncoderAttention>(context, given));
    Attending work{};
    begin(&work, false);
    const float* qkv = nullptr;
    TRY(read_tokens(given[0], qkv_width(), &qkv, &work.tokens));
    take_apart(qkv, &work);
    TRY(read_starts(given[1], work.tokens, &work.all));
    make_blocks(&work);
    TRY(read_tables(given[2], given[3], work.all, &work.heads));
    TRY(read_bias(given[4], work.all, &work.heads));
    TRY(give_out(context, &work));
    return run(context, &work);
  }

 private:
  void make_blocks(Attending* work) const {
    static thread_local std::vector<int32_t> lengths, table;
    static thread_local std::vector<float> keys, values;
    Sequences& all = work->all;
    const auto blocks = [&](int64_t s) { return (all.tokens(s) + kPositions - 1) / kPositions; };
    lengths.clear();
    for (int64_t s = 0; s < all.num; s++) {
      lengths.push_back(static_cast<int32_t>(all.tokens(s)));
      all.width = std::max(all.width, blocks(s));
    }
    grow(&table, {all.num, all.width});
    int32_t num = 0;
    for (int64_t s = 0; s < all.num; s++) {
      for (int64_t b = 0; b < blocks(s); b++) {
        table[static_cast<size_t>(s * all.width + b)] = num++;
      }
    }
    grow(&keys, {num, heads_.num_kv, heads_.key_block()});
    grow(&values, {num, heads_.num_kv, heads_.value_block()});
    work->heads.keys = keys.data(), work->heads.values = values.data();
    all.lengths = lengths.data(), all.table = table.data();
  }
};

template <bool HALVES>
class Store : public HeadsOperator {
 public:
  static constexpr const char* kName = "Store";
  static constexpr size_t kNumInputs = 7;
  static constexpr size_t kNumOutputs = 2;
  static int input_type(size_t index) {
    if (index == 2 || index == 3) return kCacheType<HALVES>;
    return index > 3 ? runtime::kInt32 : runtime::kFloat;
  }
  static int output_type(size_t) { return kCacheType<HALVES>; }
  static int input_kind(size_t index) { return index < 6 ? runtime::kRequired : runtime::kOptional; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Store>(context, given));
    Attending work{};
    begin(&work, HALVES);
    TRY(read_tokens(given[0], key_width(), &work.keys, &work.tokens));
    TRY(read_tokens(given[1], value_width(), &work.values, &work.tokens));
    work.key_stride = key_width(), work.value_stride = value_width();
    Dims dims;
    TRY(read_caches(given[2], given[3], &work.heads, &dims));
    TRY(read_starts(given[4], work.tokens, &work.all));
    static thread_local std::vector<int32_t> lengths;  // all at position 0, unless it is said
    lengths.assign(static_cast<size_t>(work.all.num), 0);
    work.all.causal = true;
    work.all.lengths = lengths.data();
    if (given[6]) TRY(read_lengths(given[6], &work.all));
    TRY(read_table(given[5], dims.sizes[0], &work.all));
    TRY(give_back(context, 0, dims, &work.heads));
    return work.tokens ? append_tokens(context, &work) : nullptr;
  }
};

}  // namespace
}  // namespace quill

// Quill's attention, with its cache.
//
//   quill::Attention(qkv, past_key, past_value, lengths - 1, longest, cosines?, sines?)
//       -> attended, present_key, present_value
//
// Knows: the runtime, threads. Does not know: how attention is computed.
// What is present is meant to be the memory of what is past: then nothing is copied.
#pragma once
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "glue.h"

namespace quill {
namespace {

constexpr int64_t kMaxHeads = 1 << 12;
constexpr int64_t kQueriesOfTile = 24;
constexpr int64_t kScoresToShare = 4000;  // fewer are computed faster alone

struct Attending {
  Heads heads;
  int64_t rows, tokens_of_tile, tiles_of_row;  // a row's tiles in one group of heads
  int64_t parts;
  std::atomic<bool> no_memory;
  int64_t tiles() const { return rows * heads.num_kv * tiles_of_row; }
};

void append_part(void* data, size_t part) {
  const Attending& work = *static_cast<Attending*>(data);
  const int64_t index = static_cast<int64_t>(part), all = work.rows * work.heads.num_new;
  for (int64_t i = all * index / work.parts; i < all * (index + 1) / work.parts; i++) {
    kernels.append(work.heads, i / work.heads.num_new, i % work.heads.num_new);
  }
}

void attend_part(void* data, size_t part) {
  static thread_local std::vector<float> room;
  Attending& work = *static_cast<Attending*>(data);
  const int64_t index = static_cast<int64_t>(part), all = work.tiles();
  for (int64_t i = all * index / work.parts; i < all * (index + 1) / work.parts; i++) {
    // Late tokens first: they have the most to look at.
    const int64_t tile = work.tiles_of_row - 1 - i / (work.rows * work.heads.num_kv);
    const int64_t first = tile * work.tokens_of_tile, last = first + work.tokens_of_tile;
    const Tile at{i / work.heads.num_kv % work.rows, i % work.heads.num_kv, first,
                  last < work.heads.num_new ? last : work.heads.num_new};
    const size_t needed = static_cast<size_t>(room_of(work.heads, at));
    try {
      if (room.size() < needed) room.resize(needed);
    } catch (const std::bad_alloc&) {
      work.no_memory = true;  // an exception would end the process in the runtime's thread
      return;
    }
    kernels.attend(work.heads, at, room.data());
  }
}

class Attention {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr size_t kNumInputs = 7;
  static constexpr size_t kNumOutputs = 3;
  static int input_type(size_t index) {
    if (index == 1 || index == 2) return runtime::kHalf;
    return index == 3 || index == 4 ? runtime::kInt32 : runtime::kFloat;
  }
  static int output_type(size_t index) { return index ? runtime::kHalf : runtime::kFloat; }
  static int input_kind(size_t index) { return index < 5 ? runtime::kRequired : runtime::kOptional; }

  Status* read_attributes(const Info* info) {
    TRY(ort->int_attribute(info, "heads", &num_));
    TRY(ort->int_attribute(info, "kv_heads", &num_kv_));
    TRY(ort->int_attribute(info, "head_size", &size_));
    TRY(ort->float_attribute(info, "scale", &scale_));
    const bool fits = num_kv_ > 0 && num_ >= num_kv_ && num_ <= kMaxHeads && num_ % num_kv_ == 0 &&
                      num_ / num_kv_ <= kMaxQueries && has_kernel(size_);
    return fits ? nullptr : failed("no such heads");
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    for (size_t i = 0; i < kNumInputs; i++) TRY(ort->input(context, i, &given[i]));
    Attending work{};
    Dims dims;
    TRY(read_dims(given[0], &dims));
    if (dims.num != 3 || dims.sizes[2] != (num_ + 2 * num_kv_) * size_) {
      return failed("heads of another width than their operator's");
    }
    work.rows = dims.sizes[0];
    work.heads.num = num_, work.heads.num_kv = num_kv_, work.heads.size = size_;
    work.heads.num_new = dims.sizes[1];
    work.heads.scale = scale_;
    TRY(read_data(given[0], &work.heads.qkv));
    TRY(read_caches(context, given, &work));
    TRY(read_lengths(given, &work));
    dims.sizes[2] = num_ * size_;
    Value* out;
    TRY(ort->output(context, 0, dims.sizes, 3, &out));
    TRY(read_data(out, &work.heads.out));
    if (dims.count() == 0) return nullptr;
    static thread_local std::vector<float> queries;  // for all operators, kept from step to step
    if (queries.size() < static_cast<size_t>(dims.count())) {
      queries.resize(static_cast<size_t>(dims.count()));
    }
    work.heads.queries = queries.data();
    return run(context, &work);
  }

 private:
  Status* read_caches(Context* context, const Value* const* given, Attending* work) {
    uint16_t* present[2];
    for (size_t side = 0; side < 2; side++) {
      Dims dims;
      TRY(read_dims(given[1 + side], &dims));
      const bool fits = dims.num == 4 && dims.sizes[0] == work->rows && dims.sizes[1] == num_kv_ &&
                        dims.sizes[3] == size_ &&
                        (side == 0 || dims.sizes[2] == work->heads.capacity);
      if (!fits) return failed("a cache of another size than its operator's");
      work->heads.capacity = dims.sizes[2];
      const uint16_t* past;
      Value* output;
      TRY(read_data(given[1 + side], &past));
      TRY(ort->output(context, 1 + side, dims.sizes, 4, &output));
      TRY(read_data(output, &present[side]));
      if (present[side] != past && dims.count()) {
        std::memcpy(present[side], past, static_cast<size_t>(dims.count()) * sizeof(uint16_t));
      }
    }
    work->heads.keys = present[0], work->heads.values = present[1];
    return nullptr;
  }

  Status* read_lengths(const Value* const* given, Attending* work) {
    Dims dims;
    TRY(read_dims(given[3], &dims));
    if (dims.count() != work->rows) return failed("lengths for another number of rows");
    int64_t longest = work->heads.capacity;
    if (!given[5] != !given[6]) return failed("cosines without sines");
    if (given[5]) TRY(read_tables(given, work, &longest));
    const int32_t* last;
    TRY(read_data(given[3], &last));
    static thread_local std::vector<int64_t> lengths;
    lengths.resize(static_cast<size_t>(work->rows));
    for (int64_t row = 0; row < work->rows; row++) {
      const int64_t length = int64_t{last[row]} + 1;
      if (length < work->heads.num_new || length > longest) {
        return failed("a row that is longer than its cache or its positions");
      }
      lengths[static_cast<size_t>(row)] = length;
    }
    work->heads.lengths = lengths.data();
    return nullptr;
  }

  Status* read_tables(const Value* const* given, Attending* work, int64_t* longest) {
    for (size_t index : {size_t{5}, size_t{6}}) {
      Dims dims;
      TRY(read_dims(given[index], &dims));
      if (dims.num != 2 || dims.sizes[1] != size_ / 2) return failed("positions of another width");
      if (dims.sizes[0] < *longest) *longest = dims.sizes[0];
    }
    TRY(read_data(given[5], &work->heads.cosines));
    return read_data(given[6], &work->heads.sines);
  }

  static Status* run(Context* context, Attending* work) {
    const Heads& heads = work->heads;
    const int64_t group = heads.num / heads.num_kv;
    work->tokens_of_tile = group < kQueriesOfTile ? kQueriesOfTile / group : 1;
    work->tiles_of_row = (heads.num_new + work->tokens_of_tile - 1) / work->tokens_of_tile;
    int64_t scores = 0;
    for (int64_t row = 0; row < work->rows; row++) scores += heads.lengths[row];
    scores *= heads.num * heads.num_new;
    const int64_t tokens = work->rows * heads.num_new, tiles = work->tiles();
    TRY(share(context, append_part, tokens < 16 ? 1 : tokens / 4, work));
    TRY(share(context, attend_part, scores < kScoresToShare ? 1 : tiles, work));
    return work->no_memory ? no_memory() : nullptr;
  }

  int64_t num_ = 0, num_kv_ = 0, size_ = 0;
  float scale_ = 0;
};

}  // namespace
}  // namespace quill

// Quill's operators for recurrent networks: T packed tokens of S sequences, states in blocks.
//
//   quill::Recurrence(input, weights, bias, query_starts) -> states
//       a cell goes through each sequence from nothing; `input` is what tokens say to its gates,
//       `weights` (state x gates) and `bias` what states do
//   quill::Update(input, state?, h?, c?) -> h, c      one token changes each state
//   quill::Ends(value_cache, query_starts, source_lengths, source_table) -> ends
//       of a source's annotations: the first half of the last, the second half of the first
//   quill::Recall(ends, key_cache, value_cache, query_starts, past_lengths, block_table) -> h, c
//       the state before a token, from its block; at the beginning the ends and zeros
//   quill::AdditiveAttention(q, score, key_cache, value_cache, query_starts, source_lengths,
//                            source_table) -> attended
//
// Knows: the runtime. Does not know: how states are computed. quill::Store keeps them.
#pragma once
#include <cstring>
#include <vector>

#include "attention_operators.h"

namespace quill {
namespace {

constexpr int64_t kRowsOfStates = 8;  // fewer are updated faster alone

Status* read_cell(const Info* info, Cell* cell) {
  TRY(ort->int_attribute(info, "kind", &cell->kind));
  TRY(ort->int_attribute(info, "size", &cell->size));
  const bool fits = cell->kind >= Cell::kPlain && cell->kind <= Cell::kLstm && cell->size > 0 &&
                    cell->size <= kMaxHeadSize && cell->size % 16 == 0;
  return fits ? nullptr : failed("no such cell");
}

// Rows of so many numbers. The first that is read says how many rows there are.
Status* read_rows(const Value* value, int64_t width, const float** to, int64_t* rows) {
  Dims dims;
  TRY(read_dims(value, &dims));
  if (dims.num != 2 || dims.sizes[1] != width) return failed("numbers of another width");
  if (*rows >= 0 && dims.sizes[0] != *rows) return failed("numbers of other rows");
  *rows = dims.sizes[0];
  return read_data(value, to);
}

Status* give_rows(Context* context, size_t index, int64_t rows, int64_t width, float** to) {
  const int64_t sizes[2] = {rows, width};
  return make_output(context, index, sizes, 2, to);
}

// Recurrent states in the blocks of one head: h among the keys, c among the values, both as wide.
class StateOperator : public HeadsOperator {
 public:
  Status* read_attributes(const Info* info) {
    TRY(HeadsOperator::read_attributes(info));
    const bool fits = heads_.num == 1 && heads_.num_kv == 1 && heads_.value_size == heads_.size;
    return fits ? nullptr : failed("states that aren't those of one head");
  }
};

class Update {
 public:
  static constexpr const char* kName = "Update";
  static constexpr size_t kNumInputs = 4;
  static constexpr size_t kNumOutputs = 2;
  static int input_type(size_t) { return runtime::kFloat; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t index) { return index ? runtime::kOptional : runtime::kRequired; }

  Status* read_attributes(const Info* info) { return read_cell(info, &cell_); }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Update>(context, given));
    Work work{cell_, {}, -1, 0};
    TRY(read_rows(given[0], cell_.gates(), &work.gates.input, &work.rows));
    if (cell_.kind != Cell::kPlain && !(given[1] && given[2] && given[3])) {
      return failed("a cell without the state before");
    }
    if (given[1]) TRY(read_rows(given[1], cell_.gates(), &work.gates.state, &work.rows));
    if (given[2]) TRY(read_rows(given[2], cell_.size, &work.gates.h, &work.rows));
    if (given[3]) TRY(read_rows(given[3], cell_.size, &work.gates.c, &work.rows));
    TRY(give_rows(context, 0, work.rows, cell_.size, &work.gates.new_h));
    TRY(give_rows(context, 1, work.rows, cell_.size, &work.gates.new_c));
    return share(context, part, work.rows < kRowsOfStates ? 1 : work.rows / 4, &work);
  }

 private:
  struct Work {
    Cell cell;
    Gates gates;
    int64_t rows, parts;
  };

  static void part(void* data, size_t index) {
    const Work& work = *static_cast<Work*>(data);
    const int64_t i = static_cast<int64_t>(index), size = work.cell.size, wide = work.cell.gates();
    const Gates& all = work.gates;
    const auto of = [](const float* p, int64_t at) { return p ? p + at : nullptr; };
    for (int64_t r = work.rows * i / work.parts; r < work.rows * (i + 1) / work.parts; r++) {
      kernels.update(work.cell, {all.input + r * wide, of(all.state, r * wide),
                                 of(all.h, r * size), of(all.c, r * size), all.new_h + r * size,
                                 all.new_c + r * size});
    }
  }

  Cell cell_{};
};

class Recurrence : public HeadsOperator {
 public:
  static constexpr const char* kName = "Recurrence";
  static constexpr size_t kNumInputs = 4;
  static constexpr size_t kNumOutputs = 1;
  static int input_type(size_t index) { return index == 3 ? runtime::kInt32 : runtime::kFloat; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* read_attributes(const Info* info) {
    TRY(read_cell(info, &cell_));
    TRY(ort->int_attribute(info, "backwards", &backwards_));
    TRY(weights_.find(info, 1, cell_.size * cell_.gates()));
    return bias_.find(info, 2, cell_.gates());
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Recurrence>(context, given));
    Work work{};
    work.cell = cell_, work.backwards = backwards_ != 0;
    int64_t tokens = -1;
    TRY(read_rows(given[0], cell_.gates(), &work.input, &tokens));
    work.product = {nullptr, nullptr, cell_.size, cell_.gates()};
    TRY(weights_.read(given[1], &work.product.weights));
    TRY(bias_.read(given[2], &work.product.bias));
    TRY(read_starts(given[3], tokens, &work.all));
    TRY(give_rows(context, 0, tokens, cell_.size, &work.states));
    return share(context, part, work.all.num, &work);
  }

 private:
  struct Work {
    Cell cell;
    RowProduct product;
    Sequences all;
    const float* input;
    float* states;
    bool backwards;
    int64_t parts;
  };

  static void part(void* data, size_t index) {
    const Work& work = *static_cast<Work*>(data);
    const int64_t i = static_cast<int64_t>(index), num = work.all.num;
    for (int64_t s = num * i / work.parts; s < num * (i + 1) / work.parts; s++) go(work, s);
  }

  static void go(const Work& work, int64_t s) {
    constexpr int64_t kMaxGates = 4;
    alignas(64) float zeros[kMaxHeadSize] = {}, gates[kMaxGates * kMaxHeadSize], c[kMaxHeadSize] = {};
    const int64_t tokens = work.all.tokens(s), size = work.cell.size, wide = work.cell.gates();
    const float* h = zeros;
    for (int64_t step = 0; step < tokens; step++) {
      const int64_t t = work.all.starts[s] + (work.backwards ? tokens - 1 - step : step);
      float* to = work.states + t * size;
      kernels.multiply_row(work.product, h, gates);
      kernels.update(work.cell, {work.input + t * wide, gates, h, c, to, c});
      h = to;
    }
  }

  Cell cell_{};
  int64_t backwards_ = 0;
  Constant weights_, bias_;
};

class Ends : public StateOperator {
 public:
  static constexpr const char* kName = "Ends";
  static constexpr size_t kNumInputs = 4;
  static constexpr size_t kNumOutputs = 1;
  static int input_type(size_t index) { return index ? runtime::kInt32 : runtime::kFloat; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Ends>(context, given));
    Dims of_values, of_starts;
    TRY(read_dims(given[0], &of_values));
    const int64_t size = heads_.size, half = size / 2;
    if (of_values.num != 4 || of_values.sizes[1] != 1 || of_values.sizes[2] != kPositions ||
        of_values.sizes[3] != size) {
      return failed("a cache of another size than its operator's");
    }
    const float* values;
    TRY(read_data(given[0], &values));
    Sequences all{};
    TRY(read_dims(given[1], &of_starts));
    TRY(read_starts(given[1], of_starts.count() - 1, &all));  // one token of each
    TRY(read_lengths(given[2], &all));
    TRY(read_table(given[3], of_values.sizes[0], &all));
    // read_table checks the blocks of positions that there are: a source must have one, also if no
    // token of this step belongs to it.
    for (int64_t s = 0; s < all.num; s++) {
      if (all.lengths[s] < 1) return failed("a source without positions");
    }
    float* to;
    TRY(give_rows(context, 0, all.num, size, &to));
    for (int64_t s = 0; s < all.num; s++, to += size) {
      const int64_t last = all.lengths[s] - 1;
      const int32_t* blocks = all.blocks(s);
      const float* at_last = values + (blocks[last / kPositions] * kPositions + last % kPositions) * size;
      const float* at_first = values + blocks[0] * kPositions * size;
      std::memcpy(to, at_last, static_cast<size_t>(half) * sizeof(float));
      std::memcpy(to + half, at_first + half, static_cast<size_t>(half) * sizeof(float));
    }
    return nullptr;
  }
};

class Recall : public StateOperator {
 public:
  static constexpr const char* kName = "Recall";
  static constexpr size_t kNumInputs = 6;
  static constexpr size_t kNumOutputs = 2;
  static int input_type(size_t index) { return index < 3 ? runtime::kFloat : runtime::kInt32; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Recall>(context, given));
    Heads heads = heads_;
    Dims dims;
    const int64_t size = heads.size;
    const float* ends = nullptr;
    int64_t tokens = -1;
    TRY(read_rows(given[0], size, &ends, &tokens));
    TRY(read_caches(given[1], given[2], &heads, &dims));
    Sequences all{};
    all.causal = true;
    TRY(read_starts(given[3], tokens, &all));
    TRY(read_lengths(given[4], &all));
    TRY(read_table(given[5], dims.sizes[0], &all));
    float *h, *c;
    TRY(give_rows(context, 0, tokens, size, &h));
    TRY(give_rows(context, 1, tokens, size, &c));
    for (int64_t s = 0; s < all.num; s++, ends += size, h += size, c += size) {
      if (all.tokens(s) != 1) return failed("several tokens of a sequence: each needs a state");
      const int64_t before = int64_t{all.lengths[s]} - 1;
      if (before < 0) {
        std::memcpy(h, ends, static_cast<size_t>(size) * sizeof(float));
        std::memset(c, 0, static_cast<size_t>(size) * sizeof(float));
        continue;
      }
      const int64_t block = all.blocks(s)[before / kPositions], lane = before % kPositions;
      const float* keys = static_cast<const float*>(heads.keys_of(block, 0)) + lane;
      const float* values = static_cast<const float*>(heads.values_of(block, 0));
      for (int64_t i = 0; i < size; i++) h[i] = keys[i * kPositions];
      std::memcpy(c, values + lane * size, static_cast<size_t>(size) * sizeof(float));
    }
    return nullptr;
  }
};

class AdditiveAttention : public StateOperator {
 public:
  static constexpr const char* kName = "AdditiveAttention";
  static constexpr size_t kNumInputs = 7;
  static constexpr size_t kNumOutputs = 1;
  static int input_type(size_t index) { return index < 4 ? runtime::kFloat : runtime::kInt32; }
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* read_attributes(const Info* info) {
    TRY(StateOperator::read_attributes(info));
    return score_.find(info, 1, heads_.size);
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<AdditiveAttention>(context, given));
    Work work{};
    work.heads = heads_;
    int64_t tokens = -1;
    TRY(read_rows(given[0], heads_.size, &work.queries, &tokens));
    TRY(score_.read(given[1], &work.score));
    Dims dims;
    TRY(read_caches(given[2], given[3], &work.heads, &dims));
    TRY(read_starts(given[4], tokens, &work.all));
    TRY(read_lengths(given[5], &work.all));
    TRY(read_table(given[6], dims.sizes[0], &work.all));
    TRY(give_rows(context, 0, tokens, heads_.size, &work.out));
    static thread_local std::vector<float> scores;
    grow(&scores, {work.all.num, work.all.width, kPositions});
    work.scores = scores.data();
    return share(context, part, work.all.num, &work);
  }

 private:
  struct Work {
    Heads heads;
    Sequences all;
    const float *queries, *score;
    float *scores, *out;
    int64_t parts;
  };

  static void part(void* data, size_t index) {
    const Work& work = *static_cast<Work*>(data);
    const int64_t i = static_cast<int64_t>(index), num = work.all.num, size = work.heads.size;
    for (int64_t s = num * i / work.parts; s < num * (i + 1) / work.parts; s++) {
      float* scores = work.scores + s * work.all.width * kPositions;
      for (int64_t t = work.all.starts[s]; t < work.all.starts[s + 1]; t++) {
        kernels.attend_additively(
            work.heads, {work.queries + t * size, work.score, work.all.blocks(s), work.all.lengths[s]},
            scores, work.out + t * size);
      }
    }
  }

  Constant score_;
};

}  // namespace
}  // namespace quill

// Quill's operators that have many matrices of one shape, of which each row needs another.
//
//   quill::Experts(x, logits, up, down, balance?, up_bias?, down_bias?)
//                                   each token's experts, weighted and added up
//   quill::HeadLinear(x, records)   a matrix for each head
//
// If they are there, the attributes clamp and slope make it a clamped SwiGLU: (value + 1) * gate /
// (1 + exp(-slope * gate)), with a gate of clamp at the most and a value from -clamp to clamp.
//
// Rows that need the same matrix are computed together, so each is read once. A row's product is the
// same bits in any company, and a token's experts are added up in the order of their scores.
//
// Knows: the runtime, threads. Does not know: how products are computed.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear_operators.h"

namespace quill {
namespace {

constexpr int64_t kTasksOfStep = 32;

// Neighbouring rows that need the same matrix.
struct Job {
  int64_t matrix, first, rows;
};

struct Stacked {
  Matrix matrix;  // the first of all; the others follow it
  const std::vector<Job>* jobs;
  const float* x;  // rows x inputs
  Rounded rounded;
  float* y;           // rows x outputs
  const float* bias;  // matrices x columns; null: there is none
  int64_t rows, cuts, parts;

  int64_t pairs() const { return (matrix.groups() + 1) / 2; }
};

void round_rows(void* data, size_t part) {
  const Stacked& work = *static_cast<Stacked*>(data);
  const int64_t index = static_cast<int64_t>(part);
  kernels.round(work.matrix, work.x, nullptr, 0.f, work.rows * index / work.parts,
                work.rows * (index + 1) / work.parts, work.rounded);
}

void multiply_jobs(void* data, size_t part) {
  const Stacked& work = *static_cast<Stacked*>(data);
  const int64_t index = static_cast<int64_t>(part);
  const int64_t tasks = static_cast<int64_t>(work.jobs->size()) * work.cuts;
  for (int64_t t = tasks * index / work.parts; t < tasks * (index + 1) / work.parts; t++) {
    const Job& job = (*work.jobs)[static_cast<size_t>(t / work.cuts)];
    const int64_t first = work.pairs() * (t % work.cuts) / work.cuts;
    const int64_t last = work.pairs() * (t % work.cuts + 1) / work.cuts;
    Matrix matrix = work.matrix;
    matrix.records += job.matrix * matrix.size();
    Output out{nullptr, nullptr, work.y + job.first * matrix.outputs()};
    if (work.bias) (matrix.gated ? out.gate_bias : out.bias) = work.bias + job.matrix * matrix.columns;
    if (matrix.layout == kFloats) {
      kernels.multiply_floats(matrix, work.x + job.first * matrix.inputs, job.rows, first, last, out);
      continue;
    }
    const int64_t block = job.first * matrix.blocks();
    const Rounded x{work.rounded.q + block * kBlock * matrix.input_bytes(),
                    work.rounded.scale + block, work.rounded.sum + block,
                    work.rounded.shift + block * matrix.of().scales};
    kernels.multiply(matrix, x, job.rows, first, last, out);
  }
}

// All rows with the matrix that each needs.
Status* multiply_all(Context* context, const Matrix& matrix, const std::vector<Job>& jobs,
                     const float* x, int64_t rows, float* y, const float* bias = nullptr) {
  static thread_local Room room;
  Stacked work{matrix, &jobs, x, {}, y, bias, rows, 1, 1};
  if (matrix.layout != kFloats) {
    work.rounded = room.for_rows(rows, matrix);
    TRY(share(context, round_rows, rows < kRowsToShare ? 1 : rows / 2, &work));
  }
  if (rows * matrix.inputs * matrix.columns < kWorthSharing) {
    return share(context, multiply_jobs, 1, &work);
  }
  const int64_t num = static_cast<int64_t>(jobs.size());
  work.cuts = std::max(std::min((kTasksOfStep + num - 1) / num, work.pairs()), int64_t{1});
  return share(context, multiply_jobs, num * work.cuts, &work);
}

struct Choosing {
  Routing routing;
  const float* x;
  const float* logits;
  const float* balance;
  const float* biases[2];  // of all experts' matrices; null: there are none
  int64_t tokens, width, parts;
  int32_t* chosen;        // tokens x experts of a token
  float* weights;         // the same
  const int64_t* places;  // the same: where its row is among those of all experts
  float* rows;            // of all experts: what they are given, and then what they give
  float* y;
};

// Calls `f` with each token of a part.
template <typename F>
void each_token(const Choosing& work, size_t part, F f) {
  const int64_t index = static_cast<int64_t>(part);
  const int64_t last = work.tokens * (index + 1) / work.parts;
  for (int64_t t = work.tokens * index / work.parts; t < last; t++) f(t, t * work.routing.per_token);
}

void choose_part(void* data, size_t part) {
  const Choosing& work = *static_cast<Choosing*>(data);
  each_token(work, part, [&](int64_t t, int64_t at) {
    kernels.choose(work.routing, work.logits + t * work.routing.number, work.balance,
                   work.chosen + at, work.weights + at);
  });
}

void gather_part(void* data, size_t part) {
  const Choosing& work = *static_cast<Choosing*>(data);
  each_token(work, part, [&](int64_t t, int64_t at) {
    for (int64_t k = 0; k < work.routing.per_token; k++) {
      std::memcpy(work.rows + work.places[at + k] * work.width, work.x + t * work.width,
                  static_cast<size_t>(work.width) * sizeof(float));
    }
  });
}

void add_part(void* data, size_t part) {
  const Choosing& work = *static_cast<Choosing*>(data);
  each_token(work, part, [&](int64_t t, int64_t at) {
    float* y = work.y + t * work.width;
    for (int64_t k = 0; k < work.routing.per_token; k++) {
      const float* row = work.rows + work.places[at + k] * work.width;
      const float weight = work.weights[at + k];
      if (k == 0) {
        for (int64_t i = 0; i < work.width; i++) y[i] = weight * row[i];
      } else {
        for (int64_t i = 0; i < work.width; i++) y[i] += weight * row[i];
      }
    }
  });
}

// Rows in the order of their experts, and of tokens within them.
void group(const Routing& routing, int64_t tokens, const int32_t* chosen,
           std::vector<int64_t>* places, std::vector<Job>* jobs) {
  static thread_local std::vector<int64_t> next;
  next.assign(static_cast<size_t>(routing.number), 0);
  const int64_t rows = tokens * routing.per_token;
  for (int64_t i = 0; i < rows; i++) next[static_cast<size_t>(chosen[i])]++;
  jobs->clear();
  int64_t first = 0;
  for (int64_t e = 0; e < routing.number; e++) {
    const int64_t num = next[static_cast<size_t>(e)];
    if (num) jobs->push_back({e, first, num});
    next[static_cast<size_t>(e)] = first;
    first += num;
  }
  places->resize(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; i++) {
    (*places)[static_cast<size_t>(i)] = next[static_cast<size_t>(chosen[i])]++;
  }
}

class Experts {
 public:
  static constexpr const char* kName = "Experts";
  static constexpr size_t kNumInputs = 7;
  static constexpr size_t kNumOutputs = 1;
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_type(size_t index) {
    return index == 2 || index == 3 ? runtime::kUint8 : runtime::kFloat;
  }
  static int input_kind(size_t index) { return index < 4 ? runtime::kRequired : runtime::kOptional; }

  Status* read_attributes(const Info* info) {
    int64_t width, inner, sigmoid, normalize;
    const struct { const char* name; int64_t* to; } attributes[] = {
        {"inputs", &width}, {"d_expert", &inner}, {"number", &routing_.number},
        {"per_token", &routing_.per_token}, {"groups", &routing_.groups},
        {"top_groups", &routing_.top_groups}, {"group_best", &routing_.group_best},
        {"sigmoid", &sigmoid}, {"normalize", &normalize}, {"up_layout", &up_.layout},
        {"up_input_bits", &up_.input_bits}, {"down_layout", &down_.layout},
        {"down_input_bits", &down_.input_bits},
    };
    for (const auto& each : attributes) TRY(ort->int_attribute(info, each.name, each.to));
    TRY(ort->float_attribute(info, "scale", &routing_.scale));
    routing_.sigmoid = sigmoid != 0, routing_.normalize = normalize != 0;
    if (!is_routing() || !has_width(width) || !has_width(inner)) return failed("no such experts");
    float clamp = 0, slope = 1;
    TRY(absent(ort->float_attribute(info, "clamp", &clamp)));
    TRY(absent(ort->float_attribute(info, "slope", &slope)));
    if (!(clamp >= 0 && slope > 0 && std::isfinite(clamp + slope))) {
      return failed("no such gate");
    }
    up_ = {nullptr, width, 2 * inner, up_.layout, up_.input_bits, true, clamp, slope};
    down_ = {nullptr, inner, width, down_.layout, down_.input_bits, false};
    for (const Matrix* each : {&up_, &down_}) {
      const bool fits = each->layout == kFloats || (has_layout(*each) && has_products(*each));
      if (!has_size(*each) || !fits) return failed("no such experts");
    }
    TRY(records_[0].find(info, 2, routing_.number * up_.size()));
    TRY(records_[1].find(info, 3, routing_.number * down_.size()));
    TRY(biases_[0].find(info, 5, routing_.number * up_.columns));
    TRY(biases_[1].find(info, 6, routing_.number * down_.columns));
    return balance_.find(info, 4, routing_.number);
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Experts>(context, given));
    Matrix up = up_, down = down_;
    Choosing work{};
    work.routing = routing_, work.width = up.inputs;
    Dims dims, of_logits;
    TRY(read_dims(given[0], &dims));
    TRY(read_dims(given[1], &of_logits));
    if (dims.num == 0 || dims.sizes[dims.num - 1] != work.width) {
      return failed("inputs of another width than the experts'");
    }
    work.tokens = dims.product(0, dims.num - 1);
    if (of_logits.num == 0 || of_logits.sizes[of_logits.num - 1] != routing_.number ||
        of_logits.product(0, of_logits.num - 1) != work.tokens) {
      return failed("scores for other tokens or experts");
    }
    TRY(records_[0].read(given[2], &up.records));
    TRY(records_[1].read(given[3], &down.records));
    TRY(balance_.read(given[4], &work.balance));
    for (size_t i = 0; i < 2; i++) TRY(biases_[i].read(given[5 + i], &work.biases[i]));
    TRY(read_data(given[0], &work.x));
    TRY(read_data(given[1], &work.logits));
    TRY(make_output(context, 0, dims.sizes, dims.num, &work.y));
    return work.tokens ? run(context, up, down, &work) : nullptr;
  }

 private:
  static bool has_width(int64_t width) {
    return width > 0 && width <= kMaxWidth / 2 && width % kColumns == 0;
  }
  bool is_routing() const {
    const Routing& of = routing_;
    return of.number > 0 && of.number <= kMaxExperts && of.groups > 0 && of.groups <= of.number &&
           of.number % of.groups == 0 && of.top_groups > 0 && of.top_groups <= of.groups &&
           of.group_best > 0 && of.group_best <= of.number / of.groups && of.per_token > 0 &&
           of.per_token <= of.number / of.groups * of.top_groups;
  }

  static Status* run(Context* context, const Matrix& up, const Matrix& down, Choosing* work) {
    static thread_local std::vector<int32_t> chosen;
    static thread_local std::vector<float> weights, rows, inner;
    static thread_local std::vector<int64_t> places;
    static thread_local std::vector<Job> jobs;
    const int64_t num = work->tokens * work->routing.per_token;
    grow(&chosen, {num}), grow(&weights, {num});
    work->chosen = chosen.data(), work->weights = weights.data();
    const int64_t parts = work->tokens < kRowsToShare ? 1 : work->tokens / 2;
    TRY(share(context, choose_part, parts, work));
    group(work->routing, work->tokens, chosen.data(), &places, &jobs);
    grow(&rows, {num, work->width}), grow(&inner, {num, down.inputs});
    work->places = places.data(), work->rows = rows.data();
    TRY(share(context, gather_part, parts, work));
    TRY(multiply_all(context, up, jobs, rows.data(), num, inner.data(), work->biases[0]));
    TRY(multiply_all(context, down, jobs, inner.data(), num, rows.data(), work->biases[1]));
    return share(context, add_part, parts, work);
  }

  Routing routing_{};
  Matrix up_{}, down_{};
  Constant records_[2], balance_, biases_[2];
};

// Tokens x (heads x inputs) become tokens x (heads x columns), with floats.
class HeadLinear {
 public:
  static constexpr const char* kName = "HeadLinear";
  static constexpr size_t kNumInputs = 2;
  static constexpr size_t kNumOutputs = 1;
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_type(size_t index) { return index ? runtime::kUint8 : runtime::kFloat; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* read_attributes(const Info* info) {
    matrix_.layout = kFloats;
    TRY(ort->int_attribute(info, "heads", &heads_));
    TRY(ort->int_attribute(info, "inputs", &matrix_.inputs));
    TRY(ort->int_attribute(info, "columns", &matrix_.columns));
    const bool fits = heads_ > 0 && heads_ <= kMaxExperts && has_size(matrix_) &&
                      matrix_.columns % kColumns == 0;
    return fits ? records_.find(info, 1, heads_ * matrix_.size()) : failed("no such heads");
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<HeadLinear>(context, given));
    Matrix matrix = matrix_;
    TRY(records_.read(given[1], &matrix.records));
    Dims dims;
    TRY(read_dims(given[0], &dims));
    if (dims.num == 0 || dims.sizes[dims.num - 1] != heads_ * matrix.inputs) {
      return failed("heads of another width than their operator's");
    }
    const int64_t tokens = dims.product(0, dims.num - 1);
    dims.sizes[dims.num - 1] = heads_ * matrix.columns;
    const float* x;
    float* y;
    TRY(read_data(given[0], &x));
    TRY(make_output(context, 0, dims.sizes, dims.num, &y));
    return tokens ? run(context, matrix, tokens, x, y) : nullptr;
  }

 private:
  // Heads x tokens x numbers, from or to tokens x heads x numbers.
  static void swap(const float* from, int64_t first, int64_t second, int64_t size, float* to) {
    for (int64_t i = 0; i < first; i++) {
      for (int64_t j = 0; j < second; j++) {
        std::memcpy(to + (j * first + i) * size, from + (i * second + j) * size,
                    static_cast<size_t>(size) * sizeof(float));
      }
    }
  }

  Status* run(Context* context, const Matrix& matrix, int64_t tokens, const float* x, float* y) const {
    static thread_local std::vector<float> before, after;
    static thread_local std::vector<Job> jobs;
    jobs.clear();
    for (int64_t h = 0; h < heads_; h++) jobs.push_back({h, h * tokens, tokens});
    const int64_t rows = heads_ * tokens;
    grow(&before, {rows, matrix.inputs}), grow(&after, {rows, matrix.columns});
    swap(x, tokens, heads_, matrix.inputs, before.data());
    TRY(multiply_all(context, matrix, jobs, before.data(), rows, after.data()));
    swap(after.data(), heads_, tokens, matrix.columns, y);
    return nullptr;
  }

  int64_t heads_ = 0;
  Matrix matrix_{};
  Constant records_;
};

}  // namespace
}  // namespace quill

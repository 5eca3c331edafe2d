// Quill's operators that multiply with matrices.
//
//   quill::Linear(x, records, gains?, residual?, bias?)   y = norm(x)·w + residual + bias
//   quill::Embedding(ids, records)                        rows of a matrix
//
// Knows: the runtime, threads. Does not know: how products are computed.
#pragma once
#include <cstring>
#include <vector>

#include "glue.h"
#include "unpacked.h"

namespace quill {
namespace {

constexpr int64_t kMaxWidth = 1 << 24;     // of a matrix, in each direction
constexpr int64_t kMaxRounded = 256;       // rows that are rounded at a time: bounds the memory
constexpr int64_t kRowsToShare = 4;        // fewer are rounded faster than threads are called
constexpr int64_t kWorthSharing = 100000;  // products; fewer are computed faster alone

struct Work {
  Matrix matrix;
  const float* x;
  const float* gains;
  float epsilon;
  Rounded rounded;
  Output out;
  int64_t rows, parts, pairs;
};

void round_part(void* data, size_t part) {
  const Work& work = *static_cast<Work*>(data);
  const int64_t index = static_cast<int64_t>(part);
  kernels.round(work.matrix, work.x, work.gains, work.epsilon, work.rows * index / work.parts,
                work.rows * (index + 1) / work.parts, work.rounded);
}

void multiply_part(void* data, size_t part) {
  const Work& work = *static_cast<Work*>(data);
  const int64_t index = static_cast<int64_t>(part);
  kernels.multiply(work.matrix, work.rounded, work.rows, work.pairs * index / work.parts,
                   work.pairs * (index + 1) / work.parts, work.out);
}

struct Room {
  std::vector<uint8_t> q;
  std::vector<float> scale, sum;
  std::vector<int32_t> shift;

  Rounded for_rows(int64_t rows, const Matrix& matrix) {
    grow(&q, {rows, matrix.blocks(), kBlock * matrix.input_bytes()});
    grow(&sum, {rows, matrix.blocks()});
    grow(&shift, {rows, matrix.blocks(), matrix.of().scales});
    grow(&scale, {rows, matrix.blocks()});
    return {q.data(), scale.data(), sum.data(), shift.data()};
  }
};

// Both sides are there.
bool has_size(const Matrix& matrix) {
  return matrix.inputs > 0 && matrix.inputs <= kMaxWidth && matrix.columns > 0 &&
         matrix.columns <= kMaxWidth;
}

// The layout is known, and records are whole.
bool has_layout(const Matrix& matrix) {
  return matrix.layout >= 0 && matrix.layout < kNumLayouts && matrix.layout != kFloats &&
         matrix.inputs % matrix.of().inputs() == 0;
}

// There are products with inputs of so many bits.
bool has_products(const Matrix& matrix) {
  return matrix.input_bits == 16 || matrix.input_bits == 8;
}

class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr size_t kNumInputs = 5;
  static constexpr size_t kNumOutputs = 1;
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_type(size_t index) { return index == 1 ? runtime::kUint8 : runtime::kFloat; }
  static int input_kind(size_t index) { return index < 2 ? runtime::kRequired : runtime::kOptional; }

  Status* read_attributes(const Info* info) {
    int64_t gated;
    TRY(ort->int_attribute(info, "inputs", &matrix_.inputs));
    TRY(ort->int_attribute(info, "columns", &matrix_.columns));
    TRY(ort->int_attribute(info, "layout", &matrix_.layout));
    TRY(ort->int_attribute(info, "input_bits", &matrix_.input_bits));
    TRY(ort->int_attribute(info, "gated", &gated));
    TRY(ort->float_attribute(info, "epsilon", &epsilon_));
    matrix_.gated = gated != 0;
    const bool fits = has_size(matrix_) && has_layout(matrix_) && has_products(matrix_) &&
                      !(matrix_.gated && matrix_.columns % (2 * kColumns));
    if (!fits) return failed("no such matrix");
    TRY(records_.find(info, 1, matrix_.size()));
    TRY(gains_.find(info, 2, matrix_.inputs));
    return bias_.find(info, 4, matrix_.outputs());
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Linear>(context, given));
    const int64_t outputs = matrix_.outputs();
    Dims dims;
    TRY(read_dims(given[0], &dims));
    if (dims.num == 0 || dims.sizes[dims.num - 1] != matrix_.inputs) {
      return failed("inputs of another width than the matrix's");
    }
    const int64_t rows = dims.product(0, dims.num - 1);
    dims.sizes[dims.num - 1] = outputs;
    Work work{matrix_, nullptr, nullptr, epsilon_, {}, {}, 0, 1, (matrix_.groups() + 1) / 2};
    TRY(records_.read(given[1], &work.matrix.records));
    TRY(gains_.read(given[2], &work.gains));
    TRY(bias_.read(given[4], &work.out.bias));
    TRY(read_data(given[0], &work.x));
    if (given[3]) {
      Dims of_residual;
      TRY(read_dims(given[3], &of_residual));
      if (of_residual.count() != rows * outputs) return failed("a residual of another size");
      TRY(read_data(given[3], &work.out.residual));
    }
    TRY(make_output(context, 0, dims.sizes, dims.num, &work.out.y));
    return run(context, work, rows);
  }

 private:
  Status* run(Context* context, Work& work, int64_t rows) {
    const int64_t most = rows < kMaxRounded ? rows : kMaxRounded;
    static thread_local Room room;  // one for all operators, kept from step to step
    work.rounded = room.for_rows(most, matrix_);
    for (int64_t done = 0; done < rows; done += most) {
      work.rows = rows - done < most ? rows - done : most;
      const int64_t size = work.rows * matrix_.inputs * matrix_.columns;
      TRY(share(context, round_part, work.rows < kRowsToShare ? 1 : work.rows / 2, &work));
      TRY(share(context, multiply_part, size < kWorthSharing ? 1 : work.pairs / 2, &work));
      work.x += work.rows * matrix_.inputs;
      work.out.y += work.rows * matrix_.outputs();
      if (work.out.residual) work.out.residual += work.rows * matrix_.outputs();
    }
    return nullptr;
  }

  Matrix matrix_{};
  float epsilon_ = 0;
  Constant records_, gains_, bias_;
};

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr size_t kNumInputs = 2;
  static constexpr size_t kNumOutputs = 1;
  static int output_type(size_t) { return runtime::kFloat; }
  static int input_type(size_t index) { return index == 1 ? runtime::kUint8 : runtime::kInt64; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* read_attributes(const Info* info) {
    TRY(ort->int_attribute(info, "inputs", &matrix_.inputs));
    TRY(ort->int_attribute(info, "columns", &matrix_.columns));
    TRY(ort->int_attribute(info, "layout", &matrix_.layout));
    if (!has_size(matrix_) || !has_layout(matrix_)) return failed("no such matrix");
    return records_.find(info, 1, matrix_.size());
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    TRY(read_inputs<Embedding>(context, given));
    const uint8_t* records;
    TRY(records_.read(given[1], &records));
    Dims dims;
    TRY(read_dims(given[0], &dims));
    const int64_t count = dims.count();
    dims.sizes[dims.num++] = matrix_.inputs;
    const int64_t* ids;
    float* y;
    TRY(read_data(given[0], &ids));
    TRY(make_output(context, 0, dims.sizes, dims.num, &y));
    for (int64_t i = 0; i < count; i++) {
      if (ids[i] < 0 || ids[i] >= matrix_.columns) return failed("an id beyond the vocabulary");
      copy(records, ids[i], y + i * matrix_.inputs);
    }
    return nullptr;
  }

 private:
  void copy(const uint8_t* records, int64_t id, float* y) const {
    const Layout& of = matrix_.of();
    const uint8_t* record = records + id / kColumns * matrix_.group_bytes();
    for (const float* last = y + matrix_.inputs; y < last; record += of.bytes()) {
      for (int block = 0; block < of.blocks; block++, y += kBlock) {
        copy_block(record, block, id % kColumns, y);
      }
    }
  }

  // In the order of operations of GGUF's own dequantization.
  void copy_block(const uint8_t* record, int block, int64_t lane, float* y) const {
    const Layout& of = matrix_.of();
    const uint8_t* body = record + of.body_at(block) + 4 * lane;
    const uint8_t* small = record + of.small_at(block) + lane;
    const auto number = [=](int i) {
      const uint8_t* half = record + 32 * i + 2 * lane;
      const uint32_t bits = half[0] | static_cast<uint32_t>(half[1]) << 8;
      return of.codes ? from_bfloat(bits) : from_half(bits);
    };
    float minimum = of.middle ? 0.f : number(1);
    if (of.blocks > 1 && !of.middle) minimum = -(minimum * static_cast<float>(small[16]));
    for (int i = 0; i < kBlock; i++) {
      float scale = number(0);
      if (of.blocks > 1 && of.middle) {
        scale *= static_cast<float>(static_cast<int8_t>(small[i < 16 ? 0 : 16]));
      } else if (of.blocks > 1) {
        scale *= static_cast<float>(small[0]);
      }
      const auto load = [=](int at) { return body[64 * at + i % 4]; };
      const uint8_t found = unpacked(of.bits, load, i / 4);
      const int q = int{of.codes ? kCodes[found] : found} - of.middle;
      y[i] = scale * static_cast<float>(q);
      if (!of.middle) y[i] += minimum;
    }
  }

  Matrix matrix_{};
  Constant records_;
};

}  // namespace
}  // namespace quill

// Quill's operators, as ONNX Runtime sees them.
//
//   quill::Linear(x, records, gains?, residual?, bias?)   y = norm(x)·w + residual + bias
//   quill::Embedding(ids, records)                        rows of a matrix of 8 bits
//
// Knows: the runtime, threads, which processor this is. Does not know: how products are computed.
// Nothing in a graph is believed: sizes that don't fit are errors, not crashes.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "matrix.h"
#include "runtime.h"

namespace quill {
namespace {

using runtime::Context;
using runtime::Info;
using runtime::Operator;
using runtime::Status;
using runtime::Value;

constexpr size_t kMaxDims = 8;
constexpr int64_t kMaxWidth = 1 << 24;     // of a matrix, in each direction
constexpr int64_t kMaxRounded = 256;       // rows that are rounded at a time: bounds the memory
constexpr int64_t kMaxParts = 64;          // that a product is cut into
constexpr int64_t kRowsToShare = 4;        // fewer are rounded faster than threads are called
constexpr int64_t kWorthSharing = 100000;  // products; fewer are computed faster alone

const runtime::Api* ort;
Kernels kernels;

#define TRY(call)                           \
  do {                                      \
    if (Status* status = (call)) return status; \
  } while (false)

Status* failed(const char* why) { return ort->create_status(runtime::kInvalidArgument, why); }

struct Dims {
  int64_t sizes[kMaxDims + 1];
  size_t num = 0;
  int64_t product(size_t first, size_t last) const {
    int64_t total = 1;
    for (size_t i = first; i < last; i++) total *= sizes[i];
    return total;
  }
  int64_t count() const { return product(0, num); }
};

Status* read_dims(const Value* value, Dims* dims) {
  runtime::Shape* shape;
  TRY(ort->shape(value, &shape));
  Status* status = ort->num_dims(shape, &dims->num);
  if (!status && dims->num > kMaxDims) status = failed("more dimensions than there should be");
  if (!status) status = ort->dims(shape, dims->sizes, dims->num);
  ort->release_shape(shape);
  return status;
}

template <typename T>
Status* read_data(const Value* value, T** data) {
  void* found = nullptr;
  if (value) TRY(ort->data(value, &found));
  *data = static_cast<T*>(found);
  return nullptr;
}

// A constant of the graph: its size is looked at when it is seen for the first time.
struct Constant {
  const Value* seen = nullptr;

  template <typename T>
  Status* read(const Value* value, int64_t size, T** data) {
    if (value != seen) {
      Dims dims;
      TRY(read_dims(value, &dims));
      if (dims.count() != size) return failed("weights of another size than their operator's");
      seen = value;
    }
    return read_data(value, data);
  }
};

struct Work {
  const Matrix& matrix;
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
  kernels.round(work.x, work.gains, work.epsilon, work.matrix.inputs,
                work.rows * index / work.parts, work.rows * (index + 1) / work.parts, work.rounded);
}

void multiply_part(void* data, size_t part) {
  const Work& work = *static_cast<Work*>(data);
  const int64_t index = static_cast<int64_t>(part);
  kernels.multiply(work.matrix, work.rounded, work.rows, work.pairs * index / work.parts,
                   work.pairs * (index + 1) / work.parts, work.out);
}

Status* share(Context* context, void (*part)(void*, size_t), int64_t parts, Work* work) {
  work->parts = parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts;
  if (work->parts > 1) {
    return ort->parallel_for(context, part, static_cast<size_t>(work->parts), 0, work);
  }
  part(work, 0);
  return nullptr;
}

class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr size_t kNumInputs = 5;
  static int input_type(size_t index) { return index == 1 ? runtime::kUint8 : runtime::kFloat; }
  static int input_kind(size_t index) { return index < 2 ? runtime::kRequired : runtime::kOptional; }

  Status* read_attributes(const Info* info) {
    int64_t halves, gated;
    TRY(ort->int_attribute(info, "inputs", &matrix_.inputs));
    TRY(ort->int_attribute(info, "columns", &matrix_.columns));
    TRY(ort->int_attribute(info, "bits", &matrix_.bits));
    TRY(ort->int_attribute(info, "halves", &halves));
    TRY(ort->int_attribute(info, "gated", &gated));
    TRY(ort->float_attribute(info, "epsilon", &epsilon_));
    matrix_.halves = halves != 0;
    matrix_.gated = gated != 0;
    const bool fits = matrix_.inputs > 0 && matrix_.inputs <= kMaxWidth &&
                      matrix_.inputs % kBlock == 0 && matrix_.columns > 0 &&
                      matrix_.columns <= kMaxWidth && (matrix_.bits == 4 || matrix_.bits == 8) &&
                      !(matrix_.halves && matrix_.bits == 8) &&
                      !(matrix_.gated && matrix_.columns % (2 * kColumns));
    return fits ? nullptr : failed("no such matrix");
  }

  Status* compute(Context* context) {
    const Value* given[kNumInputs];
    for (size_t i = 0; i < kNumInputs; i++) TRY(ort->input(context, i, &given[i]));
    const int64_t outputs = matrix_.outputs();
    Dims dims;
    TRY(read_dims(given[0], &dims));
    if (dims.num == 0 || dims.sizes[dims.num - 1] != matrix_.inputs) {
      return failed("inputs of another width than the matrix's");
    }
    const int64_t rows = dims.product(0, dims.num - 1);
    dims.sizes[dims.num - 1] = outputs;
    Work work{matrix_, nullptr, nullptr, epsilon_, {}, {}, 0, 1, (matrix_.groups() + 1) / 2};
    TRY(read_constants(given, &work));
    TRY(read_data(given[0], &work.x));
    if (given[3]) {
      Dims of_residual;
      TRY(read_dims(given[3], &of_residual));
      if (of_residual.count() != rows * outputs) return failed("a residual of another size");
      TRY(read_data(given[3], &work.out.residual));
    }
    Value* y;
    TRY(ort->output(context, 0, dims.sizes, dims.num, &y));
    TRY(read_data(y, &work.out.y));
    return run(context, work, rows);
  }

 private:
  Status* read_constants(const Value* const* given, Work* work) {
    const int64_t records = matrix_.groups() * matrix_.blocks() * matrix_.record_bytes();
    TRY(records_.read(given[1], records, &matrix_.records));
    if (given[2]) TRY(gains_.read(given[2], matrix_.inputs, &work->gains));
    if (given[4]) TRY(bias_.read(given[4], matrix_.outputs(), &work->out.bias));
    return nullptr;
  }

  Status* run(Context* context, Work& work, int64_t rows) {
    const int64_t blocks = matrix_.blocks(), most = rows < kMaxRounded ? rows : kMaxRounded;
    TRY(make_room(most, blocks));
    work.rounded = {q_.get(), scale_.get(), sum_.get(), shift_.get()};
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

  // Kept from step to step. A session computes one step at a time.
  Status* make_room(int64_t rows, int64_t blocks) {
    if (rows <= room_) return nullptr;
    room_ = 0;
    const size_t num = static_cast<size_t>(rows * blocks);
    q_.reset(new (std::nothrow) int8_t[num * kBlock]);
    scale_.reset(new (std::nothrow) float[num]);
    sum_.reset(new (std::nothrow) float[num]);
    shift_.reset(new (std::nothrow) int32_t[num]);
    if (!q_ || !scale_ || !sum_ || !shift_) {
      return ort->create_status(runtime::kFail, "no memory for rounded inputs");
    }
    room_ = rows;
    return nullptr;
  }

  Matrix matrix_{};
  float epsilon_ = 0;
  Constant records_, gains_, bias_;
  int64_t room_ = 0;
  std::unique_ptr<int8_t[]> q_;
  std::unique_ptr<float[]> scale_, sum_;
  std::unique_ptr<int32_t[]> shift_;
};

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr size_t kNumInputs = 2;
  static int input_type(size_t index) { return index == 1 ? runtime::kUint8 : runtime::kInt64; }
  static int input_kind(size_t) { return runtime::kRequired; }

  Status* read_attributes(const Info* info) {
    matrix_.bits = 8;
    TRY(ort->int_attribute(info, "inputs", &matrix_.inputs));
    TRY(ort->int_attribute(info, "columns", &matrix_.columns));
    const bool fits = matrix_.inputs > 0 && matrix_.inputs <= kMaxWidth &&
                      matrix_.inputs % kBlock == 0 && matrix_.columns > 0 &&
                      matrix_.columns <= kMaxWidth;
    return fits ? nullptr : failed("no such matrix");
  }

  Status* compute(Context* context) {
    const Value *given_ids, *given_records;
    TRY(ort->input(context, 0, &given_ids));
    TRY(ort->input(context, 1, &given_records));
    const int64_t size = matrix_.groups() * matrix_.blocks() * matrix_.record_bytes();
    TRY(records_.read(given_records, size, &matrix_.records));
    Dims dims;
    TRY(read_dims(given_ids, &dims));
    const int64_t count = dims.count();
    dims.sizes[dims.num++] = matrix_.inputs;
    Value* output;
    TRY(ort->output(context, 0, dims.sizes, dims.num, &output));
    const int64_t* ids;
    float* y;
    TRY(read_data(given_ids, &ids));
    TRY(read_data(output, &y));
    for (int64_t i = 0; i < count; i++) {
      if (ids[i] < 0 || ids[i] >= matrix_.columns) return failed("an id beyond the vocabulary");
      copy(ids[i], y + i * matrix_.inputs);
    }
    return nullptr;
  }

 private:
  void copy(int64_t id, float* y) const {
    const int64_t bytes = matrix_.record_bytes(), lane = id % kColumns;
    const uint8_t* record = matrix_.records + id / kColumns * matrix_.blocks() * bytes;
    for (int64_t block = 0; block < matrix_.blocks(); block++, record += bytes) {
      float scale;
      std::memcpy(&scale, record + 4 * lane, 4);
      const uint8_t* q = record + matrix_.head_bytes() + 4 * lane;
      for (int i = 0; i < kBlock; i++) {
        *y++ = scale * static_cast<float>(int{q[i / 4 * 64 + i % 4]} - 128);
      }
    }
  }

  Matrix matrix_{};
  Constant records_;
};

template <typename T>
Status* create(const Operator*, const runtime::Api*, const Info* info, void** kernel) {
  std::unique_ptr<T> made(new (std::nothrow) T());
  if (!made) return ort->create_status(runtime::kFail, "no memory for an operator");
  TRY(made->read_attributes(info));
  *kernel = made.release();
  return nullptr;
}

template <typename T>
Operator describe() {
  Operator op{};
  op.version = runtime::kVersion;
  op.name = [](const Operator*) { return T::kName; };
  op.provider = [](const Operator*) -> const char* { return nullptr; };  // the CPU
  op.input_type = [](const Operator*, size_t index) { return T::input_type(index); };
  op.num_inputs = [](const Operator*) { return T::kNumInputs; };
  op.output_type = [](const Operator*, size_t) { return int{runtime::kFloat}; };
  op.num_outputs = [](const Operator*) { return size_t{1}; };
  op.destroy = [](void* kernel) { delete static_cast<T*>(kernel); };
  op.input_kind = [](const Operator*, size_t index) { return T::input_kind(index); };
  op.output_kind = [](const Operator*, size_t) { return int{runtime::kRequired}; };
  op.input_memory = [](const Operator*, size_t) { return 0; };
  for (auto& each : op.variadic) each = [](const Operator*) { return 0; };
  op.create = create<T>;
  op.compute = [](void* kernel, Context* context) { return static_cast<T*>(kernel)->compute(context); };
  op.first_version = [](const Operator*) { return 1; };
  op.last_version = [](const Operator*) { return 1; };
  return op;
}

// The best that this processor has; QUILL_KERNELS names another, to compare them.
const char* choose_kernels() {
  const char* wanted = std::getenv("QUILL_KERNELS");
  const auto is_wanted = [=](const char* name) { return !wanted || !std::strcmp(wanted, name); };
#ifdef __x86_64__
  if (is_wanted("avx512") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    kernels = avx512_kernels();
    return "avx512";
  }
  if (is_wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels = avx2_kernels();
    return "avx2";
  }
#endif
  kernels = plain_kernels();
  return "plain";
}

}  // namespace
}  // namespace quill

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* QuillKernels() { return quill::choose_kernels(); }

EXPORTED runtime::Status* RegisterCustomOps(runtime::Options* options,
                                            const runtime::ApiBase* base) {
  using namespace quill;
  static const Operator linear = describe<Linear>(), embedding = describe<Embedding>();
  static std::mutex registering;
  static runtime::Domain* domain;
  const std::lock_guard<std::mutex> lock(registering);
  if (!domain) {
    ort = base->api(runtime::kVersion);
    choose_kernels();
    TRY(ort->create_domain("quill", &domain));
    TRY(ort->add_operator(domain, &linear));
    TRY(ort->add_operator(domain, &embedding));
  }
  return ort->add_domain(options, domain);
}

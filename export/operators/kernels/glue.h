// What every operator does with the runtime: reading what it is given, saying what is wrong.
//
// Knows: the runtime. Does not know: any operator. Nothing in a graph is believed: sizes that don't
// fit are errors, not crashes.
#pragma once
#include <cstddef>

#include "heads.h"
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

const runtime::Api* ort;
Kernels kernels;

#define TRY(call)                           \
  do {                                      \
    if (Status* status = (call)) return status; \
  } while (false)

Status* no_memory() { return ort->create_status(runtime::kFail, "no memory for an operator"); }

Status* failed(const char* why) { return ort->create_status(runtime::kInvalidArgument, why); }

// Cuts work into so many parts for the runtime's threads. `part` is told which one it is.
template <typename Work>
Status* share(Context* context, void (*part)(void*, size_t), int64_t parts, Work* work) {
  constexpr int64_t most = 256;
  work->parts = parts < 1 ? 1 : parts > most ? most : parts;
  if (work->parts > 1) {
    return ort->parallel_for(context, part, static_cast<size_t>(work->parts), 0, work);
  }
  part(work, 0);
  return nullptr;
}

// What a graph need not say. It stays as it is if the graph doesn't.
Status* absent(Status* status) {
  if (status) ort->release_status(status);
  return nullptr;
}

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

// Null if there is no value.
template <typename T>
Status* read_data(const Value* value, T** data) {
  void* found = nullptr;
  if (value) TRY(ort->data(value, &found));
  *data = static_cast<T*>(found);
  return nullptr;
}

// A constant of the graph. What isn't one could have another size in every step.
struct Constant {
  const void* data = nullptr;  // null: the graph has none at this place

  Status* find(const Info* info, size_t index, int64_t size) {
    int is_constant = 0;
    const Value* value = nullptr;
    TRY(ort->constant_input(info, index, &is_constant, &value));
    if (!is_constant) return nullptr;
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.count() != size) return failed("weights of another size than their operator's");
    return read_data(value, &data);
  }

  // What is given in a step must be what was found.
  template <typename T>
  Status* read(const Value* given, const T** to) const {
    const void* now;
    TRY(read_data(given, &now));
    if (now != data) return failed("weights that aren't constants of the graph");
    *to = static_cast<const T*>(now);
    return nullptr;
  }
};

}  // namespace
}  // namespace quill

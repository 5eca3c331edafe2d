// What every operator does with the runtime: it reads inputs, allocates outputs and reports errors.
//
// Knows: the runtime. Does not know: any operator.
//
// Nothing in a graph is trusted. Here are the checks that every operator needs: an input is missing,
// a shape overflows, data isn't aligned, weights aren't constants. An operator adds those of its own
// shapes and ids, once a call, before its kernels run: kernels check nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>

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
// Of a tensor: a terabyte of floats. Times the largest width of a matrix (2 to the 24) it fits into
// 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 38;

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
  bool fit() const {
    int64_t total = 1;
    for (size_t i = 0; i < num; i++) {
      if (sizes[i] < 0) return false;
      if (sizes[i] == 0) continue;
      if (__builtin_mul_overflow(total, sizes[i], &total) || total > kMaxElements) return false;
    }
    return true;
  }
};

// The shape of a tensor. An empty one can have any sizes beside the zero, [0, 2^62, 2^62] for one:
// products of those that aren't zero are limited, too.
Status* read_dims(const Value* value, Dims* dims) {
  runtime::Shape* shape;
  TRY(ort->shape(value, &shape));
  Status* status = ort->num_dims(shape, &dims->num);
  if (!status && dims->num > kMaxDims) status = failed("more dimensions than there should be");
  if (!status) status = ort->dims(shape, dims->sizes, dims->num);
  ort->release_shape(shape);
  if (!status && !dims->fit()) status = failed("a tensor of more elements than there can be");
  return status;
}

// Weights of bytes hold floats, and caches have no type here.
template <typename T>
constexpr size_t kAlignment = alignof(T) < alignof(float) ? alignof(float) : alignof(T);
template <>
constexpr size_t kAlignment<void> = alignof(float);
template <>
constexpr size_t kAlignment<const void> = alignof(float);

// Null if there is no value, or if it is empty. Weights that lie in a file are wherever the graph
// says.
template <typename T>
Status* read_data(const Value* value, T** data) {
  void* found = nullptr;
  if (value) TRY(ort->data(value, &found));
  if (reinterpret_cast<uintptr_t>(found) % kAlignment<T>) return failed("data that isn't aligned");
  *data = static_cast<T*>(found);
  return nullptr;
}

// An operator's inputs. Null: an optional one that the graph doesn't have.
template <typename T>
Status* read_inputs(const Context* context, const Value* (&given)[T::kNumInputs]) {
  for (size_t i = 0; i < T::kNumInputs; i++) {
    TRY(ort->input(context, i, &given[i]));
    if (!given[i] && T::input_kind(i) == runtime::kRequired) return failed("an input is missing");
  }
  return nullptr;
}

template <typename T>
Status* make_output(Context* context, size_t index, const int64_t* sizes, size_t num, T** data) {
  Value* output = nullptr;
  TRY(ort->output(context, index, sizes, num, &output));
  return output ? read_data(output, data) : failed("an output is missing");
}

// Makes a buffer, which is kept from step to step, at least as large as the product of these sizes.
template <typename Buffer>
void grow(Buffer* buffer, std::initializer_list<int64_t> sizes) {
  size_t needed = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(needed, size, &needed)) throw std::bad_alloc();
  }
  if (buffer->size() < needed) buffer->resize(needed);
}

// A constant of the graph. What isn't one could have another size in every step.
struct Constant {
  const void* data = nullptr;
  bool found = false;  // false: the graph has none at this place, or a tensor that it computes

  Status* find(const Info* info, size_t index, int64_t size) {
    int is_constant = 0;
    const Value* value = nullptr;
    TRY(ort->constant_input(info, index, &is_constant, &value));
    if (!is_constant) return nullptr;
    Dims dims;
    TRY(read_dims(value, &dims));
    if (dims.count() != size) return failed("weights of another size than their operator's");
    found = true;
    return read_data(value, &data);
  }

  // What is given in a step must be what was found. An empty tensor has no data, as one that is
  // missing: `found` tells them apart.
  template <typename T>
  Status* read(const Value* given, const T** to) const {
    const void* now;
    TRY(read_data(given, &now));
    if (!given == found || now != data) {
      return failed("weights that aren't constants of the graph");
    }
    *to = static_cast<const T*>(now);
    return nullptr;
  }
};

}  // namespace
}  // namespace quill

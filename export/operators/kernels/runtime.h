// The part of ONNX Runtime's C interface that operators need.
//
// Its tables only ever grow at their ends, so places in them are as good as names: this is the
// interface of version 17, which every later runtime has.
#pragma once
#include <cstddef>
#include <cstdint>

namespace runtime {

constexpr uint32_t kVersion = 17;

struct Status;
struct Value;
struct Shape;
struct Info;     // of a node, while its kernel is made
struct Context;  // of a node, while it is computed
struct Domain;
struct Options;

enum Type { kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kHalf = 10 };
enum Kind { kRequired = 0, kOptional = 1 };
enum Code { kFail = 1, kInvalidArgument = 2 };

struct Api {
  Status* (*create_status)(int code, const char* message);  // 0
  void* skipped_1[25];
  Status* (*create_domain)(const char* name, Domain** domain);  // 26
  Status* (*add_operator)(Domain* domain, const struct Operator* op);
  Status* (*add_domain)(Options* options, Domain* domain);
  void* skipped_29[22];
  Status* (*data)(const Value* value, void** data);  // 51
  void* skipped_52[9];
  Status* (*num_dims)(const Shape* shape, size_t* num);  // 61
  Status* (*dims)(const Shape* shape, int64_t* dims, size_t num);
  void* skipped_63[2];
  Status* (*shape)(const Value* value, Shape** shape);  // 65
  void* skipped_66[19];
  Status* (*float_attribute)(const Info* info, const char* name, float* value);  // 85
  Status* (*int_attribute)(const Info* info, const char* name, int64_t* value);
  void* skipped_87[3];
  Status* (*input)(const Context* context, size_t index, const Value** value);  // 90
  Status* (*output)(Context* context, size_t index, const int64_t* dims, size_t num, Value** value);
  void* skipped_92[1];
  void (*release_status)(Status* status);  // 93
  void* skipped_94[5];
  void (*release_shape)(Shape* shape);  // 99
  void* skipped_100[149];
  Status* (*constant_input)(const Info* info, size_t index, int* is_constant,
                            const Value** value);  // 249
  void* skipped_250[24];
  Status* (*parallel_for)(const Context* context, void (*work)(void* data, size_t index),
                          size_t total, size_t num_batches, void* data);  // 274
};

struct ApiBase {
  const Api* (*api)(uint32_t version);
  const char* (*version)();
};

struct Operator {
  uint32_t version;
  void* (*create_without_status)(const Operator*, const Api*, const Info*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t index);
  size_t (*num_inputs)(const Operator*);
  int (*output_type)(const Operator*, size_t index);
  size_t (*num_outputs)(const Operator*);
  void (*compute_without_status)(void* kernel, Context* context);
  void (*destroy)(void* kernel);
  int (*input_kind)(const Operator*, size_t index);
  int (*output_kind)(const Operator*, size_t index);
  int (*input_memory)(const Operator*, size_t index);
  int (*variadic[4])(const Operator*);
  Status* (*create)(const Operator*, const Api*, const Info*, void** kernel);
  Status* (*compute)(void* kernel, Context* context);
  void* infer_shape;
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
  void* aliases[4];
};

}  // namespace runtime

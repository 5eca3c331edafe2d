// The library that ONNX Runtime loads.
//
// Knows: which operators there are, which processor this is. Does not know: what they do.
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "attention_operators.h"
#include "convolution_operators.h"
#include "expert_operators.h"
#include "linear_operators.h"
#include "processor.h"
#include "recurrent_operators.h"

namespace quill {
namespace {

template <typename T>
Status* create(const Operator*, const runtime::Api*, const Info* info, void** kernel) {
  std::unique_ptr<T> made(new (std::nothrow) T());
  if (!made) return no_memory();
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
  op.output_type = [](const Operator*, size_t index) { return T::output_type(index); };
  op.num_outputs = [](const Operator*) { return T::kNumOutputs; };
  op.destroy = [](void* kernel) { delete static_cast<T*>(kernel); };
  op.input_kind = [](const Operator*, size_t index) { return T::input_kind(index); };
  op.output_kind = [](const Operator*, size_t) { return int{runtime::kRequired}; };
  op.input_memory = [](const Operator*, size_t) { return 0; };
  for (auto& each : op.variadic) each = [](const Operator*) { return 0; };
  op.create = create<T>;
  op.compute = [](void* kernel, Context* context) -> Status* {
    try {
      return static_cast<T*>(kernel)->compute(context);
    } catch (const std::exception&) {  // std::length_error, too
      return no_memory();
    }
  };
  op.first_version = [](const Operator*) { return 3; };  // layouts of matrices
  op.last_version = [](const Operator*) { return 3; };
  return op;
}

const char* choose_kernels() {
  const Named chosen = chosen_instructions();
  switch (chosen.which) {
#ifdef __x86_64__
    case Instructions::avx512: kernels = avx512_kernels(); break;
    case Instructions::avxvnni: kernels = avxvnni_kernels(); break;
    case Instructions::avx2: kernels = avx2_kernels(); break;
#endif
    default: kernels = plain_kernels();
  }
  return chosen.name;
}

}  // namespace
}  // namespace quill

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* QuillKernels() { return quill::choose_kernels(); }

EXPORTED runtime::Status* RegisterCustomOps(runtime::Options* options,
                                            const runtime::ApiBase* base) {
  using namespace quill;
  // Caches have 16 bits or 32: two operators of the same name, told apart by their types.
  static const Operator operators[] = {
      describe<Linear>(),           describe<Embedding>(),
      describe<Attention<true>>(),  describe<CrossAttention<true>>(),  describe<Store<true>>(),
      describe<Attention<false>>(), describe<CrossAttention<false>>(), describe<Store<false>>(),
      describe<EncoderAttention>(),
      describe<Recurrence>(),       describe<Update>(),                describe<Ends>(),
      describe<Recall>(),           describe<AdditiveAttention>(),
      describe<Experts>(),          describe<HeadLinear>(),
      describe<ShortConv<true>>(),  describe<ShortConv<false>>(),
  };
  static std::mutex registering;
  static runtime::Domain* domain;
  const std::lock_guard<std::mutex> lock(registering);
  if (!domain) {
    ort = base->api(runtime::kVersion);
    choose_kernels();
    TRY(ort->create_domain("quill", &domain));
    for (const Operator& each : operators) TRY(ort->add_operator(domain, &each));
  }
  return ort->add_domain(options, domain);
}

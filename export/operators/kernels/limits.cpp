// Chooses the loops for this processor: `quill doctor` measures with them what its memory and its
// multipliers give at most.
#include "limits_loops.h"
#include "processor.h"

quill::Limits quill::plain_limits() { return kLimits; }

namespace {

quill::Limits limits() {
  switch (quill::chosen_instructions().which) {
#ifdef __x86_64__
    case quill::Instructions::avx512: return quill::avx512_limits();
    case quill::Instructions::avxvnni: return quill::avxvnni_limits();
    case quill::Instructions::avx2: return quill::avx2_limits();
#endif
    default: return quill::plain_limits();
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t QuillReadMemory(const uint8_t* from, int64_t bytes) {
  return limits().read(from, bytes);
}

EXPORTED int64_t QuillMultiplyBytes(int64_t rounds) { return limits().multiply(rounds); }

// Chooses the quantizer for this processor.
#include "processor.h"
#include "quantize_loops.h"

extern "C" __attribute__((visibility("default"))) void QuillQuantizeBlock(
    const quill::BlockJob* job) {
#ifdef __x86_64__
  static const bool is_plain = quill::chosen_instructions().which == quill::Instructions::plain;
  if (!is_plain) return quill::avx2_quantize_block()(*job);
#endif
  quill::quantize_block(*job);
}

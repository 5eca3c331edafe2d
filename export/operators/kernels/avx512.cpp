#include "attention.h"
#include "kernels.h"

quill::Kernels quill::avx512_kernels() { return {round, multiply, append, attend, finish}; }

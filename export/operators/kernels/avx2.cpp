#include "attention.h"
#include "kernels.h"

quill::Kernels quill::avx2_kernels() { return {round, multiply, append, attend, finish}; }

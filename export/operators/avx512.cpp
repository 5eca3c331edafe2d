#include "kernels.h"

quill::Kernels quill::avx512_kernels() { return {round, multiply}; }

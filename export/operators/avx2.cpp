#include "kernels.h"

quill::Kernels quill::avx2_kernels() { return {round, multiply}; }

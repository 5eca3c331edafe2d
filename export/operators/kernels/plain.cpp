#include "attention.h"
#include "kernels.h"

quill::Kernels quill::plain_kernels() { return {round, multiply, append, attend, finish}; }

#include "attention.h"
#include "kernels.h"
#include "recurrent.h"

quill::Kernels quill::avx512_kernels() {
  return {round, multiply, append, attend, finish, update, multiply_row, attend_additively};
}

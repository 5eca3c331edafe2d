#include "attention.h"
#include "kernels.h"
#include "recurrent.h"

quill::Kernels quill::plain_kernels() {
  return {round, multiply, append, attend, finish, update, multiply_row, attend_additively};
}

#include "attention.h"
#include "convolution.h"
#include "experts.h"
#include "kernels.h"
#include "recurrent.h"

quill::Kernels quill::avxvnni_kernels() {
  return {round,  multiply, multiply_floats, choose,       append,           attend,
          finish, update,   multiply_row,    attend_additively, convolve};
}

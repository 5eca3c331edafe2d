#include "limits_loops.h"

quill::Limits quill::avx512_limits() { return kLimits; }

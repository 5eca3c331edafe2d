#include "limits_loops.h"

quill::Limits quill::avx2_limits() { return kLimits; }

#include "sampling_loops.h"

quill::Passes quill::avx512_passes() { return {scan, estimate, total, weigh, find}; }

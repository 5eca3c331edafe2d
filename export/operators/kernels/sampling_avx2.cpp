#include "sampling_loops.h"

quill::Passes quill::avx2_passes() { return {scan, estimate, total, weigh, find}; }

#include "sampling_loops.h"

quill::Passes quill::plain_passes() { return {scan, estimate, total, weigh, find}; }

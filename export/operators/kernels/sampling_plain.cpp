#include "sampling_loops.h"

quill::Passes quill::plain_passes() { return {scan, weigh, total, find}; }

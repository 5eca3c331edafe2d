#include "limits_loops.h"

quill::Limits quill::avxvnni_limits() { return kLimits; }

"""How many replicas there should be, by the requests that run and wait.

Knows: Ray Serve's autoscaling contexts. Does not know: bounds and delays; Ray applies those.
"""

import math
from typing import Any

REQUESTS = "requests"  # as replicas report them


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """So many that each has its target. A replica that hasn't reported yet has nothing to do."""
    counts = context.aggregated_metrics.get(REQUESTS, {})
    num_requests = sum(counts.values())
    return max(1, math.ceil(num_requests / context.config.target_ongoing_requests)), {}

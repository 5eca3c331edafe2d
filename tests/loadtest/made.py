"""Records made by hand, for tests that need no server."""

from dataclasses import replace
from typing import Any

from quill.loadtest.workload.records import RequestRecord


def made(
    index: int = 0, first_ms: float = 50.0, gap_ms: float = 10.0, **changes: Any
) -> RequestRecord:
    """Five tokens, the first after `first_ms`, the others each after `gap_ms`."""
    arrivals_ms = tuple(first_ms + gap_ms * place for place in range(5))
    record = RequestRecord(
        index=index,
        scenario="short-chat",
        intended_at_s=1000.0 + index / 10,
        status="OK",
        ok=True,
        first_token_ms=first_ms,
        total_ms=arrivals_ms[-1] + 1.0,
        finish_reason="LENGTH",
        prompt_tokens=8,
        cached_tokens=2,
        seed=7,
        token_ids=(1, 2, 3, 4, 5),
        arrivals_ms=arrivals_ms,
        request='{"promptIds": {"ids": [1, 2]}, "maxNewTokens": "5"}',
    )
    return replace(record, **changes)

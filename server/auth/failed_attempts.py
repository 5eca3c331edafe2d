"""Slows down peers that send wrong API keys again and again.

Knows: peers' addresses, time. Does not know: gRPC, keys.

Rejecting a call costs CPU time that others need. A client that waits for its rejection sends the
next call later; waiting costs the server nothing.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_PEERS = 1024
MAX_HELD = 4096  # calls: beyond it rejections come at once
BURST = 20.0
PER_SECOND = 5.0
DELAY_S = 1.0


class FailedAttempts:
    """A token bucket for each peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when
        self._num_held = 0

    def delay_s(self, peer: str) -> float:
        """How long the peer's rejection is held back at least; twice as long at most."""
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(peer, (BURST, now_s))
        tokens = min(BURST, tokens + PER_SECOND * (now_s - then_s))
        self._buckets[peer] = max(0.0, tokens - 1), now_s
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return 0.0 if tokens >= 1 or self._num_held >= MAX_HELD else DELAY_S

    async def hold(self, peer: str) -> None:
        """Until the peer may have its rejection."""
        delay_s = self.delay_s(peer)
        if not delay_s:
            return
        self._num_held += 1
        try:
            # Clients that were held together don't come back together.
            await asyncio.sleep(delay_s * random.uniform(1, 2))
        finally:
            self._num_held -= 1

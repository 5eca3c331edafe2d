"""When a call is tried again, and after how long.

Knows: errors, deadlines. Does not know: requests, channels, waiting.
"""

import logging
import random
import time
from dataclasses import dataclass

import grpc

from quill.server.client.call_error import CallError

logger = logging.getLogger(__name__)

_OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, kw_only=True)
class Retries:
    """When to try again, and after how long. Only calls that have no answer yet are repeated."""

    max_retries: int = 5
    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, error: CallError, num_tried: int, left_s: float | None) -> float | None:
        """None: give up. The server's own wish goes first; the deadline is never overrun."""
        if num_tried >= self.max_retries or not is_passing(error):
            return None
        delay_s = error.retry_after_s
        if delay_s is None:
            # Spread out, so that clients that failed together don't come back together.
            delay_s = min(self.first_s * 2**num_tried, self.max_s) * random.uniform(0.5, 1)
        return None if left_s is not None and delay_s >= left_s else delay_s

    def warn(self, error: CallError, delay_s: float) -> None:
        """Lest somebody wait and not know what for. Where logging isn't set up, on stderr."""
        busy = "the server is busy: " if error.code is _OVERLOADED else ""
        logger.warning(
            "%s%s (trying again in %.1f s, %d times at most)",
            *(busy, error.reason, delay_s, self.max_retries),
        )


class Attempts:
    """The attempts at one call, until it succeeds or its time is up."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def delay_s(
        self, error: CallError, *, warn: bool = True, elsewhere: bool = False
    ) -> float | None:
        """After one has failed: how long to wait before the next. None: give up.

        `elsewhere`: somebody else can be asked, and needn't be waited for.
        """
        left_s = None if elsewhere else self.left_s
        delay_s = self._retries.delay_s(error, self._num_failed, left_s)
        if delay_s is not None and elsewhere:
            delay_s = 0.0
        elif delay_s is not None and warn and not self._num_failed:
            self._retries.warn(error, delay_s)
        self._num_failed += 1
        return delay_s


def is_passing(error: CallError) -> bool:
    """Whether the same call may succeed later, or elsewhere."""
    # Without a delay it isn't overload, but a message that is too large.
    if error.code is _OVERLOADED and error.retry_after_s is not None:
        return True
    if error.is_broken:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting

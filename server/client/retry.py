"""When a call is retried, and after what delay.

Knows: errors, deadlines. Does not know: requests, channels, waiting.
"""

import logging
import random
import time
from dataclasses import dataclass

import grpc

from quill.server.client.errors import CallError

logger = logging.getLogger(__name__)

_OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Exponential backoff with jitter. Only calls that have no response yet are retried."""

    max_retries: int = 5
    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, error: CallError, num_tried: int, left_s: float | None) -> float | None:
        """None: give up. The server's own delay goes first; the deadline is never overrun."""
        if num_tried >= self.max_retries or not is_retryable(error):
            return None
        delay_s = error.retry_after_s
        if delay_s is None:
            # Jitter, so that clients that failed together don't come back together.
            delay_s = min(self.first_s * 2**num_tried, self.max_s) * random.uniform(0.5, 1)
        return None if left_s is not None and delay_s >= left_s else delay_s

    def warn(self, error: CallError, delay_s: float) -> None:
        """So that nobody waits without knowing why. Where logging isn't set up, on stderr."""
        busy = "the server is busy: " if error.code is _OVERLOADED else ""
        logger.warning(
            "%s%s (retrying in %.1f s, %d times at most)",
            *(busy, error.reason, delay_s, self.max_retries),
        )


class Attempts:
    """The attempts of one call, until it succeeds or its deadline passes."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def delay_s(
        self, error: CallError, *, warn: bool = True, has_other: bool = False
    ) -> float | None:
        """After a failed attempt: how long to wait before the next. None: give up.

        `has_other`: another server can be called, without waiting.
        """
        left_s = None if has_other else self.left_s
        delay_s = self._retries.delay_s(error, self._num_failed, left_s)
        if delay_s is not None and has_other:
            delay_s = 0.0
        elif delay_s is not None and warn and not self._num_failed:
            self._retries.warn(error, delay_s)
        self._num_failed += 1
        return delay_s


def is_retryable(error: CallError) -> bool:
    """Whether the same call may succeed later, or on another server."""
    # Without a delay it isn't overload, but a message that is too large.
    if error.code is _OVERLOADED and error.retry_after_s is not None:
        return True
    if error.is_broken:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and not error.is_lasting

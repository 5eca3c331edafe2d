"""Notices a step that doesn't end.

Knows: since when a step runs, time. Does not know: threads, gRPC, what is done about it.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks now and then. Says once that a step hangs, and once that it has ended after all."""

    def __init__(self, max_step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_step_s = max_step_s
        self._clock = clock
        self._hangs_since_s: float | None = None

    @property
    def period_s(self) -> float:
        return min(1.0, self._max_step_s / 4)

    def look(self, busy_since_s: float | None, describe: Callable[[], str]) -> bool:
        """Whether a step hangs. `busy_since_s`: when it began; None: there is none."""
        now_s = self._clock()
        hangs = busy_since_s is not None and now_s - busy_since_s > self._max_step_s
        if self._hangs_since_s is not None and busy_since_s != self._hangs_since_s:
            logger.info("the step that hung has ended")
            self._hangs_since_s = None
        if hangs and busy_since_s is not None and self._hangs_since_s is None:
            self._hangs_since_s = busy_since_s
            logger.error(
                "a step has run for %.1f s, and %g s is the limit: health says NOT_SERVING until "
                "it ends. It is %s",
                now_s - busy_since_s,
                self._max_step_s,
                describe(),
            )
        return hangs

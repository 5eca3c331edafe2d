"""How often and how much at once each caller may call.

Knows: callers' limits, time. Does not know: gRPC, the queue. Belongs to the event loop's thread.

The rate is a bucket that holds ten seconds' worth of calls and fills steadily.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quill.server.auth.caller import Caller
from quill.server.errors import QuotaError

BURST_S = 10.0


@dataclass
class _Account:
    num_running: int
    tokens: float
    filled_s: float


class Quotas:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """For as long as the call is answered. Refuses one that is too many."""
        if caller.requests_per_minute is None and caller.max_concurrent is None:
            yield
            return
        account = self._accounts.get(caller.name)
        if account is None:
            account = _Account(0, _most(caller), self._clock())
            self._accounts[caller.name] = account
        self._check_running(caller, account)
        self._take_token(caller, account)
        account.num_running += 1
        try:
            yield
        finally:
            account.num_running -= 1

    def _check_running(self, caller: Caller, account: _Account) -> None:
        most = caller.max_concurrent
        if most is not None and account.num_running >= most:
            reason = f"the API key {caller.name} has {most} calls running, which is its limit"
            raise QuotaError(f"{reason}. Wait for one to end", 1.0)

    def _take_token(self, caller: Caller, account: _Account) -> None:
        if caller.requests_per_minute is None:
            return
        now_s, per_second = self._clock(), caller.requests_per_minute / 60
        filled = account.tokens + (now_s - account.filled_s) * per_second
        account.tokens, account.filled_s = min(_most(caller), filled), now_s
        if account.tokens < 1:
            reason = f"the API key {caller.name} may call {caller.requests_per_minute} times a"
            raise QuotaError(f"{reason} minute", (1 - account.tokens) / per_second)
        account.tokens -= 1


def _most(caller: Caller) -> float:
    return max(1.0, (caller.requests_per_minute or 0) * BURST_S / 60)

"""How often, how much at once and how many tokens each caller may ask for.

Knows: callers' limits, time. Does not know: gRPC, the queue. Belongs to the event loop's thread.

A rate is a bucket that holds ten seconds' worth and fills steadily. That of tokens may be
overdrawn: how long an answer gets is known at its end, and a prompt may be longer than the bucket
is deep. Who has overdrawn waits until it is paid back, so the average holds all the same.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quill.server.auth.caller import Caller
from quill.server.errors import QuotaError

BURST_S = 10.0


@dataclass
class _Bucket:
    """Full at first. The rate is given anew each time, for it may change with the file of keys."""

    level: float = 0.0
    filled_s: float = -math.inf

    def wait_s(self, num: int, per_minute: int, now_s: float) -> float:
        """Until there is as much in it, or until it is full; 0 if that is now."""
        per_second = per_minute / 60
        most = max(1.0, per_second * BURST_S)
        self.level = min(most, self.level + (now_s - self.filled_s) * per_second)
        self.filled_s = now_s
        return max(0.0, (min(num, most) - self.level) / per_second)


@dataclass
class _Account:
    num_running: int = 0
    calls: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)


class Spending:
    """What one request has taken of its caller's tokens so far."""

    def __init__(self, bucket: _Bucket, num_prompt: int) -> None:
        self._bucket = bucket
        self._num_prompt = num_prompt
        self._num_taken = 0
        self.is_read = False  # whether the prompt was; else nothing is owed at the end
        self.note(0)

    def note(self, num_generated: int) -> None:
        """So many until now."""
        self._take(self._num_prompt + num_generated)

    def close(self) -> None:
        if not self.is_read:
            self._take(0)

    def _take(self, num_tokens: int) -> None:
        self._bucket.level -= num_tokens - self._num_taken
        self._num_taken = num_tokens


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
        account = self._account(caller)
        self._check_running(caller, account)
        self._take_call(caller, account)
        account.num_running += 1
        try:
            yield
        finally:
            account.num_running -= 1

    @contextmanager
    def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> Iterator[Spending]:
        """For as long as a request is answered: its prompt is paid now, its answer as it comes.

        `is_admitted`: it is part of a call that was let in. It isn't refused; the next call waits.
        """
        limit = caller.tokens_per_minute
        if limit is None:
            yield Spending(_Bucket(), num_prompt)
            return
        bucket = self._account(caller).tokens
        wait_s = bucket.wait_s(num_prompt, limit, self._clock())
        if wait_s and not is_admitted:
            reason = f"the API key {caller.name} may use {limit} tokens a minute"
            left = f"{max(0, int(bucket.level))} are left now and this prompt has {num_prompt}"
            raise QuotaError(f"{reason}; {left}", wait_s)
        spending = Spending(bucket, num_prompt)
        try:
            yield spending
        finally:
            spending.close()

    def _account(self, caller: Caller) -> _Account:
        return self._accounts.setdefault(caller.name, _Account())

    def _check_running(self, caller: Caller, account: _Account) -> None:
        most = caller.max_concurrent
        if most is not None and account.num_running >= most:
            reason = f"the API key {caller.name} has {most} calls running, which is its limit"
            raise QuotaError(f"{reason}. Wait for one to end", 1.0)

    def _take_call(self, caller: Caller, account: _Account) -> None:
        limit = caller.requests_per_minute
        if limit is None:
            return
        wait_s = account.calls.wait_s(1, limit, self._clock())
        if wait_s:
            raise QuotaError(f"the API key {caller.name} may call {limit} times a minute", wait_s)
        account.calls.level -= 1

"""Who calls, and the rate limits: calls a minute, calls at once, tokens a minute.

Knows: callers, their limits, time. Does not know: how callers proved who they are, gRPC, HTTP.

Each rate is a token bucket that holds ten seconds' worth and fills steadily. The bucket of tokens
may be overdrawn: the length of an answer is known at its end, and a prompt may be larger than the
bucket. Whoever has overdrawn it waits until it is full enough again, so the average holds.
"""

import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from quill.server.errors import QuotaError


@dataclass(frozen=True, kw_only=True)
class Caller:
    """`name` is that of an API key or a client certificate; empty if anybody may call."""

    name: str = ""
    requests_per_minute: int | None = None  # None: no limit
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    max_prompt_tokens: int | None = None
    admin: bool = False


ANYBODY = Caller()

# Names of certificates go into the log, where a line must not be two.
_UNFIT = re.compile(r"[^\w.@,:*/+-]")
MAX_NAME = 200


def certified_caller(names: Iterable[str]) -> Caller:
    """Whom a client certificate names."""
    return Caller(name=_UNFIT.sub("_", ",".join(names))[:MAX_NAME])


BURST_S = 10.0


@dataclass
class _TokenBucket:
    """Full at first. The rate is an argument each time: it may change with the file of keys."""

    level: float = 0.0
    filled_s: float = -math.inf

    def wait_s(self, num: int, per_minute: int, now_s: float) -> float:
        """Until the bucket holds `num`, or is full; 0 if that is now."""
        per_second = per_minute / 60
        size = max(1.0, per_second * BURST_S)
        self.level = min(size, self.level + (now_s - self.filled_s) * per_second)
        self.filled_s = now_s
        return max(0.0, (min(num, size) - self.level) / per_second)


@dataclass
class _Account:
    num_running: int = 0
    calls: _TokenBucket = field(default_factory=_TokenBucket)
    tokens: _TokenBucket = field(default_factory=_TokenBucket)


class QuotaUsage:
    """The tokens that one request has taken from its caller's bucket; without a bucket, a count."""

    def __init__(self, bucket: _TokenBucket | None = None, num_prompt: int = 0) -> None:
        self._bucket = bucket
        self._num_prompt = num_prompt
        self._num_taken = 0
        self.num_generated = 0
        self.is_read = False  # whether the prompt was; if not, nothing is charged in the end
        self._take(num_prompt)

    def note(self, num_generated: int) -> None:
        """So many until now."""
        self.num_generated = num_generated
        self._take(self._num_prompt + num_generated)

    def close(self) -> None:
        if not self.is_read:
            self._take(0)

    def _take(self, num_tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.level -= num_tokens - self._num_taken
        self._num_taken = num_tokens


class Quotas:
    """One account for each caller."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """For as long as a call runs. QuotaError: it is one too many."""
        if caller.requests_per_minute is None and caller.max_concurrent is None:
            yield
            return
        account = self._account(caller)
        self._check_running(caller, account)
        self._charge_call(caller, account)
        account.num_running += 1
        try:
            yield
        finally:
            account.num_running -= 1

    @contextmanager
    def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> Iterator[QuotaUsage]:
        """For as long as a request runs: its prompt is charged now, its answer as it is generated.

        `is_admitted`: it is part of a call that was admitted. It isn't rejected; the next call is.
        """
        limit = caller.tokens_per_minute
        if limit is None:
            yield QuotaUsage()
            return
        bucket = self._account(caller).tokens
        wait_s = bucket.wait_s(num_prompt, limit, self._clock())
        if wait_s and not is_admitted:
            reason = f"the API key {caller.name} may use {limit} tokens a minute"
            left = f"{max(0, int(bucket.level))} are left now"
            more = f" and this prompt has {num_prompt}" if num_prompt else ""
            raise QuotaError(f"{reason}; {left}{more}", wait_s, "key_tokens_per_minute")
        usage = QuotaUsage(bucket, num_prompt)
        try:
            yield usage
        finally:
            usage.close()

    def _account(self, caller: Caller) -> _Account:
        return self._accounts.setdefault(caller.name, _Account())

    def _check_running(self, caller: Caller, account: _Account) -> None:
        most = caller.max_concurrent
        if most is not None and account.num_running >= most:
            reason = f"the API key {caller.name} has {most} calls running, which is its limit"
            raise QuotaError(f"{reason}. Wait for one to end", 1.0, "key_max_concurrent")

    def _charge_call(self, caller: Caller, account: _Account) -> None:
        limit = caller.requests_per_minute
        if limit is None:
            return
        wait_s = account.calls.wait_s(1, limit, self._clock())
        if wait_s:
            reason = f"the API key {caller.name} may call {limit} times a minute"
            raise QuotaError(reason, wait_s, "key_requests_per_minute")
        account.calls.level -= 1


class RateLimits:
    """The limits as a server asks for them. This process counts by itself; the replicas of a
    cluster override both methods, and count together."""

    def __init__(self) -> None:
        self._quotas = Quotas()

    @asynccontextmanager
    async def call(self, caller: Caller) -> AsyncIterator[None]:
        with self._quotas.call(caller):
            yield

    @asynccontextmanager
    async def tokens(
        self, caller: Caller, num_prompt: int, is_admitted: bool = False
    ) -> AsyncIterator[QuotaUsage]:
        with self._quotas.tokens(caller, num_prompt, is_admitted) as usage:
            yield usage

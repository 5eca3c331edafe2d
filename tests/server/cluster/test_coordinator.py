"""Quotas, endpoints and reloads of a whole cluster: the coordinator, and replicas' memberships."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from quill.server.auth.caller import Caller
from quill.server.cluster import membership
from quill.server.cluster.coordinator import (
    MAX_SILENCE_S,
    Coordinator,
    Endpoint,
    Heartbeat,
)
from quill.server.cluster.membership import Membership
from quill.server.errors import QuotaError, ReloadError

PAIR = Caller(name="pair", max_concurrent=2)
FEW = Caller(name="few", requests_per_minute=30)  # a burst of five
TOKENS = Caller(name="tokens", tokens_per_minute=600)  # a burst of a hundred
UNLIMITED = Caller(name="unlimited")
FRONTEND = "127.0.0.1:50051"


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_S", 0.001)


def heartbeat(replica: str, **changes: Any) -> Heartbeat:
    first = Heartbeat(replica, f"10.0.0.1:{ord(replica)}", FRONTEND, True, 0)
    return first._replace(**changes)


def members(coordinator: Any, *names: str) -> list[Membership]:
    return [Membership(coordinator, name, FRONTEND) for name in names]


@in_a_loop
async def test_concurrent_calls_are_counted_over_replicas() -> None:
    coordinator = Coordinator()
    assert await coordinator.open_call("a", 1, PAIR) is None
    assert await coordinator.open_call("b", 1, PAIR) is None
    assert await coordinator.open_call("a", 2, PAIR) is not None
    await coordinator.close("b", 1, 0, False)
    assert await coordinator.open_call("a", 2, PAIR) is None


@in_a_loop
async def test_tickets_of_a_silent_replica_are_closed() -> None:
    clock = Clock()
    coordinator = Coordinator(clock)
    for replica in ("a", "b"):
        await coordinator.beat(heartbeat(replica))
        assert await coordinator.open_call(replica, 1, PAIR) is None
    clock.now_s = MAX_SILENCE_S
    await coordinator.beat(heartbeat("b"))
    clock.now_s += 1
    assert coordinator.replicas == ["b"]
    assert [each.address for each in await coordinator.endpoints(FRONTEND)] == ["10.0.0.1:98"]
    assert await coordinator.open_call("b", 2, PAIR) is None
    await coordinator.close("a", 1, 0, False)  # it was only slow
    assert await coordinator.open_call("b", 3, PAIR) is not None


@in_a_loop
async def test_heartbeats_charge_tokens_and_the_end_charges_the_rest() -> None:
    coordinator = Coordinator(Clock())
    assert await coordinator.open_tokens("a", 1, TOKENS, 50, False) is None
    await coordinator.beat(heartbeat("a", generated={1: 40}))
    rejection = await coordinator.open_tokens("b", 1, TOKENS, 20, False)
    assert rejection is not None
    assert rejection[2]["retry_after_s"] == pytest.approx(1.0), "10 are left, and 10 come a second"
    await coordinator.close("a", 1, 150, True)
    rejection = await coordinator.open_tokens("b", 1, TOKENS, 1, False)
    assert rejection is not None
    assert rejection[2]["retry_after_s"] == pytest.approx(10.1), "an overdraft is owed"


@in_a_loop
async def test_prompt_without_prefill_costs_nothing() -> None:
    coordinator = Coordinator(Clock())
    assert await coordinator.open_tokens("a", 1, TOKENS, 90, False) is None
    await coordinator.close("a", 1, 0, False)
    assert await coordinator.open_tokens("b", 1, TOKENS, 90, False) is None


@in_a_loop
async def test_endpoints_have_lasting_slots_and_drain() -> None:
    coordinator = Coordinator()
    slots = [(await coordinator.beat(heartbeat(replica))).slot for replica in "abc"]
    assert slots == [1, 2, 3]
    assert (await coordinator.beat(heartbeat("b", is_ready=False, slot=2))).slot == 2
    await coordinator.leave("a")
    assert (await coordinator.beat(heartbeat("d"))).slot == 4, "1 may still have streams"
    await coordinator.beat(heartbeat("e", frontend="another"))
    assert await coordinator.endpoints(FRONTEND) == [
        Endpoint(2, "10.0.0.1:98", False),
        Endpoint(3, "10.0.0.1:99", True),
        Endpoint(4, "10.0.0.1:100", True),
    ]
    restarted = Coordinator()
    assert (await restarted.beat(heartbeat("c", slot=3))).slot == 3


@in_a_loop
async def test_replicas_share_quotas() -> None:
    a, b = members(Coordinator(Clock()), "a", "b")
    async with a.call(PAIR), b.call(PAIR):
        with pytest.raises(QuotaError, match="2 calls running"):
            async with a.call(PAIR):
                pass
    async with b.call(PAIR), b.call(PAIR):
        pass
    for member in (a, b, a, b, a):
        async with member.call(FEW):
            pass
    with pytest.raises(QuotaError, match="30 times a minute") as caught:
        async with b.call(FEW):
            pass
    assert caught.value.retry_after_s == pytest.approx(2.0)
    async with a.tokens(TOKENS, 60) as usage:
        usage.is_read = True
        usage.note(100)
    with pytest.raises(QuotaError, match="600 tokens a minute"):
        async with b.tokens(TOKENS, 10):
            pass
    async with b.tokens(TOKENS, 10, is_admitted=True):
        pass


@in_a_loop
async def test_callers_without_quotas_cost_no_message() -> None:
    (member,) = members(None, "a")
    async with member.call(UNLIMITED), member.tokens(UNLIMITED, 10**6) as usage:
        usage.note(5)


class Slow:
    """A coordinator that doesn't answer, or answers late."""

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        self._wait = wait
        self._coordinator = Coordinator()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            await self._wait()
            return await getattr(self._coordinator, name)(*arguments)

        return call


@in_a_loop
async def test_without_a_coordinator_each_replica_applies_quotas_by_itself() -> None:
    async def fail() -> None:
        raise ConnectionError("no coordinator")

    a, b = members(Slow(fail), "a", "b")
    async with AsyncExitStack() as stack:
        for member in (a, a, b, b):
            await stack.enter_async_context(member.call(PAIR))
        with pytest.raises(QuotaError):
            await stack.enter_async_context(a.call(PAIR))
    async with a.tokens(TOKENS, 100) as usage:
        usage.is_read = True
    with pytest.raises(QuotaError):
        async with a.tokens(TOKENS, 1):
            pass
    with pytest.raises(ReloadError, match="doesn't answer"):
        await a.reload_all()


@in_a_loop
async def test_caller_that_leaves_before_the_answer_holds_nothing() -> None:
    answer = asyncio.Event()
    (member,) = members(Slow(answer.wait), "a")

    async def call() -> None:
        async with member.call(PAIR):
            raise AssertionError("the caller had left")

    calls = [asyncio.ensure_future(call()) for _ in range(2)]
    await asyncio.sleep(0)
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    answer.set()
    while member._tasks:
        await asyncio.sleep(0)
    async with member.call(PAIR), member.call(PAIR):
        pass


@asynccontextmanager
async def joined(
    coordinator: Coordinator, reload: Callable[[str], Coroutine[Any, Any, None]]
) -> AsyncIterator[list[Membership]]:
    """Two members, in the order of their names."""
    both, beating = members(coordinator, "a", "b"), []
    for member in both:
        load = functools.partial(reload, member.replica)
        beating.append(asyncio.ensure_future(member.join("10.0.0.1:1", load)))
        while member.replica not in coordinator.replicas:
            await asyncio.sleep(0)
    yield both
    for each in beating:
        each.cancel()


@in_a_loop
async def test_replicas_reload_one_at_a_time() -> None:
    order, running = [], 0

    async def load(name: str) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        running -= 1
        order.append(name)

    async with joined(Coordinator(), load) as (a, b):
        await asyncio.gather(a.reload_all(), b.reload_all())
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("rejecting", "text"), [("a", "is bad"), ("b", "1 of 2 replicas have")])
@in_a_loop
async def test_first_error_ends_the_reload(rejecting: str, text: str) -> None:
    loaded = []

    async def load(name: str) -> None:
        if name == rejecting:
            raise ReloadError("the new bundle is bad")
        loaded.append(name)

    async with joined(Coordinator(), load) as (_, b):
        with pytest.raises(ReloadError, match=text):
            await b.reload_all()
    assert loaded == ([] if rejecting == "a" else ["a"])


@in_a_loop
async def test_reload_does_not_wait_for_a_replica_that_stops() -> None:
    coordinator = Coordinator()
    await coordinator.beat(heartbeat("a"))
    reloading = asyncio.ensure_future(coordinator.reload())
    await asyncio.sleep(0)
    await coordinator.leave("a")
    assert await reloading == ""


@in_a_loop
async def test_draining_replica_is_no_longer_ready() -> None:
    coordinator = Coordinator()

    async def load(name: str) -> None:
        raise AssertionError

    async with joined(coordinator, load) as (a, _):
        await a.drain()
        assert [each.is_ready for each in await coordinator.endpoints(FRONTEND)] == [False, True]
        await a.leave()

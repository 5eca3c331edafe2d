"""Limits of a whole cluster, and reloads in turn: the keeper, and what replicas ask of it."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from quill.server.auth.caller import Caller
from quill.server.cluster.keeper.keeper import Keeper
from quill.server.cluster.keeper.ledger import MAX_SILENCE_S, Ledger, Refusal
from quill.server.cluster.replica import membership
from quill.server.cluster.replica.membership import Membership
from quill.server.errors import QuotaError, ReloadError

PAIR = Caller(name="pair", max_concurrent=2)
FEW = Caller(name="few", requests_per_minute=30)  # five at once
TOKENS = Caller(name="tokens", tokens_per_minute=600)  # a hundred at once
ANYBODY = Caller(name="anybody")


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
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_S", 0.001)


class TestLedger:
    def test_running_calls_are_counted_over_replicas(self) -> None:
        ledger = Ledger()
        assert ledger.open_call("a", 1, PAIR) is None
        assert ledger.open_call("b", 1, PAIR) is None
        assert isinstance(ledger.open_call("a", 2, PAIR), Refusal)
        ledger.close("b", 1, 0, False)
        assert ledger.open_call("a", 2, PAIR) is None

    def test_what_a_replica_held_that_is_gone_is_given_back(self) -> None:
        clock = Clock()
        ledger = Ledger(clock)
        for replica in ("a", "b"):
            ledger.hear(replica, {})
            assert ledger.open_call(replica, 1, PAIR) is None
        clock.now_s = MAX_SILENCE_S
        ledger.hear("b", {})
        clock.now_s += 1
        ledger.forget_silent()
        assert ledger.replicas == ["b"]
        assert ledger.open_call("b", 2, PAIR) is None
        ledger.close("a", 1, 0, False)  # it was only slow
        assert isinstance(ledger.open_call("b", 3, PAIR), Refusal)

    def test_tokens_are_paid_as_they_are_told(self) -> None:
        clock = Clock()
        ledger = Ledger(clock)
        assert ledger.open_tokens("a", 1, TOKENS, 50, False) is None
        ledger.hear("a", {1: 40})
        refusal = ledger.open_tokens("b", 1, TOKENS, 20, False)
        assert refusal is not None
        assert refusal.retry_after_s == pytest.approx(1.0), "10 are left, and 10 come a second"
        ledger.close("a", 1, 150, True)
        refusal = ledger.open_tokens("b", 1, TOKENS, 1, False)
        assert refusal is not None
        assert refusal.retry_after_s == pytest.approx(10.1), "what was overdrawn is owed"

    def test_prompt_that_was_never_read_costs_nothing(self) -> None:
        ledger = Ledger(Clock())
        assert ledger.open_tokens("a", 1, TOKENS, 90, False) is None
        ledger.close("a", 1, 0, False)
        assert ledger.open_tokens("b", 1, TOKENS, 90, False) is None


def members(keeper: Any, *names: str) -> list[Membership]:
    return [Membership(keeper, name) for name in names]


@in_a_loop
async def test_replicas_share_limits_of_calls() -> None:
    keeper = Keeper()
    a, b = members(keeper, "a", "b")
    async with a.call(PAIR), b.call(PAIR):
        with pytest.raises(QuotaError, match="2 calls running"):
            async with a.call(PAIR):
                pass
    async with b.call(PAIR), b.call(PAIR):
        pass


@in_a_loop
async def test_replicas_share_rates_of_calls() -> None:
    a, b = members(Keeper(), "a", "b")
    for member in (a, b, a, b, a):
        async with member.call(FEW):
            pass
    with pytest.raises(QuotaError, match="30 times a minute") as caught:
        async with b.call(FEW):
            pass
    assert caught.value.retry_after_s == pytest.approx(2.0, abs=0.2)


@in_a_loop
async def test_replicas_share_tokens() -> None:
    a, b = members(Keeper(), "a", "b")
    async with a.tokens(TOKENS, 60) as paying:
        paying.is_read = True
        paying.note(100)
    with pytest.raises(QuotaError, match="600 tokens a minute"):
        async with b.tokens(TOKENS, 10):
            pass
    async with b.tokens(TOKENS, 10, is_admitted=True):
        pass


@in_a_loop
async def test_callers_without_limits_ask_nobody() -> None:
    (member,) = members(None, "a")
    async with member.call(ANYBODY), member.tokens(ANYBODY, 10**6) as paying:
        paying.note(5)


class Silent:
    """A keeper that is away, or that takes its time."""

    def __init__(self, wait: Callable[[], Awaitable[None]]) -> None:
        self._wait = wait
        self._keeper = Keeper()

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            await self._wait()
            return await getattr(self._keeper, name)(*arguments)

        return ask


@in_a_loop
async def test_without_an_answer_each_replica_counts_for_itself() -> None:
    async def fail() -> None:
        raise ConnectionError("nobody is there")

    a, b = members(Silent(fail), "a", "b")
    async with AsyncExitStack() as stack:
        for member in (a, a, b, b):
            await stack.enter_async_context(member.call(PAIR))
        with pytest.raises(QuotaError):
            await stack.enter_async_context(a.call(PAIR))
    async with a.tokens(TOKENS, 100) as paying:
        paying.is_read = True
    with pytest.raises(QuotaError):
        async with a.tokens(TOKENS, 1):
            pass
    with pytest.raises(ReloadError, match="doesn't answer"):
        await a.reload_all()


@in_a_loop
async def test_caller_that_leaves_while_it_is_asked_about_holds_nothing() -> None:
    go_on = asyncio.Event()
    keeper = Silent(lambda: go_on.wait())  # type: ignore[arg-type, return-value]
    (member,) = members(keeper, "a")

    async def call() -> None:
        async with member.call(PAIR):
            raise AssertionError("it had left")

    asking = [asyncio.ensure_future(call()) for _ in range(2)]
    await asyncio.sleep(0)
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    go_on.set()
    while member._tasks:
        await asyncio.sleep(0)
    async with member.call(PAIR), member.call(PAIR):
        pass


@in_a_loop
async def test_replicas_reload_one_after_the_other() -> None:
    keeper, order, running = Keeper(), [], 0

    def reload(name: str) -> Callable[[], Any]:
        async def load() -> None:
            nonlocal running
            running += 1
            assert running == 1, "one at a time"
            await asyncio.sleep(0.01)
            running -= 1
            order.append(name)

        return load

    a, b = members(keeper, "a", "b")
    beating = [asyncio.ensure_future(each.beat(reload(n))) for n, each in (("a", a), ("b", b))]
    while len(keeper._replicas()) < 2:
        await asyncio.sleep(0)
    await asyncio.gather(a.reload_all(), b.reload_all())
    assert sorted(order) == ["a", "a", "b", "b"]
    for each in beating:
        each.cancel()


@pytest.mark.parametrize(("refusing", "told"), [("a", "is bad"), ("b", "1 of 2 replicas have")])
@in_a_loop
async def test_first_that_refuses_ends_the_reload(refusing: str, told: str) -> None:
    keeper, loaded = Keeper(), []

    def reload(name: str) -> Callable[[], Any]:
        async def load() -> None:
            if name == refusing:
                raise ReloadError("the new bundle is bad")
            loaded.append(name)

        return load

    beating = []
    for name in ("a", "b"):
        (member,) = members(keeper, name)
        beating.append(asyncio.ensure_future(member.beat(reload(name))))
        while name not in keeper._replicas():
            await asyncio.sleep(0)
    with pytest.raises(ReloadError, match=told):
        await member.reload_all()
    assert loaded == ([] if refusing == "a" else ["a"])
    for each in beating:
        each.cancel()


@in_a_loop
async def test_replica_that_goes_meanwhile_is_not_waited_for() -> None:
    keeper = Keeper()
    await keeper.hear("a", {})
    reloading = asyncio.ensure_future(keeper.reload())
    await asyncio.sleep(0)
    await keeper.leave("a")
    assert await reloading == ""

"""Bad calls and bad bytes at a real server: never a crash, a hang or INTERNAL; others go on.

`make fuzz` tries many more of them.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import BUG
from tests.server.bad_bytes import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Sent,
    begin,
    frame,
    headers,
    make_bytes,
)
from tests.server.bad_calls import SERVICE, Call, make_call
from tests.server.hostile_clients import Besieger
from tests.server.hostile_http import HttpBesieger
from tests.server.process import ServerProcess, server_process, wait_until

CHANCE = st.randoms(use_true_random=False)
BRIEFLY = settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Siege(NamedTuple):
    server: ServerProcess
    besieger: Besieger
    runner: asyncio.Runner
    known: list[int]


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    from tests.server.tiny_bundle import make_talker

    directory: Path = tmp_path_factory.mktemp("fuzz")
    make_talker(directory / "talker")
    with (
        server_process(directory / "talker", directory / "log") as server,
        asyncio.Runner() as runner,
    ):

        async def begin() -> Besieger:
            return Besieger(server.address)

        besieger = runner.run(begin())
        yield Siege(server, besieger, runner, runner.run(besieger.known_answer()))
        runner.run(besieger.close())


def test_path_that_is_no_text_ends_nobody_elses_call(siege: Siege) -> None:
    path = f"/{SERVICE}/\xff\xff"
    hostile = begin() + frame(HEADERS, END_HEADERS | END_STREAM, 1, headers(path))
    siege.runner.run(siege.besieger.send_bytes(Sent(hostile, rudely=False)))
    assert siege.runner.run(siege.besieger.known_answer()) == siege.known
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        siege.runner.run(siege.besieger.ask(Call("Nothing", b"")))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@BRIEFLY
@given(CHANCE)
def test_bad_calls_are_refused_or_answered(siege: Siege, chance: random.Random) -> None:
    siege.runner.run(siege.besieger.call(make_call(chance)))


@BRIEFLY
@given(CHANCE)
def test_bad_bytes_do_not_disturb_others(siege: Siege, chance: random.Random) -> None:
    siege.runner.run(siege.besieger.send_bytes(make_bytes(chance)))
    assert siege.runner.run(siege.besieger.known_answer()) == siege.known


def test_five_hundred_bad_requests_over_http_leave_no_trace(siege: Siege) -> None:
    num_fds, besieger = siege.server.num_fds, HttpBesieger(siege.server.http_port)
    for first in range(0, 500, 50):
        siege.runner.run(besieger.attack(7, range(first, first + 50)))
    assert siege.runner.run(siege.besieger.known_answer()) == siege.known
    wait_until(siege.server.is_idle, "every slot is free")
    wait_until(lambda: siege.server.num_fds <= num_fds + 5, "connections are given back")
    assert {outcome for _, outcome in besieger.outcomes} >= {"200", "400", "404", "415"}
    assert not BUG.search(siege.server.log)


def test_a_thousand_bad_inputs_leave_no_trace(siege: Siege) -> None:
    num_fds = siege.server.num_fds
    for first in range(0, 1000, 50):
        siege.runner.run(siege.besieger.attack(7, range(first, first + 50), 0.3))
    assert siege.runner.run(siege.besieger.known_answer()) == siege.known
    wait_until(siege.server.is_idle, "every slot is free")
    wait_until(lambda: siege.server.num_fds <= num_fds + 5, "connections are given back")
    assert not BUG.search(siege.server.log)

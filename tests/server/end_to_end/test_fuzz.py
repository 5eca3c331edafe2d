"""Bad calls and bad bytes at a real server: never a crash, a hang or INTERNAL; others go on.

`make fuzz` tries many more of them.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.fuzz import BUG
from tests.server.adversarial_load import Adversary
from tests.server.bad_bytes import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Sent,
    begin,
    frame,
    headers,
)
from tests.server.bad_calls import SERVICE, Call
from tests.server.process import ServerProcess, server_process, wait_until


class Attacked(NamedTuple):
    server: ServerProcess
    adversary: Adversary
    runner: asyncio.Runner
    known: list[int]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def check(self, num_fds: int) -> None:
        """The server still answers the same, and nothing is left of what was sent."""
        assert self.run(self.adversary.known_answer()) == self.known
        wait_until(self.server.is_idle, "no sequence runs or waits")
        wait_until(lambda: self.server.num_fds <= num_fds + 5, "connections are closed")
        assert not BUG.search(self.server.log)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    from tests.server.tiny_bundle import make_talker

    directory: Path = tmp_path_factory.mktemp("fuzz")
    make_talker(directory / "talker")
    with (
        server_process(directory / "talker", directory / "log") as server,
        asyncio.Runner() as runner,
    ):

        async def begin() -> Adversary:
            return Adversary(server.address, server.http_port)

        adversary = runner.run(begin())
        yield Attacked(server, adversary, runner, runner.run(adversary.known_answer()))
        runner.run(adversary.close())


def test_path_that_is_no_text_ends_nobody_elses_call(attacked: Attacked) -> None:
    path = f"/{SERVICE}/\xff\xff"
    bad = begin() + frame(HEADERS, END_HEADERS | END_STREAM, 1, headers(path))
    attacked.run(attacked.adversary.send_bytes(Sent(bad, rudely=False)))
    assert attacked.run(attacked.adversary.known_answer()) == attacked.known
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        attacked.run(attacked.adversary.call_once(Call("Nothing", b"")))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_five_hundred_bad_requests_over_http_leave_no_trace(attacked: Attacked) -> None:
    num_fds = attacked.server.num_fds
    for first in range(0, 500, 50):
        attacked.run(attacked.adversary.attack_http(7, range(first, first + 50)))
    attacked.check(num_fds)
    assert {outcome for _, outcome in attacked.adversary.outcomes} >= {"200", "400", "404", "415"}


def test_a_thousand_bad_inputs_leave_no_trace(attacked: Attacked) -> None:
    num_fds = attacked.server.num_fds
    for first in range(0, 1000, 50):
        attacked.run(attacked.adversary.attack(7, range(first, first + 50), 0.3))
    attacked.check(num_fds)

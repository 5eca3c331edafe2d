"""Two real servers, of which one is killed: its streams go on at the other, token for token."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quill.server.client.async_client import AsyncClient
from quill.server.client.balancer import ServerState
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.faults import Faults
from tests.server.process import PATIENCE_S, PROMPT, ServerProcess, ask, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

LENGTH = 100
# Another server is asked at once: nobody has the time to wait for the same one.
ONCE = Retries(max_retries=1, first_s=10 * PATIENCE_S, max_s=10 * PATIENCE_S)
Kill = Callable[[tuple[ServerState, ...]], None]


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path)


@pytest.fixture
def two(tiny_bundle: TinyBundle, faults: Faults, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                server_process(
                    tiny_bundle.directory,
                    tmp_path / f"log-{number}",
                    environment=faults.environment,
                )
            )
            for number in range(2)
        ]


def read_blocking(address: str, kill: Kill) -> list[int]:
    with Client(address, ONCE) as client:
        chunks = client.stream(
            PROMPT, seed=5, max_new_tokens=LENGTH, resume=True, timeout_s=PATIENCE_S
        )
        tokens = [*next(chunks).token_ids]
        kill(client.servers())
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert sorted(each.num_failed for each in client.servers()) == [0, 1]
    return tokens


def read_asyncio(address: str, kill: Kill) -> list[int]:
    async def main() -> list[int]:
        async with AsyncClient(address, ONCE) as client:
            chunks = client.stream(
                PROMPT, seed=5, max_new_tokens=LENGTH, resume=True, timeout_s=PATIENCE_S
            )
            tokens = [*(await anext(chunks)).token_ids]
            kill(client.servers())
            async for chunk in chunks:
                tokens += chunk.token_ids
            assert sorted(each.num_failed for each in client.servers()) == [0, 1]
        return tokens

    return asyncio.run(main())


@pytest.mark.parametrize("read", [read_blocking, read_asyncio])
def test_stream_of_a_killed_server_goes_on_at_the_other(
    read: Callable[[str, Kill], list[int]], two: list[ServerProcess], faults: Faults
) -> None:
    survivors: list[ServerProcess] = []

    def kill(states: tuple[ServerState, ...]) -> None:
        (busy,) = (each.address for each in states if each.num_outstanding)
        for server in two:
            if server.address == busy:
                server.signal(signal.SIGKILL)
                server.process.wait()
            else:
                survivors.append(server)
        faults.end("slow")

    faults.start("slow")
    tokens = read("quill://" + ",".join(each.address for each in two), kill)
    (survivor,) = survivors
    assert tokens == ask(survivor, seed=5, max_new_tokens=LENGTH)
    wait_until(survivor.is_idle, "nothing runs or waits")


def test_server_that_comes_back_gets_its_texts_again(
    two: list[ServerProcess], tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    first, second = two

    def serving() -> list[bool]:
        states = {each.address: each.is_serving for each in client.servers()}
        return [states[each.address] for each in two]

    with Client(f"quill://{first.address},{second.address}", ONCE) as client:
        client.model()
        first.signal(signal.SIGKILL)
        first.process.wait()
        wait_until(lambda: serving() == [False, True], "its death is known")
        for _ in range(4):
            client.model()
        with server_process(tiny_bundle.directory, tmp_path / "log-again", port=first.port):
            wait_until(lambda: serving() == [True, True], "it is known again")
            before = client.servers()
            for _ in range(2):
                client.model()
            assert [each.num_started + 1 for each in before] == [
                each.num_started for each in client.servers()
            ]

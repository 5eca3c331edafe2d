"""Servers that are killed and come back: their streams go on, token for token."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.client.conftest import MakeClient
from tests.server.faults import Faults
from tests.server.process import (
    PATIENCE_S,
    PROMPT,
    ServerProcess,
    ask,
    reserved_port,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

NUM_STREAMS = 12
LENGTH = 60
# Until all have failed so often: more often than calls were retried when that had a number.
NUM_FAILURES = 7
# Another server is called at once: nobody has the time to wait for the same one.
ONCE = Retries(max_retries=1, first_s=10 * PATIENCE_S, max_s=10 * PATIENCE_S)


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """Steps are slow, so that no stream has ended when its server is killed."""
    switches = Faults(tmp_path)
    switches.start("slow")
    return switches


@pytest.fixture
def bundle(tiny_bundle: TinyBundle) -> Path:
    return tiny_bundle.directory


def slow_server(
    bundle: Path, faults: Faults, log: Path, *options: str, port: int = 0
) -> AbstractContextManager[ServerProcess]:
    return server_process(bundle, log, *options, port=port, environment=faults.environment)


def kill(server: ServerProcess) -> None:
    server.signal(signal.SIGKILL)
    server.process.wait()


def tokens_of(client: Client, seed: int) -> list[int]:
    chunks = client.stream(
        PROMPT, seed=seed, max_new_tokens=LENGTH, timeout_s=PATIENCE_S, resume=True
    )
    return [token for chunk in chunks for token in chunk.token_ids]


def num_failed(client: Client) -> int:
    return client.servers()[0].num_failed


def test_every_stream_outlasts_the_restart_of_its_only_server(
    make_client: MakeClient, bundle: Path, faults: Faults, tmp_path: Path
) -> None:
    log, room = tmp_path / "log", ("--max-num-seqs", str(NUM_STREAMS))
    with (
        reserved_port() as port,
        slow_server(bundle, faults, log, *room, port=port) as first,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):
        clients = [make_client(first.address) for _ in range(NUM_STREAMS)]
        streams = [threads.submit(tokens_of, each, seed) for seed, each in enumerate(clients)]
        wait_until(lambda: first.metric("quill_sequences_running") == NUM_STREAMS, "all run")
        kill(first)
        wait_until(
            lambda: all(num_failed(each) >= NUM_FAILURES for each in clients),
            "all have called in vain",
            PATIENCE_S,
        )
        with server_process(bundle, log, *room, port=port) as second:
            received = [each.result(PATIENCE_S) for each in streams]
            for each in clients:
                each.close()
            expected = [ask(second, seed, LENGTH) for seed in range(NUM_STREAMS)]
            assert received == expected
            wait_until(second.is_idle, "nothing runs or waits")


def test_stream_whose_server_stays_away_ends_at_its_deadline(
    make_client: MakeClient,
    bundle: Path,
    faults: Faults,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retries come 0.15, 0.45, 1.05 and 2.25 s after the failure: none just before the deadline,
    which would end it before the connection is refused."""
    monkeypatch.setattr("random.uniform", lambda *_: 0.75)
    with (
        slow_server(bundle, faults, tmp_path / "log") as server,
        make_client(server.address, Retries(first_s=0.2, max_s=PATIENCE_S)) as client,
    ):
        chunks = client.stream(PROMPT, max_new_tokens=LENGTH, timeout_s=4.0, resume=True)
        next(chunks)
        kill(server)
        began_s = time.monotonic()
        with pytest.raises(CallError, match="Connection refused"):
            list(chunks)
        assert time.monotonic() - began_s < 4.0


@pytest.fixture
def two(bundle: Path, faults: Faults, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2)]
        yield [
            stack.enter_context(slow_server(bundle, faults, tmp_path / f"log-{port}", port=port))
            for port in ports
        ]


def test_stream_of_a_killed_server_goes_on_at_the_other(
    make_client: MakeClient, two: list[ServerProcess], faults: Faults
) -> None:
    with make_client("quill://" + ",".join(each.address for each in two), ONCE) as client:
        chunks = client.stream(
            PROMPT, seed=5, max_new_tokens=LENGTH, resume=True, timeout_s=PATIENCE_S
        )
        tokens = [*next(chunks).token_ids]
        (busy,) = (each.address for each in client.servers() if each.num_outstanding)
        killed, survivor = two if two[0].address == busy else two[::-1]
        kill(killed)
        faults.end("slow")
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert sorted(each.num_failed for each in client.servers()) == [0, 1]
    assert tokens == ask(survivor, seed=5, max_new_tokens=LENGTH)
    wait_until(survivor.is_idle, "nothing runs or waits")


def test_server_that_comes_back_gets_its_texts_again(
    two: list[ServerProcess], bundle: Path, tmp_path: Path
) -> None:
    first, second = two

    def serving() -> list[bool]:
        states = {each.address: each.is_serving for each in client.servers()}
        return [states[each.address] for each in two]

    with Client(f"quill://{first.address},{second.address}", ONCE) as client:
        client.model()
        kill(first)
        wait_until(lambda: serving() == [False, True], "its death is known")
        for _ in range(4):
            client.model()
        with server_process(bundle, tmp_path / "log-again", port=first.port):
            wait_until(lambda: serving() == [True, True], "it is known again")
            before = client.servers()
            for _ in range(2):
                client.model()
            assert [each.num_started + 1 for each in before] == [
                each.num_started for each in client.servers()
            ]

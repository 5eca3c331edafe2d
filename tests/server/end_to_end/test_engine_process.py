"""The engine's process dies, and nobody loses more than the answers that it was working on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.faults import Faults
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    PROMPT,
    ServerProcess,
    ask,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

LENGTH = 100
PATIENT = Retries(max_retries=1000, first_s=0.05, max_s=0.2)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(
    tiny_bundle: TinyBundle, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(tiny_bundle.directory, log, environment=faults.environment) as running:
        yield running


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_streams_of_an_engine_that_is_killed_end_or_resume_with_the_same_tokens(
    server: ServerProcess, faults: Faults
) -> None:
    expected = ask(server, seed=5, max_new_tokens=LENGTH)
    faults.start("slow")
    engine, num_restarts = server.engine_pid, server.metric("quill_engine_restarts_total")
    with Client(server.address, NEVER) as plain, Client(server.address, PATIENT) as patient:
        broken = plain.stream(PROMPT, seed=5, max_new_tokens=LENGTH, timeout_s=PATIENCE_S)
        resuming = patient.stream(PROMPT, seed=5, max_new_tokens=LENGTH, resume=True)
        next(broken)
        tokens = list(next(resuming).token_ids)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(CallError) as caught:
            list(broken)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        faults.end("slow")
        for chunk in resuming:
            tokens += chunk.token_ids
    assert tokens == expected
    assert server.engine_pid != engine
    assert server.metric("quill_engine_restarts_total") == num_restarts + 1
    assert server.metric("quill_serving") == 1
    wait_until(server.is_idle, "nothing runs or waits")


def test_a_bundle_that_crashes_its_process_is_refused_and_the_old_one_goes_on(
    server: ServerProcess, faults: Faults
) -> None:
    expected, engine = ask(server), server.engine_pid
    faults.start("abort")
    server.signal(signal.SIGHUP)
    wait_until(
        lambda: "the new bundle is refused, and the old one goes on" in server.log, "refused"
    )
    faults.end("abort")
    assert "by signal 6" in server.log
    assert (ask(server), server.engine_pid) == (expected, engine)


def test_a_reload_takes_a_new_process_and_ends_the_old_one(server: ServerProcess) -> None:
    expected, engine = ask(server), server.engine_pid
    server.signal(signal.SIGHUP)
    wait_until(lambda: not is_alive(engine), "the old engine ends")
    assert ask(server) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_server(
    tiny_bundle: TinyBundle, tmp_path: Path, number: signal.Signals
) -> None:
    with server_process(tiny_bundle.directory, tmp_path / "log") as server:
        engine = server.engine_pid
        server.signal(number)
        server.process.wait(PATIENCE_S)
        wait_until(lambda: not is_alive(engine), "the engine ends")

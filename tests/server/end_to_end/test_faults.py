"""Faults in a real server process: nothing is lost in silence, no sequence leaks, others go on."""

import signal
import threading
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.faults import Faults
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    PROMPT,
    ServerProcess,
    ask,
    wait_until,
)

LENGTH = 100
SERVER_OPTIONS = ("--watchdog", "0.5")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(CallError) as caught:
        call()
    return caught.value.code


def health(server: ServerProcess) -> int:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status)


def test_steps_that_raise_for_ever_make_the_server_unhealthy_until_they_stop(
    server: ServerProcess, faults: Faults
) -> None:
    expected = ask(server)
    faults.start("raise")
    while health(server) == SERVING:
        assert code_of(lambda: ask(server)) is grpc.StatusCode.INTERNAL
    faults.end("raise")
    assert ask(server) == expected
    wait_until(lambda: health(server) == SERVING, "health says so")
    wait_until(server.is_idle, "nothing runs or waits")


def test_step_that_hangs_turns_health_and_goes_on_when_it_is_over(
    server: ServerProcess, faults: Faults
) -> None:
    expected = ask(server)
    faults.hang()
    answers: list[list[int]] = []
    caller = threading.Thread(target=lambda: answers.append(ask(server)))
    caller.start()
    wait_until(lambda: health(server) == NOT_SERVING, "the watchdog reports it")
    assert "a step has run for" in server.log
    # Whoever is in a hurry is told, though the engine can't move.
    with Client(server.address, NEVER) as client:
        code = code_of(lambda: client.generate(PROMPT, timeout_s=0.5))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    faults.let_go()
    caller.join(PATIENCE_S)
    assert answers == [expected]
    wait_until(lambda: health(server) == SERVING, "health says so")
    wait_until(server.is_idle, "nothing runs or waits")


def test_server_that_was_stopped_for_five_seconds_goes_on_where_it_was(
    server: ServerProcess, faults: Faults
) -> None:
    expected = ask(server, max_new_tokens=LENGTH)
    faults.start("slow")
    with Client(server.address, NEVER) as client:
        chunks = client.stream(PROMPT, seed=3, max_new_tokens=LENGTH, timeout_s=PATIENCE_S)
        tokens = list(next(chunks).token_ids)
        server.signal(signal.SIGSTOP)
        # This is how five seconds are waited for: a client that gives up after them.
        with Client(server.address, NEVER) as hurried:
            code = code_of(lambda: hurried.generate(PROMPT, timeout_s=5.0))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        server.signal(signal.SIGCONT)
        faults.end("slow")
        for chunk in chunks:
            tokens += chunk.token_ids
    assert tokens == expected
    wait_until(server.is_idle, "nothing runs or waits, of the hurried client either")

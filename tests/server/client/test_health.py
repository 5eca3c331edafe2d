"""What is made of a server that says nothing more."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2

from quill.protos import health_pb2 as ours
from quill.server.client.async_client import AsyncClient
from quill.server.client.call_error import CallError
from quill.server.client.health import is_serving, read_silence
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.scripted_session import TIMEOUT_S

NEVER = Retries(max_retries=0)


def test_words_are_those_of_grpcs_own_service() -> None:
    states = health_pb2.HealthCheckResponse
    for status in (states.SERVING, states.NOT_SERVING, states.SERVICE_UNKNOWN, states.UNKNOWN):
        said = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        assert is_serving(ours.HealthCheckResponse.FromString(said)) == (status == states.SERVING)
    assert ours.HealthCheckRequest().SerializeToString() == b""


def test_silence_is_death_unless_it_was_agreed_on() -> None:
    over = grpc.StatusCode.DEADLINE_EXCEEDED
    assert read_silence(over, was_heard=True).is_serving is None
    assert read_silence(over, was_heard=False).is_serving is False
    for code in (None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        assert read_silence(code, was_heard=True).is_serving is False
    assert read_silence(grpc.StatusCode.UNIMPLEMENTED, was_heard=False).is_serving


def test_server_that_knows_no_health_is_asked_all_the_same() -> None:
    async def main(address: str) -> tuple[bool, ...]:
        async with AsyncClient(address, NEVER) as client:
            with pytest.raises(CallError, match="UNIMPLEMENTED"):
                await client.model(timeout_s=TIMEOUT_S)
            return tuple(each.is_serving for each in client.servers())

    server = grpc.server(ThreadPoolExecutor(2))
    address = f"quill://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with Client(address, NEVER) as client:
            with pytest.raises(CallError, match="UNIMPLEMENTED"):
                client.model(timeout_s=TIMEOUT_S)
            assert [each.is_serving for each in client.servers()] == [True]
        assert asyncio.run(main(address)) == (True,)
    finally:
        server.stop(None).wait(TIMEOUT_S)

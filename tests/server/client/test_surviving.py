"""Servers die, and proxies say so in different words; clients, blocking and asyncio, go on."""

import asyncio
import base64
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quill.protos import generation_pb2 as pb
from quill.server.client.async_client import AsyncClient
from quill.server.client.call_error import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.breaking_server import (
    CANCEL,
    HANG_UP,
    INTERNAL_ERROR,
    NO_END,
    OK,
    REFUSED_STREAM,
    Ending,
    Reset,
    Status,
    breaking_server,
)
from tests.server.scripted_session import TIMEOUT_S

AT_ONCE = Retries(first_s=0.001, max_s=0.002)
CHUNKS = [
    *(pb.GenerateChunk(text=text, token_ids=[ord(text)]) for text in "abc"),
    pb.GenerateChunk(finish_reason=pb.FINISH_REASON_LENGTH),
]
DEATHS: dict[str, Ending] = {
    "reset: CANCELLED": Reset(CANCEL),
    "reset: INTERNAL": Reset(INTERNAL_ERROR),
    "reset: UNAVAILABLE": Reset(REFUSED_STREAM),
    "UNKNOWN": NO_END,
    "hung up: UNAVAILABLE": HANG_UP,
    "said by a proxy: INTERNAL": Status(13, "the replica died"),
    "said by a proxy: UNAVAILABLE": Status(14, "no healthy upstream"),
}


def said_by_quill(code: grpc.StatusCode) -> Status:
    status = status_pb2.Status(code=code.value[0], message="a bug in the server")
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id="r1"))
    packed = base64.b64encode(status.SerializeToString()).decode()
    return Status(code.value[0], "a bug in the server", packed)


def read_blocking(address: str, retries: Retries = AT_ONCE) -> list[str]:
    with Client(address, retries) as client:
        chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
        return [chunk.text for chunk in chunks]


def read_asyncio(address: str, retries: Retries = AT_ONCE) -> list[str]:
    async def main() -> list[str]:
        async with AsyncClient(address, retries) as client:
            chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
            return [chunk.text async for chunk in chunks]

    return asyncio.run(main())


both = pytest.mark.parametrize("read", [read_blocking, read_asyncio])
Read = Callable[..., list[str]]


@both
@pytest.mark.parametrize("death", DEATHS.values(), ids=list(DEATHS))
def test_stream_goes_on_whatever_its_death_is_called(read: Read, death: Ending) -> None:
    with breaking_server(CHUNKS, death, death, OK) as server:
        assert "".join(read(server.address)) == "abc"
        assert server.num_calls == 3


@both
@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_what_the_server_says_itself_is_not_asked_for_again(
    read: Read, code: grpc.StatusCode
) -> None:
    with breaking_server(CHUNKS, said_by_quill(code)) as server:
        with pytest.raises(CallError, match="a bug in the server") as caught:
            read(server.address)
        assert server.num_calls == 1
    assert (caught.value.code, caught.value.request_id) == (code, "r1")


@both
def test_request_that_kills_every_server_is_given_up(read: Read) -> None:
    with breaking_server(CHUNKS, Reset(INTERNAL_ERROR)) as server:
        with pytest.raises(CallError) as caught:
            read(server.address, Retries(max_retries=3, first_s=0.001))
        # A stream breaks so often, and it may fail so often to begin again each time.
        assert 4 <= server.num_calls <= 4 * 4
    assert caught.value.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("death", DEATHS.values(), ids=list(DEATHS))
def test_whole_answer_is_asked_for_again_with_the_seed_that_it_had(death: Ending) -> None:
    with breaking_server([pb.GenerateResponse(request_id="r1")], death, OK) as server:
        with Client(server.address, AT_ONCE) as client:
            assert client.generate("x", timeout_s=TIMEOUT_S).request_id == "r1"
        first, second = map(pb.GenerateRequest.FromString, server.requests)
    assert first.HasField("seed")
    assert first == second


def test_stream_without_resume_says_that_it_broke() -> None:
    with (
        breaking_server(CHUNKS, Reset(CANCEL)) as server,
        Client(server.address, AT_ONCE) as client,
    ):
        server.may_end.clear()
        chunks = client.stream("x", timeout_s=TIMEOUT_S)
        assert next(chunks).text == "a"
        server.may_end.set()
        with pytest.raises(CallError, match="broke on its way") as caught:
            list(chunks)
        assert server.num_calls == 1
    # CANCELLED would say that the caller did it.
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.is_broken


def test_stream_that_its_caller_closes_stays_closed() -> None:
    async def main(address: str) -> None:
        async with AsyncClient(address, AT_ONCE) as client:
            chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
            assert (await anext(chunks)).text == "a"
            await chunks.aclose()
            assert [chunk async for chunk in chunks] == []

    with breaking_server(CHUNKS, OK) as server:
        server.may_end.clear()
        with Client(server.address, AT_ONCE) as client:
            chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
            assert next(chunks).text == "a"
            chunks.close()
            assert list(chunks) == []
        asyncio.run(main(server.address))
        assert server.num_calls == 2


def test_task_that_is_cancelled_asks_nobody_again() -> None:
    async def main(address: str) -> None:
        async with AsyncClient(address, AT_ONCE) as client:
            chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
            for text in "abc":
                assert (await anext(chunks)).text == text
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)  # now it waits for what never comes
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [chunk async for chunk in chunks] == []

    with breaking_server([*CHUNKS[:3], CHUNKS[0]], NO_END) as server:
        server.may_end.clear()
        asyncio.run(main(server.address))
        assert server.num_calls == 1


def test_client_that_is_closed_meanwhile_is_not_taken_for_a_death() -> None:
    with breaking_server([*CHUNKS[:2], CHUNKS[0]], NO_END) as server:
        server.may_end.clear()
        client = Client(server.address, AT_ONCE)
        chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
        assert [next(chunks).text, next(chunks).text] == ["a", "b"]
        closing = threading.Timer(0.05, client.close)
        closing.start()
        with pytest.raises(CallError, match="client was closed") as caught:
            next(chunks)
        closing.join()
        assert server.num_calls == 1
    assert caught.value.code is grpc.StatusCode.CANCELLED


def test_deadline_is_not_overrun_by_another_try() -> None:
    """A proxy whose own clock is ahead cancels a call just before its client would."""
    waits: list[float] = []
    with breaking_server(CHUNKS, Reset(CANCEL)) as server:
        patient = Retries(first_s=10.0 * TIMEOUT_S, max_s=10.0 * TIMEOUT_S)
        with Client(server.address, patient, waits.append) as client, pytest.raises(CallError):
            list(client.stream("x", resume=True, timeout_s=TIMEOUT_S))
        assert (waits, server.num_calls) == ([], 1)


def test_client_that_is_closed_while_it_waits_to_try_again_says_so() -> None:
    def close(delay_s: float) -> None:
        client.close()

    client = Client("127.0.0.1:1", AT_ONCE, sleep=close)
    with pytest.raises(CallError, match="client was closed") as caught:
        client.model()
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def read(client: AsyncClient) -> object:
    return [chunk.text async for chunk in client.stream("x", resume=True, timeout_s=TIMEOUT_S)]


@pytest.mark.parametrize("call", [read, lambda each: each.generate("x"), AsyncClient.model])
def test_client_for_asyncio_that_is_closed_meanwhile_says_so_and_cancels_no_task(
    call: Callable[[AsyncClient], Coroutine[Any, Any, object]],
) -> None:
    async def main(address: str) -> None:
        client = AsyncClient(address, AT_ONCE)
        calling = asyncio.ensure_future(call(client))
        while not server.num_calls:
            await asyncio.sleep(0.001)
        await client.close()
        for each in (calling, client.model()):
            with pytest.raises(CallError, match="client was closed"):
                await each

    with breaking_server([*CHUNKS[:2], CHUNKS[0]], NO_END) as server:
        server.may_end.clear()
        asyncio.run(main(server.address))
        assert server.num_calls == 1

"""Calls of both clients: responses, retries, servers that die, cancellation."""

import asyncio
import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from quill.protos import generation_pb2 as pb
from quill.server.api import accepting, grpc_server
from quill.server.client import retry
from quill.server.client.async_client import AsyncClient
from quill.server.client.errors import CallError
from quill.server.client.requests import Options
from quill.server.client.retry import Attempts, Retries
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
from tests.server.client.conftest import MakeClient
from tests.server.parrot import Parrot, make_parrot
from tests.server.process import wait_until
from tests.server.running import running_server
from tests.server.scripted_session import TIMEOUT_S

OVERLOADED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
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
    "connection closed: UNAVAILABLE": HANG_UP,
    "status of a proxy: INTERNAL": Status(13, "the replica died"),
    "status of a proxy: UNAVAILABLE": Status(14, "no healthy upstream"),
}
each_death = pytest.mark.parametrize("death", DEATHS.values(), ids=list(DEATHS))


def error(code: grpc.StatusCode, retry_after_s: float | None = None) -> CallError:
    return CallError(code, "no", retry_after_s=retry_after_s)


def test_delay_of_the_server_goes_first() -> None:
    assert Retries().delay_s(error(OVERLOADED, 3.0), 0, None) == 3.0


@pytest.mark.parametrize(
    ("failure", "num_failed", "left_s"),
    [
        (error(OVERLOADED, 1.0), 5, None),  # often enough
        (error(OVERLOADED, 2.0), 0, 1.5),  # the deadline comes first
        (error(OVERLOADED), 0, None),  # a message that is too large
        (error(grpc.StatusCode.INVALID_ARGUMENT), 0, None),
        (error(grpc.StatusCode.INTERNAL), 0, None),
        (error(grpc.StatusCode.DEADLINE_EXCEEDED), 0, None),
    ],
)
def test_call_is_given_up(failure: CallError, num_failed: int, left_s: float | None) -> None:
    assert Retries(max_retries=5).delay_s(failure, num_failed, left_s) is None


def waits(
    monkeypatch: pytest.MonkeyPatch, attempts: Attempts, failure: CallError, took_s: float = 0.0
) -> list[float]:
    """The delays until the call is given up, if each attempt takes so long."""
    clock, found = [time.monotonic()], list[float]()
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    while True:
        delay_s = attempts.delay_s(failure, has_other=False, was_reached=True)
        if delay_s is None:
            return found
        found.append(delay_s)
        clock.append(clock[-1] + delay_s + took_s)


@pytest.mark.parametrize(("timeout_s", "most_s"), [(120.0, 120.0), (0.5, 0.5), (None, 62.0)])
def test_retries_last_until_the_deadline_or_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, most_s: float
) -> None:
    delays = waits(monkeypatch, Attempts(Retries(), timeout_s), error(UNAVAILABLE))
    assert sum(delays) < most_s
    assert sum(delays) > most_s - 2.0
    assert max(delays) <= 2.0


def test_overload_is_retried_as_the_server_says_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overload = error(OVERLOADED, 9.0)
    assert waits(monkeypatch, Attempts(Retries(), 30.0), overload, took_s=0.5) == 3 * [9.0]
    # Without a deadline also a delay that is longer than a minute is waited for, once.
    assert waits(monkeypatch, Attempts(Retries(), None), error(OVERLOADED, 70.0)) == [70.0]


def test_rejection_can_be_final_for_calls_that_have_not_begun() -> None:
    attempts = Attempts(Retries(retry_rejected=False), None)
    first = attempts.delay_s(error(UNAVAILABLE), has_other=False, was_reached=True)
    rejected = attempts.delay_s(error(OVERLOADED, 9.0), has_other=False, was_reached=True)
    assert (first is None, rejected) == (False, None)
    attempts.note_progress()
    assert attempts.delay_s(error(OVERLOADED, 9.0), has_other=False, was_reached=True) == 9.0


def test_delays_grow_with_jitter_and_anew_after_progress() -> None:
    attempts = Attempts(Retries(max_retries=4, first_s=1.0, max_s=3.0), None)
    for _ in range(3):
        for longest_s in (1.0, 2.0, 3.0, 3.0):
            delay_s = attempts.delay_s(error(UNAVAILABLE), has_other=False, was_reached=True)
            assert delay_s is not None
            assert longest_s / 2 <= delay_s <= longest_s
        last = attempts.delay_s(error(UNAVAILABLE), has_other=False, was_reached=True)
        assert last is None
        attempts.note_progress()


def test_request_that_kills_servers_is_not_sent_to_many_at_once() -> None:
    attempts = Attempts(Retries(), None)
    failure = CallError(UNAVAILABLE, "no", is_broken=True)
    delays = [attempts.delay_s(failure, has_other=True, was_reached=True) for _ in range(8)]
    assert delays[:5] == 5 * [0.0]
    assert all(delays[5:])


@pytest.mark.parametrize(
    ("retries", "limit"),
    [(Retries(max_retries=5), "5 times at most"), (Retries(), "for 60 s at most")],
)
def test_overload_is_named_in_the_warning(
    caplog: pytest.LogCaptureFixture, retries: Retries, limit: str
) -> None:
    attempts = Attempts(retries, None)
    for _ in range(2):
        attempts.delay_s(error(OVERLOADED, 2.0), has_other=False, was_reached=True)
    assert caplog.messages == [f"the server is busy: no (retrying in 2.0 s, {limit})"]


def test_every_call_has_its_response(make_client: MakeClient) -> None:
    with running_server() as running, make_client(running.address) as client:
        response = client.generate("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
        assert response.sequences[0].text == "def"
        stream = client.stream("abc", max_new_tokens=3, timeout_s=TIMEOUT_S)
        assert "".join(chunk.text for chunk in stream) == "def"
        assert client.model().name == "reciter"
        assert client.detokenize(client.tokenize("abc")) == "abc"
        assert len(client.score("abc").tokens) == 3
        with pytest.raises(CallError) as caught:
            client.generate("", timeout_s=TIMEOUT_S)
        assert caught.value.field == "prompt"


def test_stream_that_is_closed_cancels_the_request(make_client: MakeClient) -> None:
    with running_server() as running, make_client(running.address) as client:
        running.session.hold()
        running.session.let_go(1)
        chunks = client.stream("abc", max_new_tokens=100, timeout_s=TIMEOUT_S)
        assert next(chunks).text == "d"
        chunks.close()
        record = running.next_record("CANCELLED")
        assert (record.num_prompt, record.num_generated) == (3, 1)
        running.session.let_go()


def test_tool_calls_are_the_same_in_a_stream_and_in_a_response(make_client: MakeClient) -> None:
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"x": 4}}\n</tool_call>'
    messages = [{"role": "user", "content": f"say {text}"}]
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    options: Options = {"tools": [{"name": "f", "parameters": schema}], "seed": 3}
    with (
        running_server(served=make_parrot(), session=Parrot()) as running,
        make_client(running.address) as client,
    ):
        chunks = list(client.stream(messages, resume=True, **options))
        (whole,) = client.generate(messages, **options).sequences
        assert client.model().tool_call_format == "hermes"
    (call,) = whole.tool_calls
    assert (whole.text, call.name, call.arguments) == ("Hm.\n", "f", '{"x": 4}')
    assert whole.finish_reason == chunks[-1].finish_reason == pb.FINISH_REASON_EOS
    assert "".join(chunk.text for chunk in chunks) == whole.text
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [(each.id, each.name) for each in deltas if each.id] == [(call.id, "f")]
    assert "".join(each.arguments for each in deltas) == call.arguments


def test_call_is_retried_while_the_server_loads(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def sleep(_: float) -> None:
        assert "the server is loading its model" in caplog.text
        running.loading.set()
        running.call(running.server.ready.wait())

    with (
        running_server(wait=False) as running,
        make_client(running.address, sleep=sleep) as client,
    ):
        response = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
    assert response.sequences[0].text == "de"


def test_retries_are_warned_of_once(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    delays: list[float] = []
    with (
        make_client("127.0.0.1:1", Retries(max_retries=3), sleep=delays.append) as client,
        pytest.raises(CallError),
    ):
        client.model()
    assert len(delays) == 3
    (warning,) = caplog.messages
    assert warning.startswith("no server answers: ipv4:127.0.0.1:1: ")
    assert warning.endswith(f"(retrying in {delays[0]:.1f} s, 3 times at most)")


def test_call_that_grpc_drops_unaccepted_is_retried(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_UNREAD", 1)
    monkeypatch.setattr(accepting, "NUM_ACCEPTORS", 1)
    held, dropped = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        dropped.set()
        held.set()

    def call(_: int) -> str:
        with make_client(running.address, Retries(max_retries=10**6), sleep=sleep) as client:
            response = client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
            return response.sequences[0].text

    with running_server(max_waiting=8) as running, ThreadPoolExecutor(8) as threads:
        # While the loop stands still, gRPC itself accepts a call or two and drops the others.
        running._loop.call_soon_threadsafe(held.wait, TIMEOUT_S)
        assert list(threads.map(call, range(8))) == 8 * ["de"]
    assert dropped.is_set()


def status_of_quill(code: grpc.StatusCode) -> Status:
    status = status_pb2.Status(code=code.value[0], message="a bug in the server")
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id="r1"))
    packed = base64.b64encode(status.SerializeToString()).decode()
    return Status(code.value[0], "a bug in the server", packed)


def read(make_client: MakeClient, address: str, retries: Retries = AT_ONCE) -> str:
    with make_client(address, retries) as client:
        chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
        return "".join(chunk.text for chunk in chunks)


@each_death
def test_stream_resumes_after_the_server_died(make_client: MakeClient, death: Ending) -> None:
    with breaking_server(CHUNKS, death, death, OK) as server:
        assert read(make_client, server.address) == "abc"
        assert server.num_calls == 3


@each_death
def test_whole_response_is_requested_again_with_its_seed(
    make_client: MakeClient, death: Ending
) -> None:
    with breaking_server([pb.GenerateResponse(request_id="r1")], death, OK) as server:
        with make_client(server.address, AT_ONCE) as client:
            assert client.generate("x", timeout_s=TIMEOUT_S).request_id == "r1"
        first, second = map(pb.GenerateRequest.FromString, server.requests)
    assert first.HasField("seed")
    assert first == second


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_error_of_the_server_itself_is_not_retried(
    make_client: MakeClient, code: grpc.StatusCode
) -> None:
    with breaking_server(CHUNKS, status_of_quill(code)) as server:
        with pytest.raises(CallError, match="a bug in the server") as caught:
            read(make_client, server.address)
        assert server.num_calls == 1
    assert (caught.value.code, caught.value.request_id) == (code, "r1")


def test_request_that_kills_every_server_is_given_up(make_client: MakeClient) -> None:
    with breaking_server(CHUNKS, Reset(INTERNAL_ERROR)) as server:
        with pytest.raises(CallError) as caught:
            read(make_client, server.address, Retries(max_retries=3, first_s=0.001))
        # A reset may overtake tokens, and each of the three that comes at last gives three retries.
        assert 4 <= server.num_calls <= 3 * 4
    assert caught.value.code is grpc.StatusCode.INTERNAL


def test_stream_without_resume_reports_that_it_broke(make_client: MakeClient) -> None:
    with (
        breaking_server(CHUNKS, Reset(CANCEL)) as server,
        make_client(server.address, AT_ONCE) as client,
    ):
        server.may_end.clear()
        chunks = client.stream("x", timeout_s=TIMEOUT_S)
        assert next(chunks).text == "a"
        server.may_end.set()
        with pytest.raises(CallError) as caught:
            list(chunks)
        assert server.num_calls == 1
    # CANCELLED would mean that the caller did it.
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.is_broken


def test_stream_that_its_caller_closes_stays_closed(make_client: MakeClient) -> None:
    with breaking_server(CHUNKS, OK) as server:
        server.may_end.clear()
        with make_client(server.address, AT_ONCE) as client:
            chunks = client.stream("x", resume=True, timeout_s=TIMEOUT_S)
            assert next(chunks).text == "a"
            chunks.close()
            assert list(chunks) == []
        assert server.num_calls == 1


def test_deadline_is_not_overrun_by_a_retry(make_client: MakeClient) -> None:
    """A proxy whose own clock is ahead cancels a call just before its client would."""
    delays: list[float] = []
    with breaking_server(CHUNKS, Reset(CANCEL)) as server:
        retries = Retries(first_s=10.0 * TIMEOUT_S, max_s=10.0 * TIMEOUT_S)
        client = make_client(server.address, retries, sleep=delays.append)
        with client, pytest.raises(CallError):
            list(client.stream("x", resume=True, timeout_s=TIMEOUT_S))
        assert (delays, server.num_calls) == ([], 1)


def read_all(client: Any) -> object:
    return list(client.stream("x", resume=True, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize(
    "call", [read_all, lambda each: each.generate("x"), lambda each: each.model()]
)
def test_call_of_a_client_that_is_closed_meanwhile_says_so(
    make_client: MakeClient, call: Any
) -> None:
    with breaking_server([*CHUNKS[:2], CHUNKS[0]], NO_END) as server:
        server.may_end.clear()
        client = make_client(server.address, AT_ONCE)
        with ThreadPoolExecutor(1) as threads:
            calling = threads.submit(call, client)
            wait_until(lambda: server.num_calls > 0, "it is called")
            client.close()
            for result in (calling.result, client.model):
                with pytest.raises(CallError, match="client was closed") as caught:
                    result()
                assert caught.value.code is grpc.StatusCode.CANCELLED
        assert server.num_calls == 1


def test_client_that_is_closed_while_it_waits_for_a_retry_says_so(make_client: MakeClient) -> None:
    client = make_client("127.0.0.1:1", AT_ONCE, sleep=lambda _: client.close())
    with pytest.raises(CallError, match="client was closed") as caught:
        client.model()
    assert caught.value.code is grpc.StatusCode.CANCELLED


def test_task_that_is_canceled_retries_nothing() -> None:
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


def test_event_loop_that_ends_with_an_open_client_does_not_hang() -> None:
    """asyncio.run cancels the health watches, which must not take that for a failed call."""

    async def main(address: str) -> str:
        client = AsyncClient(f"quill://{address}")
        response = await client.generate("abc", max_new_tokens=2, timeout_s=TIMEOUT_S)
        return response.sequences[0].text

    with running_server() as running:
        assert asyncio.run(main(running.address)) == "de"

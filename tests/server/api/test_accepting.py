"""Calls are accepted faster than one in a turn of the event loop, and the late are counted."""

import asyncio
import gc
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api import accept_queue, accepting
from quill.server.errors import RequestError
from tests.server.process import wait_until
from tests.server.running import SERVING, Running, health_of, running_server
from tests.server.scripted_session import TIMEOUT_S

NUM_CALLS = 64
MAX_ROUNDS = 20
METHOD = "/quill.v1.TextGeneration/GenerateStream"
REQUEST = pb.GenerateRequest(prompt="abc", max_new_tokens=2)
Messages = queue.SimpleQueue[bytes | None]


async def most_in_a_turn(count: Callable[[], int], is_blocked: threading.Event) -> int:
    """How many calls were counted in one turn, from the end of a pause of the whole loop on."""
    loop = asyncio.get_running_loop()
    is_blocked.wait(TIMEOUT_S)
    most, before = 0, count()
    end_s = loop.time() + TIMEOUT_S
    while count() < NUM_CALLS and loop.time() < end_s:
        await asyncio.sleep(0)
        most, before = max(most, count() - before), count()
    return most


def send_during_a_pause(running: Running, count: Callable[[], int]) -> int:
    """The most of NUM_CALLS that were counted in one turn."""
    began = threading.Event()
    turns = asyncio.run_coroutine_threadsafe(most_in_a_turn(count, began), running._loop)
    with grpc.insecure_channel(running.address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        stub = pb_grpc.TextGenerationStub(channel)
        calls = [stub.GenerateStream(REQUEST) for _ in range(NUM_CALLS)]
        began.set()
        most = turns.result(TIMEOUT_S)
        for call in calls:
            call.cancel()
    return most


def test_several_streams_are_accepted_in_one_turn() -> None:
    """grpc.aio's own loop accepts one, or two at the most."""
    for _ in range(MAX_ROUNDS):
        with running_server(max_waiting=2 * NUM_CALLS) as running:
            running.session.hold()
            most = send_during_a_pause(running, lambda: len(running.server.dispatcher))
        if most > 2:
            return
    raise AssertionError(f"at most {most} were accepted in a turn")


def test_one_turn_of_the_loop_reads_all_wakeups_of_grpcs_poller() -> None:
    """grpc.aio's own handler reads one byte of them. When the socket is full, the poller thread
    blocks, and each turn handles one event, however many wait: streams were unserved for minutes.
    """
    with running_server() as running:
        selector: Any = running._loop._selector  # type: ignore[attr-defined]
        readers = [key.data[0] for key in selector.get_map().values()]
        assert accepting._handle_all in [each._callback for each in readers if each]
    read_socket, write_socket = socket.socketpair()
    with read_socket, write_socket:
        read_socket.setblocking(False)
        for _ in range(200):
            write_socket.send(b"1")
        num_handled: list[int] = []
        accepting._handle_all(read_socket.fileno(), lambda: num_handled.append(1))
        with pytest.raises(BlockingIOError):
            read_socket.recv(1)
        accepting._handle_all(read_socket.fileno(), lambda: num_handled.append(1))
    assert len(num_handled) == 2


def test_an_event_of_a_closed_loop_does_not_keep_back_those_after_it() -> None:
    """All loops of a process share gRPC's queue of events. grpc.aio raises at an event whose loop
    is closed, and what is behind it would wait for the next wakeup, which may never come."""
    events = iter(
        [RuntimeError("Event loop is closed"), RuntimeError("Event loop is closed"), None]
    )

    def handle_events() -> None:
        if (error := next(events)) is not None:
            raise error

    read_socket, write_socket = socket.socketpair()
    with read_socket, write_socket:
        read_socket.setblocking(False)
        accepting._handle_all(read_socket.fileno(), handle_events)
    assert not list(events)


def test_a_call_that_waited_too_long_is_rejected_unread_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept_queue, "MAX_WAIT_S", 0.0)
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GenerateStream(REQUEST, timeout=TIMEOUT_S))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)
        assert status is not None
        assert any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in status.details)
        record = running.next_record("RESOURCE_EXHAUSTED")
        assert (record.method, record.rejection) == ("GenerateStream", "unread")
        assert health_of(running) == SERVING  # which is never late
        monkeypatch.setattr(accept_queue, "MAX_WAIT_S", 30.0)
        assert list(stub.GenerateStream(REQUEST, timeout=TIMEOUT_S))


def test_a_call_that_has_expired_unread_is_dropped_and_counted() -> None:
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        stub = pb_grpc.TextGenerationStub(channel)
        # The loop stands still. The server counts from a call's arrival, so its deadline is later
        # than the client's.
        running._loop.call_soon_threadsafe(threading.Event().wait, 3.0)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GenerateStream(REQUEST, timeout=1.0))  # it gets there before
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        record = running.next_record("DEADLINE_EXCEEDED")
        assert (record.method, record.rejection) == ("GenerateStream", "unread")
        assert list(stub.GenerateStream(REQUEST, timeout=TIMEOUT_S))


class Expired:
    """grpc.aio's context of a call whose deadline has passed."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def time_remaining(self) -> float:
        return -0.001


def test_a_call_that_has_expired_gets_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is dropped is reset, which is CANCELLED for a client whose timer is late."""
    make = accepting._Core._context
    monkeypatch.setattr(accepting._Core, "_context", lambda *given: Expired(make(*given)))
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(pb_grpc.TextGenerationStub(channel).GenerateStream(REQUEST, timeout=TIMEOUT_S))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert running.next_record("DEADLINE_EXCEEDED").rejection == "unread"


def test_a_full_queue_rejects_a_call_before_its_message_is_read() -> None:
    with running_server(max_waiting=1) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            held = stub.GenerateStream(REQUEST)
            send: Any = channel.unary_stream(METHOD)
            running.wait_for_waiting(1)
            with pytest.raises(grpc.RpcError) as caught:
                list(send(b"no message", timeout=TIMEOUT_S))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert running.next_record("RESOURCE_EXHAUSTED").rejection == "queue_full"
            held.cancel()


def test_a_full_queue_rejects_more_calls_in_a_turn_than_are_started() -> None:
    """So a rejection doesn't wait for the turns that newer calls take."""
    for _ in range(MAX_ROUNDS):
        with running_server(max_waiting=1) as running:
            running.session.hold()
            with grpc.insecure_channel(running.address) as channel:
                held = pb_grpc.TextGenerationStub(channel).GenerateStream(REQUEST)
                running.wait_for_waiting(1)
                most = send_during_a_pause(running, running.records.qsize)
                held.cancel()
        if most > accepting.MAX_STARTS:
            return
    raise AssertionError(f"at most {most} were rejected in a turn")


def wait_for_free_places(running: Running) -> None:
    """All that were reserved were given back."""
    admission: Any = running.server.dispatcher.admission
    running.wait_for(lambda: admission.num_reserved == 0)


def test_a_full_queue_is_full_before_its_requests_are_read() -> None:
    """Each call has its place from the start: of those that come together, no more are read than
    there are places. These messages aren't requests, so none of them ever waits."""
    for _ in range(MAX_ROUNDS):
        with running_server(max_waiting=1) as running:
            with grpc.insecure_channel(running.address) as channel:
                grpc.channel_ready_future(channel).result(TIMEOUT_S)
                send: Any = channel.unary_stream(METHOD)
                is_sent = threading.Event()
                running._loop.call_soon_threadsafe(is_sent.wait, TIMEOUT_S)
                calls = [send(b"no message", timeout=TIMEOUT_S) for _ in range(NUM_CALLS)]
                is_sent.set()
                codes = {call.code() for call in calls}
            wait_for_free_places(running)
        if grpc.StatusCode.RESOURCE_EXHAUSTED in codes:
            return
    raise AssertionError("all were read")


def started_without_message(channel: grpc.Channel, messages: Messages) -> Any:
    """A call whose message comes later, or never."""
    grpc.channel_ready_future(channel).result(TIMEOUT_S)
    send: Any = channel.stream_stream(METHOD)
    call = send(iter(messages.get, None), timeout=TIMEOUT_S)
    health = health_pb2_grpc.HealthStub(channel)
    health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)  # which came after the call
    return call


def test_a_call_without_a_message_keeps_no_place() -> None:
    """Clients that sent headers alone kept all others out."""
    messages = Messages()
    with (
        running_server(max_waiting=1) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        started_without_message(channel, messages)
        stub = pb_grpc.TextGenerationStub(channel)
        assert list(stub.GenerateStream(REQUEST, timeout=TIMEOUT_S))
        messages.put(None)


def test_a_call_whose_message_comes_when_the_queue_is_full_is_rejected() -> None:
    messages = Messages()
    with running_server(max_waiting=1) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            late = started_without_message(channel, messages)
            held = pb_grpc.TextGenerationStub(channel).GenerateStream(REQUEST)
            running.wait_for_waiting(1)
            messages.put(b"no message")
            assert late.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert running.next_record("RESOURCE_EXHAUSTED").rejection == "queue_full"
            messages.put(None)
            held.cancel()


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
def test_a_call_that_ends_its_stream_without_a_message_gets_a_status(name: str) -> None:
    """grpc.aio's own unary calls end without one, and clients wait until their deadlines."""
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        send: Any = channel.stream_stream(f"/quill.v1.TextGeneration/{name}")
        call = send(iter(()), timeout=TIMEOUT_S)
        assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert call.details() == "message is missing: the stream ended before one was sent"
        assert running.next_record("INVALID_ARGUMENT").method == name


def test_a_rejection_whose_client_has_left_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever sends headers and resets their streams filled the log, six lines for each call."""
    with running_server(max_waiting=1) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            held = pb_grpc.TextGenerationStub(channel).GenerateStream(REQUEST)
            running.wait_for_waiting(1)
            is_sent = threading.Event()
            running._loop.call_soon_threadsafe(is_sent.wait, TIMEOUT_S)
            send: Any = channel.unary_stream(METHOD)
            for _ in range(NUM_CALLS):
                send(b"no message", timeout=TIMEOUT_S).cancel()
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            is_sent.set()
            assert health_of(running) == SERVING  # sent after them on a connection of its own
            held.cancel()
    gc.collect()  # a task logs its error when it is freed
    assert "execute_batch" not in caplog.text


def errors_left(call: Callable[[], None]) -> Callable[[], int]:
    """How many errors are still there that eight calls raised, without the garbage collector."""

    def count() -> int:
        kinds = (RequestError, grpc.aio.AbortError)
        # Not isinstance, which reads __class__: some lazy modules do things then.
        return sum(issubclass(type(each), kinds) for each in gc.get_objects())

    gc.collect()
    before = count()
    for _ in range(8):
        call()
    return lambda: count() - before


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_rejected_call_leaves_nothing_to_the_cyclic_garbage_collector() -> None:
    """After some thousand rejections it stopped the event loop for 70 ms."""
    with running_server(max_waiting=1) as running:
        running.session.hold()
        with grpc.insecure_channel(running.address) as channel:
            stub = pb_grpc.TextGenerationStub(channel)
            held = stub.GenerateStream(REQUEST)
            running.wait_for_waiting(1)

            def call() -> None:
                with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
                    list(stub.GenerateStream(REQUEST, timeout=TIMEOUT_S))

            num_left = errors_left(call)
            wait_until(lambda: num_left() <= 0, "the last rejection has ended")
            held.cancel()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_stream", [True, False])
def test_nor_does_a_call_that_was_read(is_stream: bool) -> None:
    wrong = pb.GenerateRequest(prompt="abc", temperature=-1)
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)

        def send() -> object:
            return list(stub.GenerateStream(wrong)) if is_stream else stub.Generate(wrong)

        def call() -> None:
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                send()

        num_left = errors_left(call)
        wait_until(lambda: num_left() <= 0, "the last call has ended")

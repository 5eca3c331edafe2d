"""Calls are accepted faster than one in a turn of the event loop, and the expired are counted."""

import asyncio
import threading

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api import grpc_server
from tests.server.running import Running, running_server
from tests.server.scripted_session import TIMEOUT_S

NUM_CALLS = 64
MAX_ROUNDS = 20


async def most_in_a_turn(running: Running, is_blocked: threading.Event) -> int:
    """How many calls were accepted in one turn, from the end of a pause of the whole loop on."""
    loop, dispatcher = asyncio.get_running_loop(), running.server.dispatcher
    is_blocked.wait(TIMEOUT_S)
    most, before = 0, len(dispatcher)
    end_s = loop.time() + TIMEOUT_S
    while len(dispatcher) < NUM_CALLS and loop.time() < end_s:
        await asyncio.sleep(0)
        most, before = max(most, len(dispatcher) - before), len(dispatcher)
    return most


def test_several_streams_are_accepted_in_one_turn() -> None:
    """grpc.aio's own loop accepts one, or two at the most."""
    request = pb.GenerateRequest(prompt="abc", max_new_tokens=4)
    for _ in range(MAX_ROUNDS):
        with running_server(max_waiting=2 * NUM_CALLS) as running:
            running.session.hold()
            began = threading.Event()
            turns = asyncio.run_coroutine_threadsafe(most_in_a_turn(running, began), running._loop)
            with grpc.insecure_channel(running.address) as channel:
                grpc.channel_ready_future(channel).result(TIMEOUT_S)
                stub = pb_grpc.TextGenerationStub(channel)
                calls = [stub.GenerateStream(request) for _ in range(NUM_CALLS)]
                began.set()
                most = turns.result(TIMEOUT_S)
                for call in calls:
                    call.cancel()
        if most > 2:
            return
    raise AssertionError(f"at most {most} were accepted in a turn")


def test_a_call_that_has_expired_unread_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expired = [True]
    monkeypatch.setattr(grpc_server._Core, "_is_expired", lambda *_: bool(expired))
    request = pb.GenerateRequest(prompt="abc", max_new_tokens=2)
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        with pytest.raises(grpc.RpcError):
            list(stub.GenerateStream(request, timeout=TIMEOUT_S))
        assert running.next_record("DEADLINE_EXCEEDED").method == "GenerateStream"
        expired.clear()
        assert list(stub.GenerateStream(request, timeout=TIMEOUT_S))

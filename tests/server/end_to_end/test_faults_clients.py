"""Clients that do harm to a real server process, by many connections or by not reading."""

import resource
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.api.grpc_server import MAX_CALLS
from quill.server.http.connection import MAX_CONNECTIONS
from tests.server.bad_bytes import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    begin,
    frame,
    headers,
)
from tests.server.bad_calls import SERVICE
from tests.server.http_client import HttpClient, connected, read_until, whole_request
from tests.server.process import PATIENCE_S, PROMPT, ServerProcess, ask, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

NUM_CONNECTIONS = 2000
CANCEL = struct.pack(">I", 8)  # why a stream is reset
# As most systems start a program: with fewer descriptors than it may have.
FEW_DESCRIPTORS = """
import resource, sys
from quill.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(main())
"""


@pytest.fixture(scope="module")
def server(
    tiny_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(tiny_bundle.directory, log, code=FEW_DESCRIPTORS) as running:
        yield running


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as two thousand connections take at our end, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUM_CONNECTIONS + 500
    if hard != resource.RLIM_INFINITY and hard < most:
        pytest.skip(f"this system allows {hard} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def call_frames(stream: int, max_new_tokens: int, **others: str) -> bytes:
    request = pb.GenerateRequest(
        prompt_ids=pb.TokenIds(ids=PROMPT), seed=stream, max_new_tokens=max_new_tokens
    )
    message = request.SerializeToString()
    data = b"\0" + len(message).to_bytes(4, "big") + message
    block = headers(f"/{SERVICE}/GenerateStream", **others)
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, data)


@pytest.mark.usefixtures("descriptors")
def test_two_thousand_connections_disturb_nobody(server: ServerProcess) -> None:
    """The server holds all of them: its backlog is the system's largest, and it asks for as many
    descriptors as it may have. Sockets are counted, and not all descriptors: among those is for a
    while that of the call before."""
    expected = ask(server)
    with ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(connect(server)).sendall(begin())
        wait_until(lambda: server.num_connections >= NUM_CONNECTIONS, "all are accepted")
        assert ask(server) == expected
    wait_until(lambda: server.num_connections == 0, "all are closed")


def test_half_open_connections_disturb_nobody(server: ServerProcess) -> None:
    expected = ask(server)
    beginnings = (b"", PREFACE[:10], PREFACE, begin(), begin() + call_frames(1, 8)[:20])
    with ExitStack() as stack:
        for beginning in beginnings * 10:
            stack.enter_context(connect(server)).sendall(beginning)
        assert ask(server) == expected
        assert server.is_idle()
    wait_until(lambda: server.num_connections == 0, "all are closed")


def test_calls_that_are_reset_at_once_leave_no_sequence_running(server: ServerProcess) -> None:
    expected = ask(server)
    reset = b"".join(
        call_frames(stream, 100) + frame(RST_STREAM, 0, stream, bytes(4))
        for stream in range(1, 600, 2)
    )
    with connect(server) as flood:
        flood.sendall(begin() + reset)
        assert ask(server) == expected
    assert ask(server) == expected
    wait_until(server.is_idle, "nothing runs or waits")


def fall_asleep(server: ServerProcess) -> socket.socket:
    """A connection on which the server may send no data at all, and that nobody reads from."""
    sleeper = connect(server)
    sleeper.sendall(PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)))
    return sleeper


def asking_s(server: ServerProcess) -> float:
    """How long an answer takes, at best of a few."""
    times_s = []
    for _ in range(5):
        started_s = time.monotonic()
        ask(server)
        times_s.append(time.monotonic() - started_s)
    return min(times_s)


def wait_for_started(server: ServerProcess, number: float) -> None:
    wait_until(lambda: server.num_started >= number, f"{number} were scheduled")


def test_client_that_never_reads_keeps_no_sequence_running_and_is_ended_in_every_way(
    server: ServerProcess,
) -> None:
    """Its answers wait in the server, not its sequences: those end although nothing was read."""
    expected, alone_s = ask(server), asking_s(server)
    late, cancelled = (server.num_ended(name) for name in ("DEADLINE_EXCEEDED", "CANCELLED"))
    calls = [call_frames(stream, 50) for stream in range(1, 60, 2)]
    hurried = [call_frames(stream, 1, **{"grpc-timeout": "2S"}) for stream in range(61, 81, 2)]
    resets = [frame(RST_STREAM, 0, stream, CANCEL) for stream in range(1, 20, 2)]
    with fall_asleep(server) as sleeper:
        started = server.num_started
        sleeper.sendall(b"".join(calls))
        assert ask(server) == expected
        wait_for_started(server, started + len(calls) + 1)
        wait_until(server.is_idle, "nothing runs or waits, while nobody reads and nobody leaves")
        assert asking_s(server) < 5 * alone_s + 2, "nobody waits for who doesn't read"
        assert server.num_ended("CANCELLED") == cancelled
        sleeper.sendall(b"".join(hurried))
        late += len(hurried)
        wait_until(lambda: server.num_ended("DEADLINE_EXCEEDED") == late, "deadlines end some")
        sleeper.sendall(b"".join(resets))
        wait_until(lambda: server.num_ended("CANCELLED") == cancelled + len(resets), "resets, too")
    wait_until(lambda: server.num_ended("CANCELLED") == cancelled + len(calls), "closing, the rest")
    assert ask(server) == expected
    wait_until(server.is_idle, "nothing runs or waits")
    assert "a bug in" not in server.log


def test_client_that_never_reads_cannot_fill_the_memory(server: ServerProcess) -> None:
    """Two thousand calls; of one connection only so many are let in as are allowed at once."""
    expected, before = ask(server), server.memory_bytes
    cancelled, started = server.num_ended("CANCELLED"), server.num_started
    with fall_asleep(server) as sleeper:
        for first in range(1, 4000, 400):  # few enough for the queue
            sleeper.sendall(b"".join(call_frames(each, 1) for each in range(first, first + 400, 2)))
            wait_for_started(server, started + min(first // 2 + 200, MAX_CALLS))
        assert ask(server) == expected
        let_in = server.num_started - started - 1
        assert let_in < 1.1 * MAX_CALLS
        assert server.memory_bytes < before + 2**26
    # Some may have been let in since they were counted.
    wait_until(lambda: server.num_ended("CANCELLED") >= cancelled + let_in, "all have ended")
    assert ask(server) == expected
    wait_until(server.is_idle, "nothing runs or waits")


def test_calls_that_lie_unread_are_all_answered_and_counted(server: ServerProcess) -> None:
    before, num_calls = server.num_ended("OK"), 3000
    own = (("grpc.use_local_subchannel_pool", 1),)
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.address, options=own))
            for _ in range(4)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        stubs = [pb_grpc.TextGenerationStub(channel) for channel in channels]
        server.signal(signal.SIGSTOP)
        calls = [
            stubs[number % len(stubs)].GetModel.future(pb.GetModelRequest(), timeout=PATIENCE_S)
            for number in range(num_calls)
        ]
        server.signal(signal.SIGCONT)
        assert Counter(call.code().name for call in calls) == {"OK": num_calls}
    wait_until(lambda: server.num_ended("OK") - before == num_calls, "all are counted")


# Over HTTP.

PATH = "/v1/completions"
REQUEST = {"prompt": PROMPT, "seed": 3, "max_tokens": 8, "return_token_ids": True}
LONG = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True}
NUM_IDLE = MAX_CONNECTIONS + 100


def ask_http(server: ServerProcess) -> list[int]:
    reply = HttpClient(server.http_port).post(PATH, REQUEST)
    return list(reply.json["choices"][0]["token_ids"])


def test_both_protocols_give_the_same_tokens(server: ServerProcess) -> None:
    assert ask_http(server) == ask(server)


@pytest.mark.usefixtures("descriptors")
def test_a_thousand_idle_connections_keep_nobody_out(server: ServerProcess) -> None:
    known, num_fds = ask(server), server.num_fds
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(connected(server.http_port))
        assert ask_http(server) == known
        assert ask(server) == known
        assert server.num_fds <= num_fds + MAX_CONNECTIONS + 10
    wait_until(lambda: server.num_fds <= num_fds + 5, "connections are given back")


def test_many_who_leave_early_leave_no_sequence_running(server: ServerProcess) -> None:
    known, before = ask(server), server.num_ended("CANCELLED")
    for number in range(40):
        with connected(server.http_port) as sock:
            sock.sendall(whole_request(PATH, LONG | {"stream": number % 2 == 0}))
            if number % 4 == 0:
                read_until(sock, b"data: ")
            if number % 3 == 0:  # with a reset instead of a goodbye
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: server.num_ended("CANCELLED") > before, "some have left")
    wait_until(server.is_idle, "nothing runs or waits")
    assert ask_http(server) == known


def test_half_a_hundred_who_never_read_hold_nobody_up(server: ServerProcess) -> None:
    known = ask(server)
    with ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(connected(server.http_port))
            sock.sendall(whole_request(PATH, LONG | {"stream": True}))
        assert ask_http(server) == known
        assert ask(server) == known
    wait_until(server.is_idle, "nothing runs or waits")

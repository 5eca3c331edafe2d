"""HTTP clients that do harm to a real server process: others are served, by either door."""

import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from quill.server.http.wire.connection import MAX_CONNECTIONS
from tests.server.http_client import (
    HttpClient,
    connected,
    read_until,
    read_until_closed,
    whole_request,
)
from tests.server.process import PROMPT, ServerProcess, ask, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

PATH = "/v1/completions"
ASKED = {"prompt": PROMPT, "seed": 3, "max_tokens": 8, "return_token_ids": True}
LONG = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True}
NUM_IDLE = MAX_CONNECTIONS + 100


@pytest.fixture(scope="module")
def server(
    tiny_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(tiny_bundle.directory, log) as running:
        yield running


def ask_http(server: ServerProcess) -> list[int]:
    reply = HttpClient(server.http_port).post(PATH, ASKED)
    return list(reply.json["choices"][0]["token_ids"])


def test_both_doors_give_the_same_tokens(server: ServerProcess) -> None:
    assert ask_http(server) == ask(server)


def test_a_thousand_idle_connections_keep_nobody_out(server: ServerProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_IDLE + 200:
        pytest.skip(f"this system allows {hard} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_IDLE + 200), hard))
    known, num_fds = ask(server), server.num_fds
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(connected(server.http_port))
        assert ask_http(server) == known
        assert ask(server) == known
        assert server.num_fds <= num_fds + MAX_CONNECTIONS + 10
    wait_until(lambda: server.num_fds <= num_fds + 5, "connections are given back")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_who_leave_early_leave_no_slot_taken(server: ServerProcess) -> None:
    known, before = ask(server), server.num_ended("CANCELLED")
    for number in range(40):
        with connected(server.http_port) as sock:
            sock.sendall(whole_request(PATH, LONG | {"stream": number % 2 == 0}))
            if number % 4 == 0:
                read_until(sock, b"data: ")
            if number % 3 == 0:  # with a reset instead of a goodbye
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(server.is_idle, "no slot is taken")
    assert server.num_ended("CANCELLED") > before
    assert ask_http(server) == known


def test_half_a_hundred_who_never_read_hold_nobody_up(server: ServerProcess) -> None:
    known = ask(server)
    with ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(connected(server.http_port))
            sock.sendall(whole_request(PATH, LONG | {"stream": True}))
        assert ask_http(server) == known
        assert ask(server) == known
    wait_until(server.is_idle, "no slot is taken")


def test_sigterm_lets_a_stream_end(
    tiny_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(tiny_bundle.directory, log) as server, connected(server.http_port) as sock:
        sock.sendall(whole_request(PATH, LONG | {"stream": True}))
        begun = read_until(sock, b"data: ")
        server.signal(signal.SIGTERM)
        assert b"[DONE]" in begun + read_until_closed(sock)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log

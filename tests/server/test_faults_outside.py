"""Faults of the world around a real server process: disks, memory, clocks, connections."""

import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server.asking import Retries
from server.client import Client
from tests.server.bad_bytes import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    begin,
    frame,
    headers,
)
from tests.server.bad_calls import SERVICE
from tests.server.besieging import KNOWN
from tests.server.process import OPTIONS, ROOT, ServerProcess, serve_command, server_process
from tests.server.process import wait_until as wait
from tests.server.tiny_bundle import TinyBundle

NEVER = Retries(max_retries=0)
TIMEOUT_S = 120.0
NUM_CONNECTIONS = 2000
# Only the clock that people read is set back: the other one can't be, on any machine.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    const char *back = getenv("QUILL_CLOCK_BACK");
    if (clock == CLOCK_REALTIME && back && access(back, F_OK) == 0) now->tv_sec -= 86400;
    return code;
}
"""


@pytest.fixture(scope="module")
def server(
    tiny_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with server_process(tiny_bundle.directory, log) as running:
        yield running


def ask(server: ServerProcess) -> list[int]:
    with Client(server.address, NEVER) as client:
        answer = client.generate([5, 6, 7], seed=3, max_new_tokens=8, timeout_s=TIMEOUT_S)
    return list(answer.sequences[0].token_ids)


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def call_frames(stream: int, max_new_tokens: int) -> bytes:
    request = type(KNOWN)()
    request.CopyFrom(KNOWN)
    request.max_new_tokens = max_new_tokens
    message = request.SerializeToString()
    data = b"\0" + len(message).to_bytes(4, "big") + message
    opened = frame(HEADERS, END_HEADERS, stream, headers(f"/{SERVICE}/GenerateStream"))
    return opened + frame(DATA, END_STREAM, stream, data)


def test_two_thousand_connections_disturb_nobody(server: ServerProcess) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(hard, 2 * NUM_CONNECTIONS) if hard != resource.RLIM_INFINITY else 2 * NUM_CONNECTIONS
    resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (soft, hard))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
    expected, num_fds = ask(server), server.num_fds
    with ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(connect(server)).sendall(begin())
        assert ask(server) == expected
    wait(lambda: server.num_fds <= num_fds + 2, "all are closed", TIMEOUT_S)


def test_half_open_connections_disturb_nobody(server: ServerProcess) -> None:
    expected, num_fds = ask(server), server.num_fds
    beginnings = (b"", PREFACE[:10], PREFACE, begin(), begin() + call_frames(1, 8)[:20])
    with ExitStack() as stack:
        for beginning in beginnings * 10:
            stack.enter_context(connect(server)).sendall(beginning)
        assert ask(server) == expected
        assert server.is_idle()
    wait(lambda: server.num_fds <= num_fds + 2, "all are closed", TIMEOUT_S)


def test_calls_that_are_reset_at_once_leave_no_slot_taken(server: ServerProcess) -> None:
    expected = ask(server)
    reset = b"".join(
        call_frames(stream, 100) + frame(RST_STREAM, 0, stream, bytes(4))
        for stream in range(1, 600, 2)
    )
    with connect(server) as flood:
        flood.sendall(begin() + reset)
        assert ask(server) == expected
    assert ask(server) == expected
    wait(server.is_idle, "every slot is free")


def test_log_on_a_full_disk_stops_no_answer(tiny_bundle: TinyBundle) -> None:
    command = serve_command(tiny_bundle.directory, (*OPTIONS, "--metrics-port", "off"))
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("Serving at ").partition(". ")[0]
        with Client(address, NEVER) as client:
            for _ in range(3):
                assert client.generate([5, 6, 7], max_new_tokens=4, timeout_s=TIMEOUT_S).sequences
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) in (0, 120)  # 120: Python itself misses its last words
    finally:
        process.kill()
        process.communicate()


def test_too_little_memory_is_an_error_in_words(tiny_bundle: TinyBundle) -> None:
    options = ("--precision", "fp32", "--threads", "1", "--max-slots", "60000")
    most = 2 * 2**30
    done = subprocess.run(
        serve_command(tiny_bundle.directory, options),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
    )
    assert done.returncode == 1, done.stderr[-2000:]
    *_, last = done.stderr.splitlines()
    assert last.startswith("quill: ")
    assert "memory" in last
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to bend the clock")
def test_clock_that_is_set_back_changes_nothing(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    source, library, back = (tmp_path / name for name in ("clock.c", "clock.so", "back"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "QUILL_CLOCK_BACK": str(back)}
    with (
        server_process(tiny_bundle.directory, tmp_path / "log", environment=environment) as server,
        Client(server.address, NEVER) as client,
    ):
        expected = ask(server)
        chunks = client.stream([5, 6, 7], seed=3, max_new_tokens=8, timeout_s=TIMEOUT_S)
        tokens = list(next(chunks).token_ids)
        back.touch()
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected
        assert ask(server) == expected
        assert server.metric("quill_request_time_seconds_sum") > 0
        wait(server.is_idle, "every slot is free")

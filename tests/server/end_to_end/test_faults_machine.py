"""Faults of the machine under a real server process: disk, memory, clock."""

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.process import (
    NEVER,
    OPTIONS,
    PATIENCE_S,
    PROMPT,
    ROOT,
    ask,
    reserved_port,
    serve_command,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

UNTIL_IT_LISTENS = Retries(max_retries=1000, first_s=0.05, max_s=0.2)
WEIGHTS = "weights.fp32.bin"


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_full_disk_for_all_that_the_server_says_stops_no_answer(
    tiny_bundle: TinyBundle, port: int
) -> None:
    command = serve_command(tiny_bundle.directory, (*OPTIONS, "--metrics-port", "off"), port)
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full, cwd=ROOT)
    try:
        with Client(f"127.0.0.1:{port}", UNTIL_IT_LISTENS) as client:
            for _ in range(3):
                answer = client.generate(PROMPT, max_new_tokens=4, timeout_s=PATIENCE_S)
                assert len(answer.sequences[0].token_ids) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, 120)  # 120: Python itself misses its last words
    finally:
        process.kill()
        process.wait()


def test_bundle_that_is_damaged_in_place_does_not_reach_what_is_loaded(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    """Where weights are still mapped, the first harm changes answers and the second one kills."""
    bundle = Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))
    size = (bundle / WEIGHTS).stat().st_size
    with server_process(bundle, tmp_path / "log") as server:
        expected = ask(server)
        with (bundle / WEIGHTS).open("r+b") as file:
            file.write(bytes(size))
        assert ask(server) == expected
        for path in bundle.iterdir():
            os.truncate(path, path.stat().st_size // 3)
        assert ask(server) == expected
        server.signal(signal.SIGHUP)
        wait_until(lambda: "refused, and the old one goes on" in server.log, "the reload ends")
        assert ask(server) == expected
        shutil.copytree(tiny_bundle.directory, bundle, dirs_exist_ok=True)
        os.truncate(bundle / WEIGHTS, size - 1)
        server.signal(signal.SIGHUP)
        wait_until(lambda: server.log.count("goes on") == 2, "the reload ends")
        assert f"{WEIGHTS} has {size - 1} bytes; it should have {size}" in server.log
        assert ask(server) == expected
        wait_until(server.is_idle, "nothing runs or waits")


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


def test_too_little_memory_is_an_error_in_words(tiny_bundle: TinyBundle) -> None:
    options = ("--precision", "fp32", "--threads", "1", "--max-num-seqs", "60000")
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
        chunks = client.stream(PROMPT, seed=3, max_new_tokens=8, timeout_s=PATIENCE_S)
        tokens = list(next(chunks).token_ids)
        back.touch()
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected
        assert ask(server) == expected
        assert server.metric("quill_request_time_seconds_sum") > 0
        wait_until(server.is_idle, "nothing runs or waits")

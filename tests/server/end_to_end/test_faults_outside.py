"""Faults of the world around a real server process: memory, clocks."""

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from quill.server.client.sync_client import Client
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    PROMPT,
    ROOT,
    ask,
    serve_command,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

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
        wait_until(server.is_idle, "every slot is free")

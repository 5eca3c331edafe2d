"""Faults of the disk under a real server process: full for its words, or broken for its bundle."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.server.process import (
    OPTIONS,
    PATIENCE_S,
    PROMPT,
    ROOT,
    ask,
    serve_command,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

UNTIL_IT_LISTENS = Retries(max_retries=1000, first_s=0.05, max_s=0.2)
WEIGHTS = "weights.fp32.bin"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_full_disk_for_all_that_the_server_says_stops_no_answer(tiny_bundle: TinyBundle) -> None:
    port, options = free_port(), (*OPTIONS, "--metrics-port", "off")
    command = serve_command(tiny_bundle.directory, options, port)
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
        wait_until(server.is_idle, "the slots are free")

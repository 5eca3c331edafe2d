"""`quill batch` over real servers, while one of them is killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import COMMAND_LINE, ServerProcess, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

NUM_LINES = 150


def batch_command(files: tuple[Path, Path], *servers: ServerProcess) -> list[str]:
    address = f"quill://{','.join(server.address for server in servers)}"
    command = [sys.executable, "-c", COMMAND_LINE, "batch", *map(str, files)]
    return [*command, "--address", address]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    lines = [
        {"prompt": [5, 6, 7 + number], "max_new_tokens": 20 + 7 * number % 40}
        for number in range(NUM_LINES)
    ]
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return given, tmp_path / "out.jsonl"


def test_a_server_that_is_killed_costs_no_line(
    tiny_bundle: TinyBundle, files: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle, out = tiny_bundle.directory, files[1]
    with server_process(bundle, tmp_path / "first.log") as stays:
        with server_process(bundle, tmp_path / "second.log") as goes:
            command = batch_command(files, goes, stays)
            batch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: goes.num_ended("OK") > 2 and stays.num_ended("OK") > 2, "both work")
            goes.signal(signal.SIGKILL)
        _, said = batch.communicate()
        assert batch.returncode == 0, said
        assert f"{goes.address} doesn't serve" in said
        shared = out.read_bytes()
        assert shared.count(b"\n") == NUM_LINES
        out.unlink()
        alone = subprocess.run(batch_command(files, stays), capture_output=True, check=False)
        assert alone.returncode == 0, alone.stderr
    assert out.read_bytes() == shared


def test_both_are_killed_at_once_and_the_same_command_goes_on(
    tiny_bundle: TinyBundle, files: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle, out = tiny_bundle.directory, files[1]
    with server_process(bundle, tmp_path / "first.log") as server:
        batch = subprocess.Popen(batch_command(files, server), stderr=subprocess.PIPE)
        wait_until(lambda: out.exists() and out.stat().st_size > 0, "lines are answered")
        batch.kill()
        server.signal(signal.SIGKILL)
        batch.communicate()
    begun = out.read_bytes()
    assert 0 < begun.count(b"\n") < NUM_LINES
    with server_process(bundle, tmp_path / "second.log") as server:
        again = subprocess.run(batch_command(files, server), capture_output=True, check=False)
        assert again.returncode == 0, again.stderr
    whole = out.read_bytes()
    assert whole.startswith(begun[: begun.rindex(b"\n") + 1])
    assert [json.loads(line)["line"] for line in whole.splitlines()] == [*range(1, NUM_LINES + 1)]

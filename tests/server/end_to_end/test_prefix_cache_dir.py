"""`quill serve --prefix-cache-dir`: the next process answers the same, sooner, whatever happened to
the last one and to its files."""

import os
import random
import signal
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.sync_client import Client
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    ServerProcess,
    serve_command,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle, make_tiny_hybrid

RNG = random.Random(3)
PROMPTS = [[RNG.randrange(512) for _ in range(100)] for _ in range(4)]
NUM_CACHED = 96  # of each prompt
BLOCKS = "quill_prefix_cache_dir_blocks_total"


class Answer(NamedTuple):
    token_ids: list[int]
    num_cached: int


def ask(
    server: ServerProcess, prompts: Sequence[list[int]] = PROMPTS, key: str | None = None
) -> list[Answer]:
    with Client(server.address, NEVER, access=Access(api_key=key)) as client:
        replies = [
            client.generate(ids, seed=5, max_new_tokens=12, ignore_eos=True, timeout_s=PATIENCE_S)
            for ids in prompts
        ]
    return [Answer(list(each.sequences[0].token_ids), each.usage.cached_tokens) for each in replies]


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [each.token_ids for each in answers]


def cached(answers: Sequence[Answer]) -> list[int]:
    return [each.num_cached for each in answers]


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("prefix-blocks/*/*") if path.is_file())


class Servers:
    """One after another, with one directory."""

    def __init__(self, bundle: Path, place: Path, *options: str) -> None:
        self.directory = place / "cache"
        self._bundle = bundle
        self._log = place / "log"
        self._options = ("--prefix-cache-dir", str(self.directory), *options)

    def start(self, *options: str) -> AbstractContextManager[ServerProcess]:
        return server_process(self._bundle, self._log, *self._options, *options)

    def stop(self, server: ServerProcess) -> None:
        server.signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0

    def wait_until_written(self, num_blocks: int) -> None:
        wait_until(lambda: len(files_of(self.directory)) >= num_blocks, "blocks are written")


@pytest.fixture(scope="module")
def expected(tiny_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a server without a directory answers."""
    with server_process(tiny_bundle.directory, tmp_path_factory.mktemp("plain") / "log") as server:
        return tokens(ask(server))


@pytest.fixture
def servers(tiny_bundle: TinyBundle, tmp_path: Path) -> Servers:
    return Servers(tiny_bundle.directory, tmp_path)


def test_restarted_server_finds_its_prefixes_and_answers_the_same(
    servers: Servers, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        first = ask(server)
        servers.stop(server)
    assert tokens(first) == expected
    assert cached(first) == [0, 0, 0, 0]
    assert len(files_of(servers.directory)) == 4 * 6, "a server that stops writes what is left"
    with servers.start() as server:
        again = ask(server)
        assert tokens(again) == expected
        assert cached(again) == [NUM_CACHED] * 4
        assert server.metric(BLOCKS, kind="read") == 4 * 6
        assert server.metric(BLOCKS, kind="damaged") == 0
        assert server.metric("quill_prefix_cache_dir_bytes_total", kind="read") > 0
        assert server.metric("quill_prefix_cache_dir_used_bytes") > 0
        assert "has 24 blocks of this model" in server.log
        servers.stop(server)


def test_killed_server_leaves_a_directory_that_the_next_one_reads(
    servers: Servers, expected: list[list[int]]
) -> None:
    """The engine and all others, with whatever they are just writing."""
    for num_before in (1, 7, 13, 24):
        with servers.start() as server:
            answers = ask(server)
            servers.wait_until_written(num_before)
            for pid in (*server.children, server.pid):
                os.kill(pid, signal.SIGKILL)
            server.process.wait()
        assert tokens(answers) == expected
    whole = files_of(servers.directory)
    for number, path in enumerate(whole):
        os.truncate(path, path.stat().st_size * number // len(whole))  # all moments of a write
    with servers.start() as server:
        answers = ask(server)
        assert tokens(answers) == expected
        servers.stop(server)
    with servers.start() as server:
        again = ask(server)
        assert (tokens(again), cached(again)) == (expected, [NUM_CACHED] * 4)


def test_damage_that_comes_while_a_server_runs_is_a_miss(
    servers: Servers, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        ask(server)
        servers.stop(server)
    with servers.start() as server:
        for number, path in enumerate(files_of(servers.directory)):
            content = bytearray(path.read_bytes())
            content[number * 100] ^= 64
            path.write_bytes(content if number % 3 else content[:-7])
        answers = ask(server)
        assert tokens(answers) == expected
        assert cached(answers) == [0] * 4
        assert server.metric(BLOCKS, kind="damaged") > 0
        assert server.num_ended("OK") == 4
        assert cached(ask(server)) == [NUM_CACHED] * 4
        servers.stop(server)
    with servers.start() as server:
        assert cached(ask(server)) == [NUM_CACHED] * 4, "it was written when it was used again"


def test_another_bundle_and_another_precision_find_nothing_of_the_first(
    servers: Servers, tmp_path: Path, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        ask(server)
        servers.stop(server)
    with servers.start("--precision", "quill4") as server:
        assert cached(ask(server)) == [0] * 4
        servers.stop(server)
    hybrid = make_tiny_hybrid(tmp_path / "hybrid")
    with server_process(hybrid.directory, tmp_path / "plain") as server:
        of_hybrid = tokens(ask(server))
    for num_cached in (0, NUM_CACHED):
        with Servers(hybrid.directory, tmp_path).start() as server:
            answers = ask(server)
            assert (tokens(answers), cached(answers)) == (of_hybrid, [num_cached] * 4)
            servers.stop(server)
    with servers.start() as server:
        answers = ask(server)
        assert (tokens(answers), cached(answers)) == (expected, [NUM_CACHED] * 4)


def test_no_key_finds_another_key_s_prompts_after_a_restart(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    alice, bob = add_key(keys, "alice"), add_key(keys, "bob")
    servers = Servers(tiny_bundle.directory, tmp_path, "--api-keys", str(keys))
    with servers.start() as server:
        ask(server, key=alice)
        servers.stop(server)
    with servers.start() as server:
        assert cached(ask(server, key=bob)) == [0] * 4
        assert cached(ask(server, key=alice)) == [NUM_CACHED] * 4


def test_two_servers_share_a_directory_and_its_limit(
    servers: Servers, tiny_bundle: TinyBundle, tmp_path: Path, expected: list[list[int]]
) -> None:
    rng = random.Random(4)
    others = [[rng.randrange(512) for _ in range(120)] for _ in range(40)]
    (tmp_path / "other").mkdir()
    with (
        servers.start("--prefix-cache-dir-mb", "1", "--frontends", "2") as one,
        server_process(
            tiny_bundle.directory,
            tmp_path / "other" / "log",
            *("--prefix-cache-dir", str(servers.directory), "--prefix-cache-dir-mb", "1"),
        ) as two,
    ):
        assert tokens(ask(one)) == expected
        for prompts in (others[:20], others[20:], PROMPTS):
            assert tokens(ask(two, prompts)) == tokens(ask(one, prompts))
            on_disk = sum(path.stat().st_blocks * 512 for path in files_of(servers.directory))
            assert on_disk <= 2**20
        servers.stop(one)
        servers.stop(two)
    with servers.start("--prefix-cache-dir-mb", "1") as server:
        assert tokens(ask(server)) == expected


def test_reloaded_bundle_finds_the_blocks_of_the_engine_before(
    servers: Servers, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        ask(server)
        servers.wait_until_written(24)
        before = server.engine_pid
        server.signal(signal.SIGHUP)
        wait_until(lambda: set(server.children).isdisjoint({before}), "the old engine ends")
        answers = ask(server)
        assert (tokens(answers), cached(answers)) == (expected, [NUM_CACHED] * 4)


def test_engine_that_dies_finds_its_blocks_again(
    servers: Servers, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        ask(server)
        servers.wait_until_written(24)
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.metric("quill_engine_restarts_total") == 1, "a new engine")
        wait_until(lambda: server.metric("quill_serving") == 1, "it serves")
        answers = ask(server)
        assert (tokens(answers), cached(answers)) == (expected, [NUM_CACHED] * 4)


def test_directory_that_vanishes_is_warned_of_and_the_server_goes_on(
    servers: Servers, expected: list[list[int]]
) -> None:
    with servers.start() as server:
        assert tokens(ask(server, PROMPTS[:1])) == expected[:1]
        servers.wait_until_written(6)
        servers.directory.rename(servers.directory.with_name("elsewhere"))
        assert tokens(ask(server)) == expected
        wait_until(lambda: "can't write to --prefix-cache-dir" in server.log, "a warning")
        ask(server, PROMPTS[:1])
        assert server.metric(BLOCKS, kind="dropped") > 0
        servers.stop(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefix-cache-dir", "/proc/quill"], "--prefix-cache-dir /proc/quill can't be used"),
        (["--prefix-cache-dir", "DIR", "--no-prefix-cache"], "leave out --no-prefix-cache"),
    ],
)
def test_server_that_can_not_have_its_directory_does_not_start(
    tiny_bundle: TinyBundle, tmp_path: Path, options: list[str], message: str
) -> None:
    given = [str(tmp_path) if each == "DIR" else each for each in options]
    done = subprocess.run(
        serve_command(tiny_bundle.directory, given),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr

"""Constraints that are meant to kill or stall a server: another caller doesn't notice them."""

import itertools
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quill.protos import generation_pb2 as pb
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.hostile_constraints import hostile_constraints
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    ServerProcess,
    children_of,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

MAX_GROWTH = 100 * 2**20  # of a serving process
HEADROOM = 500 * 2**20  # of address space: with less than a hostile constraint wants
MAX_S = 2.0  # until another caller's new constraint is compiled and followed
FINE = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
NUM_QUICK = 40  # `make test-hostile` sends all
REPRODUCERS = {
    "a?": pb.Constraint(regex="a?" * 32_760),
    ".?": pb.Constraint(regex=".?" * 32_760),
    "Lark": pb.Constraint(lark=f"start: /{'a?' * 32_700}/"),
    "patternProperties": pb.Constraint(
        json_schema='{"type": "object", "patternProperties": {"^%s$": {}}}' % ("a?" * 32_000)
    ),
    "two of these kept others out": pb.Constraint(regex=".?" * 5_200),
    "what is forced": pb.Constraint(regex="(ab ){50000}"),
    "memory": pb.Constraint(regex=r"\p{L}?" * 999),
}


@pytest.fixture
def server(talker: TinyBundle, tmp_path: Path) -> Iterator[tuple[ServerProcess, list[Access]]]:
    keys = tmp_path / "keys.json"
    access = [Access(api_key=add_key(keys, name)) for name in ("attacker", "victim")]
    options = ("--api-keys", str(keys), "--allow-unauthenticated", "metrics")
    with server_process(talker.directory, tmp_path / "log", *options) as running:
        yield running, access


def status_of(client: Client, constraint: pb.Constraint, num_tokens: int = 8) -> str:
    try:
        client.generate(
            "Go on:", constraint=constraint, max_new_tokens=num_tokens, timeout_s=PATIENCE_S
        )
    except CallError as error:
        return error.code.name
    return "OK"


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def limit(pid: int) -> None:
    """So little memory that a server dies of what a hostile constraint would take."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + HEADROOM, size + HEADROOM))


def serving_pids(running: ServerProcess) -> tuple[int, ...]:
    return running.pid, running.frontend_pid, running.engine_pid


def harm(running: ServerProcess, access: list[Access], hostile: list[pb.Constraint]) -> None:
    with (
        Client(running.address, NEVER, access=access[0]) as attacker,
        Client(running.address, NEVER, access=access[1]) as victim,
    ):
        new = (pb.Constraint(regex=f"[0-9]{{4}}|u{number}") for number in itertools.count())
        assert {status_of(each, next(new)) for each in (attacker, victim)} == {"OK"}
        pids = serving_pids(running)
        before = [memory_bytes(pid) for pid in pids]
        for pid in pids:
            limit(pid)
        outcomes: Counter[str] = Counter()

        def attack(share: list[pb.Constraint]) -> None:
            outcomes.update(status_of(attacker, each) for each in share)

        attackers = [threading.Thread(target=attack, args=(hostile[i::3],)) for i in range(3)]
        for each in attackers:
            each.start()
        durations_s = []
        while any(each.is_alive() for each in attackers):
            began_s = time.monotonic()
            assert status_of(victim, next(new)) == "OK"
            durations_s.append(time.monotonic() - began_s)
        print(outcomes, f"{len(durations_s)} others, at most {max(durations_s):.2f} s")
        assert set(outcomes) <= FINE, outcomes
        assert max(durations_s) < MAX_S
        assert serving_pids(running) == pids, "no process but the worker's dies"
        growth = [memory_bytes(pid) - old for pid, old in zip(pids, before, strict=True)]
        print("growth in MB:", [each // 2**20 for each in growth])
        assert max(growth) < MAX_GROWTH


def test_constraints_that_killed_a_server_are_errors_and_nobody_else_notices(
    server: tuple[ServerProcess, list[Access]],
) -> None:
    harm(*server, list(REPRODUCERS.values()))


def test_hostile_constraints_harm_nobody(server: tuple[ServerProcess, list[Access]]) -> None:
    hostile = list(hostile_constraints().values())
    assert len(hostile) >= 200
    harm(*server, hostile[:: len(hostile) // NUM_QUICK])


def worker_pids(running: ServerProcess) -> list[int]:
    lines = children_of(running.frontend_pid)
    return [pid for pid, line in lines.items() if "grammar.worker" in line]


def test_worker_that_is_killed_again_and_again_changes_no_answer(
    server: tuple[ServerProcess, list[Access]],
) -> None:
    running, access = server
    constraints = [pb.Constraint(regex=f"[a-z ]{{30,60}}|u{number}") for number in range(16)]
    with (
        Client(running.address, NEVER, access=access[0]) as client,
        Client(running.address, NEVER, access=access[1]) as other,
    ):

        def answer(constraint: pb.Constraint) -> str:
            given = client.generate(
                "Go on:", constraint=constraint, seed=5, max_new_tokens=64, timeout_s=PATIENCE_S
            )
            return given.sequences[0].text

        pids, killed, durations_s = serving_pids(running), set[int](), []
        with ThreadPoolExecutor(len(constraints)) as threads:
            answers = [threads.submit(answer, each) for each in constraints]
            for number in range(3):
                wait_until(lambda: bool(worker_pids(running)), "the worker starts")
                (pid,) = worker_pids(running)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                began_s = time.monotonic()
                assert status_of(other, pb.Constraint(regex=f"new{number}")) == "OK"
                durations_s.append(time.monotonic() - began_s)
        print("a new constraint after a kill, s:", durations_s)
        assert max(durations_s) < MAX_S
        assert [answer(each) for each in constraints] == [each.result() for each in answers]
        assert (serving_pids(running), len(killed)) == (pids, 3)


@pytest.mark.hostile
def test_all_hostile_constraints_harm_nobody(server: tuple[ServerProcess, list[Access]]) -> None:
    harm(*server, list(hostile_constraints().values()))

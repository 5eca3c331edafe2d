"""A server's processes die, and nobody loses more than the answers that were under way."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from quill.export.bundle.manifest import MANIFEST_FILE
from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError
from quill.server.client.retry import Retries
from quill.server.client.sync_client import Client
from tests.bad_files import agree
from tests.server.end_to_end.test_process import change_manifest
from tests.server.faults import Faults
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    PROMPT,
    ServerProcess,
    ask,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

LENGTH = 100
SERVED = "talker"  # which takes constraints
SERVER_OPTIONS = ("--max-num-seqs", "32")
NUM_STREAMS = 16
PATIENT = Retries(max_retries=1000, first_s=0.05, max_s=0.2)


def tokens_of(stream: Iterator[pb.GenerateChunk]) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("victim", ["engine_pid", "frontend_pid", "worker_pid"])
def test_streams_of_a_process_that_is_killed_end_or_resume_with_the_same_tokens(
    server: ServerProcess, faults: Faults, victim: str
) -> None:
    expected = [ask(server, seed, LENGTH) for seed in range(NUM_STREAMS)]
    is_worker, port = victim == "worker_pid", server.port
    with Client(server.address, NEVER) as plain, Client(server.address, PATIENT) as patient:
        before, after = (pb.Constraint(regex=f"{victim}{each}") for each in "ab")
        plain.generate(PROMPT, constraint=before, max_new_tokens=1)  # the worker compiles it
        pid = getattr(server, victim)
        faults.start("slow")
        broken = plain.stream(
            PROMPT, seed=5, max_new_tokens=LENGTH, ignore_eos=True, timeout_s=PATIENCE_S
        )
        resuming = [
            patient.stream(PROMPT, seed=seed, max_new_tokens=LENGTH, ignore_eos=True, resume=True)
            for seed in range(NUM_STREAMS)
        ]
        next(broken)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            # All have their first token while the others' first ones are on their way.
            begun = list(pool.map(lambda stream: list(next(stream).token_ids), resuming))
            os.kill(pid, signal.SIGKILL)
            if is_worker:
                list(broken)
            else:
                with pytest.raises(CallError) as caught:
                    list(broken)
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            faults.end("slow")
            rest = list(pool.map(tokens_of, resuming))
        patient.generate(PROMPT, constraint=after, max_new_tokens=1)
    assert [first + more for first, more in zip(begun, rest, strict=True)] == expected
    assert (getattr(server, victim) != pid, server.port) == (True, port)
    if victim == "engine_pid":
        assert server.metric("quill_engine_restarts_total") == 1
    assert server.metric("quill_serving") == 1
    wait_until(server.is_idle, "nothing runs or waits")


def test_a_bundle_that_crashes_its_process_is_refused_and_the_old_one_goes_on(
    server: ServerProcess, faults: Faults
) -> None:
    expected, engine = ask(server), server.engine_pid
    faults.start("abort")
    server.signal(signal.SIGHUP)
    wait_until(
        lambda: "the new bundle is refused, and the old one goes on" in server.log, "refused"
    )
    faults.end("abort")
    assert "by signal 6" in server.log
    assert (ask(server), server.engine_pid) == (expected, engine)


def test_a_reload_takes_a_new_process_and_ends_the_old_one(server: ServerProcess) -> None:
    expected, engine = ask(server), server.engine_pid
    server.signal(signal.SIGHUP)
    wait_until(lambda: not is_alive(engine), "the old engine ends")
    assert ask(server) == expected


def end_frontend(server: ServerProcess) -> None:
    """And waits until the next one answers."""
    before = server.frontend_pid
    os.kill(before, signal.SIGKILL)
    with Client(server.address, PATIENT) as client:
        client.model(timeout_s=PATIENCE_S)
    assert server.frontend_pid != before


def test_a_frontend_goes_on_with_its_engine_though_the_bundle_on_disk_has_changed(
    talker: TinyBundle, tmp_path: Path
) -> None:
    """Nobody reloaded it; whatever is there now may be half written."""
    bundle = Path(shutil.copytree(talker.directory, tmp_path / "bundle"))
    with server_process(bundle, tmp_path / "log") as server:
        expected, engine = ask(server), server.engine_pid
        (bundle / MANIFEST_FILE).write_text("half")
        (bundle / "weights.fp32.bin").write_bytes(b"written")
        end_frontend(server)
        assert (ask(server), server.engine_pid) == (expected, engine)


def test_a_frontend_that_finds_another_tokenizer_loads_the_bundle_that_is_there(
    talker: TinyBundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(talker.directory, tmp_path / "bundle"))
    with server_process(bundle, tmp_path / "log") as server:
        expected, engine = ask(server), server.engine_pid
        tokenizer = bundle / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text() + "\n")
        agree(tokenizer)
        end_frontend(server)
        wait_until(lambda: not is_alive(engine), "the old engine ends")
        assert ask(server) == expected


def test_metrics_describe_the_bundle_that_an_engine_was_started_again_with(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.directory, tmp_path / "bundle"))
    with server_process(bundle, tmp_path / "log") as server:
        change_manifest(bundle, name="second")
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: "the engine is back with second" in server.log, "it is back")
        assert server.metric("quill_model_info", model="second") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_server(
    tiny_bundle: TinyBundle, tmp_path: Path, number: signal.Signals
) -> None:
    with server_process(tiny_bundle.directory, tmp_path / "log") as server:
        children = server.children
        assert len(children) == 2
        server.signal(number)
        server.process.wait(PATIENCE_S)
        wait_until(lambda: not any(map(is_alive, children)), "both end")

"""A server that is killed and comes back: calls wait for it until their deadline."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.client.conftest import MakeClient
from tests.server.faults import CODE, Faults
from tests.server.process import PATIENCE_S, PROMPT, server_process, wait_until
from tests.server.tiny_bundle import TinyBundle

NUM_STREAMS = 12
LENGTH = 60
# Until all have failed so often: more often than calls were retried when that had a number.
NUM_FAILURES = 7


def tokens_of(client: Client, seed: int) -> list[int]:
    chunks = client.stream(
        PROMPT, seed=seed, max_new_tokens=LENGTH, timeout_s=PATIENCE_S, resume=True
    )
    return [token for chunk in chunks for token in chunk.token_ids]


def num_failed(client: Client) -> int:
    return client.servers()[0].num_failed


def test_every_stream_outlasts_the_restart_of_its_only_server(
    make_client: MakeClient, tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    bundle, log, faults = tiny_bundle.directory, tmp_path / "log", Faults(tmp_path)
    faults.start("slow")  # so that none has ended when the server is killed
    room = ("--max-num-seqs", str(NUM_STREAMS))
    with (
        server_process(bundle, log, *room, code=CODE, environment=faults.environment) as first,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):
        clients = [make_client(first.address) for _ in range(NUM_STREAMS)]
        streams = [threads.submit(tokens_of, each, seed) for seed, each in enumerate(clients)]
        wait_until(lambda: first.metric("quill_sequences_running") == NUM_STREAMS, "all run")
        first.signal(signal.SIGKILL)
        first.process.wait()
        wait_until(
            lambda: all(num_failed(each) >= NUM_FAILURES for each in clients),
            "all have called in vain",
            PATIENCE_S,
        )
        with server_process(bundle, log, *room, port=first.port) as second:
            received = [each.result(PATIENCE_S) for each in streams]
            for each in clients:
                each.close()
            with make_client(second.address) as client:
                assert received == [tokens_of(client, seed) for seed in range(NUM_STREAMS)]


def test_stream_whose_server_stays_away_ends_at_its_deadline(
    make_client: MakeClient, tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    faults = Faults(tmp_path)
    faults.start("slow")
    with (
        server_process(
            *(tiny_bundle.directory, tmp_path / "log"), code=CODE, environment=faults.environment
        ) as server,
        make_client(server.address) as client,
    ):
        chunks = client.stream(PROMPT, max_new_tokens=LENGTH, timeout_s=3.0, resume=True)
        next(chunks)
        server.signal(signal.SIGKILL)
        server.process.wait()
        began_s = time.monotonic()
        with pytest.raises(CallError, match="Connection refused"):
            list(chunks)
        assert time.monotonic() - began_s < 3.0

"""Several frontends of one server: they count together, and others go on where one dies."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key, revoke_key
from quill.server.client.access import Access, Metadata
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.authority import Authority, trusting, write
from tests.server.faults import Faults
from tests.server.process import (
    NEVER,
    PATIENCE_S,
    PROMPT,
    ROOT,
    ServerProcess,
    serve_command,
    server_process,
    wait_until,
)
from tests.server.tiny_bundle import TinyBundle

LENGTH = 100
NUM_FRONTENDS = 2
MAX_QUEUE = 6  # of which one key may have half
MAX_CHANNELS = 64  # the kernel chooses the frontend: so many never all come to the same one
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OPTIONS = ("--frontends", str(NUM_FRONTENDS), "--max-queue", str(MAX_QUEUE))
LIMITS: dict[str, dict[str, Any]] = {
    "free": {"admin": True},
    "slow": {"requests_per_minute": 1},  # one, and the next in a minute
    "narrow": {"max_concurrent": 3},
    "terse": {"tokens_per_minute": 60},  # ten at once
    "revoked": {},
}


class Server:
    """A server with several frontends, and a channel to each of them."""

    def __init__(
        self,
        process: ServerProcess,
        keys: dict[str, str],
        key_file: Path,
        faults: Faults,
        access: Access | None = None,
    ) -> None:
        self.process = process
        self.access = access or Access()
        self.key_file = key_file
        self.faults = faults
        self._keys = keys
        self._stack = ExitStack()
        self.stubs: dict[int, pb_grpc.TextGenerationStub] = {}
        self.admins: dict[int, pb_grpc.AdministrationStub] = {}

    def close(self) -> None:
        self._stack.close()

    def connect(self) -> None:
        """To those frontends that there is no channel to."""
        wait_until(lambda: len(self.process.frontend_pids) == NUM_FRONTENDS, "all run")
        pids = self.process.frontend_pids
        self.stubs = {pid: stub for pid, stub in self.stubs.items() if pid in pids}
        wait_until(lambda: all(map(self._listens, pids)), "all listen")
        for _ in range(MAX_CHANNELS):
            if set(self.stubs) == pids:
                return
            before = {pid: self._num_connections(pid) for pid in pids}
            options = (("grpc.use_local_subchannel_pool", 1),)
            channel = self._stack.enter_context(self.access.channel(self.process.address, options))
            grpc.channel_ready_future(channel).result(PATIENCE_S)
            (pid,) = [each for each in pids if self._num_connections(each) > before[each]]
            self.stubs[pid] = pb_grpc.TextGenerationStub(channel)
            self.admins[pid] = pb_grpc.AdministrationStub(channel)
        raise AssertionError(f"{MAX_CHANNELS} connections came to {len(self.stubs)} frontends")

    def metadata(self, key: str) -> Metadata:
        return Access(api_key=self._keys.get(key)).metadata

    def stream(self, pid: int, key: str = "", num: int = LENGTH, seed: int = 5) -> Any:
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=PROMPT))
        request.seed = seed
        request.max_new_tokens = num
        stub = self.stubs[pid]
        return stub.GenerateStream(request, metadata=self.metadata(key), timeout=PATIENCE_S)

    def ask(self, pid: int, key: str = "", num: int = 8, seed: int = 5) -> list[int]:
        return tokens_of(self.stream(pid, key, num, seed))

    def code(self, pid: int, key: str) -> grpc.StatusCode:
        call = self.stream(pid, key, 1)
        with suppress(grpc.RpcError):
            tokens_of(call)
        code: grpc.StatusCode = call.code()
        return code

    def _listens(self, pid: int) -> bool:
        return any(state == "0A" for state in self._states(pid))

    def _num_connections(self, pid: int) -> int:
        return sum(state != "0A" for state in self._states(pid))

    def _states(self, pid: int) -> list[str]:
        """Of the sockets at the server's port that a process has."""
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        at_port = {
            f"socket:[{row[9]}]": row[3]
            for row in rows
            if row[1].endswith(f":{self.process.port:04X}")
        }
        found = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(str(path.readlink()))
            except OSError:
                continue  # closed meanwhile
        return [at_port[name] for name in found if name in at_port]


def tokens_of(call: Any) -> list[int]:
    return [token for chunk in call for token in chunk.token_ids]


@pytest.fixture
def server(tiny_bundle: TinyBundle, tmp_path: Path, faults: Faults) -> Iterator[Server]:
    key_file = tmp_path / "keys.json"
    keys = {name: add_key(key_file, name, **limits) for name, limits in LIMITS.items()}
    options = (*OPTIONS, "--api-keys", str(key_file), "--allow-unauthenticated", "metrics")
    log = tmp_path / "log"
    with server_process(
        tiny_bundle.directory, log, *options, environment=faults.environment
    ) as process:
        server = Server(process, keys, key_file, faults)
        server.connect()
        yield server
        server.close()


def test_quotas_the_queue_and_metrics_are_counted_over_all_frontends(server: Server) -> None:
    pids, faults = [*server.stubs] * 4, server.faults
    expected = server.ask(pids[0], "free", LENGTH)
    assert server.ask(pids[1], "free", LENGTH) == expected, "the same tokens from each"

    codes = [server.code(pid, "slow") for pid in pids]
    assert (codes.count(grpc.StatusCode.OK), codes.count(EXHAUSTED)) == (1, 7)

    assert len(server.ask(pids[0], "terse", 30)) == 30
    assert [server.code(pid, "terse") for pid in pids[:4]] == [EXHAUSTED] * 4

    faults.start("slow")
    running = [server.stream(pid, "narrow") for pid in pids[:3]]
    for call in running:
        next(call)
    faults.hang()  # so that none of them ends by itself
    assert [server.code(pid, "narrow") for pid in pids[:2]] == [EXHAUSTED] * 2
    running[0].cancel()
    faults.end("slow")
    faults.let_go()
    assert [len(tokens_of(call)) for call in running[1:]] == [LENGTH - 1] * 2
    assert server.code(pids[1], "narrow") is grpc.StatusCode.OK

    faults.hang()
    first = server.stream(pids[0], "free")
    wait_until(lambda: faults.hangs, "the first request's step hangs")
    found: list[grpc.StatusCode] = []
    threads = [
        threading.Thread(target=lambda pid=pid: found.append(server.code(pid, "free")))
        for pid in pids
    ]
    for thread in threads:
        thread.start()
    num_rejected = 1 + len(pids) - MAX_QUEUE // 2
    wait_until(lambda: len(found) >= num_rejected, "the others are rejected")
    assert found == [EXHAUSTED] * num_rejected
    faults.let_go()
    tokens_of(first)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found.count(grpc.StatusCode.OK) == len(pids) - num_rejected
    process = server.process
    num_calls = 2 + len(pids) + 5 + 6 + 1 + len(pids)
    wait_until(
        lambda: process.metric("quill_requests_total", method="GenerateStream") == num_calls,
        "all are counted",  # a call is counted after its client has seen its end
    )
    assert process.metric("quill_key_requests_total", key="slow") == len(pids)
    assert process.metric("quill_serving") == 1
    wait_until(process.is_idle, "nothing runs or waits")


def test_death_of_a_frontend_is_no_matter_to_the_others(server: Server) -> None:
    victim, other = server.stubs
    process, faults = server.process, server.faults
    expected = server.ask(other, "free", LENGTH)
    before = process.metric("quill_requests_total", outcome="OK")
    faults.start("slow")
    held = [server.stream(victim, "narrow") for _ in range(3)]
    unbroken = server.stream(other, "free")
    tokens = list(next(unbroken).token_ids)
    for call in held:
        next(call)
    os.kill(victim, signal.SIGKILL)
    # Not frontend_pids: a process that ends has no command line before its sockets are closed.
    wait_until(lambda: victim not in process.children, "nobody is sent to it any more")
    for call in held:
        with pytest.raises(grpc.RpcError):
            tokens_of(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    # The other frontend's request may have ended by itself meanwhile.
    wait_until(lambda: process.metric("quill_requests_running") <= 1, "its requests end")
    faults.end("slow")
    assert tokens + tokens_of(unbroken) == expected
    server.connect()
    assert process.frontend_pids == {other, *server.stubs}
    for pid in server.stubs:
        assert server.ask(pid, "narrow", LENGTH) == expected, "its calls aren't counted any more"
    wait_until(
        lambda: process.metric("quill_requests_total", outcome="OK") == before + 1 + NUM_FRONTENDS,
        "what it had counted isn't lost",
    )


def test_reload_and_keys_reach_all_frontends(server: Server) -> None:
    process = server.process
    expected = {pid: server.ask(pid, "free") for pid in server.stubs}
    engine, (first, second) = process.engine_pid, server.stubs
    for number in (1, 2):
        if number == 1:
            process.signal(signal.SIGHUP)
        else:
            server.admins[second].Reload(pb.ReloadRequest(), metadata=server.metadata("free"))
        gone = Path(f"/proc/{engine}")
        wait_until(lambda gone=gone: not gone.exists(), "the old engine ends")  # type: ignore[misc]
        engine = process.engine_pid
        assert {pid: server.ask(pid, "free") for pid in server.stubs} == expected
    assert process.log.count("is on duty now") == 2 * NUM_FRONTENDS
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: process.log.count("the engine is back") == NUM_FRONTENDS, "it is back")
    assert {pid: server.ask(pid, "free") for pid in server.stubs} == expected
    assert process.metric("quill_engine_restarts_total") == 1
    revoke_key(server.key_file, "revoked")
    for pid in (first, second):
        assert server.code(pid, "revoked") is grpc.StatusCode.PERMISSION_DENIED


def test_new_certificate_serves_new_connections_of_all_frontends(
    tiny_bundle: TinyBundle, tmp_path: Path
) -> None:
    before, after = Authority("before"), Authority("after")
    files = write(tmp_path, before.sign("server"))
    options = (*OPTIONS, "--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with ExitStack() as stack:
        process = stack.enter_context(
            server_process(tiny_bundle.directory, tmp_path / "log", *options)
        )
        server = Server(process, {}, tmp_path, Faults(tmp_path), trusting(before))
        stack.callback(server.close)
        server.connect()
        streams = [server.stream(pid) for pid in server.stubs]
        tokens = [list(next(stream).token_ids) for stream in streams]
        write(tmp_path, after.sign("server"))
        old, server.access = server.stubs, trusting(after)
        server.stubs = {}
        server.connect()
        assert set(server.stubs) == set(old), "each has the new certificate"
        answers = [got + tokens_of(stream) for got, stream in zip(tokens, streams, strict=True)]
        assert answers == [server.ask(pid, num=LENGTH) for pid in server.stubs]
        late = stack.enter_context(Client(process.address, NEVER, access=trusting(before)))
        with pytest.raises(CallError):
            late.model(timeout_s=PATIENCE_S)


def test_drain_ends_all_frontends_after_their_last_streams(server: Server) -> None:
    process, faults = server.process, server.faults
    expected = server.ask(next(iter(server.stubs)), "free", LENGTH)
    faults.start("slow")
    calls = [server.stream(pid, "free") for pid in server.stubs]
    tokens = [list(next(call).token_ids) for call in calls]
    children = process.children
    process.signal(signal.SIGTERM)
    wait_until(lambda: process.log.count("health says NOT_SERVING") == NUM_FRONTENDS, "they drain")
    faults.end("slow")
    for got, call in zip(tokens, calls, strict=True):
        assert got + tokens_of(call) == expected
    assert process.process.wait(PATIENCE_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_second_server_at_the_same_port_is_refused(
    server: Server, tiny_bundle: TinyBundle
) -> None:
    for options in ((), OPTIONS):
        command = serve_command(tiny_bundle.directory, options, server.process.port)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "can't listen at" in done.stderr

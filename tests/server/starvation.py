"""What clients see of a server that gets too little CPU time, or more calls than it can serve.

Knows: cgroups, gRPC's client, the server's metrics. Does not know: how calls are accepted.

    python -m tests.server.starvation quota        # 600 streams; the server gets 20% of one core
    python -m tests.server.starvation busy-loops   # eight processes compute beside it
    python -m tests.server.starvation wrong-keys   # another key beside 400 users with a wrong one
    python -m tests.server.starvation saturation   # streams that the full queue rejects

Clients run in processes of their own; how late their event loops were, and how much CPU time they
took, is printed beside what they saw. `quota` needs root: it makes a cgroup. Ends by itself after
--seconds and a few more; with 1 if a bound wasn't kept.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.loadtest.environment.faults import busy_loops
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.errors import read_error
from quill.server.prometheus_text import Samples, read_samples
from tests.server.process import ServerProcess, server_process
from tests.server.tiny_bundle import make_talker

PERIOD_US = 100_000
MAX_GAP_S = 2.0
MAX_RATIO = 2.0  # of another key's time to first token, to what it was alone
MAX_REJECTION_MS = 50.0
USERS_A_CHANNEL = 100
# Nice values, which need root. Clients stand for other machines, so the server goes before those
# that only make load, and those whose times count must not wait for a core. All go before others'
# processes on this machine: where a latency is the bar, the server has the processor to itself.
LOADING, SERVING, MEASURING = -8, -13, -15
OPTIONS = ("--threads", "1", "--max-num-seqs", "32", "--max-queue", "64")
REJECTED = "RESOURCE_EXHAUSTED"


class Users(NamedTuple):
    """Closed loops of streams: the next call follows the last at once."""

    number: int
    timeout_s: float
    api_key: str | None = None
    max_new_tokens: int = 1
    pause_s: float | None = None  # after each call; None: as long as a rejection asks for
    niceness: int = 0


@dataclass
class Seen:
    """By clients. Times are seconds since the load began."""

    ended: list[tuple[float, float, str]] = field(default_factory=list)  # when, how long, status
    lags_s: list[float] = field(default_factory=list)  # of the clients' event loop
    cores: float = 0.0  # that the clients' process used

    def counts(self) -> Counter[str]:
        return Counter(status for _, _, status in self.ended)

    def longest_gap_s(self, end_s: float) -> float:
        """Without a stream that ended well."""
        times = [0.0, *(at_s for at_s, _, status in self.ended if status == "OK"), end_s]
        return max(after - before for before, after in itertools.pairwise(times))

    def quantiles_ms(self, status: str) -> "Quantiles":
        """Until a first chunk or an error."""
        return quantiles_ms([took_s for _, took_s, each in self.ended if each == status])

    def print_clients(self, who: str) -> None:
        lags = quantiles_ms(self.lags_s)
        print(f"{who}: {dict(self.counts())}; {self.cores:.2f} cores, event loop late by {lags}")


class Quantiles(NamedTuple):
    p50: float
    p95: float
    longest: float

    def __str__(self) -> str:
        return f"p50 {self.p50:.1f} ms, p95 {self.p95:.1f} ms, longest {self.longest:.0f} ms"


def quantiles_ms(times_s: list[float]) -> Quantiles:
    times = sorted(1000 * each for each in times_s) or [0.0]
    return Quantiles(times[len(times) // 2], times[len(times) * 95 // 100], times[-1])


async def user(
    stub: pb_grpc.TextGenerationStub, users: Users, seen: Seen, began_s: float, end_s: float
) -> None:
    request = pb.GenerateRequest(prompt="Once upon a time", ignore_eos=True)
    request.max_new_tokens = users.max_new_tokens
    metadata = Access(api_key=users.api_key).metadata
    while (start_s := time.monotonic()) < end_s:
        first_s, pause_s = None, users.pause_s or 0.0
        try:
            stream: Any = stub.GenerateStream(request, timeout=users.timeout_s, metadata=metadata)
            async for _ in stream:
                first_s = first_s or time.monotonic()
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            if status == REJECTED and users.pause_s is None:
                pause_s = read_error(error, Access()).retry_after_s or 0.0
        now_s = time.monotonic()
        seen.ended.append((now_s - began_s, (first_s or now_s) - start_s, status))
        if pause_s:
            await asyncio.sleep(pause_s)


async def load(address: str, users: Users, seconds: float) -> Seen:
    seen, began_s = Seen(), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        loops = []
        for number in range(users.number):
            if number % USERS_A_CHANNEL == 0:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = grpc.aio.insecure_channel(address, options)
                stub = pb_grpc.TextGenerationStub(await stack.enter_async_context(channel))
            loops.append(user(stub, users, seen, began_s, began_s + seconds))
        lags = asyncio.ensure_future(measure_lag(seen))
        cpu_s = time.process_time()
        await asyncio.gather(*loops)
        lags.cancel()
        seen.cores = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    return seen


def run_load(address: str, users: Users, seconds: float) -> Seen:
    """In a process of its own."""
    with contextlib.suppress(PermissionError):  # it has one already
        os.setsid()
    set_niceness(os.getpid(), users.niceness)
    return asyncio.run(load(address, users, seconds))


def set_niceness(pid: int, niceness: int) -> None:
    """Of a process' session and its threads. Linux' autogroups share the processor among sessions,
    whatever nice values their threads have."""
    if pid == os.getpid() or os.getsid(pid) != os.getsid(0):  # not the session of who started this
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    with contextlib.suppress(PermissionError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


async def measure_lag(seen: Seen) -> None:
    """How late the client's own event loop is: times are the server's only where this is small."""
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        seen.lags_s.append(time.monotonic() - began_s - 0.01)


def watch(server: ServerProcess, seconds: float) -> None:
    """Prints once a second what the server tells of itself."""
    channel = grpc.insecure_channel(server.address)
    health = health_pb2_grpc.HealthStub(channel)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        try:
            page = scrape(server)
            told = (
                f"unread {page.value('quill_oldest_unread_call_seconds'):5.2f} s, "
                f"waiting {page.value('quill_requests_waiting'):3.0f}, "
                f"running {page.value('quill_requests_running'):3.0f}, "
                f"OK {page.value('quill_requests_total', outcome='OK'):5.0f}"
            )
            state = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
            told += f", {health_pb2.HealthCheckResponse.ServingStatus.Name(state)}"
        except (OSError, grpc.RpcError) as error:
            told = f"no metrics or health: {type(error).__name__}"
        print(f"  {told} (after {time.monotonic() - began_s:.2f} s)", flush=True)
        time.sleep(max(0.0, began_s + 1 - time.monotonic()))
    channel.close()


def scrape(server: ServerProcess) -> Samples:
    return read_samples(server.metrics_page(timeout_s=5.0))


@contextlib.contextmanager
def cgroup(pids: list[int], percent: int) -> Iterator[None]:
    """Processes with so much of a core. 100,000 µs is the kernel's own period."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "cpu").is_dir()  # version 1 has a tree for each resource
    group = (root / "cpu" if is_first else root) / f"quill-starvation-{os.getpid()}"
    home = Path("/proc/self/cgroup").read_text()
    group.mkdir()
    quota = PERIOD_US * percent // 100
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        if is_first:
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield
    finally:
        lines = [line.split(":", 2) for line in home.splitlines()]
        path = next(path for _, names, path in lines if "cpu" in names.split(",") or not is_first)
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / path.lstrip("/") / "cgroup.procs").write_text(left)
        group.rmdir()


@dataclass(frozen=True)
class Run:
    """A server under clients."""

    server: ServerProcess
    clients: ProcessPoolExecutor
    seconds: float
    users: int
    timeout_s: float
    api_key: str

    def start(self, users: Users, seconds: float | None = None) -> "Future[Seen]":
        return self.clients.submit(run_load, self.server.address, users, seconds or self.seconds)

    def prefer_server(self) -> None:
        for pid in (self.server.pid, *self.server.children):
            set_niceness(pid, SERVING)


def starve(run: Run, starving: contextlib.AbstractContextManager[None]) -> bool:
    """Whether no stream died uncounted, and answers never stopped for long."""
    before = scrape(run.server)
    with starving:
        loading = run.start(Users(run.users, run.timeout_s, run.api_key, niceness=MEASURING))
        watch(run.server, run.seconds)
        seen = loading.result()
        time.sleep(3)
    time.sleep(3)
    return report(seen, run.seconds, before, scrape(run.server))


def quota(run: Run) -> bool:
    return starve(run, cgroup([run.server.pid, *run.server.children], percent=20))


def loops(run: Run) -> bool:
    return starve(run, busy_loops(8))


def wrong_keys(run: Run) -> bool:
    """Whether another key's first token takes at most MAX_RATIO of what it takes alone."""
    run.prefer_server()
    other = Users(1, run.timeout_s, run.api_key, niceness=MEASURING)
    run.start(other, 2.0).result()  # what is done once
    alone = run.start(other).result()
    wrong = Users(run.users, run.timeout_s, f"{run.api_key[:-1]}!", niceness=LOADING)
    attacking = run.start(wrong, run.seconds + 4)
    time.sleep(2)  # the first ones come together
    beside = run.start(other).result()
    attacking.result().print_clients("users with a wrong key")
    for name, seen in (("alone", alone), ("beside them", beside)):
        seen.print_clients(f"another key, {name}")
        print(f"its first token {name}: {seen.quantiles_ms('OK')}")
    pairs = zip(beside.quantiles_ms("OK"), alone.quantiles_ms("OK"), strict=True)
    p50, p95, _ = (after / before for after, before in pairs)
    print(f"ratio: p50 {p50:.2f}, p95 {p95:.2f}")
    return max(p50, p95) <= MAX_RATIO


def saturation(run: Run) -> bool:
    """Whether rejections are fast. Clients wait as long as their rejections ask for."""
    run.prefer_server()
    crowd = Users(run.users, 60.0, run.api_key, max_new_tokens=64, niceness=LOADING)
    crowding = run.start(crowd, run.seconds + 6)
    time.sleep(3)
    more = Users(8, 60.0, run.api_key, 64, pause_s=0.1, niceness=MEASURING)
    seen = run.start(more).result()
    crowding.result().print_clients("the crowd")
    seen.print_clients("eight more")
    rejections = seen.quantiles_ms(REJECTED)
    print(f"their rejections: {rejections}")
    return seen.counts()[REJECTED] > 0 and rejections.p95 <= MAX_REJECTION_MS


class Scenario(NamedTuple):
    run: Callable[[Run], bool]
    users: int
    seconds: float
    timeout_s: float


SCENARIOS = {
    "quota": Scenario(quota, 600, 20.0, 3.0),
    "busy-loops": Scenario(loops, 600, 300.0, 3.0),
    "wrong-keys": Scenario(wrong_keys, 400, 15.0, 30.0),
    "saturation": Scenario(saturation, 450, 15.0, 60.0),
}


def report(seen: Seen, seconds: float, before: Samples, after: Samples) -> bool:
    """Whether all is well."""
    for second in range(int(max(at_s for at_s, _, _ in seen.ended)) + 1):
        counts = Counter(status for at_s, _, status in seen.ended if int(at_s) == second)
        print(f"  second {second:3}: {dict(counts)}")
    for status, number in seen.counts().items():
        counted = after.value("quill_requests_total", outcome=status)
        counted -= before.value("quill_requests_total", outcome=status)
        quantiles = seen.quantiles_ms(status)
        print(f"{status}: clients saw {number}, the server counted {counted:.0f}; {quantiles}")
    seen.print_clients("clients")
    name, gap_s = "quill_requests_total", seen.longest_gap_s(seconds)
    num_counted = after.value(name) - before.value(name)
    print(f"calls: clients made {len(seen.ended)}, the server counted {num_counted:.0f}")
    print(f"longest time without an answer: {gap_s:.2f} s")
    return gap_s <= MAX_GAP_S and num_counted >= len(seen.ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--users", type=int)
    parser.add_argument("--timeout", type=float, dest="timeout_s", help="of each stream, seconds")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--bundle", type=Path, help="default: a tiny model, made anew")
    parser.add_argument("--serve", default="", help="more options of quill serve")
    given = parser.parse_args()
    scenario = SCENARIOS[given.scenario]
    named = {name: getattr(given, name) for name in ("users", "timeout_s", "seconds")}
    scenario = scenario._replace(**{name: each for name, each in named.items() if each})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bundle = given.bundle or make_talker(folder / "bundle").directory
        api_key = add_key(folder / "keys.json", "other")
        keys = ("--api-keys", str(folder / "keys.json"), "--allow-unauthenticated", "metrics")
        options = (*OPTIONS, *keys, *given.serve.split())
        server = stack.enter_context(server_process(bundle, folder / "log", *options))
        spawn = multiprocessing.get_context("spawn")
        # Both start before the load: it would keep the second from starting until it is over.
        both = spawn.Barrier(2)
        clients = stack.enter_context(ProcessPoolExecutor(2, spawn, both.wait))
        for started in [clients.submit(os.getpid) for _ in range(2)]:
            started.result()
        is_well = scenario.run(
            Run(server, clients, scenario.seconds, scenario.users, scenario.timeout_s, api_key)
        )
    print("passed" if is_well else "FAILED")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()

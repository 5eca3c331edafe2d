"""`make soak`: the scenarios mixed and unfriendly together, at twice the server's capacity.

Knows: the order of the steps, the criteria. Does not know: how a request is sent.

    python -m quill.loadtest.run.soak --minutes 20 --bundle bundles/tiny
    python -m quill.loadtest.run.soak --minutes 60 --load-factor 1.5 --keys 2 --faults --verify 500

First a closed loop measures the capacity; that is also the warm-up. Then requests come at a
multiple of that rate, whatever the server does; with --faults clients resume what breaks, and
processes are starved, killed and reloaded in turns. At the end some requests are sent again, alone.
"""

import argparse
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quill.loadtest.environment.faults import FAULTS, inject, num_logged, wait_until_noticed
from quill.loadtest.environment.process import (
    ProcessSample,
    sample_process,
    slope_mb_per_minute,
    watch_process,
)
from quill.loadtest.environment.server import (
    RUNNING,
    WAITING,
    StartedServer,
    fetch_metrics,
    read_log,
    start_server,
)
from quill.loadtest.errors import LoadtestError
from quill.loadtest.protocols.connect import PoolClient, Resuming
from quill.loadtest.protocols.grpc import GrpcClient, ProtocolClient
from quill.loadtest.results.verify import Verdict, verify
from quill.loadtest.workload.call import call
from quill.loadtest.workload.closed_loop import closed_loop
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest, ModelInfo
from quill.loadtest.workload.scenarios import make_request
from quill.loadtest.workload.schedule import arrivals
from quill.server.client.access import Access

SEQUENCES, QUEUE = 8, 16
SERVE = ("--max-num-seqs", str(SEQUENCES), "--max-queue", str(QUEUE), "--kv-cache-mb", "512")
MAX_CALLS = 200  # concurrent calls of the clients: far more than the server admits
SHOW_S = 10.0
SETTLE_S = 60.0
MAX_MORE_PERIODS = 10  # until each fault has happened
MAX_SLOPE_MB = 1.0  # a minute
MAX_REJECTION_MS = 100.0
MIN_SLOPE_S = 120.0  # shorter runs have no meaningful slope
REJECTED = "RESOURCE_EXHAUSTED"
# A client with a deadline, or one that cancels, may be gone before the server has its call.
EARLY = ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE")


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """`load_factor`: of the measured capacity."""

    duration_s: float
    num_verified: int = 200
    load_factor: float = 2.0
    num_keys: int = 0  # 0: the server has no API keys
    faults: Sequence[str] = ()
    fault_period_s: float = 60.0


@dataclass(frozen=True)
class SoakResult:
    """All measurements. `bound_ms` is for the 99th percentile of accepted requests."""

    records: Sequence[RequestRecord]
    num_sent: int
    num_ended: int  # as the server logged them
    bound_ms: float
    start: ProcessSample
    end: ProcessSample
    samples: Sequence[ProcessSample]  # after the warm-up
    is_idle: bool
    log: Sequence[Mapping[str, Any]]  # the server's
    verdict: Verdict
    options: SoakOptions
    injected: Sequence[str] = ()  # faults


@dataclass
class Judgement:
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def note(self, is_well: bool, text: str) -> None:
        self.lines.append(f"{'ok  ' if is_well else 'FAIL'} {text}")
        if not is_well:
            self.failures.append(text)


def judge(soaked: SoakResult) -> Judgement:
    judgement = Judgement()
    _judge_ends(soaked, judgement)
    _judge_faults(soaked, judgement)
    _judge_times(soaked, judgement)
    _judge_process(soaked, judgement)
    judgement.note(not soaked.verdict.differences, str(soaked.verdict))
    return judgement


def _judge_ends(soaked: SoakResult, judgement: Judgement) -> None:
    records = soaked.records
    statuses = Counter(record.status for record in records)
    listed = ", ".join(f"{number:,} {status}" for status, number in statuses.most_common())
    judgement.note(len(records) == soaked.num_sent, f"{len(records):,} calls ended: {listed}")
    wrong = Counter(f"{each.status}: {each.message}" for each in records if not each.ok)
    shown = f"{wrong.total():,} ended with unexpected statuses {wrong.most_common(5)}"
    judgement.note(not wrong, shown)
    early = sum(record.status in EARLY for record in records)
    is_exact = len(records) - early <= soaked.num_ended <= len(records)
    how = "each once"
    if soaked.options.faults:  # what is resumed ends several times
        is_exact, how = len(records) - early <= soaked.num_ended, "each at least once"
    judgement.note(is_exact, f"{soaked.num_ended:,} ended at the server, {how}")
    judgement.note(soaked.is_idle, "at the end no sequence runs and no request waits")


def _judge_faults(soaked: SoakResult, judgement: Judgement) -> None:
    for name in soaked.options.faults:
        number, logged = soaked.injected.count(name), num_logged(soaked.log, name)
        judgement.note(0 < number <= logged, f"{name}: {number} times, and each was noticed")


def _judge_times(soaked: SoakResult, judgement: Judgement) -> None:
    """The server's own times: on a busy machine, clients receive late. With faults, which make them
    longer, they are only shown."""
    for name, status, bound_ms in (
        ("accepted", "OK", soaked.bound_ms),
        ("rejected", REJECTED, MAX_REJECTION_MS),
    ):
        took_ms = times_ms(soaked.log, status)
        if not took_ms:
            judgement.note(False, f"no request was {name}: this was no overload")
            continue
        p99_ms = float(np.percentile(took_ms, 99))
        client_ms = [
            each.total_ms - each.late_ms for each in soaked.records if each.status == status
        ]
        client_p99_ms = float(np.percentile(client_ms or [0.0], 99))
        clients = f"({client_p99_ms:,.0f} ms at these clients)"
        if soaked.options.faults:
            judgement.lines.append(f"--   {name}: p99 {p99_ms:,.1f} ms at the server {clients}")
            continue
        judgement.note(
            p99_ms <= bound_ms,
            f"{name}: p99 {p99_ms:,.1f} ms at the server, and {bound_ms:,.0f} ms is the limit "
            f"{clients}",
        )


def times_ms(log: Sequence[Mapping[str, Any]], status: str) -> list[float]:
    """Durations of the streams with this status, from the server's log."""
    wanted = ("GenerateStream", status)
    return [
        entry["total_ms"] for entry in log if (entry.get("method"), entry.get("outcome")) == wanted
    ]


def _judge_process(soaked: SoakResult, judgement: Judgement) -> None:
    start, end, samples = soaked.start, soaked.end, soaked.samples
    round_s = soaked.options.fault_period_s * len(soaked.options.faults)
    samples = medians(samples, round_s)  # what was killed has another size until it is warm
    memory = f"memory {start.memory_mb:,.0f} MB before, {end.memory_mb:,.0f} MB after"
    if len(samples) < 2 or samples[-1].at_s - samples[0].at_s < MIN_SLOPE_S:
        judgement.lines.append(f"--   {memory}; too short for a slope")
    else:
        slope = slope_mb_per_minute(samples)
        judgement.note(slope <= MAX_SLOPE_MB, f"{memory}; {slope:+.2f} MB/min after the warm-up")
    judgement.note(
        end.num_fds <= start.num_fds, f"descriptors {start.num_fds} before, {end.num_fds} after"
    )
    # asyncio's pool keeps its threads for the next call, and has so many at most.
    pool = min(32, (os.cpu_count() or 1) + 4)
    is_well = end.num_threads <= start.num_threads + pool
    judgement.note(is_well, f"threads {start.num_threads} before, {end.num_threads} after")


def medians(samples: Sequence[ProcessSample], window_s: float) -> Sequence[ProcessSample]:
    """The sample in the middle, by memory, of each window; all, if it has no length."""
    if not window_s or not samples:
        return samples
    windows: dict[int, list[ProcessSample]] = {}
    for each in samples:
        windows.setdefault(int((each.at_s - samples[0].at_s) / window_s), []).append(each)
    by_memory = [sorted(each, key=lambda sample: sample.memory_mb) for each in windows.values()]
    return [each[len(each) // 2] for each in by_memory]


class SoakClient:
    """Sends requests and keeps their records. `accesses`: the callers, in turns."""

    def __init__(
        self,
        address: str,
        seed: int,
        accesses: Sequence[Access] = (Access(),),
        resumes: bool = False,
    ) -> None:
        self._address, self._seed, self._resumes = address, seed, resumes
        self._accesses = accesses
        self._clients = [self._connect(number) for number in range(8)]
        with closing(GrpcClient(address, accesses[0])) as client:
            self._info = ModelInfo.of(client.get_model())
        self.records: list[RequestRecord] = []

    def _connect(self, number: int) -> ProtocolClient:
        access = self._accesses[number % len(self._accesses)]
        if self._resumes:
            return PoolClient(self._address, access, Resuming())
        return GrpcClient(self._address, access)

    def send(self, index: int, due_s: float | None = None) -> None:
        """Even numbers are of the scenario mixed, odd ones of unfriendly."""
        name = ("mixed", "unfriendly")[index % 2]
        load = make_request(name, self._seed, index, self._info)
        load = replace(load, expected=(*load.expected, "OK", REJECTED))
        if self._resumes and "DEADLINE_EXCEEDED" in load.expected:  # too short for a restart
            load = replace(load, expected=(*load.expected, "UNAVAILABLE"))
        due_s = time.monotonic() if due_s is None else due_s
        measured = self._call(load, index, due_s)
        self.records.append(measured)  # appending is atomic

    def _call(self, load: LoadRequest, index: int, due_s: float) -> RequestRecord:
        at_s = time.time() - (time.monotonic() - due_s)
        if not load.reconnect:
            client = self._clients[index // 2 % len(self._clients)]
            return call(client, load, due_s).record(load, index, load.kind, at_s)
        with closing(self._connect(index // 2)) as client:
            return call(client, load, due_s).record(load, index, load.kind, at_s)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def find_capacity(client: SoakClient, indices: Iterator[int], duration_s: float) -> float:
    """Requests a second while the server runs its maximum of sequences and few requests wait."""

    def send(_: object) -> int:
        client.send(next(indices))  # itertools.count is atomic
        return 0  # tokens aren't counted here

    served = closed_loop(send, [()], SEQUENCES + 4, duration_s)
    return served.num_requests / served.seconds


def overload(client: SoakClient, indices: Iterator[int], rate: float, duration_s: float) -> int:
    """Sends at the rate, whatever the server does. Returns the number sent when all have ended."""
    start_s, shown_s, sent = time.monotonic(), time.monotonic(), []
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        for offset_s in arrivals(0, 0, rate, 0.0):
            if offset_s > duration_s:
                break
            due_s = start_s + offset_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            future: Future[None] = pool.submit(client.send, next(indices), due_s)
            sent.append(future)
            if time.monotonic() - shown_s > SHOW_S:
                shown_s = time.monotonic()
                _print(
                    f"{shown_s - start_s:5.0f} s: {len(sent):,} sent, {len(client.records):,} ended"
                )
    for future in sent:
        future.result()
    return len(sent)


def num_streams(log: Path) -> int:
    """Streams that have ended, as the server logged them: a killed process's metrics are gone."""
    return sum(entry.get("method") == "GenerateStream" for entry in read_log(log))


def settle(server: StartedServer, start: ProcessSample) -> tuple[ProcessSample, bool]:
    """Waits a while for connections to be closed and for what was killed, then samples."""
    end_s = time.monotonic() + SETTLE_S
    sample, is_idle = start, False
    while time.monotonic() < end_s:
        with suppress(OSError):
            sample, metrics = sample_process(server.pid), fetch_metrics(server.metrics_url)
            is_idle = not metrics.value(RUNNING) + metrics.value(WAITING)
            if is_idle and sample.num_fds <= start.num_fds:
                break
        time.sleep(0.2)
    return sample, is_idle


def make_keys(folder: Path, number: int) -> tuple[tuple[str, ...], Sequence[Access]]:
    """The server's options, and one access for each key; for none the only one without a key."""
    if not number:
        return (), (Access(),)
    file = folder / "keys.json"
    command = [sys.executable, "-m", "quill", "keys", "add", str(file)]
    secrets = [
        subprocess.run([*command, f"key{each}"], capture_output=True, text=True, check=True).stdout
        for each in range(number)
    ]
    options = ("--api-keys", str(file), "--allow-unauthenticated", "metrics")
    return options, [Access(api_key=secret.strip()) for secret in secrets]


def soak(folder: Path, bundle: Path | None, options: SoakOptions, *serve: str) -> Judgement:
    """`serve`: more options of the server, whose log and keys are in `folder`."""
    log = folder / "log"
    key_options, accesses = make_keys(folder, options.num_keys)
    with start_server(log, bundle, *SERVE, *key_options, *serve) as server:
        # One call first: what the server opens only once isn't a leak.
        SoakClient(server.address, 0, accesses).close()
        settle(server, sample_process(server.pid))
        start = sample_process(server.pid)
        client = SoakClient(server.address, 0, accesses, resumes=bool(options.faults))
        before, indices = num_streams(log), itertools.count()
        capacity = find_capacity(client, indices, min(60.0, 0.2 * options.duration_s))
        normal_ms = times_ms(read_log(log), "OK")
        num_warm_up = len(client.records)
        rate = options.load_factor * capacity
        _print(f"capacity {capacity:.1f} requests/s; now {rate:.1f} requests/s are sent")
        faults = inject(server.pid, options.faults, options.fault_period_s, log)
        with watch_process(server.pid) as watcher, faults:
            num_sent = num_warm_up + overload(client, indices, rate, options.duration_s)
            for _ in range(MAX_MORE_PERIODS):  # a busy machine restarts slowly
                if set(options.faults) <= set(faults.samples):
                    break
                num_sent += overload(client, indices, rate, options.fault_period_s)
        client.close()
        wait_until_noticed(log, faults.samples)
        end, is_idle = settle(server, start)
        num_ended = num_streams(log) - before
        _print(f"now {options.num_verified:,} of the answers are requested again, alone")
        some = _some(client.records, options.num_verified)
        verdict = verify(server.address, some, lambda *_: None, accesses[0])
        soaked = SoakResult(
            records=client.records,
            num_sent=num_sent,
            num_ended=num_ended,
            # An admitted request waits for a full queue at most; then it is served as before.
            bound_ms=3 * (max(normal_ms, default=0.0) + 1000 * QUEUE / capacity),
            start=start,
            end=end,
            samples=watcher.samples[len(watcher.samples) // 3 :],
            is_idle=is_idle,
            log=read_log(log),
            verdict=verdict,
            options=options,
            injected=faults.samples,
        )
    return judge(soaked)


def _some(records: Sequence[RequestRecord], number: int) -> Sequence[RequestRecord]:
    """Answers with tokens, spread over the whole run."""
    answered = [record for record in records if record.token_ids]
    return answered[:: max(1, len(answered) // max(1, number))][:number]


def _print(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0)
    add("--bundle", type=Path, help="default: the default model")
    add("--verify", type=int, default=200, metavar="N")
    add("--load-factor", type=float, default=2.0, metavar="F", help="of the capacity (default 2)")
    add("--keys", type=int, default=0, metavar="N", help="API keys, which clients use in turns")
    add("--faults", nargs="*", choices=list(FAULTS), metavar="FAULT",
        help=f"in turns; without a name all: {', '.join(FAULTS)}")  # fmt: skip
    add("--fault-period", type=float, default=60.0, metavar="S", help="from one to the next")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # nothing of each retry
    faults = list(FAULTS) if args.faults == [] else args.faults or []
    options = SoakOptions(
        duration_s=60 * args.minutes,
        num_verified=args.verify,
        load_factor=args.load_factor,
        num_keys=args.keys,
        faults=faults,
        fault_period_s=args.fault_period,
    )
    with tempfile.TemporaryDirectory() as name:
        try:
            judgement = soak(Path(name), args.bundle, options)
        except LoadtestError as error:
            print(f"soak: {error}", file=sys.stderr)
            return error.exit_code
    print("\n".join(judgement.lines))
    print(f"soaked for {args.minutes:g} minutes: {'FAILED' if judgement.failures else 'passed'}")
    return 1 if judgement.failures else 0


if __name__ == "__main__":
    sys.exit(main())

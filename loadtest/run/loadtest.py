"""`quill loadtest`: a load from its start to its report.

Knows: the order of the steps. Does not know: how each is done.
"""

import argparse
import importlib.util
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from quill.loadtest.environment.process import ProcessSample, machine_info, watch_process
from quill.loadtest.environment.server import (
    HTTP_OFFSET,
    MetricsSample,
    derive_url,
    offset_port,
    start_server,
    wait_until_healthy,
    watch_server,
)
from quill.loadtest.errors import LoadtestError, NoServerError, StoppedError
from quill.loadtest.protocols.grpc import CallError, GrpcClient
from quill.loadtest.protocols.names import TITLES
from quill.loadtest.results.report import PAGE, Run, search_result, write_report
from quill.loadtest.results.slo import RateTrial, Slo, next_rate
from quill.loadtest.results.summary import lines
from quill.loadtest.results.verify import Verdict, verify
from quill.loadtest.run.locust_process import Load, ProgressLine, describe_progress, run_locust
from quill.loadtest.run.options import LoadtestOptions, read_options
from quill.loadtest.workload.records import RequestRecord, read_records
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.scenarios import check_model, find_scenario
from quill.protos import generation_pb2 as pb
from quill.server.client.access import Access, read_access
from quill.server.client.target import is_multiple, read_target, resolve

EARLIER = (
    "The seed was given. If this server had answered the same requests before, their prompts were "
    "in its prefix cache, and the run is flattered."
)
INTERRUPTED = (
    "Ctrl-C ended the run early: requests that hadn't ended aren't counted, nothing is verified."
)


class Target(NamedTuple):
    address: str  # of one server, also where the load goes to several
    load_address: str  # for the protocol of the load
    metrics_url: str | None
    model: pb.Model
    access: Access
    pid: int | None = None  # of a server that was started here


class LoadResult(NamedTuple):
    """The records and samples of a load."""

    records: list[RequestRecord]
    samples: list[MetricsSample]
    process: list[ProcessSample]
    trials: list[RateTrial]
    is_whole: bool = True  # False: Ctrl-C ended it early


def run(args: argparse.Namespace) -> None:
    options = read_options(args)
    slo = Slo.parse(options.slo) if options.slo else None
    find_scenario(options.plan.scenario)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.recorded:
        _run_recorded(options, slo, read_access(args))
        return
    # Started processes don't get the terminal's signals, so they are ended when it is closed.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    if importlib.util.find_spec("locust") is None:  # looked for, not imported
        raise ModuleNotFoundError("locust", name="locust")
    with _target(options, read_access(args)) as target:
        check_model(options.plan.scenario, target.model)
        print(_describe_model(target), flush=True)
        notes = [EARLIER] if options.plan.seed and options.address else []
        if not options.plan.seed:
            options = replace(options, plan=options.plan.with_seed())
            again = f"--seed {options.plan.seed} sends the same requests again"
            print(f"seed {options.plan.seed} ({again})", flush=True)
        loaded = _search(options, target, slo) if slo and options.shape == "search" else None
        loaded = loaded or _load(options, target)
        verdict = None
        if options.verify and loaded.is_whole:
            try:
                verdict = _verify(target, loaded.records)
            except KeyboardInterrupt:
                loaded = loaded._replace(is_whole=False)
    info = machine_info() | _model_info(target.model) | {"load": _describe_load(options)}
    _finish(options, slo, loaded, info, verdict, notes)
    if not loaded.is_whole:
        raise StoppedError("stopped by Ctrl-C; the report has the requests that had ended by then")


def _run_recorded(options: LoadtestOptions, slo: Slo | None, access: Access) -> None:
    assert options.recorded
    records = read_records(options.recorded)
    verdict, info = None, machine_info() | {"recorded": str(options.recorded)}
    if options.verify:
        with _target(options, access) as target:
            info |= _model_info(target.model)
            verdict = _verify(target, records)
    _finish(options, slo, LoadResult(records, [], [], []), info, verdict)


def _finish(
    options: LoadtestOptions,
    slo: Slo | None,
    loaded: LoadResult,
    info: dict[str, str],
    verdict: Verdict | None,
    notes: Sequence[str] = (),
) -> None:
    if not loaded.records:
        raise LoadtestError(
            f"no request ended, so there is nothing to report; {options.out} has the logs"
        )
    info["written"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    verified = str(verdict) if verdict else ""
    run_ = Run(
        records=loaded.records,
        info=info,
        samples=loaded.samples,
        process=loaded.process,
        slo=slo,
        trials=loaded.trials,
        verified=verified,
        notes=[*notes],
    )
    if not loaded.is_whole:
        run_.notes.append(INTERRUPTED)
    summary = write_report(options.out, run_)
    for line in lines(summary):
        print(line)
    if loaded.trials:
        print(search_result(loaded.trials))
    print(f"report: {options.out / PAGE}", flush=True)
    if verdict:
        print(verdict, flush=True)
        verdict.check()


@contextmanager
def _target(options: LoadtestOptions, access: Access) -> Iterator[Target]:
    address = options.address
    if address and is_multiple(address):
        servers = _servers(address)
        for each in servers:
            wait_until_healthy(each, access=access)
        model = _get_model(servers[0], access)
        yield Target(servers[0], address, options.metrics_url, model, access)
        return
    if address:
        wait_until_healthy(address, access=access)
        scheme = "https" if access.uses_tls else "http"
        url = options.metrics_url or derive_url(address, scheme)
        load_address = address
        if options.protocol == "http":
            load_address = options.http_address or offset_port(address, HTTP_OFFSET)
        yield Target(address, load_address, url, _get_model(address, access), access)
        return
    log = options.out / "server.log"
    with start_server(log, options.bundle, *options.serve_options, access=access) as server:
        load_address = server.address_for(options.protocol)
        model, metrics = _get_model(server.address, access), server.metrics_url
        yield Target(server.address, load_address, metrics, model, access, server.pid)


def _servers(address: str) -> tuple[str, ...]:
    target = read_target(address)
    try:
        return target.servers if target.name is None else resolve(target.name)
    except OSError as error:
        raise NoServerError(f"{target.name} can't be looked up: {error}") from error


def _get_model(address: str, access: Access) -> pb.Model:
    with closing(GrpcClient(address, access)) as client:
        try:
            return client.get_model()
        except CallError as error:
            raise NoServerError(
                f"the server at {address} doesn't answer GetModel: {error.message} "
                f"({error.status}). API keys come with --api-key-file"
            ) from error


def _load(options: LoadtestOptions, target: Target) -> LoadResult:
    records = options.out / "requests.csv"
    log = options.out / "locust.log"
    log.unlink(missing_ok=True)
    load = Load(
        plan=options.plan,
        protocol=options.protocol,
        address=target.load_address,
        records=records,
        log=log,
        num_users=options.users or max(1, options.num_workers),
        num_workers=options.num_workers,
        access_options=options.access_options,
        info=ModelInfo.of(target.model),
    )
    records.unlink(missing_ok=True)  # an older run's
    line = ProgressLine()
    with (
        watch_server(target.metrics_url, target.access) as watcher,
        watch_process(target.pid) as process,
    ):
        is_whole = run_locust(load, lambda progress: line.show(describe_progress(progress)))
    line.end()
    found = read_records(records) if is_whole or records.exists() else []
    if is_whole and not options.num_workers:  # workers' parts end at different numbers
        check_all_recorded(found, log)
    # Before the load the server only waits for Locust to start.
    start_s = min((record.intended_at_s for record in found), default=0.0)
    busy = [sample for sample in process.samples if sample.at_s >= start_s]
    return LoadResult(found, watcher.samples, busy, [], is_whole)


def check_all_recorded(records: list[RequestRecord], log: Path) -> None:
    """Requests are numbered as they start: a missing number was lost by the load test itself."""
    num_begun = max((record.index for record in records), default=-1) + 1
    if num_begun != len(records):
        raise LoadtestError(
            f"{num_begun - len(records)} of {num_begun} requests have no record: a bug in their "
            f"scenario, or in the user. {log} has more"
        )


def _search(options: LoadtestOptions, target: Target, slo: Slo) -> LoadResult:
    """Each step has requests of its own: the prefix cache must not have them from the last step."""
    everything = LoadResult([], [], [], [])
    plan = options.plan
    while (rate := next_rate(everything.trials, plan.rate)) is not None:
        step = replace(plan, rate=rate, seed=plan.seed + len(everything.trials))
        loaded = _load(replace(options, plan=step, shape="constant"), target)
        everything.records.extend(loaded.records)
        everything.samples.extend(loaded.samples)
        everything.process.extend(loaded.process)
        if not loaded.is_whole:
            return everything._replace(is_whole=False)
        well = sum(map(slo.is_met, loaded.records))
        num_requests, goodput = len(loaded.records), well / plan.duration_s
        trial = RateTrial(rate, slo.share(loaded.records), goodput, num_requests)
        verb = "is" if trial.is_carried else "isn't"
        print(f"{rate:g} requests/s {verb} carried: {trial.share:.1%} served well", flush=True)
        everything.trials.append(trial)
    return everything


def _verify(target: Target, records: list[RequestRecord]) -> Verdict:
    line = ProgressLine()

    def show(number: int, verdict: Verdict) -> None:
        line.show(f"verifying: {number:,} of {len(records):,}, {len(verdict.differences):,} differ")

    verdict = verify(_answering(target), records, show, target.access)
    line.end()
    return verdict


def _answering(target: Target) -> str:
    """One server. Of several the first that still answers: some may have failed under the load."""
    if not is_multiple(target.load_address):
        return target.address
    for each in _servers(target.load_address):
        with suppress(NoServerError):
            _get_model(each, target.access)
            return each
    raise NoServerError(f"none of {target.load_address} answers any more: nothing is verified")


def _describe_model(target: Target) -> str:
    model = target.model
    return f"{model.name}, {model.precision} on {model.device}, at {target.load_address}"


def _describe_load(options: LoadtestOptions) -> str:
    plan = options.plan
    size = f"{options.users} users" if options.users else f"{plan.rate:g} requests/s"
    kind = "closed loop" if options.users else "open loop, Poisson arrivals"
    load = f"{plan.scenario}, seed {plan.seed}, {size} ({kind}), {options.shape}"
    return f"{load}, over {TITLES[options.protocol]}"


def _model_info(model: pb.Model) -> dict[str, str]:
    exact = "same seed, same tokens" if model.deterministic else "not exact"
    return {
        "model": f"{model.name}, {model.num_parameters:,} parameters",
        "precision": f"{model.precision} on {model.device}, {exact}",
        "server": f"Quill {model.server_version}, ONNX Runtime {model.runtime_version}, "
        f"{model.max_num_seqs} sequences, context {model.context:,}, queue {model.max_waiting}",
    }

"""`quill loadtest`: a load from its start to its report.

Knows: the order of the steps. Does not know: how each is done.
"""

import argparse
import importlib.util
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from quill.loadtest.environment.process import machine_info, watch_process
from quill.loadtest.environment.server import (
    HTTP_OFFSET,
    derive_url,
    offset_port,
    start_server,
    wait_until_healthy,
    watch_server,
)
from quill.loadtest.errors import LoadtestError, NoServerError, StoppedError
from quill.loadtest.protocols.grpc import CallError, GrpcClient
from quill.loadtest.protocols.names import TITLES
from quill.loadtest.results.report import PAGE, sentences, write_report
from quill.loadtest.results.slo import RateTrial, Slo, next_rate
from quill.loadtest.results.summary import Run, table
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
MIN_DRAIN_S = 30.0
DRAINED = (
    "Requests of a step had {:g} s to end after the last one was sent. Those that hadn't ended "
    "were cut off, and count by what had come until then."
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


def run(args: argparse.Namespace) -> None:
    options = read_options(args)
    loaded = Run(slo=Slo.parse(options.slo) if options.slo else None)
    find_scenario(options.plan.scenario)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.recorded:
        _run_recorded(options, loaded, read_access(args))
        return
    # Started processes don't get the terminal's signals, so they are ended when it is closed.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    if importlib.util.find_spec("locust") is None:  # looked for, not imported
        raise ModuleNotFoundError("locust", name="locust")
    with _target(options, read_access(args)) as target:
        check_model(options.plan.scenario, target.model)
        print(_describe_model(target), flush=True)
        options = _with_seed(options, loaded)
        if options.shape == "search":
            _search(options, target, loaded)
        else:
            _load(options, target, loaded)
        verdict = None
        if options.verify and loaded.is_whole:
            try:
                verdict = _verify(target, loaded.records)
            except KeyboardInterrupt:
                loaded.is_whole = False
    loaded.info = machine_info() | _model_info(target.model) | {"load": _describe_load(options)}
    if not loaded.is_whole:
        loaded.notes.append(INTERRUPTED)
    _finish(options, loaded, verdict)
    if not loaded.is_whole:
        raise StoppedError("stopped by Ctrl-C; the report has the requests that had ended by then")


def _with_seed(options: LoadtestOptions, loaded: Run) -> LoadtestOptions:
    if options.plan.seed:
        loaded.notes += [EARLIER] if options.address else []
        return options
    plan = options.plan.with_seed()
    print(f"seed {plan.seed} (--seed {plan.seed} sends the same requests again)", flush=True)
    return replace(options, plan=plan)


def _run_recorded(options: LoadtestOptions, loaded: Run, access: Access) -> None:
    assert options.recorded
    loaded.records = read_records(options.recorded)
    loaded.info = machine_info() | {"recorded": str(options.recorded)}
    verdict = None
    if options.verify:
        with _target(options, access) as target:
            loaded.info |= _model_info(target.model)
            verdict = _verify(target, loaded.records)
    _finish(options, loaded, verdict)


def _finish(options: LoadtestOptions, loaded: Run, verdict: Verdict | None) -> None:
    if not loaded.records:
        raise LoadtestError(
            f"no request ended, so there is nothing to report; {options.out} has the logs"
        )
    loaded.info["written"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    loaded.verified = str(verdict) if verdict else ""
    summary = write_report(options.out, loaded)
    for text in sentences(loaded, summary):
        print(text)
    for name, *cells in table(summary):
        print(f"{name:<24}" + "".join(f"{cell:>11}" for cell in cells))
    print(f"report: {options.out / PAGE}", flush=True)
    if verdict:
        verdict.check()


@contextmanager
def _target(options: LoadtestOptions, access: Access) -> Iterator[Target]:
    address = options.address
    if address and is_multiple(address):
        servers = _servers(address)
        for each in servers:
            wait_until_healthy(each, access=access)
        model = _get_model(servers[0], access)
        yield Target(servers[0], address, options.metrics, model, access)
        return
    if address:
        wait_until_healthy(address, access=access)
        scheme = "https" if access.uses_tls else "http"
        url = options.metrics or derive_url(address, scheme)
        load_address = address
        if options.protocol == "http":
            load_address = options.http or offset_port(address, HTTP_OFFSET)
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


def _load(options: LoadtestOptions, target: Target, loaded: Run) -> list[RequestRecord]:
    """Adds the records and samples of one load; returns its records."""
    log, records = options.out / "locust.log", options.out / "requests.csv"
    for older in (log, records):
        older.unlink(missing_ok=True)
    load = Load(
        plan=options.plan,
        protocol=options.protocol,
        address=target.load_address,
        records=records,
        log=log,
        num_users=options.users or max(1, options.workers),
        num_workers=options.workers,
        access_options=options.access_options,
        info=ModelInfo.of(target.model),
    )
    line = ProgressLine()
    with (
        watch_server(target.metrics_url, target.access) as watcher,
        watch_process(target.pid) as process,
    ):
        is_whole = run_locust(load, lambda progress: line.show(describe_progress(progress)))
    line.end()
    found = read_records(records) if is_whole or records.exists() else []
    if is_whole and not options.workers:  # workers' parts end at different numbers
        check_all_recorded(found, log)
    # Before the load the server only waits for Locust to start.
    start_s = min((record.intended_at_s for record in found), default=0.0)
    loaded.records += found
    loaded.samples += watcher.samples
    loaded.process += [sample for sample in process.samples if sample.at_s >= start_s]
    loaded.is_whole = is_whole
    return found


def check_all_recorded(records: list[RequestRecord], log: Path) -> None:
    """Requests are numbered as they start: a missing number was lost by the load test itself."""
    num_begun = max((record.index for record in records), default=-1) + 1
    if num_begun != len(records):
        raise LoadtestError(
            f"{num_begun - len(records)} of {num_begun} requests have no record: a bug in their "
            f"scenario, or in the user. {log} has more"
        )


def _search(options: LoadtestOptions, target: Target, loaded: Run) -> None:
    """Each step has requests of its own: the prefix cache must not have them from the last step."""
    plan, slo, trials = options.plan, loaded.slo, loaded.trials
    assert slo is not None
    # A request that is cut off has missed a limit on its whole time.
    drain_s = max(MIN_DRAIN_S, plan.duration_s, 2 * max(slo.limits_ms.values()) / 1000)
    loaded.notes.append(DRAINED.format(drain_s))
    while (rate := next_rate(trials, plan.rate)) is not None:
        step = replace(plan, rate=rate, seed=plan.seed + len(trials), drain_s=drain_s)
        records = _load(replace(options, plan=step, shape="constant"), target, loaded)
        if not loaded.is_whole:
            return
        goodput = sum(map(slo.is_met, records)) / plan.duration_s
        trial = RateTrial(rate, slo.share(records), goodput, len(records))
        verb = "is" if trial.is_carried else "isn't"
        print(f"{rate:g} requests/s {verb} carried: {trial.share:.1%} served well", flush=True)
        trials.append(trial)


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

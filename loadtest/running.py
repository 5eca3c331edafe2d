"""`quill loadtest`: a load from its start to its report.

Knows: the order of things. Does not know: how each is done.
"""

import argparse
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc

from loadtest.crowd import Plan
from loadtest.errors import LoadtestError, NoServerError
from loadtest.locust_process import Load, run_locust
from loadtest.machine import machine_facts
from loadtest.metrics import Look, guess_url, watch_server
from loadtest.options import Settings, read_settings
from loadtest.own_server import own_server, wait_until_healthy
from loadtest.progress import Line, describe
from loadtest.records import Record, read_records
from loadtest.report import PAGE, Run, search_result, write_report
from loadtest.scenarios import check_scenario
from loadtest.slo import Slo, Tried, next_rate
from loadtest.summary import lines
from loadtest.verify import Verdict, verify
from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as pb_grpc
from server.access import Access, read_access


class Target(NamedTuple):
    address: str
    metrics_url: str | None
    model: pb.Model
    access: Access


class Loaded(NamedTuple):
    """What a load leaves."""

    records: list[Record]
    looks: list[Look]
    tried: list[Tried]


def run(args: argparse.Namespace) -> None:
    settings = read_settings(args)
    slo = Slo.parse(settings.slo) if settings.slo else None
    check_scenario(settings.scenario)
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.recorded:
        _run_recorded(settings, slo, read_access(args))
        return
    if importlib.util.find_spec("locust") is None:  # looked for, not imported
        raise ModuleNotFoundError("locust", name="locust")
    with _target(settings, read_access(args)) as target:
        print(_describe_model(target), flush=True)
        loaded = _search(settings, target, slo) if slo and settings.shape == "search" else None
        loaded = loaded or _load(settings, target)
        verdict = _verify(target, loaded.records) if settings.verify else None
    facts = machine_facts() | _model_facts(target.model) | {"load": _describe_load(settings)}
    _finish(settings, slo, loaded, facts, verdict)


def _run_recorded(settings: Settings, slo: Slo | None, access: Access) -> None:
    assert settings.recorded
    records = read_records(settings.recorded)
    verdict, facts = None, machine_facts() | {"recorded": str(settings.recorded)}
    if settings.verify:
        with _target(settings, access) as target:
            facts |= _model_facts(target.model)
            verdict = _verify(target, records)
    _finish(settings, slo, Loaded(records, [], []), facts, verdict)


def _finish(
    settings: Settings,
    slo: Slo | None,
    loaded: Loaded,
    facts: dict[str, str],
    verdict: Verdict | None,
) -> None:
    if not loaded.records:
        raise LoadtestError(
            f"no request ended, so there is nothing to report; {settings.out} has the logs"
        )
    facts["written"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    verified = str(verdict) if verdict else ""
    run_ = Run(loaded.records, facts, loaded.looks, slo, loaded.tried, verified)
    summary = write_report(settings.out, run_)
    for line in lines(summary):
        print(line)
    if loaded.tried:
        print(search_result(loaded.tried))
    print(f"report: {settings.out / PAGE}", flush=True)
    if verdict:
        print(verdict, flush=True)
        verdict.check()


@contextmanager
def _target(settings: Settings, access: Access) -> Iterator[Target]:
    address = settings.address
    if address:
        wait_until_healthy(address, access=access)
        scheme = "https" if access.uses_tls else "http"
        url = settings.metrics_url or guess_url(address, scheme)
        yield Target(address, url, _get_model(address, access), access)
        return
    log = settings.out / "server.log"
    with own_server(log, settings.bundle, *settings.serve_options, access=access) as server:
        model = _get_model(server.address, access)
        yield Target(server.address, server.metrics_url, model, access)


def _get_model(address: str, access: Access) -> pb.Model:
    with access.channel(address, ()) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        try:
            return stub.GetModel(pb.GetModelRequest(), timeout=60, metadata=access.metadata)
        except grpc.RpcError as error:
            raise NoServerError(
                f"the server at {address} doesn't tell its model: {error.details()} "
                f"({error.code().name}). API keys come with --api-key-file"
            ) from error


def _load(settings: Settings, target: Target) -> Loaded:
    records = settings.out / "requests.csv"
    log = settings.out / "locust.log"
    log.unlink(missing_ok=True)
    load = Load(
        plan=_plan(settings),
        address=target.address,
        records=records,
        log=log,
        num_users=settings.users or max(1, settings.num_workers),
        num_workers=settings.num_workers,
        access_options=settings.access_options,
    )
    line = Line()
    with watch_server(target.metrics_url, target.access) as watcher:
        run_locust(load, lambda told: line.show(describe(told)))
    line.end()
    found = read_records(records)
    if not settings.num_workers:  # whose parts end at different numbers
        check_all_recorded(found, log)
    return Loaded(found, watcher.looks, [])


def check_all_recorded(records: list[Record], log: Path) -> None:
    """Requests are numbered as they begin: a number that is missing was lost by the load itself."""
    num_begun = max((record.index for record in records), default=-1) + 1
    if num_begun != len(records):
        raise LoadtestError(
            f"{num_begun - len(records)} of {num_begun} requests have no record: a bug in their "
            f"scenario, or in the user. {log} has more"
        )


def _search(settings: Settings, target: Target, slo: Slo) -> Loaded:
    """Each step has requests of its own: the prefix cache must not know them from the last."""
    everything = Loaded([], [], [])
    while (rate := next_rate(everything.tried, settings.rate)) is not None:
        number = len(everything.tried)
        step = replace(settings, rate=rate, shape="constant", seed=settings.seed + number)
        loaded = _load(step, target)
        well = sum(map(slo.is_met, loaded.records))
        tried = Tried(rate, slo.share(loaded.records), well / settings.duration_s)
        verb = "is" if tried.is_carried else "isn't"
        print(f"{rate:g} requests/s {verb} carried: {tried.share:.1%} served well", flush=True)
        everything.records.extend(loaded.records)
        everything.looks.extend(loaded.looks)
        everything.tried.append(tried)
    return everything


def _plan(settings: Settings) -> Plan:
    return Plan(
        scenario=settings.scenario,
        seed=settings.seed,
        max_requests=settings.max_requests,
        duration_s=settings.duration_s,
        rate=settings.rate,
        ramp_s=settings.ramp_s,
        max_new_tokens=settings.max_new_tokens,
    )


def _verify(target: Target, records: list[Record]) -> Verdict:
    line = Line()

    def show(number: int, verdict: Verdict) -> None:
        line.show(f"verifying: {number:,} of {len(records):,}, {len(verdict.differences):,} differ")

    verdict = verify(target.address, records, show, target.access)
    line.end()
    return verdict


def _describe_model(target: Target) -> str:
    model = target.model
    return f"{model.name}, {model.precision} on {model.device}, at {target.address}"


def _describe_load(settings: Settings) -> str:
    crowd = f"{settings.users} users" if settings.users else f"{settings.rate:g} requests/s"
    kind = "closed loop" if settings.users else "open loop, Poisson arrivals"
    return f"{settings.scenario}, seed {settings.seed}, {crowd} ({kind}), {settings.shape}"


def _model_facts(model: pb.Model) -> dict[str, str]:
    exact = "same seed, same tokens" if model.deterministic else "not exact"
    return {
        "model": f"{model.name}, {model.num_parameters:,} parameters",
        "precision": f"{model.precision} on {model.device}, {exact}",
        "server": f"Quill {model.server_version}, ONNX Runtime {model.runtime_version}, "
        f"{model.max_rows} rows, context {model.context:,}, queue {model.max_waiting}",
    }

"""`quill cluster up`: replicas on this machine, until a signal ends them.

Knows: the command's arguments, signals, what a person wants to see. Does not know: how Ray works.
"""

import argparse
import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

from quill.export.bundle.manifest import read_manifest
from quill.server.addresses import write_address
from quill.server.auth.key_file import read_keys
from quill.server.cluster.environment import free_port, is_free
from quill.server.cluster.local_ray import LocalCluster, Progress, local_cluster
from quill.server.cluster.own_session import go_on_in_own_session
from quill.server.cluster.plan import Plan, check_exposure, read_plan
from quill.server.cluster.reload import DONE, reload_all
from quill.server.cluster.replica.bundle_source import local_bundle
from quill.server.errors import ReloadError, StartError
from quill.server.serve.ready_message import line_to_type, proof, quill_command
from quill.server.settings import Settings

POLL_S = 0.5
LOCAL_DRAIN_S = 2.0  # HAProxy hears of a replica that ends within a moment
CACHE_MB, LEAST_CACHE_MB = 2048, 256


def run(args: argparse.Namespace) -> None:
    plan = _plan(args)
    check_exposure(plan, args.insecure)
    go_on_in_own_session()
    lines = _lines_to_type(plan)
    stopping, at_once, reloading = threading.Event(), threading.Event(), threading.Event()
    _stop_on_signals(stopping, at_once)
    signal.signal(signal.SIGHUP, lambda *_: reloading.set())
    print("Starting Ray: about ten seconds. Ctrl-C ends everything.", flush=True)
    with local_cluster(plan, args.dashboard) as cluster:
        _stop_on_signals(stopping, at_once)  # again: Ray has put its own in the place of ours
        cluster.deploy(plan)
        shown = _wait(cluster, plan, stopping)
        if stopping.is_set():
            return
        print(f"Serving at {plan.host}:{plan.port}. Now type:")
        print(*(f"  {line}" for line in lines), sep="\n", flush=True)
        _watch(cluster, stopping, reloading, shown)
        print("Stopping: running answers are finished first, unless it is said again.", flush=True)
        cluster.end(at_once)


def _plan(args: argparse.Namespace) -> Plan:
    most = args.replicas[1]
    plan = read_plan(
        args,
        threads=max(1, (os.cpu_count() or 1) // most),
        cache_mb=max(LEAST_CACHE_MB, CACHE_MB // most),
        one_machine=True,
    )
    return replace(plan, drain_s=LOCAL_DRAIN_S, http_port=free_port())


def _lines_to_type(plan: Plan) -> list[str]:
    """What is wrong with what was given is said here, and not by each replica again and again."""
    options = plan.options
    directory = local_bundle(options.bundle, options.manifest_sha256)
    family = read_manifest(directory).family
    settings = Settings(host=plan.host, api_keys=_keys(plan))
    if settings.api_keys is not None:
        read_keys(settings.api_keys)
    if not is_free(plan.host, plan.port):
        address = write_address(plan.host, plan.port)
        raise StartError(
            f"can't listen at {address}: is another server there, or is the host not this "
            "machine's? Give another --port or --host"
        )
    lines = [line_to_type(settings, plan.port, family)]
    if options.metrics_port is not None:
        host, ports = options.metrics_host, itertools.count(options.metrics_port)
        free = itertools.islice((port for port in ports if is_free(host, port)), plan.most)
        needed = [] if options.open_metrics else proof(settings)
        lines.append(
            " ".join([quill_command(), "top", *(f"{host}:{port}" for port in free), *needed])
        )
    return lines


def _watch(
    cluster: LocalCluster, stopping: threading.Event, reloading: threading.Event, shown: str
) -> None:
    while not stopping.wait(POLL_S):
        shown = _show(cluster.progress(), shown)
        if reloading.is_set():
            reloading.clear()
            _reload()


def _reload() -> None:
    """As a server does on SIGHUP: what goes wrong is told, and all goes on."""
    try:
        reload_all()
        print(DONE, flush=True)
    except ReloadError as error:
        print(error, flush=True)


def _keys(plan: Plan) -> Path | None:
    return None if plan.options.api_keys is None else Path(plan.options.api_keys)


def _stop_on_signals(stopping: threading.Event, at_once: threading.Event) -> None:
    """The first time in good order, the second time at once."""

    def stop(*_: object) -> None:
        if stopping.is_set():
            at_once.set()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _wait(cluster: LocalCluster, plan: Plan, stopping: threading.Event) -> str:
    """Until all that shall be there first are there. What was shown last."""
    shown = ""
    while not stopping.wait(POLL_S):
        progress = cluster.progress()
        shown = _show(progress, shown)
        if progress.is_running and cluster.answers(plan):
            break
        if progress.has_failed:
            raise StartError(f"the replicas don't start: {progress.message}")
    return shown


def _show(progress: Progress, shown: str) -> str:
    states = ", ".join(f"{num} {state.lower()}" for state, num in progress.replicas.items())
    line = f"replicas: {states or 'none yet'}"
    if line != shown:
        print(line, flush=True)
    return line

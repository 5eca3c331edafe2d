"""`quill cluster up`, `config` and `reload`.

Knows: the commands' arguments, signals, what is printed. Does not know: how Ray works.
"""

import argparse
import itertools
import logging
import os
import signal
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue

from quill.export.bundle.manifest import read_manifest
from quill.server.auth.key_file import read_keys
from quill.server.cluster import local_ray
from quill.server.cluster.bundle_source import local_bundle
from quill.server.cluster.plan import (
    COORDINATOR,
    NAMESPACE,
    Plan,
    check_exposure,
    read_plan,
    write_ray_service,
    write_serve_config,
)
from quill.server.errors import ReloadError, StartError
from quill.server.serve.command_line import access_options, line_to_type, quill_command
from quill.server.settings import Settings

POLL_S = 0.5
KV_CACHE_MB, MIN_KV_CACHE_MB = 2048, 256
THREADS = 4
DASHBOARD_PORT = 8265
RELOADED = "every replica has the bundle as it is now"
_HINT = (
    "run it on one of its machines, with the environment and the token of `ray start`. "
    "`quill cluster up` reloads on SIGHUP"
)


def up(args: argparse.Namespace) -> None:
    """Replicas on this machine, until a signal."""
    most = args.replicas[1]
    threads = max(1, (os.cpu_count() or 1) // most)
    kv_cache_mb = max(MIN_KV_CACHE_MB, KV_CACHE_MB // most)
    plan = read_plan(args, threads=threads, kv_cache_mb=kv_cache_mb, one_machine=True)
    check_exposure(plan, args.insecure)
    lines = lines_to_type(plan)
    signals = Signals()
    signals.listen()
    print("Starting Ray: about ten seconds. Ctrl-C ends everything.", flush=True)
    with local_ray.local_ray(plan, DASHBOARD_PORT if args.dashboard else None):
        signals.listen()  # again: Ray has replaced the handlers
        local_ray.deploy(plan)
        shown = _wait(plan, signals)
        if signals.num_stops:
            return
        print(f"Serving at {plan.args.frontend}. Now type:")
        print(*(f"  {line}" for line in lines), sep="\n", flush=True)
        while not signals.wait_for_stop(1, POLL_S):
            shown = _show(local_ray.progress(), shown)
            if signals.take_reload():
                try:
                    _reload_all()
                    print(RELOADED, flush=True)
                except ReloadError as error:  # the cluster goes on
                    print(error, flush=True)
        print("Stopping: running calls finish first; a second signal ends them.", flush=True)
        local_ray.stop(lambda timeout_s: signals.wait_for_stop(2, timeout_s))


def config(args: argparse.Namespace) -> None:
    """Writes serve.yaml, or a RayService. It needs no Ray."""
    plan = read_plan(args, threads=THREADS, one_machine=False)
    check_exposure(plan, args.insecure)
    ray_service = args.ray_service
    print(write_ray_service(plan, args.image) if ray_service else write_serve_config(plan), end="")


def reload(args: argparse.Namespace) -> None:
    """All replicas, from a machine of the Ray cluster."""
    import ray

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(address="auto", configure_logging=False, log_to_driver=False)
    except Exception as error:  # Ray has many kinds
        raise ReloadError(f"no Ray cluster can be reached from here: {_HINT} ({error})") from error
    try:
        _reload_all()
    finally:
        ray.shutdown()
    print(RELOADED)


def _reload_all() -> None:
    import ray

    try:
        coordinator = ray.get_actor(COORDINATOR, NAMESPACE)
    except ValueError as error:
        raise ReloadError("this Ray cluster has no replicas of Quill") from error
    try:
        refused = ray.get(coordinator.reload.remote())
    except ray.exceptions.RayError as error:
        raise ReloadError(f"the replicas' coordinator ended while it reloaded: {error}") from error
    if refused:
        raise ReloadError(refused)


def lines_to_type(plan: Plan) -> list[str]:
    """Checks the arguments here, so that not every replica has to report the same error."""
    args = plan.args
    family = read_manifest(local_bundle(args.bundle, args.manifest_sha256)).family
    settings = Settings(host=args.host, api_keys=args.settings.api_keys)
    if settings.api_keys is not None:
        read_keys(settings.api_keys)
    if not is_free(args.host, args.port):
        raise StartError(
            f"can't listen at {args.frontend}: is another server there, or is the host not this "
            "machine's? Give another --port or --host"
        )
    lines = [line_to_type(settings, args.port, family)]
    for first in args.settings.metrics_ports[:1]:
        free = (port for port in itertools.count(first) if is_free("127.0.0.1", port))
        pages = [f"127.0.0.1:{port}" for port in itertools.islice(free, plan.max_replicas)]
        needed = (
            access_options(settings) if "metrics" not in args.settings.allow_unauthenticated else []
        )
        lines.append(" ".join([quill_command(), "top", *pages, *needed]))
    return lines


def is_free(host: str, port: int) -> bool:
    """At this moment."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
    except OSError:
        return False
    return True


class Signals:
    """SIGINT and SIGTERM: the first stops gracefully, the second at once. SIGHUP reloads.

    A handler runs in the thread that waits, at any instruction of its waiting. An Event takes a
    lock that isn't reentrant, so `set` could wait for its own caller; a SimpleQueue's `put` can't.
    """

    def __init__(self) -> None:
        self._received: SimpleQueue[int] = SimpleQueue()
        self._is_reload = False
        self.num_stops = 0

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._received.put(number))

    def wait_for_stop(self, number: int, timeout_s: float) -> bool:
        """For the first, or the second. A SIGHUP ends the waiting, too."""
        with suppress(Empty):
            if self.num_stops < number:
                self._note(self._received.get(timeout=timeout_s))
            while True:
                self._note(self._received.get_nowait())
        return self.num_stops >= number

    def take_reload(self) -> bool:
        taken, self._is_reload = self._is_reload, False
        return taken

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._is_reload = True
        else:
            self.num_stops += 1


def _wait(plan: Plan, signals: Signals) -> str:
    """Until the first replicas serve. Returns the last line shown."""
    shown = ""
    while not signals.wait_for_stop(1, POLL_S):
        found = local_ray.progress()
        shown = _show(found, shown)
        if found.state == "RUNNING" and local_ray.is_serving(plan):
            break
        if found.state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise StartError(f"the replicas don't start: {found.message}")
    return shown


def _show(found: local_ray.Progress, shown: str) -> str:
    states = ", ".join(f"{num} {state.lower()}" for state, num in found.replicas.items())
    line = f"replicas: {states or 'none yet'}"
    if line != shown:
        print(line, flush=True)
    return line

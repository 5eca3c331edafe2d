"""The load test itself: `locust -f loadtest/locustfile.py`, or `quill loadtest`, which runs it.

Knows: Locust's options and events, the schedule. Does not know: reports.
Without --host it starts the default server, and stops it at the end. With --rate above 0 the loop
is open: requests start when they are due, whether or not earlier ones have ended.
"""

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from quill.loadtest.environment.server import HTTP_OFFSET, offset_port, start_server
from quill.loadtest.locust_users.collector import Collector
from quill.loadtest.locust_users.stream_user import StreamUser, address_of
from quill.loadtest.protocols.grpc import GrpcClient
from quill.loadtest.protocols.names import PROTOCOLS
from quill.loadtest.workload.request import ModelInfo
from quill.loadtest.workload.scenarios import SCENARIOS
from quill.loadtest.workload.schedule import Plan, Schedule, new_seed
from quill.server.client.access import read_access

logger = logging.getLogger(__name__)
_IDLE_S = 0.1


class Shared:
    """What all users of this process share."""

    collector: Collector
    schedule: Schedule
    servers = ExitStack()
    grpc_address: str | None = None  # of a server that was started here


class QuillUser(StreamUser):
    """Closed loop: one request after the other. Open loop: the first user starts them all."""

    def on_start(self) -> None:
        self._schedule = Shared.schedule
        self._calls = Group()
        self._is_open = self._schedule.plan.rate > 0
        self._starts: Iterator[float] | None = None
        if self._is_open:
            self._starts = self._schedule.take_arrivals()

    @task
    def next_request(self) -> None:
        if self._is_open and self._starts is None:
            self._idle()
            return
        intended_s = self._wait_for_start()
        index = self._schedule.next_index(intended_s)
        if index is None:
            raise StopUser
        self._schedule.num_running += 1
        if self._is_open:
            self._calls.spawn(self._run, index, intended_s)
        else:
            self._run(index, intended_s)

    def _wait_for_start(self) -> float | None:
        if self._starts is None:
            return None
        intended_s = next(self._starts)
        gevent.sleep(max(0.0, intended_s - time.monotonic()))
        return intended_s

    def _run(self, index: int, intended_s: float | None) -> None:
        schedule = self._schedule
        try:
            load = schedule.request(index)
            record = self.generate(load, load.kind, index, intended_s, schedule.plan.rate)
            Shared.collector.add(record)
        finally:
            schedule.num_running -= 1

    def _idle(self) -> None:
        if self._schedule.is_over():
            raise StopUser
        gevent.sleep(_IDLE_S)

    def on_stop(self) -> None:
        """Waits for an open loop's requests, unless Locust ends them early."""
        if not self._schedule.is_over():
            self._calls.join(timeout=self.environment.stop_timeout)
            self._calls.kill()
        self._calls.join()
        super().on_stop()


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """The options beside Locust's own. A master sends all of them to its workers."""
    add = parser.add_argument
    for each in fields(Plan):
        choices = {"choices": list(SCENARIOS)} if each.name == "scenario" else {}
        kind, text = type(each.default), each.metadata["help"]
        add(f"--{each.metadata['option']}", type=kind, default=each.default, help=text, **choices)
    add("--protocol", choices=PROTOCOLS, default="grpc", help="HTTP has a port of its own")
    # As for `quill generate`. Strings, not paths: workers get them by message.
    for name, text in (
        ("--model-info", "of the model, as JSON"),
        ("--records", "write a CSV file with every request"),
        ("--ca", "use TLS, and trust this authority (PEM file)"),
        ("--cert", "the client's own certificate (PEM file)"),
        ("--key", "its key (PEM file)"),
        ("--api-key-file", "holds the API key; or $QUILL_API_KEY"),
    ):
        add(name, default="", help=text, include_in_web_ui=False)
    for name, text in (
        ("--progress", "print progress as JSON"),
        ("--tls", "use TLS; the machine's own authorities are trusted"),
        ("--insecure", "send the API key in the clear, if there is no TLS"),
    ):
        add(name, action="store_true", help=text, include_in_web_ui=False)


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    assert options is not None
    path = Path(options.records) if options.records else None
    Shared.collector = Collector(environment, path)
    if isinstance(environment.runner, WorkerRunner):
        return
    if not environment.host:
        directory = Shared.servers.enter_context(tempfile.TemporaryDirectory())
        server = Shared.servers.enter_context(start_server(Path(directory) / "server.log"))
        Shared.grpc_address = server.address
        environment.host = server.address_for(options.protocol)
        print(f"started the default server at {environment.host}", flush=True)
    gevent.spawn(Shared.collector.print_progress)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """The process without a master picks a seed and calls GetModel; its workers get both.

    The given options stay as they are: the page's next test may have another host or seed.
    """
    options, runner = environment.parsed_options, environment.runner
    assert options is not None
    QuillUser.access, QuillUser.protocol = read_access(options), options.protocol
    if not isinstance(runner, WorkerRunner):
        seed, text = options.seed or new_seed(), options.model_info or get_model_info(environment)
        options.shared = {"seed": seed, "model_info": text, "num_parts": 1}
        logger.info("%s, with seed %d", options.scenario, seed)
    shared = options.shared
    if isinstance(runner, MasterRunner):
        shared["num_parts"] = Shared.collector.start_workers()
        return
    part = runner.worker_index if isinstance(runner, WorkerRunner) else 0
    plan = replace(Plan.from_options(options), seed=shared["seed"])
    info = ModelInfo(**json.loads(shared["model_info"]))
    Shared.schedule = Schedule(plan, info, part, shared["num_parts"])
    Shared.collector.watch(Shared.schedule)


@events.quitting.add_listener
def on_quitting(**_: Any) -> None:
    Shared.servers.close()


@events.quit.add_listener
def on_quit(**_: Any) -> None:
    Shared.collector.close()


def get_model_info(environment: Environment) -> str:
    with closing(GrpcClient(grpc_address(environment), QuillUser.access)) as client:
        return json.dumps(asdict(ModelInfo.of(client.get_model(wait_for_ready=True))))


def grpc_address(environment: Environment) -> str:
    """Of the server under load, whichever protocol the load uses."""
    if Shared.grpc_address is not None:
        return Shared.grpc_address
    address, options = address_of(environment.host), environment.parsed_options
    return offset_port(address, -HTTP_OFFSET) if options and options.protocol == "http" else address

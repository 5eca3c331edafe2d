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
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from quill.loadtest.asking import Facts
from quill.loadtest.collecting import Collector
from quill.loadtest.crowd import Plan, Schedule
from quill.loadtest.own_server import own_server
from quill.loadtest.scenarios import SCENARIOS
from quill.loadtest.user import StreamUser, address_of
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access, read_access

_IDLE_S = 0.1

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    for each in fields(Plan):
        choices = {"choices": list(SCENARIOS)} if each.name == "scenario" else {}
        kind, text = type(each.default), each.metadata["help"]
        add(f"--{each.metadata['option']}", type=kind, default=each.default, help=text, **choices)
    add("--facts", default="", help="of the model, as JSON", include_in_web_ui=False)
    add(
        "--records", default="", help="write a CSV file with every request", include_in_web_ui=False
    )
    add("--progress", action="store_true", help="print progress as JSON", include_in_web_ui=False)
    _add_proof(parser)


def _add_proof(parser: LocustArgumentParser) -> None:
    """As for `quill generate`. Texts, not paths: they travel to the workers."""
    for name, text in (
        ("--ca", "use TLS, and trust this authority (PEM file)"),
        ("--cert", "the client's own certificate (PEM file)"),
        ("--key", "its key (PEM file)"),
        ("--api-key-file", "holds the API key; or $QUILL_API_KEY"),
    ):
        parser.add_argument(name, default="", help=text, include_in_web_ui=False)
    for name, text in (
        ("--tls", "use TLS; the machine's own authorities are trusted"),
        ("--insecure", "send the API key in the clear, if there is no TLS"),
    ):
        parser.add_argument(name, action="store_true", help=text, include_in_web_ui=False)


class Shared:
    """What this process's users need to find."""

    collector: Collector
    schedule: Schedule
    servers = ExitStack()


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
        server = Shared.servers.enter_context(own_server(Path(directory) / "server.log"))
        environment.host = server.address
        print(f"started the default server at {server.address}", flush=True)
    gevent.spawn(Shared.collector.tell_progress)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """A plan is made and the model asked for once; a master's workers get both with its options."""
    options, runner = environment.parsed_options, environment.runner
    assert options is not None
    QuillUser.access = read_access(options)
    if not isinstance(runner, WorkerRunner):
        plan = Plan.from_options(options).with_seed()
        known = json.loads(options.facts) if options.facts else None
        facts = Facts(**known) if known else ask_facts(environment.host, QuillUser.access)
        options.shared = {"plan": asdict(plan), "facts": asdict(facts), "num_parts": 1}
        logger.info("%s, with seed %d", plan.scenario, plan.seed)
    if isinstance(runner, MasterRunner):
        options.shared["num_parts"] = Shared.collector.share_out()
        return
    part = runner.worker_index if isinstance(runner, WorkerRunner) else 0
    shared = options.shared
    plan, facts = Plan(**shared["plan"]), Facts(**shared["facts"])
    Shared.schedule = Schedule(plan, facts, part, shared["num_parts"])
    Shared.collector.watch(Shared.schedule)


@events.quitting.add_listener
def on_quitting(**_: Any) -> None:
    Shared.servers.close()


@events.quit.add_listener
def on_quit(**_: Any) -> None:
    Shared.collector.close()


def ask_facts(host: str | None, access: Access) -> Facts:
    with access.channel(address_of(host), ()) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        request, metadata = pb.GetModelRequest(), access.metadata
        model = stub.GetModel(request, timeout=60, wait_for_ready=True, metadata=metadata)
    return Facts.of(model)


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
            self._rest()
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
            ask = schedule.ask(index)
            record = self.generate(ask, ask.kind, index, intended_s, schedule.plan.rate)
            Shared.collector.add(record)
        finally:
            schedule.num_running -= 1

    def _rest(self) -> None:
        if self._schedule.is_over():
            raise StopUser
        gevent.sleep(_IDLE_S)

    def on_stop(self) -> None:
        """An open loop's requests end by themselves, if it isn't Locust that ends them early."""
        if not self._schedule.is_over():
            self._calls.join(timeout=self.environment.stop_timeout)
            self._calls.kill()
        self._calls.join()
        super().on_stop()

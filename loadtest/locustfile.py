"""The load test itself: `locust -f loadtest/locustfile.py`, or `quill loadtest`, which runs it.

Knows: Locust's options and events, the schedule. Does not know: reports.
Without --host it starts the default server, and stops it at the end. With --rate above 0 the loop
is open: requests start when they are due, whether or not earlier ones have ended.
"""

import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from quill.loadtest.environment.own_server import derive_grpc, own_server
from quill.loadtest.locust_users.collector import Collector
from quill.loadtest.locust_users.options import add_options
from quill.loadtest.locust_users.quill_user import QuillUser, Shared
from quill.loadtest.locust_users.stream_user import address_of
from quill.loadtest.workload.ask import Facts
from quill.loadtest.workload.schedule import Plan, Schedule
from quill.protos import generation_pb2 as pb
from quill.protos import generation_pb2_grpc as pb_grpc
from quill.server.client.access import Access, read_access

logger = logging.getLogger(__name__)

events.init_command_line_parser.add_listener(add_options)


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
        Shared.grpc_address = server.address
        environment.host = server.address_for(options.protocol)
        print(f"started the default server at {environment.host}", flush=True)
    gevent.spawn(Shared.collector.tell_progress)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """A plan is made and the model asked for once; a master's workers get both with its options."""
    options, runner = environment.parsed_options, environment.runner
    assert options is not None
    QuillUser.access, QuillUser.door = read_access(options), options.protocol
    if not isinstance(runner, WorkerRunner):
        plan = Plan.from_options(options).with_seed()
        known = json.loads(options.facts) if options.facts else None
        facts = Facts(**known) if known else ask_facts(grpc_address(environment), QuillUser.access)
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


def grpc_address(environment: Environment) -> str:
    """Of the server whose door the load goes through."""
    if Shared.grpc_address is not None:
        return Shared.grpc_address
    address, options = address_of(environment.host), environment.parsed_options
    return derive_grpc(address) if options and options.protocol == "http" else address


def ask_facts(address: str, access: Access) -> Facts:
    with access.channel(address, ()) as channel:
        stub = pb_grpc.TextGenerationStub(channel)
        request, metadata = pb.GetModelRequest(), access.metadata
        model = stub.GetModel(request, timeout=60, wait_for_ready=True, metadata=metadata)
    return Facts.of(model)

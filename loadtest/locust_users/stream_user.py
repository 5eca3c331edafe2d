"""Locust users that understand token streams: over gRPC, HTTP and KServe.

Knows: Locust, gevent. Does not know: which requests are asked, or when.
Importing this patches the standard library: only a Locust process does it.

    class Mine(StreamUser):
        @task
        def ask(self) -> None:
            self.generate(Ask(pb.GenerateRequest(prompt="Once", max_new_tokens=20)), "my name")

Locust then counts streams under "my name", failed ones by gRPC status. Its tab Tokens, and the end
of its summary, have time to first token, gaps and tokens a second
(loadtest/locust_users/token_stats.py).
"""

import time
from contextlib import closing
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent
from locust import User, events
from locust.env import Environment

from quill.loadtest.locust_users.token_stats import TokenStats
from quill.loadtest.protocols.door import Door
from quill.loadtest.protocols.names import DoorName
from quill.loadtest.protocols.open_door import open_door
from quill.loadtest.workload.ask import Ask
from quill.loadtest.workload.call import TimedCall, call
from quill.loadtest.workload.records import RequestRecord
from quill.server.client.access import Access
from quill.server.client.target import is_multiple

grpc_gevent.init_gevent()  # after Locust's patches, before the first channel

# gRPC waits for each channel's events in a thread of gevent's pool, whose own limit is 10: the
# channels of 32 users would take turns. Seen once each, on a busy machine: 256 short requests by 32
# users took 8.9 s with 10 threads and 5.0 s with 100.
gevent.get_hub().threadpool.maxsize = 4096


class StatusError(Exception):
    """Locust groups failures by what this prints: a gRPC status."""


class StreamUser(User):
    """Asks over a connection of its own. `host` is the address of the door, without a scheme.

    `access` has TLS and an API key, where the server wants them: set it in a class of your own.
    """

    abstract = True
    door: DoorName = "grpc"
    access = Access()
    token_stats: TokenStats | None = None  # None: no Locust process has begun

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._door = self._connect()

    def generate(
        self,
        ask: Ask,
        name: str,
        index: int = 0,
        intended_s: float | None = None,
        offered_rate: float = 0.0,
    ) -> RequestRecord:
        """One request to its end. `intended_s`: its start on the monotonic clock, if not now."""
        now_s = time.monotonic()
        intended_s = now_s if intended_s is None else intended_s
        intended_at_s = time.time() - (now_s - intended_s)
        measured = self._call(ask, intended_s)
        record = measured.record(ask, index, name, intended_at_s, offered_rate)
        self._tell(record, measured.heard.num_bytes)
        return record

    def on_stop(self) -> None:
        self._door.close()

    def _call(self, ask: Ask, intended_s: float) -> TimedCall:
        if not ask.reconnect:
            return call(self._door, ask, intended_s)
        with closing(self._connect()) as door:
            return call(door, ask, intended_s)

    def _connect(self) -> Door:
        return open_door(self.door, address_of(self.host), self.access)

    def _tell(self, record: RequestRecord, num_bytes: int) -> None:
        self.environment.events.request.fire(
            request_type="stream" if self.door == "grpc" else f"{self.door} stream",
            name=record.scenario,
            response_time=record.total_ms,
            response_length=num_bytes,
            exception=None if record.ok else StatusError(record.status),
            context={},
        )
        if self.token_stats is not None:
            self.token_stats.log(record)


class HttpStreamUser(StreamUser):
    """The same over OpenAI's HTTP: `host` is that of the HTTP port."""

    abstract = True
    door = "http"


class KserveStreamUser(StreamUser):
    """The same over KServe v2, which is on the gRPC port."""

    abstract = True
    door = "kserve"


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    StreamUser.token_stats = TokenStats(environment)


def address_of(host: str | None) -> str:
    """Locust's page likes to put a scheme before a host."""
    if is_multiple(host or ""):
        return host or ""
    return (host or "").rpartition("://")[2].rstrip("/")

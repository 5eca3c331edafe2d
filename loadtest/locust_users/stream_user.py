"""Locust users for token streams over gRPC, HTTP and KServe.

Knows: Locust, gevent. Does not know: which requests are sent, or when.
Importing this patches the standard library: only a Locust process does it.

    class Mine(StreamUser):
        @task
        def story(self) -> None:
            request = pb.GenerateRequest(prompt="Once", max_new_tokens=20)
            self.generate(LoadRequest(request), "my name")

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
from quill.loadtest.protocols.connect import connect
from quill.loadtest.protocols.grpc import ProtocolClient
from quill.loadtest.protocols.names import ProtocolName
from quill.loadtest.workload.call import TimedCall, call
from quill.loadtest.workload.records import RequestRecord
from quill.loadtest.workload.request import LoadRequest
from quill.server.client.access import Access
from quill.server.client.target import is_multiple

grpc_gevent.init_gevent()  # after Locust's patches, before the first channel

# gRPC waits for each channel's events in a thread of gevent's pool, whose own limit is 10: the
# channels of 32 users would take turns. Measured once each, on a busy machine: 256 short requests
# of 32 users took 8.9 s with 10 threads and 5.0 s with 100.
gevent.get_hub().threadpool.maxsize = 4096


class StatusError(Exception):
    """Its text is a gRPC status: Locust groups failures by it."""


class StreamUser(User):
    """Has a connection of its own. `host` is the address for the protocol, without a scheme.

    `access` has TLS and an API key, where the server needs them: set it in a subclass.
    """

    abstract = True
    protocol: ProtocolName = "grpc"
    access = Access()
    token_stats: TokenStats | None = None  # None: not in a Locust process

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._client = self._connect()

    def generate(
        self,
        load: LoadRequest,
        name: str,
        index: int = 0,
        intended_s: float | None = None,
        offered_rate: float = 0.0,
    ) -> RequestRecord:
        """One request to its end. `intended_s`: its start on the monotonic clock, if not now."""
        now_s = time.monotonic()
        intended_s = now_s if intended_s is None else intended_s
        intended_at_s = time.time() - (now_s - intended_s)
        measured = self._call(load, intended_s)
        record = measured.record(load, index, name, intended_at_s, offered_rate)
        self._report(record, measured.result.num_bytes)
        return record

    def on_stop(self) -> None:
        self._client.close()

    def _call(self, load: LoadRequest, intended_s: float) -> TimedCall:
        if not load.reconnect:
            return call(self._client, load, intended_s)
        with closing(self._connect()) as client:
            return call(client, load, intended_s)

    def _connect(self) -> ProtocolClient:
        return connect(self.protocol, address_of(self.host), self.access)

    def _report(self, record: RequestRecord, num_bytes: int) -> None:
        self.environment.events.request.fire(
            request_type="stream" if self.protocol == "grpc" else f"{self.protocol} stream",
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
    protocol = "http"


class KserveStreamUser(StreamUser):
    """The same over KServe v2, which is on the gRPC port."""

    abstract = True
    protocol = "kserve"


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    StreamUser.token_stats = TokenStats(environment)


def address_of(host: str | None) -> str:
    """Without the scheme that Locust's page may put before a host."""
    if is_multiple(host or ""):
        return host or ""
    return (host or "").rpartition("://")[2].rstrip("/")

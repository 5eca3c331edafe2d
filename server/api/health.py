"""gRPC's health service: SERVING while nothing is known that speaks against it.

Knows: grpc.health.v1, what keeps the server from serving. Does not know: who finds that out.

grpc_health's own servicer holds a lock while it writes to a watcher, and needs the same lock to
change a status. A watcher that didn't read kept the server from getting ready, and from stopping.
"""

import asyncio
import logging
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quill.server.api.grpc_calls import Context, host_of, write
from quill.server.errors import SlowReaderError

# A watcher needs no key, and keeps about 30 KB of memory.
MAX_WATCHERS = 4096
MAX_WATCHERS_OF_HOST = 1024
logger = logging.getLogger(__name__)

_NOW = {
    "failing": "step after step fails; health says NOT_SERVING until one succeeds",
    "restarting": "health says NOT_SERVING: the engine's process is started again",
    "unread": "calls wait unaccepted for seconds; health says NOT_SERVING until they don't",
    "stopping": "health says NOT_SERVING: the server is stopping",
}
_OVER = {"failing": "steps succeed again"}
_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Belongs to the event loop, but for `note_soon`."""

    def __init__(self, service: str, write_timeout_s: float) -> None:
        self._services = ("", service)
        self._write_timeout_s = write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._problems = {"loading"}
        self._changed = asyncio.Event()  # another one after each change
        self._num_watchers: Counter[str] = Counter()  # of each host

    @property
    def is_serving(self) -> bool:
        return not self._problems

    def has(self, problem: str) -> bool:
        return problem in self._problems

    def note(self, problem: str, is_there: bool) -> None:
        if is_there == (problem in self._problems):
            return
        self._problems ^= {problem}
        message = (_NOW if is_there else _OVER).get(problem)
        if message is not None:
            level = logging.ERROR if problem == "failing" and is_there else logging.INFO
            logger.log(level, message)
        self._changed.set()
        self._changed = asyncio.Event()

    def note_soon(self, problem: str, is_there: bool) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self.note, problem, is_there)

    async def Check(self, request: Any, context: Context) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Response(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> None:
        host = host_of(context.peer())
        num_watchers = self._num_watchers
        if num_watchers[host] >= MAX_WATCHERS_OF_HOST or num_watchers.total() >= MAX_WATCHERS:
            reason = "too many watch the server's health. Use Check, or try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        num_watchers[host] += 1
        try:
            await self._send_changes(request.service, context)
        except SlowReaderError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            num_watchers[host] -= 1
            if not num_watchers[host]:
                del num_watchers[host]

    async def _send_changes(self, service: str, context: Context) -> None:
        """Until the client leaves. Of changes during a write it gets the last one."""
        sent = None
        while True:
            changed, status = self._changed, self._status(service)
            if status != sent:
                await write(_Response(status=status), context, self._write_timeout_s)
            sent = status
            await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self.is_serving else _Response.NOT_SERVING

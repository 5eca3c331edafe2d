"""The endpoint pool: channels to the servers behind an address, their health, their DNS name.

Knows: channels, background work. Does not know: calls, retries, which server is best.
The health of each of several servers is watched, and a DNS name is resolved again now and then. A
single server's health isn't watched. All begins with the first call: before it there needn't be an
event loop. The lock is for the blocking pool, which is generated from this one, and is never held
across an await.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

from quill.server.client.access import Access
from quill.server.client.balancer import ServerState
from quill.server.client.errors import CallError, closed, read_failure, status_code
from quill.server.client.pool_state import (
    FIRST_STATUS_S,
    RESOLVE_S,
    PickedEndpoint,
    PoolState,
    channel_options,
    is_serving,
    make_stub,
    read_watch_end,
    watch_health,
)
from quill.server.client.primitives import (
    ASYNC_CALL_ERRORS,
    AsyncEvent,
    AsyncTasks,
    async_resolve,
)
from quill.server.client.target import read_target


@dataclass
class _Connection:
    channel: Any
    stub: Any
    watch: Any = None  # the call that watches the server's health

    def stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.cancel()


class AsyncEndpointPool:
    """Belongs to one event loop."""

    def __init__(self, address: str, access: Access) -> None:
        self._state = PoolState(read_target(address))
        self._access = access
        self._options = channel_options(self._state.target, access)
        self._lock = threading.RLock()
        self._connections: dict[str, _Connection] = {}
        self._tasks = AsyncTasks()
        self._is_ready, self._closed = AsyncEvent(), AsyncEvent()
        self._is_started = False
        self.was_reached = False  # any server, by any call

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def pick(
        self, key: bytes | None, avoid: set[str], left_s: float | None = None
    ) -> PickedEndpoint:
        """`left_s`: until the call's deadline; the first call waits half of it at most here."""
        self._start()
        if not self._is_ready.is_set():
            wait_s = FIRST_STATUS_S if left_s is None else min(FIRST_STATUS_S, left_s / 2)
            await self._is_ready.wait(wait_s)
            self._is_ready.set()
        with self._lock:
            if self.is_closed:
                raise closed()
            address = self._state.begin(key, avoid)
            stub, headers = self._connections[address].stub, self._state.headers
        return PickedEndpoint(address, stub, headers, self._end, self._set_load, self._read_error)

    def has_other(self, avoid: set[str]) -> bool:
        with self._lock:
            return self._state.balancer.has_other(avoid)

    def servers(self) -> tuple[ServerState, ...]:
        with self._lock:
            return self._state.balancer.states()

    async def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections = [*self._connections.values()]
        self._is_ready.set()
        for connection in connections:
            connection.stop_watch()
            await connection.channel.close()
        await self._tasks.close()

    def _start(self) -> None:
        with self._lock:
            if self._is_started or self.is_closed:
                return
            self._is_started = True
            self._connect()
            if self._state.target.name is not None:
                self._tasks.start(self._follow_dns, self._state.target.name)
            self._note_ready()

    def _end(self, address: str, error: CallError | None) -> None:
        with self._lock:
            if self._state.end(address, error):
                self._connections[address].stop_watch()  # and it is watched anew
            self._disconnect()

    def _set_load(self, address: str, num_calls: int) -> None:
        with self._lock:
            self._state.balancer.set_load(address, num_calls, time.monotonic())

    def _read_error(self, raised: BaseException) -> CallError:
        error = read_failure(
            raised, self._access, is_closed=self.is_closed, was_reached=self.was_reached
        )
        self.was_reached |= not error.is_unreached
        return error

    def _connect(self) -> None:
        """To the servers that are new."""
        for state in self._state.balancer.states():
            if state.address not in self._connections and not self.is_closed:
                channel = self._access.async_channel(state.address, self._options)
                connection = _Connection(channel, make_stub(channel))
                self._connections[state.address] = connection
                if self._state.target.is_watched:
                    self._tasks.start(self._watch, state.address, connection)

    def _disconnect(self) -> None:
        """From servers that left the DNS name and have no calls outstanding."""
        gone = [each for each in self._connections if not self._state.balancer.knows(each)]
        for address in gone:
            connection = self._connections.pop(address)
            connection.stop_watch()
            self._tasks.start(connection.channel.close)

    async def _watch(self, address: str, connection: _Connection) -> None:
        while self._is_current(address, connection):
            had_status, code = False, None
            try:
                connection.watch = watch_health(connection.channel)
                async for status in connection.watch:
                    had_status = True
                    self._set_serving(address, is_serving(status))
            except ASYNC_CALL_ERRORS as raised:
                code = status_code(raised)
            except ValueError:  # the channel was closed just now
                return
            end = read_watch_end(code, had_status=had_status)
            if end.is_serving is not None:
                self._set_serving(address, end.is_serving)
            await self._closed.wait(end.pause_s)

    def _is_current(self, address: str, connection: _Connection) -> bool:
        with self._lock:
            return not self.is_closed and self._connections.get(address) is connection

    def _set_serving(self, address: str, is_serving: bool) -> None:
        with self._lock:
            if not self.is_closed:
                self._state.set_serving(address, is_serving)
                self._note_ready()

    def _note_ready(self) -> None:
        if self._state.is_ready:
            self._is_ready.set()

    async def _follow_dns(self, name: str) -> None:
        while not self.is_closed:
            try:
                servers, problem = await async_resolve(name), ""
            except (OSError, UnicodeError) as error:  # the latter: a label that no host can have
                servers, problem = (), str(error)
            with self._lock:
                if servers:
                    self._state.set_servers(servers)
                    self._connect()
                    self._disconnect()
                else:  # the known servers may still be there
                    self._state.dns_error = problem
                self._note_ready()
            await self._closed.wait(RESOLVE_S if servers else FIRST_STATUS_S)

"""The servers behind an address, for clients of asyncio.

Knows: channels, tasks. Does not know: calls, retries, which server is the right one.
As server/client/fleet.py, with tasks in place of threads. They begin with the first call: before it
there needn't be a loop.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from quill.server.client.access import Access, options_to
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.balancing.target import read_target, resolve
from quill.server.client.call_error import CallError
from quill.server.client.fleet_state import FleetState, Lease, channel_options, closed, make_stub
from quill.server.client.health import (
    HEAR_S,
    QUESTION,
    RESOLVE_S,
    WATCH_S,
    is_serving,
    read_silence,
    watching,
)


@dataclass
class _Connection:
    channel: grpc.aio.Channel
    stub: Any
    watch: "asyncio.Task[None] | None" = None


class AsyncFleet:
    """Belongs to one event loop."""

    def __init__(self, address: str, access: Access) -> None:
        self._state = FleetState(read_target(address))
        self._access = access
        self._options = channel_options(self._state.target, access)
        self._connections: dict[str, _Connection] = {}
        self._known = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_begun = False
        self.is_closed = False

    async def take(self, key: bytes | None, avoid: set[str], left_s: float | None = None) -> Lease:
        """`left_s`: of the call's time, of which the first one keeps half for itself."""
        if not self._known.is_set():
            await self._wait_until_known(HEAR_S if left_s is None else min(HEAR_S, left_s / 2))
        if self.is_closed:
            raise closed()
        address = self._state.begin(key, avoid)
        stub, state = self._connections[address].stub, self._state
        return Lease(address, stub, state.headers, self._end, state.hear)

    def has_other(self, avoid: set[str]) -> bool:
        return self._state.balancer.has_other(avoid)

    def servers(self) -> tuple[ServerState, ...]:
        return self._state.balancer.states()

    async def close(self) -> None:
        self.is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            await connection.channel.close()

    async def _wait_until_known(self, wait_s: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._connect()
            if self._state.target.name is not None:
                self._start(self._follow(self._state.target.name))
            self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._known.wait()
        self._known.set()

    def _end(self, address: str, error: CallError | None) -> None:
        connection = self._connections[address]
        if self._state.end(address, error) and connection.watch is not None:
            connection.watch.cancel()
            connection.watch = self._start(self._watch(address, connection))
        self._leave()

    def _connect(self) -> None:
        """To those that are new."""
        for state in self._state.balancer.states():
            if state.address not in self._connections:
                channel = _open(state.address, self._access, self._options)
                connection = _Connection(channel, make_stub(channel))
                self._connections[state.address] = connection
                if self._state.target.is_watched:
                    connection.watch = self._start(self._watch(state.address, connection))

    def _leave(self) -> None:
        """Those that are gone and have no calls outstanding."""
        gone = [each for each in self._connections if not self._state.balancer.knows(each)]
        for address in gone:
            connection = self._connections.pop(address)
            if connection.watch is not None:
                connection.watch.cancel()
            self._start(connection.channel.close())

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, address: str, connection: _Connection) -> None:
        while True:
            was_heard, code = False, None
            try:
                async for word in watching(connection.channel)(QUESTION, timeout=WATCH_S):
                    was_heard = True
                    self._note(address, is_serving(word))
            except grpc.aio.AioRpcError as error:
                code = error.code()
            silence = read_silence(code, was_heard)
            if silence.is_serving is not None:
                self._note(address, silence.is_serving)
            await asyncio.sleep(silence.pause_s)

    def _note(self, address: str, is_serving: bool) -> None:
        self._state.note(address, is_serving)
        self._tell()

    def _tell(self) -> None:
        if self._state.is_known:
            self._known.set()

    async def _follow(self, name: str) -> None:
        while True:
            try:
                servers, problem = await asyncio.to_thread(resolve, name), ""
            except OSError as error:
                servers, problem = (), str(error)
            if servers:
                self._state.set_servers(servers)
                self._connect()
                self._leave()
            else:  # those that are known may still be there
                self._state.problem = problem
            self._tell()
            await asyncio.sleep(RESOLVE_S if servers else HEAR_S)


def _open(address: str, access: Access, options: Any) -> grpc.aio.Channel:
    credentials = access.credentials(address)
    options = options_to(address, options)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)

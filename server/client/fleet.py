"""The servers behind an address, for clients that block.

Knows: channels, threads. Does not know: calls, retries, which server is the right one.
A thread listens to each server's health, and one follows a name. An address of one server has
neither.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from quill.server.client.access import Access
from quill.server.client.balancing.balancer import ServerState
from quill.server.client.balancing.target import read_target, resolve
from quill.server.client.call_error import CallError
from quill.server.client.fleet_state import (
    ChannelOptions,
    FleetState,
    Lease,
    channel_options,
    closed,
    make_stub,
)
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
    channel: grpc.Channel
    stub: Any
    watch: Any = None  # the call that listens to its health


class Fleet:
    """Safe to use from several threads."""

    def __init__(self, address: str, access: Access, options: ChannelOptions = ()) -> None:
        """`options`: of channels, beside the usual ones."""
        self._state = FleetState(read_target(address))
        self._access = access
        self._options = (*channel_options(self._state.target, access), *options)
        self._changed = threading.Condition()
        self._connections: dict[str, _Connection] = {}
        self._closed = threading.Event()
        self._was_waited_for = False
        with self._changed:
            self._connect()
        if self._state.target.name is not None:
            self._start(self._follow, self._state.target.name)

    def take(self, key: bytes | None, avoid: set[str], left_s: float | None = None) -> Lease:
        """`left_s`: of the call's time, of which the first one keeps half for itself."""
        with self._changed:
            if not self._was_waited_for:
                wait_s = HEAR_S if left_s is None else min(HEAR_S, left_s / 2)
                self._changed.wait_for(lambda: self._state.is_known, wait_s)
                self._was_waited_for = True
            if self.is_closed:
                raise closed()
            address = self._state.begin(key, avoid)
            stub = self._connections[address].stub
            return Lease(address, stub, self._state.headers, self._end, self._hear)

    def has_other(self, avoid: set[str]) -> bool:
        with self._changed:
            return self._state.balancer.has_other(avoid)

    def servers(self) -> tuple[ServerState, ...]:
        with self._changed:
            return self._state.balancer.states()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            for connection in self._connections.values():
                _hang_up(connection)

    def _end(self, address: str, error: CallError | None) -> None:
        with self._changed:
            is_doubtful = self._state.end(address, error)
            connection = self._connections[address]
            if is_doubtful and connection.watch is not None:
                connection.watch.cancel()  # its thread asks anew
            self._leave()

    def _hear(self, address: str, num_calls: int | None) -> None:
        with self._changed:
            self._state.hear(address, num_calls)

    def _connect(self) -> None:
        """To those that are new."""
        for state in self._state.balancer.states():
            if state.address not in self._connections and not self.is_closed:
                channel = self._access.channel(state.address, self._options)
                connection = _Connection(channel, make_stub(channel))
                self._connections[state.address] = connection
                if self._state.target.is_watched:
                    self._start(self._watch, state.address, connection)

    def _leave(self) -> None:
        """Those that are gone and have no calls outstanding."""
        gone = [each for each in self._connections if not self._state.balancer.knows(each)]
        for address in gone:
            _hang_up(self._connections.pop(address))

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _watch(self, address: str, connection: _Connection) -> None:
        while self._is_current(address, connection):
            was_heard, code = False, None
            try:
                connection.watch = watching(connection.channel)(QUESTION, timeout=WATCH_S)
                for word in connection.watch:
                    was_heard = True
                    self._note(address, is_serving(word))
            except grpc.RpcError as error:
                code = error.code()
            except ValueError:  # the channel was closed just now
                return
            silence = read_silence(code, was_heard)
            if silence.is_serving is not None:
                self._note(address, silence.is_serving)
            self._closed.wait(silence.pause_s)

    def _is_current(self, address: str, connection: _Connection) -> bool:
        with self._changed:
            return not self.is_closed and self._connections.get(address) is connection

    def _note(self, address: str, is_serving: bool) -> None:
        with self._changed:
            if not self.is_closed:
                self._state.note(address, is_serving)
                self._changed.notify_all()

    def _follow(self, name: str) -> None:
        while not self.is_closed:
            try:
                servers, problem = resolve(name), ""
            except OSError as error:
                servers, problem = (), str(error)
            with self._changed:
                if servers:
                    self._state.set_servers(servers)
                    self._connect()
                    self._leave()
                else:  # those that are known may still be there
                    self._state.problem = problem
                self._changed.notify_all()
            self._closed.wait(RESOLVE_S if servers else HEAR_S)


def _hang_up(connection: _Connection) -> None:
    if connection.watch is not None:
        connection.watch.cancel()
    connection.channel.close()

"""What the replicas of a cluster share: callers' quotas, endpoints, the turns of a rolling reload.

Knows: tickets, replicas by name, slots. Does not know: Ray, HAProxy, bundles.

The coordinator closes the tickets of a replica whose heartbeats have stopped. A new coordinator
starts with full quotas.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quill.server.auth.caller import Caller
from quill.server.auth.tickets import Tickets
from quill.server.errors import PlainError

MAX_SILENCE_S = 10.0  # between two heartbeats, which come twice a second
NUM_SLOTS = 512  # servers that HAProxy's configuration reserves
POLL_S = 0.1


class Heartbeat(NamedTuple):
    replica: str
    address: str  # where the replica's gRPC server listens
    frontend: str  # where HAProxy listens for it
    is_ready: bool  # False: no new calls
    slot: int  # 0 before the first answer
    generated: Mapping[int, int] = {}  # tokens so far, by ticket


class Instruction(NamedTuple):
    slot: int
    reload: bool


class Endpoint(NamedTuple):
    slot: int  # the same on every machine, so that every HAProxy hashes alike
    address: str
    is_ready: bool


@dataclass
class _Replica:
    seen_s: float
    heartbeat: Heartbeat | None = None


class Coordinator:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tickets = Tickets(clock)
        self._replicas: dict[str, _Replica] = {}
        self._next_slot = 0
        self._reloading = asyncio.Lock()
        self._turn: str | None = None
        self._outcome: asyncio.Future[str] | None = None

    @property
    def replicas(self) -> list[str]:
        """Those whose heartbeats go on."""
        now_s = self._clock()
        for name, each in list(self._replicas.items()):
            if now_s - each.seen_s > MAX_SILENCE_S:
                self._forget(name)
        return list(self._replicas)

    async def open_call(self, replica: str, ticket: int, caller: Caller) -> PlainError | None:
        self._replicas.setdefault(replica, _Replica(self._clock()))
        return self._tickets.open_call(replica, ticket, caller)

    async def open_tokens(
        self, replica: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> PlainError | None:
        self._replicas.setdefault(replica, _Replica(self._clock()))
        return self._tickets.open_tokens(replica, ticket, caller, num_prompt, is_admitted)

    async def close(self, replica: str, ticket: int, num_generated: int, is_read: bool) -> None:
        self._tickets.close(replica, ticket, num_generated, is_read)

    async def beat(self, heartbeat: Heartbeat) -> Instruction:
        replica = self._replicas.setdefault(heartbeat.replica, _Replica(0.0))
        replica.seen_s = self._clock()
        before = replica.heartbeat
        slot = heartbeat.slot or (before and before.slot) or self._free_slot()
        replica.heartbeat = heartbeat._replace(slot=slot)
        self._tickets.note(heartbeat.replica, heartbeat.generated)
        return Instruction(slot, heartbeat.replica == self._turn)

    async def endpoints(self, frontend: str) -> list[Endpoint]:
        """The endpoint pool of the HAProxies at this address."""
        beats = [self._replicas[name].heartbeat for name in self.replicas]
        return [
            Endpoint(beat.slot, beat.address, beat.is_ready)
            for beat in beats
            if beat is not None and beat.frontend == frontend
        ]

    async def leave(self, replica: str) -> None:
        self._forget(replica)

    async def finish_reload(self, replica: str, error: str) -> None:
        """`error`: "" after a success."""
        if replica == self._turn and self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(error)

    async def reload(self) -> str:
        """Reloads all replicas, one at a time, until the first error, which it returns, or "".

        A replica learns in the answer to its next heartbeat that it shall reload.
        """
        async with self._reloading:
            for num_done, replica in enumerate(self.replicas):
                error = await self._reload(replica)
                if error and num_done:
                    return (
                        f"{num_done} of {len(self.replicas)} replicas have the new bundle; the "
                        f"next one rejects it, and the others keep the old one: {error}"
                    )
                if error:
                    return error
            return ""

    async def _reload(self, replica: str) -> str:
        self._turn, self._outcome = replica, asyncio.get_running_loop().create_future()
        try:
            while replica in self.replicas:
                done, _ = await asyncio.wait({self._outcome}, timeout=POLL_S)
                if done:
                    return self._outcome.result()
            return ""  # it has stopped; its successor loads the new bundle
        finally:
            self._turn = None

    def _free_slot(self) -> int:
        """In turn: a slot isn't taken again while its last streams may still run."""
        used = {each.heartbeat.slot for each in self._replicas.values() if each.heartbeat}
        while True:
            self._next_slot = self._next_slot % NUM_SLOTS + 1
            if self._next_slot not in used:
                return self._next_slot

    def _forget(self, name: str) -> None:
        self._replicas.pop(name, None)
        self._tickets.close_all(name)

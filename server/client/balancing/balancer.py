"""Which server is asked next.

Knows: which servers there are, which of them serve, how many calls each has outstanding.
Does not know: channels, clocks, threads, what is asked.

Affinity has a bound: of the servers in the key's own order the first is taken that has fewer calls
than 1.25 times its share. So requests that begin alike meet the cache that knows their beginning,
and those of a beginning that everybody asks for overflow to the next ones, always the same.
"""

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from quill.server.client.balancing.ring import Ring
from quill.server.client.balancing.target import Balance

MAX_LOAD = 1.25  # of the mean


@dataclass(frozen=True)
class ServerState:
    """A server as this client knows it, and what the client has asked of it."""

    address: str
    is_serving: bool
    num_outstanding: int = 0
    num_begun: int = 0
    num_failed: int = 0  # because of the server: it died, stopped or was full


class Balancer:
    """Every `begin` is followed by one `end`."""

    def __init__(self, balance: Balance = "affinity") -> None:
        self._balance = balance
        self._states: dict[str, ServerState] = {}
        self._leaving: dict[str, ServerState] = {}  # while they have calls outstanding
        self._ring = Ring(())
        self._turn = 0

    def set_servers(self, servers: Iterable[str], *, are_serving: bool) -> None:
        """Those that stay keep their numbers; `are_serving` is of those that are new."""
        old = {**self._leaving, **self._states}
        self._states = {
            each: old[each] if each in old else ServerState(each, are_serving)
            for each in sorted(set(servers))
        }
        self._leaving = {
            each: state
            for each, state in old.items()
            if each not in self._states and state.num_outstanding
        }
        self._ring = Ring(self._states)

    def states(self) -> tuple[ServerState, ...]:
        return tuple(self._states.values())

    def knows(self, server: str) -> bool:
        """Also if it is leaving."""
        return server in self._states or server in self._leaving

    def note(self, server: str, is_serving: bool) -> bool:
        """Whether that is new."""
        state = self._states.get(server)
        if state is None or state.is_serving == is_serving:
            return False
        self._states[server] = replace(state, is_serving=is_serving)
        return True

    def begin(self, key: bytes | None, avoid: Set[str] = frozenset()) -> str:
        """For a call with this key; the fewest outstanding for one without."""
        assert self._states, "there is nobody to ask"
        server = self._choose(key, self._candidates(avoid))
        self._turn += 1
        state = self._states[server]
        self._states[server] = replace(
            state, num_outstanding=state.num_outstanding + 1, num_begun=state.num_begun + 1
        )
        return server

    def end(self, server: str, *, has_failed: bool = False) -> None:
        group = self._states if server in self._states else self._leaving
        state = group[server]
        group[server] = replace(
            state,
            num_outstanding=state.num_outstanding - 1,
            num_failed=state.num_failed + has_failed,
        )
        if group is self._leaving and not group[server].num_outstanding:
            del group[server]

    def has_other(self, avoid: Set[str]) -> bool:
        """Whether one serves that isn't to be avoided."""
        return any(each.is_serving and each.address not in avoid for each in self._states.values())

    def _candidates(self, avoid: Set[str]) -> list[ServerState]:
        """If nobody is said to serve, somebody is asked all the same: that may be wrong."""
        serving = [each for each in self._states.values() if each.is_serving]
        others = [each for each in serving if each.address not in avoid]
        return others or serving or list(self._states.values())

    def _choose(self, key: bytes | None, candidates: list[ServerState]) -> str:
        if self._balance == "affinity" and key is not None:
            return self._bounded(key, {each.address: each for each in candidates})
        first = self._turn % len(candidates)
        turns = [*candidates[first:], *candidates[:first]]
        if self._balance == "round-robin":
            return turns[0].address
        return min(turns, key=lambda each: each.num_outstanding).address

    def _bounded(self, key: bytes, candidates: dict[str, ServerState]) -> str:
        total = 1 + sum(each.num_outstanding for each in candidates.values())
        most = math.ceil(MAX_LOAD * total / len(candidates))
        return next(
            server
            for server in self._ring.order(key)
            if server in candidates and candidates[server].num_outstanding < most
        )

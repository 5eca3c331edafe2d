"""Which server is asked next.

Knows: which servers there are, which of them serve, how many calls each has outstanding: this
client's, which it counts, and others', of which servers tell. Does not know: channels, clocks,
threads, what is asked.

Affinity has a bound: of the servers in the key's own order the first is taken that isn't loaded,
that is, has fewer calls than 1.25 times the mean. Where calls are few, chance alone gives some
servers more than that; so two standard deviations above the mean are no load, either. Without them
every third call left the cache that knew its beginning, and three servers with twelve calls found
68% of their prompts instead of 88%. So requests that begin alike meet one server, and a beginning
that everybody asks for overflows to the next ones, always the same.

A client that counted its own calls only would bound its own only: sixteen of them put 4.0 times the
mean on one of twenty simulated servers, and 2.3 with what servers say. A server that wasn't asked
lately is taken to have none of others' calls: if that is wrong, the first call there tells. Where
some never tell, being older, own calls are all that counts; else those would attract all.
"""

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from quill.server.client.balancing.ring import Ring
from quill.server.client.balancing.target import Balance

MAX_LOAD = 1.25  # of the mean
CHANCE = 2.0  # standard deviations; of a number of calls it is the mean's square root
# So long a server's word is believed. Every call brings one, so what is older is of a server that
# wasn't asked: it was thought to be loaded, and would be for ever.
WORD_S = 10.0


@dataclass(frozen=True)
class ServerState:
    """A server as this client knows it, and what the client has asked of it."""

    address: str
    is_serving: bool
    num_outstanding: int = 0
    num_begun: int = 0
    num_failed: int = 0  # because of the server: it died, stopped or was full
    num_others: int = 0  # calls of other clients, when it last told of its load
    heard_s: float = -math.inf  # when that was
    is_silent: bool = False  # it has answered and never told


def bound(mean: float) -> int:
    """How many calls a server may have, the next one included."""
    return math.ceil(max(MAX_LOAD * mean, mean + CHANCE * math.sqrt(mean)))


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
        self._states[server] = replace(state, is_serving=is_serving, heard_s=-math.inf)
        return True

    def hear(self, server: str, num_calls: int | None, now_s: float) -> None:
        """How many calls of anybody it has, those included that this client has outstanding.

        None: it answered and didn't say, as servers did before they told of their load.
        """
        state = self._states.get(server)
        if state is None:
            return
        if num_calls is None:
            state = replace(state, is_silent=state.heard_s == -math.inf)
        else:
            num_others = max(0, num_calls - state.num_outstanding)
            state = replace(state, num_others=num_others, heard_s=now_s, is_silent=False)
        self._states[server] = state

    def begin(self, key: bytes | None, avoid: Set[str] = frozenset(), now_s: float = 0.0) -> str:
        """For a call with this key; the fewest outstanding for one without."""
        assert self._states, "there is nobody to ask"
        server = self._choose(key, self._candidates(avoid), now_s)
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

    def _choose(self, key: bytes | None, candidates: list[ServerState], now_s: float) -> str:
        first = self._turn % len(candidates)
        turns = [each.address for each in (*candidates[first:], *candidates[:first])]
        if self._balance == "round-robin":
            return turns[0]
        loads = _loads(candidates, now_s)
        if self._balance == "affinity" and key is not None:
            return self._bounded(key, loads)
        return min(turns, key=loads.__getitem__)

    def _bounded(self, key: bytes, loads: dict[str, int]) -> str:
        most = bound((1 + sum(loads.values())) / len(loads))
        return next(
            server for server in self._ring.order(key) if server in loads and loads[server] < most
        )


def _loads(servers: list[ServerState], now_s: float) -> dict[str, int]:
    all_tell = not any(each.is_silent for each in servers)
    return {
        each.address: each.num_outstanding
        + (each.num_others if all_tell and now_s - each.heard_s <= WORD_S else 0)
        for each in servers
    }

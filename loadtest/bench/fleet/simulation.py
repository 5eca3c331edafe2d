"""A fleet in simulated time: calls arrive, clients choose servers, servers take steps, some die.

Knows: events and their order. Does not know: how servers choose who runs, or clients whom to ask:
that is the real code of server/scheduler/ and server/client/balancing/.

As the clients do it, a call whose server dies or refuses is asked at another one at once, as often
as a client tries; what the dead server had made is made again there. Deaths are heard of at once,
as on connections that break. Servers tell of their load as real ones do: a call's own client, when
it is taken in and when it ends, and nobody else.
"""

import heapq
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quill.loadtest.bench.fleet.replica import Replica, StepCost
from quill.loadtest.bench.fleet.traffic import Call
from quill.server.client.balancer import Balancer
from quill.server.client.retry import Retries
from quill.server.client.target import Balance
from quill.server.limits import Limits
from quill.server.request import Request

LIMITS = Limits(
    max_num_seqs=256, context=2048, num_blocks=2840, speculative=False
)  # 1 GB of SmolLM2's
COST = StepCost()
MAX_WAITING = 256


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    num_replicas: int = 100
    num_clients: int = 4  # processes, each with a balancer of its own
    limits: Limits = LIMITS  # of each replica
    cost: StepCost = COST
    max_waiting: int = MAX_WAITING


class Trouble(NamedTuple):
    """From one time to another some replicas are gone, or slow."""

    replicas: Iterable[int]
    from_s: float
    to_s: float
    slowness: float | None = None  # None: they are dead


@dataclass
class CallState:
    call: Call
    client: int
    server: int = -1
    num_tries: int = 0
    avoid: frozenset[str] = frozenset()
    first_s: float | None = None
    end_s: float | None = None
    has_failed: bool = False


@dataclass
class Simulated:
    """What became of every call, and of every replica."""

    calls: list[CallState]
    replicas: list[Replica]
    num_retries: int = 0


class Simulation:
    def __init__(self, shape: FleetShape, balance: Balance, seed: int) -> None:
        self._shape = shape
        self._chance = random.Random(f"{seed}/clients")
        self._names = [f"replica-{number:03}:50051" for number in range(shape.num_replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._balancers = [Balancer(balance) for _ in range(shape.num_clients)]
        for balancer in self._balancers:
            balancer.set_servers(self._names, are_serving=True)
        self._replicas = [
            Replica(shape.limits, shape.cost, shape.max_waiting) for _ in range(shape.num_replicas)
        ]
        self._lives = [0] * shape.num_replicas  # steps of an old life are void
        self._present: list[dict[str, CallState]] = [{} for _ in range(shape.num_replicas)]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._max_tries = 1 + Retries().max_retries
        self._result = Simulated([], self._replicas)

    def run(self, calls: Iterable[Call], troubles: Iterable[Trouble] = ()) -> Simulated:
        """Until every call has ended."""
        for trouble in troubles:
            self._foresee(trouble)
        arrivals = iter(calls)
        coming = next(arrivals, None)
        while coming is not None or self._events:
            if coming is not None and (not self._events or coming.at_s <= self._events[0][0]):
                self._now_s = coming.at_s
                client = self._chance.randrange(self._shape.num_clients)
                state = CallState(coming, client)
                self._result.calls.append(state)
                self._ask(state)
                coming = next(arrivals, None)
            else:
                self._happen(heapq.heappop(self._events))
        return self._result

    def _foresee(self, trouble: Trouble) -> None:
        for number in trouble.replicas:
            if trouble.slowness is None:
                self._at(trouble.from_s, "die", number)
                self._at(trouble.to_s, "revive", number)
            else:
                self._at(trouble.from_s, "slow", number, round(1000 * trouble.slowness))
                self._at(trouble.to_s, "slow", number, 1000)

    def _at(self, at_s: float, what: str, number: int, more: int = 0) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what, number, more))

    def _happen(self, event: tuple[float, int, str, int, int]) -> None:
        self._now_s, _, what, number, more = event
        match what:
            case "step" if more == self._lives[number]:
                self._end_step(number)
            case "die":
                self._die(number)
            case "revive":
                self._note(number, is_serving=True)
            case "slow":
                self._replicas[number].slowness = more / 1000

    def _ask(self, state: CallState) -> None:
        """Of servers, until one takes it or the client gives up."""
        balancer = self._balancers[state.client]
        while state.num_tries < self._max_tries:
            state.num_tries += 1
            name = balancer.begin(state.call.key, state.avoid, self._now_s)
            state.server = number = self._numbers[name]
            if self._replicas[number].add(_request(state)):
                self._present[number][_name(state)] = state
                self._tell_load(state)
                self._step(number)
                return
            balancer.end(name, has_failed=True)
            state.avoid |= {name}
        state.has_failed = True

    def _step(self, number: int) -> None:
        replica = self._replicas[number]
        if replica.is_stepping:
            return
        seconds = replica.begin_step()
        if seconds is not None:
            self._at(self._now_s + seconds, "step", number, self._lives[number])

    def _end_step(self, number: int) -> None:
        end = self._replicas[number].end_step()
        present = self._present[number]
        for name in end.begun:
            if present[name].first_s is None:  # it had one before its server died
                present[name].first_s = self._now_s
        for name in end.finished:
            state = present.pop(name)
            state.end_s = self._now_s
            self._balancers[state.client].end(self._names[number])
            self._tell_load(state)
        self._step(number)

    def _die(self, number: int) -> None:
        lost, self._present[number] = self._present[number], {}
        self._lives[number] += 1
        self._replicas[number].restart()
        self._note(number, is_serving=False)
        name = self._names[number]
        for state in lost.values():
            self._balancers[state.client].end(name, has_failed=True)
        for state in lost.values():
            self._result.num_retries += 1
            state.avoid |= {name}
            self._ask(state)

    def _tell_load(self, state: CallState) -> None:
        num_calls = len(self._present[state.server])
        self._balancers[state.client].set_load(self._names[state.server], num_calls, self._now_s)

    def _note(self, number: int, *, is_serving: bool) -> None:
        for balancer in self._balancers:
            balancer.set_serving(self._names[number], is_serving)


def _name(state: CallState) -> str:
    return f"{state.call.number}"


def _request(state: CallState) -> Request:
    call = state.call
    return Request(request_id=_name(state), prompt_ids=call.prompt_ids, max_new_tokens=call.num_new)

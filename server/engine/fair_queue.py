"""The queue of waiting requests: start-time fair queueing between owners, by tokens.

Knows: arrival order, owners, priority, tokens. Does not know: blocks, steps, time.

A request's virtual start time is its owner's last virtual finish time (start plus cost in tokens),
or the virtual clock, if the owner has nothing ahead of it. The virtual clock is the earliest
virtual start time of all who wait. Between equal times, the owner goes first that was served less
recently. A request that its owner takes back has still cost it.

Priority is between an owner's own requests: the most urgent one gets the earliest of its owner's
virtual start times, and no other owner waits longer for it. A level of priority is worth a fixed
number of places. So a request is overtaken only by the few of higher priority that come within
their lead: no request starves.
"""

from collections import OrderedDict
from typing import NamedTuple

from quill.server.request import Request

PLACES_PER_LEVEL = 16
ANSWER_COST = 64  # tokens of each answer, whose length isn't known
MAX_REMEMBERED = 4096  # owners

_Start = tuple[int, int]  # a virtual start time, and the number of its arrival


def cost(request: Request) -> int:
    """In tokens."""
    has_answers = request.pooling is None
    return request.num_prompt + ANSWER_COST * request.num_seqs * has_answers


class _Ticket(NamedTuple):
    arrival: int
    place: int  # among its owner's, at arrival
    request: Request

    @property
    def urgency(self) -> tuple[int, int]:
        """Among its owner's requests. Lower is sooner."""
        return self.place - PLACES_PER_LEVEL * self.request.priority, self.arrival


class FairQueue:
    """The requests that have never run."""

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}  # by request id
        self._starts: dict[str, list[_Start]] = {}  # of each owner, one for each of its tickets
        self._places: dict[str, int] = {}  # the next one of each owner that waits
        self._order: list[tuple[_Start, Request]] | None = []  # None: it has to be made anew
        self._num_arrived = 0
        self._virtual_finish: dict[str, int] = {}  # of owners that are ahead of the virtual clock
        self._served: OrderedDict[str, int] = OrderedDict()  # when each owner last was

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request) -> None:
        owner = request.owner
        start = self._virtual_start(owner, cost(request)), self._num_arrived
        place = self._places.get(owner, 0)
        self._places[owner] = place + 1
        self._tickets[request.request_id] = _Ticket(self._num_arrived, place, request)
        self._starts.setdefault(owner, []).append(start)
        self._num_arrived += 1
        self._order = None

    def in_order(self, most: int) -> list[Request]:
        """The first few."""
        return [request for _, request in self._ordered()[:most]]

    def _ordered(self) -> list[tuple[_Start, Request]]:
        """An owner's most urgent request gets its owner's first virtual start time, and so on."""
        if self._order is not None:
            return self._order
        owned: dict[str, list[_Ticket]] = {}
        for ticket in self._tickets.values():
            owned.setdefault(ticket.request.owner, []).append(ticket)
        placed = []
        for owner, tickets in owned.items():
            tickets.sort(key=lambda ticket: ticket.urgency)
            pairs = zip(sorted(self._starts[owner]), tickets, strict=True)
            placed += [(start, ticket.request) for start, ticket in pairs]
        self._order = sorted(placed, key=self._rank)
        return self._order

    def _rank(self, placed: tuple[_Start, Request]) -> tuple[int, int, int]:
        (start, arrival), request = placed
        return start, self._served.get(request.owner, 0), arrival

    def _virtual_start(self, owner: str, num_tokens: int) -> int:
        clock = min(
            (start for starts in self._starts.values() for start, _ in starts), default=None
        )
        if clock is None:
            clock = 0
            self._virtual_finish.clear()  # the queue is empty: all owners are even
        elif len(self._virtual_finish) > len(self._tickets):
            ahead = self._virtual_finish.items()
            self._virtual_finish = {name: finish for name, finish in ahead if finish > clock}
        start = max(clock, self._virtual_finish.get(owner, clock))
        self._virtual_finish[owner] = start + num_tokens
        return start

    def serve(self, request: Request) -> None:
        """The request starts, or runs again after a preemption."""
        self.remove(request.request_id)
        self._served[request.owner] = self._num_arrived = self._num_arrived + 1
        self._served.move_to_end(request.owner)
        if len(self._served) > MAX_REMEMBERED:
            self._served.popitem(last=False)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out, with its virtual start time; None if it isn't in the queue."""
        if request_id not in self._tickets:
            return None
        (start,) = (start for start, each in self._ordered() if each.request_id == request_id)
        request = self._tickets.pop(request_id).request
        self._starts[request.owner].remove(start)
        if not self._starts[request.owner]:
            del self._starts[request.owner], self._places[request.owner]
        self._order = None
        return request

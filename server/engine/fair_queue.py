"""The line of requests that wait to start.

Knows: arrival order, owners, priority, tokens. Does not know: blocks, steps, time.

Owners take turns by tokens, however many requests each has sent: a request's turn is its owner's
last plus what that one costs, or that of whoever waits longest if its owner has nothing before it.
(This is start-time fair queueing.) If two have the same turn, the owner goes first that was served
less recently. What an owner takes back has still cost it a turn.

Priority is between an owner's own requests: the more urgent one has the earlier of its owner's
turns, and nobody else waits longer for it. A level of priority is worth a fixed number of requests.
So a request can only be overtaken by the few of higher priority that come within its lead: nobody
waits for ever. Who was set back has had its turn, and goes before all who haven't.
"""

from collections import OrderedDict
from typing import NamedTuple

from quill.server.request import Request

PLACES_PER_LEVEL = 16
ANSWER_COST = 64  # of each answer, whose length nobody knows
MAX_REMEMBERED = 4096  # owners


_Turn = tuple[int, int]  # and when it was given: who came first goes first


def cost(request: Request) -> int:
    """In tokens."""
    has_answers = request.pooling is None
    return request.num_prompt + ANSWER_COST * request.num_rows * has_answers


class _Ticket(NamedTuple):
    given: _Turn  # at arrival
    place: int  # among its owner's, at arrival
    request: Request

    @property
    def urgency(self) -> _Turn:
        """Among its owner's requests. Lower is sooner."""
        return self.place - PLACES_PER_LEVEL * self.request.priority, self.given[1]


class RequestQueue:
    """Who is next."""

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}  # by request id
        self._preempted: dict[str, Request] = {}  # the last that was set back is first of all
        self._turns: dict[str, list[_Turn]] = {}  # of each owner, one for each of its tickets
        self._places: dict[str, int] = {}  # the next one of each owner that waits
        self._order: list[tuple[_Turn, Request]] | None = []  # None: it has to be made anew
        self._num_arrived = 0
        self._next_turns: dict[str, int] = {}  # of owners that are ahead of the line
        self._served: OrderedDict[str, int] = OrderedDict()  # when each owner last was

    def __len__(self) -> int:
        return len(self._tickets) + len(self._preempted)

    def add(self, request: Request) -> None:
        owner = request.owner
        turn = self._take_turn(owner, cost(request)), self._num_arrived
        place = self._places.get(owner, 0)
        self._places[owner] = place + 1
        self._tickets[request.request_id] = _Ticket(turn, place, request)
        self._turns.setdefault(owner, []).append(turn)
        self._num_arrived += 1
        self._order = None

    def put_back(self, request: Request) -> None:
        """It had started. The youngest are set back first, so the last one is the oldest."""
        self._preempted = {request.request_id: request, **self._preempted}

    def in_order(self, most: int) -> list[Request]:
        """The first few."""
        waiting = [request for _, request in self._placed()[:most]]
        return [*self._preempted.values(), *waiting][:most]

    def first(self) -> Request | None:
        return next(iter(self.in_order(1)), None)

    def _placed(self) -> list[tuple[_Turn, Request]]:
        """Each owner's most urgent request gets its owner's first turn, and so on."""
        if self._order is not None:
            return self._order
        owned: dict[str, list[_Ticket]] = {}
        for ticket in self._tickets.values():
            owned.setdefault(ticket.request.owner, []).append(ticket)
        placed = []
        for owner, tickets in owned.items():
            tickets.sort(key=lambda ticket: ticket.urgency)
            pairs = zip(sorted(self._turns[owner]), tickets, strict=True)
            placed += [(turn, ticket.request) for turn, ticket in pairs]
        self._order = sorted(placed, key=self._rank)
        return self._order

    def _rank(self, placed: tuple[_Turn, Request]) -> tuple[int, int, int]:
        (turn, arrival), request = placed
        return turn, self._served.get(request.owner, 0), arrival

    def _take_turn(self, owner: str, num_tokens: int) -> int:
        now = min((turn for turns in self._turns.values() for turn, _ in turns), default=None)
        if now is None:
            now = 0
            self._next_turns.clear()  # nobody waits: all are even
        elif len(self._next_turns) > len(self._tickets):
            ahead = self._next_turns.items()
            self._next_turns = {name: turn for name, turn in ahead if turn > now}
        turn = max(now, self._next_turns.get(owner, now))
        self._next_turns[owner] = turn + num_tokens
        return turn

    def serve(self, request: Request) -> None:
        """It starts."""
        self.remove(request.request_id)
        self._served[request.owner] = self._num_arrived = self._num_arrived + 1
        self._served.move_to_end(request.owner)
        if len(self._served) > MAX_REMEMBERED:
            self._served.popitem(last=False)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out of the line, and its turn; None if it isn't in it."""
        if request_id in self._preempted:
            return self._preempted.pop(request_id)
        if request_id not in self._tickets:
            return None
        (turn,) = (turn for turn, request in self._placed() if request.request_id == request_id)
        request = self._tickets.pop(request_id).request
        self._turns[request.owner].remove(turn)
        if not self._turns[request.owner]:
            del self._turns[request.owner], self._places[request.owner]
        self._order = None
        return request

"""The line of requests that wait for a slot.

Knows: arrival order, owners, priority. Does not know: slots, steps, time.

Owners take turns, however many requests each has sent: a request's turn is one after its owner's
last, or that of whoever waits longest if its owner has nothing before it. (This is start-time fair
queueing with one virtual second a sequence.) What an owner takes back has still cost it a turn.

Priority is between an owner's own requests: the more urgent one has the earlier of its owner's
turns, and nobody else waits longer for it. A level of priority is worth a fixed number of turns. So
a request can only be overtaken by the few of higher priority that come within its lead: nobody
waits for ever.
"""

from typing import NamedTuple

from quill.server.request import Request

PLACES_PER_LEVEL = 16


_Turn = tuple[int, int]  # and when it was given: who came first goes first


class _Ticket(NamedTuple):
    given: _Turn  # at arrival
    request: Request

    @property
    def urgency(self) -> _Turn:
        """Among its owner's requests. Lower is sooner."""
        turn, arrival = self.given
        return turn - PLACES_PER_LEVEL * self.request.priority, arrival


class RequestQueue:
    """Who is next."""

    def __init__(self) -> None:
        self._tickets: dict[str, _Ticket] = {}  # by request id
        self._turns: dict[str, list[_Turn]] = {}  # of each owner, one for each of its tickets
        self._order: list[tuple[_Turn, Request]] | None = []  # None: it has to be made anew
        self._num_arrived = 0
        self._next_turns: dict[str, int] = {}  # of owners that are ahead of the line

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request) -> None:
        turn = self._take_turn(request.owner, request.num_sequences), self._num_arrived
        self._tickets[request.request_id] = _Ticket(turn, request)
        self._turns.setdefault(request.owner, []).append(turn)
        self._num_arrived += 1
        self._order = None

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
        self._order = sorted(placed, key=lambda each: each[0])
        return self._order

    def _take_turn(self, owner: str, num_turns: int) -> int:
        now = min((turn for turns in self._turns.values() for turn, _ in turns), default=None)
        if now is None:
            now = 0
            self._next_turns.clear()  # nobody waits: all are even
        elif len(self._next_turns) > len(self._tickets):
            ahead = self._next_turns.items()
            self._next_turns = {name: turn for name, turn in ahead if turn > now}
        turn = max(now, self._next_turns.get(owner, now))
        self._next_turns[owner] = turn + num_turns
        return turn

    def first(self) -> Request | None:
        placed = self._placed()
        return placed[0][1] if placed else None

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out of the line, and its turn; None if it isn't in it."""
        if request_id not in self._tickets:
            return None
        (turn,) = (turn for turn, request in self._placed() if request.request_id == request_id)
        request = self._tickets.pop(request_id).request
        self._turns[request.owner].remove(turn)
        if not self._turns[request.owner]:
            del self._turns[request.owner]
        self._order = None
        return request

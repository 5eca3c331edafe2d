"""The line of requests that wait for a slot.

Knows: arrival order, owners, priority. Does not know: slots, steps, time.

Owners take turns, however many requests each has sent: a request's turn is one after its owner's
last, or that of whoever waits longest if its owner has nothing before it. (This is start-time fair
queueing with one virtual second a sequence.) What an owner takes back has still cost it a turn.

A level of priority is worth a fixed number of turns. So the order is settled at arrival, and a
request can only be overtaken by the few of higher priority that come within its lead, and by other
owners in their turns: nobody waits for ever, and whoever calls everything urgent gains a lead once
and no greater share.
"""

import bisect
from typing import NamedTuple

from server.request import Request

PLACES_PER_LEVEL = 16


class _Ticket(NamedTuple):
    place: int
    arrival: int
    turn: int
    request: Request


class WaitingLine:
    """Who is next."""

    def __init__(self) -> None:
        self._tickets: list[_Ticket] = []
        self._num_arrived = 0
        self._next_turns: dict[str, int] = {}  # of owners that are ahead of the line

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request) -> None:
        turn = self._take_turn(request.owner, request.num_sequences)
        place = turn - PLACES_PER_LEVEL * request.priority
        ticket = _Ticket(place, self._num_arrived, turn, request)
        bisect.insort(self._tickets, ticket, key=lambda each: each[:2])
        self._num_arrived += 1

    def _take_turn(self, owner: str, num_turns: int) -> int:
        now = min((ticket.turn for ticket in self._tickets), default=None)
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
        return self._tickets[0].request if self._tickets else None

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out of the line; None if it isn't in it."""
        for index, ticket in enumerate(self._tickets):
            if ticket.request.request_id == request_id:
                del self._tickets[index]
                return ticket.request
        return None

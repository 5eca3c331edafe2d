"""The line of requests that wait for a slot.

Knows: arrival order, priority. Does not know: slots, steps, time.

A level of priority is worth a fixed number of places. So the order is settled at arrival, and a
request can only be overtaken by the few of higher priority that come within its lead: nobody
waits for ever.
"""

import bisect
from typing import NamedTuple

from server.request import Request

PLACES_PER_LEVEL = 16


class _Ticket(NamedTuple):
    place: int
    arrival: int
    request: Request


class WaitingLine:
    """Who is next."""

    def __init__(self) -> None:
        self._tickets: list[_Ticket] = []
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request) -> None:
        place = self._num_arrived - PLACES_PER_LEVEL * request.priority
        ticket = _Ticket(place, self._num_arrived, request)
        bisect.insort(self._tickets, ticket, key=lambda each: each[:2])
        self._num_arrived += 1

    def first(self) -> Request | None:
        return self._tickets[0].request if self._tickets else None

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out of the line; None if it isn't in it."""
        for index, ticket in enumerate(self._tickets):
            if ticket.request.request_id == request_id:
                del self._tickets[index]
                return ticket.request
        return None

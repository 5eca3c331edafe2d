"""How a server tells a client of its load: a header of gRPC that is a number.

Knows: the header's name and form. Does not know: who counts, who reads.

Who wants to know sends `quill-load: tell` along: headers that go before an answer's first message
take the better part of a millisecond, and who has one server learns nothing by them.
`quill-load` is how many requests the server has, running and waiting, whosever they are. It comes
with the headers of an answer, as soon as its request is taken in, and after it with the trailers.
A name of our own: ORCA (`endpoint-load-metrics`) has a message for shares of processors and rates,
and no word for requests.
"""

from collections.abc import Iterable

LOAD_HEADER = "quill-load"
MAX_DIGITS = 9
TELL_LOAD = ((LOAD_HEADER, "tell"),)


def wants_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    return any(header in TELL_LOAD for header in metadata or ())


def write_load(num_requests: int) -> tuple[tuple[str, str]]:
    return ((LOAD_HEADER, str(num_requests)),)


def read_load(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """None: nothing is said, or nothing that can be read."""
    told = next((value for name, value in metadata or () if name == LOAD_HEADER), "")
    is_number = isinstance(told, str) and told.isascii() and told.isdigit()
    return int(told) if is_number and len(told) <= MAX_DIGITS else None

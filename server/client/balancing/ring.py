"""Consistent hashing: each key has an order of the servers, which others' coming and going keeps.

Knows: names, hashes. Does not know: load, health.
Every server stands at many places of a ring, and a key's order is that in which they are met from
the key's own place on. A server that leaves moves its own keys only, each to the next one.
"""

import hashlib
from bisect import bisect
from collections.abc import Iterable, Iterator

# So many that shares are even within some 10%.
NUM_PLACES = 128


class Ring:
    def __init__(self, servers: Iterable[str]) -> None:
        self._servers = frozenset(servers)
        places = sorted(
            (_place(f"{server}#{number}".encode()), server)
            for server in self._servers
            for number in range(NUM_PLACES)
        )
        self._places = [place for place, _ in places]
        self._owners = [server for _, server in places]

    def order(self, key: bytes) -> Iterator[str]:
        """All servers, each once."""
        seen: set[str] = set()
        begin = bisect(self._places, _place(key))
        for number in range(len(self._owners)):
            server = self._owners[(begin + number) % len(self._owners)]
            if server not in seen:
                seen.add(server)
                yield server
            if len(seen) == len(self._servers):
                return


def _place(name: bytes) -> int:
    """The same in every process, which `hash` isn't."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")

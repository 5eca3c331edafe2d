"""Parses the address of one or several servers.

Knows: the syntax, DNS. Does not know: channels. Imports nothing heavy.

    HOST:PORT                       one server
    quill://HOST:PORT,HOST:PORT     these servers
    quill+dns://NAME:PORT           all addresses of a DNS name, which may change
    …?balance=least                 the balancing policy: affinity, least, round-robin
"""

import socket
from dataclasses import dataclass
from typing import Literal, get_args

from quill.server.addresses import check_address, write_address
from quill.server.errors import ServerError

Balance = Literal["affinity", "least", "round-robin"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
LISTED, NAMED = "quill://", "quill+dns://"


class TargetError(ServerError):
    """An address that can't be parsed."""


@dataclass(frozen=True)
class Target:
    """`name`, if there is one, is NAME:PORT and has to be resolved."""

    servers: tuple[str, ...] = ()
    name: str | None = None
    balance: Balance = "affinity"
    is_watched: bool = True  # the servers' health, where there are several to choose from


def is_multiple(address: str) -> bool:
    return address.startswith((LISTED, NAMED))


def read_target(address: str) -> Target:
    if not is_multiple(address):
        return Target((address,), is_watched=False)
    rest, _, query = address.partition("?")
    if rest.startswith(NAMED):
        name = _checked(rest.removeprefix(NAMED), address)
        return Target(name=name, balance=_balance(query))
    servers = tuple(_checked(each, address) for each in rest.removeprefix(LISTED).split(","))
    if len(set(servers)) < len(servers):
        raise TargetError(f"{address!r} names a server twice: leave one out")
    return Target(servers, balance=_balance(query))


def resolve(name: str) -> tuple[str, ...]:
    """All addresses of a NAME:PORT, sorted. OSError if there are none."""
    host, _, port = name.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return tuple(sorted({write_address(str(place[0]), int(port)) for *_, place in found}))


def _checked(server: str, address: str) -> str:
    try:
        return check_address(server)
    except ValueError as error:
        raise TargetError(
            f"{address!r}: {error}. Several servers are written quill://HOST:PORT,HOST:PORT, and "
            "all of a name quill+dns://NAME:PORT"
        ) from None


def _balance(query: str) -> Balance:
    given = query.removeprefix("balance=")
    found = next((each for each in BALANCES if each == given), None)
    if query and (found is None or given == query):
        allowed = ", ".join(f"?balance={each}" for each in BALANCES)
        raise TargetError(f"'?{query}' isn't known after an address: give one of {allowed}")
    return found or "affinity"

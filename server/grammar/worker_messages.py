"""What passes between the grammar worker and the checker, and the limits that both name.

Knows: frames of msgpack on a socket. Does not know: llguidance, processes.
"""

import socket
from typing import Literal

import msgspec

from quill.server import frames
from quill.server.request import Constraint

MAX_COMPILE_S = 1.0  # of processor time
# Of the wall clock: only a process that hangs takes so long. On a busy machine a second of work of
# this process, which waits for all others, takes many; with twice as much it blamed constraints.
MAX_WALL_S = 15 * MAX_COMPILE_S
# Of address space, beyond what the worker has after its start. The schemas of the benchmarks take
# 2 MB at most; `\p{L}?`, 1,000 times, takes 83.
MAX_COMPILE_BYTES = 64 * 2**20

# accepted; rejected: the constraint is wrong; slow, large: it is beyond the limits; killed: by
# somebody else, perhaps by the kernel for want of memory; bug: of ours.
Outcome = Literal["accepted", "rejected", "slow", "large", "killed", "bug"]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a constraint."""

    outcome: Outcome
    field: str = ""  # which field a rejected constraint's error names
    reason: str = ""


CONSTRAINTS = msgspec.msgpack.Decoder(Constraint)
VERDICTS = msgspec.msgpack.Decoder(Verdict)


def send(connection: socket.socket, message: Constraint | Verdict) -> None:
    connection.sendall(frames.pack(msgspec.msgpack.encode(message)))


def receive_constraint(connection: socket.socket) -> Constraint:
    """EOFError, in both: the other side has gone."""
    return CONSTRAINTS.decode(frames.receive(connection))


def receive_verdict(connection: socket.socket) -> Verdict:
    return VERDICTS.decode(frames.receive(connection))

"""Bytes that no honest client sends: noise, other protocols, HTTP/2 that breaks its rules.

Knows: HTTP/2's frames, a little. Does not know: servers.
"""

import random
import struct
from typing import NamedTuple

from tests.server.bad_calls import SERVICE, make_call, mutate, noise, path_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
OTHERS = (
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # how TLS begins
    b"SSH-2.0-nobody\r\n",
    b"\0" * 4096,
    PREFACE[:9],
)


class Sent(NamedTuple):
    content: bytes
    rudely: bool  # ends with a reset instead of a goodbye
    kind: str = "by hand"


def make_bytes(chance: random.Random) -> Sent:
    kind = chance.choice(tuple(KINDS))
    return Sent(KINDS[kind](chance), chance.random() < 0.3, kind)


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    length = len(payload) if length is None else length
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def begin() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0, b"")


def headers(path: str, **others: str) -> bytes:
    """HPACK without tables or Huffman: each name and value as it is."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    pairs |= {"content-type": "application/grpc", "te": "trailers"} | others
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in pairs.items())


def _string(text: str) -> bytes:
    return bytes([len(text) % 127]) + text.encode("latin-1")


def _noise(chance: random.Random) -> bytes:
    return noise(chance, 300)


def _other(chance: random.Random) -> bytes:
    return mutate(chance, chance.choice(OTHERS))


def _frames(chance: random.Random) -> bytes:
    """Any frame with any content, and some that lie about their length."""
    content = begin()
    for _ in range(chance.randint(1, 12)):
        payload = noise(chance, 40)
        lie = chance.choice((None, None, None, 0, 2**14 + 1, 2**24 - 1))
        stream = chance.choice((0, 1, 2, 3, 2**31 - 1, 2**32 - 1))
        content += frame(chance.randint(0, 12), chance.getrandbits(8), stream, payload, lie)
    return content


def _call(chance: random.Random) -> bytes:
    """A call that is nearly right: its headers, its message's frame or its message are changed."""
    call = make_call(chance)
    timeout = chance.choice(("1S", "0n", "-1S", "99999999H", "999999999999S", "x", ""))
    encoding = chance.choice(("identity", "gzip", "no-such", ""))
    path = path_of(call.method)
    block = headers(path, **{"grpc-timeout": timeout, "grpc-encoding": encoding})
    if chance.random() < 0.3:
        block = mutate(chance, block)
    message = call.message[:16_000]
    length = chance.choice((len(message), len(message), 0, len(message) + 1, 2**32 - 1))
    data = struct.pack(">BI", chance.choice((0, 0, 1, 255)), length) + message
    content = begin() + frame(HEADERS, END_HEADERS, 1, block)
    content += frame(DATA, END_STREAM, 1, data[: 2**14])
    return mutate(chance, content, len(content)) if chance.random() < 0.3 else content


def _flood(chance: random.Random) -> bytes:
    """Many small frames that cost their sender nothing."""
    kind = chance.choice((RST_STREAM, SETTINGS, PING, WINDOW, CONTINUATION, PRIORITY))
    sizes = {RST_STREAM: 4, PING: 8, WINDOW: 4, PRIORITY: 5}
    payload = bytes(chance.getrandbits(8) for _ in range(sizes.get(kind, 0)))
    opened = frame(HEADERS, 0, 1, headers(f"/{SERVICE}/Generate"))
    return begin() + opened + frame(kind, 0, chance.choice((0, 1)), payload) * 300


KINDS = {
    "noise": _noise,
    "another protocol": _other,
    "any frames": _frames,
    "a call that is nearly right": _call,
    "a flood": _flood,
}

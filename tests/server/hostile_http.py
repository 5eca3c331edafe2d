"""Sends bad HTTP to a server, and judges what it makes of it.

Knows: sockets, statuses. Does not know: what is sent, how the server was started.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence

from tests.server.bad_bytes import Sent
from tests.server.bad_http import make_http
from tests.server.hostile_clients import ANSWER_S, HANGS_S, SiegeError

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_WHOLE = ("HTTP: JSON that is nearly right", "HTTP: any JSON")


class HttpBesieger:
    """One server's enemy. Use it within one event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by kind of input, and answer

    async def attack(self, seed: int, numbers: Sequence[int]) -> None:
        """The inputs with these numbers, all at once."""
        await asyncio.gather(
            *(
                self.send(make_http(random.Random(f"http/{seed}/{number}")), f"{number} of {seed}")
                for number in numbers
            )
        )

    async def send(self, sent: Sent, name: str = "this input") -> None:
        """Requests that are whole get an answer, whatever they say. Others get one or don't."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        is_whole = sent.kind in _WHOLE
        heard = b""
        try:
            writer.write(sent.content)
            await writer.drain()
            async with asyncio.timeout(HANGS_S if is_whole else ANSWER_S):
                while piece := await reader.read(65_536):
                    heard += piece
        except TimeoutError:
            if is_whole:
                raise SiegeError(f"{name} hangs: {sent.content[:500]!r}") from None
        except OSError:
            pass  # a server that hangs up while we write is within its rights
        await self._leave(writer, sent.rudely)
        self._judge(sent, heard, is_whole, name)

    def _judge(self, sent: Sent, heard: bytes, is_whole: bool, name: str) -> None:
        statuses = [status.decode() for status in _STATUS.findall(heard)]
        if "500" in statuses or b'"type":"server_error"' in heard:
            raise SiegeError(f"{name}, {sent.content[:500]!r}: {heard[:2000]!r}")
        if is_whole and len(statuses) != 1:
            raise SiegeError(f"{name}, {sent.content[:500]!r}: {len(statuses)} answers")
        self.outcomes[sent.kind, statuses[0] if statuses else "no answer"] += 1

    async def _leave(self, writer: asyncio.StreamWriter, rudely: bool) -> None:
        if rudely:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

"""What every door does for a client, whichever wire is behind it.

Knows: generation.proto's messages. Does not know: any wire.
"""

from collections.abc import Generator
from typing import Protocol

from quill.protos import generation_pb2 as pb

Chunks = Generator[pb.GenerateChunk, None, None]


class CallError(Exception):
    """How a call failed: the name of a gRPC status, also where the wire has other names."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message[:200]


class Door(Protocol):
    """One user's connection. Raises CallErrors."""

    def stream(self, request: pb.GenerateRequest, timeout_s: float) -> Chunks:
        """The answer as it comes. Whoever closes it leaves: the server needn't go on."""

    def embed(self, request: pb.EmbedRequest, timeout_s: float) -> pb.EmbedResponse:
        """Not behind every door."""

    def close(self) -> None:
        """Nothing is asked through it any more."""

"""The one process that the replicas of a cluster ask: what a key has left, and whose turn it is.

Knows: the ledger, the rolling reload. Does not know: how it is reached; Ray runs one of it beside
the replicas, and starts another if it dies. Then every key's buckets are full again.
"""

from collections.abc import Mapping

from quill.server.auth.caller import Caller
from quill.server.cluster.keeper.ledger import Ledger, Refusal
from quill.server.cluster.keeper.rolling import Rolling


class Keeper:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._rolling = Rolling(self._replicas)

    async def open_call(self, replica: str, ticket: int, caller: Caller) -> Refusal | None:
        return self._ledger.open_call(replica, ticket, caller)

    async def open_tokens(
        self, replica: str, ticket: int, caller: Caller, num_prompt: int, is_admitted: bool
    ) -> Refusal | None:
        return self._ledger.open_tokens(replica, ticket, caller, num_prompt, is_admitted)

    async def close(self, replica: str, ticket: int, num_generated: int, is_read: bool) -> None:
        self._ledger.close(replica, ticket, num_generated, is_read)

    async def hear(self, replica: str, generated: Mapping[int, int]) -> bool:
        """A sign of life. True: it is this replica's turn to reload."""
        self._ledger.hear(replica, generated)
        self._ledger.forget_silent()
        return self._rolling.is_turn(replica)

    async def settle(self, replica: str, refusal: str) -> None:
        """How a replica's reload went; "" if it went well."""
        self._rolling.settle(replica, refusal)

    async def leave(self, replica: str) -> None:
        self._ledger.forget(replica)

    async def reload(self) -> str:
        """Of all replicas. Why it was refused; "" if it wasn't."""
        return await self._rolling.reload()

    def _replicas(self) -> list[str]:
        self._ledger.forget_silent()
        return self._ledger.replicas

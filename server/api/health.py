"""The gRPC health service: SERVING as long as there is no problem.

Knows: gRPC's health service, the names of problems. Does not know: what causes them.
"""

import asyncio
import logging

from grpc_health.v1 import health, health_pb2

logger = logging.getLogger(__name__)

_NOW = {
    "failing": "step after step fails; health says NOT_SERVING until one succeeds",
    "stopping": "health says NOT_SERVING: the server is stopping",
}
_OVER = {"failing": "steps succeed again"}


class Health:
    """Belongs to the event loop, but for `note_soon`."""

    def __init__(self, service: str) -> None:
        self.servicer = health.aio.HealthServicer()
        self._services = ("", service)
        self._loop = asyncio.get_running_loop()
        self._problems = {"loading"}

    @property
    def is_serving(self) -> bool:
        return not self._problems

    async def begin(self) -> None:
        await self._publish()

    async def note(self, problem: str, is_there: bool) -> None:
        if is_there == (problem in self._problems):
            return
        if is_there:
            self._problems.add(problem)
        else:
            self._problems.discard(problem)
        message = (_NOW if is_there else _OVER).get(problem)
        if message is not None:
            logger.log(
                logging.ERROR if problem == "failing" and is_there else logging.INFO, message
            )
        await self._publish()

    def note_soon(self, problem: str, is_there: bool) -> None:
        """From any thread."""
        asyncio.run_coroutine_threadsafe(self.note(problem, is_there), self._loop)

    async def _publish(self) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if self.is_serving else states.NOT_SERVING
        for service in self._services:
            await self.servicer.set(service, state)

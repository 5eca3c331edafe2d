"""What the two clients don't share: events, background work, reading from a stream.

Knows: asyncio, threads, gRPC's two Python APIs. Does not know: calls, endpoints.
The async client uses the names that begin with Async or async_; server/client/generate.py
replaces each by its blocking counterpart here.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from quill.server.client.target import resolve as resolve

# What a call raises when it fails or when it is canceled.
ASYNC_CALL_ERRORS = (grpc.aio.AioRpcError, asyncio.CancelledError)
CALL_ERRORS = (grpc.RpcError,)

Event = threading.Event


class AsyncEvent(asyncio.Event):
    """An asyncio.Event whose `wait` has a timeout, as threading.Event has it."""

    async def wait(self, timeout_s: float | None = None) -> bool:  # type: ignore[override]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await super().wait()
        return self.is_set()


class AsyncTasks:
    """Background work in tasks of the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        task = asyncio.ensure_future(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Tasks:
    """Background work in daemon threads, which end by themselves when their channel is closed."""

    def start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def close(self) -> None:
        pass


async def async_read(call: Any) -> Any:
    """The stream's next message; None at its end."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


def read(call: Any) -> Any:
    return next(call, None)


async def async_resolve(name: str) -> tuple[str, ...]:
    return await asyncio.to_thread(resolve, name)


def is_task_canceled(raised: BaseException) -> bool:
    """Whether the caller's own task was canceled, not the gRPC call alone."""
    if not isinstance(raised, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

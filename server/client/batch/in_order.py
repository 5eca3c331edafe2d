"""Many at once, and their results in order.

Knows: asyncio. Does not know: what is done.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

AHEAD = 8  # so many times as many as run at once may be kept behind one that takes long


async def in_order(
    items: Iterable[_Item],
    do: Callable[[_Item], Awaitable[_Result]],
    take: Callable[[_Result], None],
    concurrency: int,
) -> None:
    """`take` is given each result as soon as those before it were. The first error ends it; what is
    ready before that place is taken all the same, and so it is when it is cancelled."""
    places = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[_Result]] = deque()

    async def work(item: _Item) -> _Result:
        async with places:
            return await do(item)

    def take_ready() -> None:
        while waiting and waiting[0].done():
            take(waiting.popleft().result())

    try:
        for item in items:
            waiting.append(asyncio.create_task(work(item)))
            while len(waiting) >= AHEAD * concurrency:
                await asyncio.wait({waiting[0]})
                take_ready()
        while waiting:
            await asyncio.wait({waiting[0]})
            take_ready()
    except asyncio.CancelledError:
        while waiting and _is_well(waiting[0]):
            take(waiting.popleft().result())
        raise
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _is_well(task: asyncio.Task[_Result]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None

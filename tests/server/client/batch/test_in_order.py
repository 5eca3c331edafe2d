"""Many at once, in order."""

import asyncio
import random

import pytest

from quill.server.client.batch.in_order import AHEAD, in_order


def test_results_come_in_order_and_no_more_run_than_may() -> None:
    running, most, turns = 0, 0, random.Random(3)
    taken: list[int] = []

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(turns.randrange(20)):
            await asyncio.sleep(0)
        running -= 1
        return item

    asyncio.run(in_order(range(200), work, taken.append, 5))
    assert taken == list(range(200))
    assert most == 5


def test_one_that_takes_long_holds_back_a_bounded_number() -> None:
    begun: list[int] = []
    taken: list[int] = []

    async def main() -> None:
        may_end = asyncio.Event()

        async def work(item: int) -> int:
            begun.append(item)
            if item == 0:
                await may_end.wait()
            return item

        whole = asyncio.create_task(in_order(range(1000), work, taken.append, 2))
        while len(begun) < 2 * AHEAD:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(begun) == 2 * AHEAD
        assert taken == []
        may_end.set()
        await whole

    asyncio.run(main())
    assert taken == list(range(1000))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_is_ready_before_an_end_is_taken(is_cancelled: bool) -> None:
    taken: list[int] = []
    ended: list[int] = []

    async def main() -> None:
        whole = asyncio.current_task()
        assert whole is not None

        async def work(item: int) -> int:
            try:
                if item == 3:
                    if not is_cancelled:
                        raise ValueError(item)
                    whole.cancel()
                if item > 2:
                    await asyncio.Event().wait()
            finally:
                ended.append(item)
            return item

        await in_order(range(10), work, taken.append, 5)

    with pytest.raises(asyncio.CancelledError if is_cancelled else ValueError):
        asyncio.run(main())
    assert taken == [0, 1, 2]
    assert {0, 1, 2, 3, 4} <= set(ended)

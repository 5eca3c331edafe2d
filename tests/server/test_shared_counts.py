"""The queue that several frontends share: what one of them knows without asking."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from quill.server.errors import DeadlineError, OverloadedError
from quill.server.process.control import Answer, Left, Question
from quill.server.process.counts import Counted, Counts
from quill.server.process.shared_counts import FULL_S, SharedAdmission
from quill.server.process.supervisor_link import SupervisorLink


class DirectLink:
    """To counts in this process."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.num_asked = 0

    async def ask(self, make: Callable[[int], Question]) -> Answer:
        self.num_asked += 1
        answer = self._counts.handle("frontend", cast("Counted", make(self.num_asked)))
        assert answer is not None
        return answer

    def tell(self, message: Left) -> None:
        self._counts.handle("frontend", message)


def test_full_queue_is_known_for_a_moment_without_asking() -> None:
    now_s = 100.0
    link = DirectLink(Counts(max_queue=1))
    admission = SharedAdmission(cast("SupervisorLink", link), lambda: now_s)

    async def admit(request_id: str, deadline_s: float | None = None) -> None:
        admission.reserve("")
        await admission.admit(request_id, "", deadline_s)

    asyncio.run(admit("first"))
    with pytest.raises(OverloadedError, match="which is the limit"):
        asyncio.run(admit("second"))
    assert link.num_asked == 2
    with pytest.raises(OverloadedError, match="which is the limit"):
        asyncio.run(admit("third"))
    assert link.num_asked == 2, "nobody was asked"
    admission.leave(["first"], [])
    now_s += 2 * FULL_S
    asyncio.run(admit("fourth"))
    admission.leave(["fourth"], [])
    with pytest.raises(DeadlineError):
        asyncio.run(admit("late", deadline_s=0.0))
    admission.reserve("")  # another's deadline is no reason

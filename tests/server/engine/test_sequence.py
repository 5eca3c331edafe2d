"""The life of a sequence: its statuses, and what it may become."""

from itertools import product
from pathlib import Path

import pytest

from quill.server.engine.sequence import (
    FINISHED,
    TRANSITIONS,
    Sequence,
    SequenceStatus,
    make_sequence,
)
from tests.server.engine_harness import make_request

PAGE = Path(__file__).parents[3] / "ARCHITECTURE.md"
ALLOWED = {(before, after) for before, some in TRANSITIONS.items() for after in some}


def _sequence(status: SequenceStatus) -> Sequence:
    sequence = make_sequence(make_request(), 0, 96)
    sequence.status = status
    return sequence


@pytest.mark.parametrize(("before", "after"), [*product(SequenceStatus, SequenceStatus)])
def test_sequence_makes_the_transitions_of_the_table_and_no_others(
    before: SequenceStatus, after: SequenceStatus
) -> None:
    sequence = _sequence(before)
    if (before, after) in ALLOWED:
        sequence.transition(after)
        assert sequence.status is after
    else:
        with pytest.raises(AssertionError):
            sequence.transition(after)
        assert sequence.status is before


def test_every_finish_reason_has_a_status_that_nothing_follows() -> None:
    assert not {*FINISHED.values(), SequenceStatus.FAILED} & {*TRANSITIONS}
    assert {*SequenceStatus} == {*TRANSITIONS, *FINISHED.values(), SequenceStatus.FAILED}


def mermaid() -> str:
    """The states of a sequence as a diagram."""
    lines = ["stateDiagram-v2", "    [*] --> WAITING"]
    lines += [
        f"    {before.name} --> {after.name}"
        for before, following in TRANSITIONS.items()
        for after in following
    ]
    ends = [each for each in SequenceStatus if each not in TRANSITIONS]
    return "\n".join([*lines, *(f"    {each.name} --> [*]" for each in ends)])


def test_architecture_shows_the_states_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    _, _, after = page.partition("<!-- states of a sequence: made by mermaid() -->\n")
    block, _, _ = after.partition("\n<!-- end -->")
    assert block == f"```mermaid\n{mermaid()}\n```"

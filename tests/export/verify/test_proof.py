"""How much a precision is measured on."""

from quill.export.verify.held_out import Passage
from quill.export.verify.proof import enough

PASSAGES = [Passage((1,) * length) for length in (10, 20, 30)]


def test_short_passages_are_taken_until_there_are_tokens_enough() -> None:
    assert enough(PASSAGES, None) == PASSAGES
    assert enough(PASSAGES, 1) == PASSAGES[:1]
    assert enough(PASSAGES, 10) == PASSAGES[:1]
    assert enough(PASSAGES, 11) == PASSAGES[:2]
    assert enough(PASSAGES, 1000) == PASSAGES
